"""An optimizer's state by the names of its parameters, never by their index.

Its tensors are shards or replicas like the parameters they belong to; `step` counters and param groups follow. Used by
`program`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from surefoot.errors import ConfigurationError, StateMismatch
from surefoot.state.entries import Entries, Entry, Saved, dtype_named, is_dtensor, ranks_of
from surefoot.state.trees import put_together, taken_apart


class OptimizerPart:
    """One optimizer of the program. `names` maps the id of each known parameter to its full name."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, world: int, names: Mapping[int, str]) -> None:
        self.name, self._optimizer = name, optimizer
        self._names: dict[str, torch.Tensor] = {}
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise ConfigurationError(
                        f"parameter {position} of group {index} of {name} belongs to no model given to Checkpointer:"
                        " give that model too, and build the optimizer after sharding it"
                    )
                self._names[names[id(parameter)]] = parameter
        ranks = ranks_of(list(self._names.values()), world)
        self._entries = Entries(ranks)
        self.everywhere = len(ranks) == world

    def entries(self) -> Iterator[Entry]:
        """Live state tensors; empty before the first step."""
        for full_name, parameter in self._names.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    name = f"{self.name}/{full_name}/{key}"
                    yield self._entries.of(name, value, "split", lazy=True)
        for name, value in self._group_tensors().items():
            yield self._entries.of(name, value, "lowest")

    def values(self) -> Any:
        """Param groups without their parameters, and what is plain in each parameter's state."""
        plain = {}
        for full_name, parameter in self._names.items():
            state = self._optimizer.state.get(parameter, {})
            kept = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
            if kept:
                plain[full_name] = kept
        ignored: dict[str, torch.Tensor] = {}
        return {"groups": [self._group(i, group, ignored) for i, group in self._groups()], "plain": plain}

    def prepare(self, values: Any, saved: Mapping[str, Saved]) -> None:
        """Makes a state tensor for each that the checkpoint has, without a step that could change anything.

        What has the parameter's shape is sharded as the parameter is; counters are plain, and lie where the
        optimizer's own options want them.
        """
        if len(values["groups"]) != len(self._optimizer.param_groups):
            raise StateMismatch(
                f"{self.name} has {len(self._optimizer.param_groups)} param groups and had {len(values['groups'])} in"
                " the checkpoint: build it as before"
            )
        wanted: dict[str, dict[str, Saved]] = {}
        for name, what in saved.items():
            if name.startswith(f"{self.name}/"):
                full_name, _, key = name.removeprefix(f"{self.name}/").rpartition("/")
                wanted.setdefault(full_name, {})[key] = what
        group_of = {id(p): group for _, group in self._groups() for p in group["params"]}
        for full_name, parameter in self._names.items():
            self._prepare_one(full_name, parameter, group_of[id(parameter)], wanted.get(full_name, {}))

    def _prepare_one(
        self, full_name: str, parameter: torch.Tensor, group: dict[str, Any], wanted: Mapping[str, Saved]
    ) -> None:
        prefix = f"{self.name}/{full_name}/"
        live = self._optimizer.state.get(parameter, {})
        built = {}
        for key, what in wanted.items():
            value = live.get(key)
            if isinstance(value, torch.Tensor) and tuple(value.shape) == what.shape:
                built[key] = value
            elif what.shape == tuple(parameter.shape):
                built[key] = torch.zeros_like(parameter, dtype=dtype_named(what.dtype), requires_grad=False)
            elif is_dtensor(parameter) and what.shape:
                raise StateMismatch(
                    f"{prefix}{key} has shape {what.shape} and its sharded parameter {tuple(parameter.shape)}: take one"
                    " optimizer step before restoring, so that its place is known"
                )
            else:
                built[key] = torch.zeros(what.shape, dtype=dtype_named(what.dtype), device=_home(parameter, group))
        if built or live:
            self._optimizer.state[parameter] = built

    def targets(self) -> Iterator[Entry]:
        """What a restore fills, after `prepare`."""
        return self.entries()

    def apply(self, values: Any) -> None:
        """Tensors were filled in place; sets param groups and plain state."""
        tensors = self._group_tensors()
        for (_, group), saved_group in zip(self._groups(), values["groups"], strict=True):
            group.update(put_together(saved_group, tensors.__getitem__))
        for full_name, kept in values["plain"].items():
            if full_name in self._names:
                self._optimizer.state[self._names[full_name]].update(kept)

    def _groups(self) -> list[tuple[int, dict[str, Any]]]:
        return list(enumerate(self._optimizer.param_groups))

    def _group(self, index: int, group: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        plain = {key: value for key, value in group.items() if key != "params"}
        tree: dict[str, Any] = taken_apart(plain, f"{self.name}/groups/{index}", tensors)
        return tree

    def _group_tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for index, group in self._groups():
            self._group(index, group, tensors)
        return tensors


def _home(parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where torch's optimizers keep what has not the parameter's shape: on the host unless a kernel needs it."""
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
