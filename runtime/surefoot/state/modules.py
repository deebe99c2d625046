"""A module's parameters and persistent buffers under names that do not depend on how it was wrapped.

Parameters are replicas (or shards, if DTensor) and may be copied lazily; buffers are saved by the lowest rank of their
group; tied weights once. Used by `program`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from surefoot.errors import ConfigurationError, StateMismatch
from surefoot.state.entries import Entries, Entry, Saved, ranks_of
from surefoot.state.trees import marked, put_together, taken_apart

_WRAPPINGS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Names that torch.compile and activation checkpointing put into a module's path."""


def named(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, submodule), each once, without the names that wrappers add."""
    seen: set[int] = set()

    def walk(current: torch.nn.Module, path: tuple[str, ...]) -> Iterator[tuple[str, torch.nn.Module]]:
        if id(current) in seen:
            return
        seen.add(id(current))
        _refuse_flat(current, ".".join(path))
        yield ".".join(path), current
        parallel = isinstance(current, torch.nn.parallel.DistributedDataParallel)
        for name, child in current.named_children():
            hidden = name in _WRAPPINGS or (parallel and name == "module")
            yield from walk(child, path if hidden else (*path, name))

    yield from walk(module, ())


def _refuse_flat(module: torch.nn.Module, name: str) -> None:
    kind = f"{type(module).__module__}.{type(module).__name__}"
    if kind.startswith("torch.distributed.fsdp.fully_sharded_data_parallel."):
        raise ConfigurationError(
            f"{name or 'the model'} is wrapped in FullyShardedDataParallel, whose flat parameters have no names:"
            " use fully_shard (FSDP2)"
        )


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter once, under the first of its names."""
    seen: set[int] = set()
    for name, owner in named(module):
        for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=True):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{leaf}" if name else leaf, parameter


def named_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each persistent buffer once."""
    seen: set[int] = set()
    for name, owner in named(module):
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and leaf not in owner._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{name}.{leaf}" if name else leaf, buffer


class ModulePart:
    """One module of the program.

    Parameters are taken once, at the start: between an evaluation and the next step FSDP2 may leave unsharded copies
    in the module, while the sharded ones that it was built with stay what training changes.
    """

    def __init__(self, name: str, module: torch.nn.Module, world: int, lazy: frozenset[int]) -> None:
        self.name, self._module, self._lazy = name, module, lazy
        self.parameters = dict(named_parameters(module))
        ranks = ranks_of(list(self.parameters.values()), world)
        self._entries = Entries(ranks)
        self.everywhere = len(ranks) == world
        self._incoming: dict[str, torch.Tensor] = {}
        self._extras = {
            owner_name: owner
            for owner_name, owner in named(module)
            if type(owner).get_extra_state is not torch.nn.Module.get_extra_state
        }

    def entries(self) -> Iterator[Entry]:
        """Live entries, in the module's order."""
        yield from self.standing()
        for name, tensor in self._extra_state()[1].items():
            yield self._entries.of(name, tensor, "lowest")

    def values(self) -> Any:
        """Extra state of submodules, where they have any."""
        return self._extra_state()[0]

    def prepare(self, values: Any, saved: Mapping[str, Saved]) -> None:
        """A module's own tensors stand before it is restored; those of extra state are made to fit the checkpoint."""
        self._incoming = {name: saved[name].empty() for name in marked(values) if name in saved}

    def targets(self) -> Iterator[Entry]:
        """What a restore fills: the live tensors, and those that `prepare` made."""
        yield from self.standing()
        for name, tensor in self._incoming.items():
            yield self._entries.of(name, tensor, "lowest")

    def apply(self, values: Any) -> None:
        """Everything is filled: hands extra state back."""
        for owner_name, tree in values.items():
            if owner_name not in self._extras:
                raise StateMismatch(f"{self.name} has no submodule {owner_name!r} with extra state; the checkpoint has")
            self._extras[owner_name].set_extra_state(put_together(tree, self._incoming.__getitem__))
        self._incoming = {}

    def standing(self) -> Iterator[Entry]:
        """Parameters and buffers."""
        for leaf, parameter in self.parameters.items():
            name = f"{self.name}/{leaf}"
            yield self._entries.of(name, parameter, "split", id(parameter) in self._lazy)
        for leaf, buffer in named_buffers(self._module):
            name = f"{self.name}/{leaf}"
            yield self._entries.of(name, buffer, "lowest")

    def _extra_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        trees = {
            name: taken_apart(owner.get_extra_state(), f"{self.name}/{name}/extra_state", tensors)
            for name, owner in self._extras.items()
        }
        return trees, tensors
