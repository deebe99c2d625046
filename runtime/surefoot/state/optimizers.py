"""An optimizer's state by the names of its parameters, never by their index.

Its tensors are shards or replicas like the parameters they belong to; `step` counters and param groups follow. Used by
`program`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch

from surefoot.errors import ConfigurationError, StateMismatch
from surefoot.geometry.grids import Grid
from surefoot.state.entries import Entry, Saved, dtype_named, is_dtensor, local_part
from surefoot.state.flat import described
from surefoot.state.modules import Held
from surefoot.state.places import Places, grid_of_dtensor, says_itself
from surefoot.state.replicas import Replicas
from surefoot.state.trees import put_together, taken_apart

MASTER = "master"
"""Key of a flat tensor that belongs to no model: the optimizer's own weights of the ranges in it."""


class OptimizerPart:
    """One optimizer of the program. `held` maps the id of each known parameter to what is known of it."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        where: tuple[int, int],
        held: Mapping[int, Held],
        replicas: Replicas,
    ) -> None:
        rank, world = where
        self.name, self._optimizer = name, optimizer
        self._inner, mine = _partitioned(optimizer)
        self._own_flat: list[Held] = []
        self._held = [self._known(place, p, held, rank) for place, p in self._parameters()]
        if mine is not None:
            self._held = [h for h in self._held if id(h.parameter) in mine]
        default = Grid.world(world) if mine is None else Grid.alone(rank)
        self._places = Places(rank, default, replicas if mine is None else Replicas(None, rank))
        self._groups_places = Places(rank, Grid.world(world), replicas.of_objects())
        self.everywhere = mine is None and all(_everywhere(h, replicas, where) for h in self._held)

    def entries(self) -> Iterator[Entry]:
        """Live state tensors; empty before the first step."""
        for held in self._own_flat:
            assert held.flat is not None, "only described tensors are the optimizer's own"
            yield from self._places.of_flat(f"{self.name}/", f"/{MASTER}", held.parameter, held.flat, lazy=True)
        for held in self._held:
            for key, value in self._inner.state.get(held.parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield from self._state_entries(held, key, value)
        for name, value in self._group_tensors().items():
            yield from self._groups_places.of(name, value, "lowest")

    def values(self) -> Any:
        """Param groups without their parameters, and what is plain in each parameter's state.

        `members` says which parameter is in which group, as runs over their sorted names; nothing if there is one.
        """
        plain = {}
        for held in self._held:
            state = self._inner.state.get(held.parameter, {})
            kept = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
            if kept:
                plain[held.name] = kept
        ignored: dict[str, torch.Tensor] = {}
        groups = [self._group(i, group, ignored) for i, group in self._groups()]
        return {"groups": groups, "plain": plain, "members": self._members() if len(groups) > 1 else []}

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
                if key != MASTER:
                    wanted.setdefault(full_name, {})[key] = what
        group_of = {id(p): group for _, group in self._groups() for p in group["params"]}
        for held in self._held:
            home = _home(held.parameter, group_of[id(held.parameter)])
            if held.flat is None:
                self._prepare_one(held, home, wanted.get(held.name, {}))
            else:
                self._prepare_flat(held, home, wanted)

    def targets(self) -> Iterator[Entry]:
        """What a restore fills, after `prepare`."""
        return self.entries()

    def apply(self, values: Any) -> None:
        """Tensors were filled in place; sets param groups and plain state."""
        tensors = self._group_tensors()
        for (_, group), saved_group in zip(self._groups(), values["groups"], strict=True):
            group.update(put_together(saved_group, tensors.__getitem__))
        for held in self._held:
            kept = values["plain"].get(held.name)
            if kept:
                self._inner.state[held.parameter].update(kept)

    # ---- how -------------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield f"parameter {position} of group {index}", parameter

    def _known(self, place: str, parameter: torch.Tensor, held: Mapping[int, Held], rank: int) -> Held:
        if id(parameter) in held:
            return held[id(parameter)]
        flat = described(parameter, rank)
        if flat is None:
            raise ConfigurationError(
                f"{place} of {self.name} belongs to no model given to Checkpointer: give that model too, and build the"
                " optimizer after sharding it; of an optimizer's own flat tensors, surefoot.describe_flat says what"
                " they hold"
            )
        own = Held(f"flat {len(self._own_flat)}", parameter, flat)
        self._own_flat.append(own)
        return own

    def _state_entries(self, held: Held, key: str, value: torch.Tensor) -> Iterator[Entry]:
        if held.flat is None:
            yield from self._places.of(f"{self.name}/{held.name}/{key}", value, "split", True, held.owner)
        elif value.shape == local_part(held.parameter).shape and value.dim() == 1:
            yield from self._places.of_flat(f"{self.name}/", f"/{key}", value, held.flat, lazy=True)
        else:
            yield from self._places.of_flat_scalar(f"{self.name}/", f"/{key}", value, held.flat)

    def _prepare_one(self, held: Held, home: torch.device, wanted: Mapping[str, Saved]) -> None:
        parameter, prefix = held.parameter, f"{self.name}/{held.name}/"
        live = self._inner.state.get(parameter, {})
        built = {}
        for key, what in wanted.items():
            value = live.get(key)
            dtype = dtype_named(what.dtype)
            if isinstance(value, torch.Tensor) and tuple(value.shape) == what.shape:
                built[key] = value
            elif what.shape == tuple(parameter.shape):
                built[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            elif says_itself(parameter) and what.shape == tuple(parameter.global_shape):  # type: ignore[attr-defined]
                built[key] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            elif is_dtensor(parameter) and what.shape:
                raise StateMismatch(
                    f"{prefix}{key} has shape {what.shape} and its sharded parameter {tuple(parameter.shape)}: take one"
                    " optimizer step before restoring, so that its place is known"
                )
            else:
                built[key] = torch.zeros(what.shape, dtype=dtype, device=home)
        if built or live:
            self._inner.state[parameter] = built

    def _prepare_flat(self, held: Held, home: torch.device, wanted: Mapping[str, Mapping[str, Saved]]) -> None:
        """One tensor for all ranges of a flat parameter, and one counter."""
        assert held.flat is not None, "the caller looked"
        memory = local_part(held.parameter)
        live = self._inner.state.get(held.parameter, {})
        built: dict[str, torch.Tensor] = {}
        for r in held.flat.ranges:
            for key, what in wanted.get(r.name, {}).items():
                shape = tuple(memory.shape) if what.shape == r.shape else what.shape
                value = built.get(key, live.get(key))
                if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                    device = memory.device if what.shape == r.shape else home
                    value = torch.zeros(shape, dtype=dtype_named(what.dtype), device=device)
                built[key] = value
        if built or live:
            self._inner.state[held.parameter] = built

    def _members(self) -> list[list[int]]:
        index = {id(p): i for i, group in self._groups() for p in group["params"]}
        names = sorted((name, index[id(h.parameter)]) for h in self._held for name in _names(h))
        return [[group, len(list(run))] for group, run in groupby(number for _, number in names)]

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


def _partitioned(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, frozenset[int] | None]:
    """The optimizer that has the state, and the parameters whose state is here (None: all).

    torch's ZeroRedundancyOptimizer gives each rank the state of some parameters.
    """
    owners: Any = getattr(optimizer, "_param_to_rank", None)
    inner = getattr(optimizer, "optim", None)
    if owners is None or not isinstance(inner, torch.optim.Optimizer):
        return optimizer, None
    own_rank = optimizer.rank  # type: ignore[attr-defined]  # ZeroRedundancyOptimizer's
    return inner, frozenset(id(p) for p, rank in owners.items() if rank == own_rank)


def _everywhere(held: Held, replicas: Replicas, where: tuple[int, int]) -> bool:
    if held.flat is not None or says_itself(held.parameter):
        return False
    if is_dtensor(held.parameter):
        return grid_of_dtensor(held.parameter, where[0]).count == where[1]
    told = replicas.of(held.name)
    return told is None or told.count == where[1]


def _names(held: Held) -> list[str]:
    return [held.name] if held.flat is None else [r.name for r in held.flat.ranges]


def _home(parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where torch's optimizers keep what has not the parameter's shape: on the host unless a kernel needs it."""
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
