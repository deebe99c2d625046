"""Names a module's parameters and buffers independently of its wrappers.

Parameters are replicas (or shards) and may be copied lazily; buffers are saved by the lowest rank of their group; tied
weights once. Used by `program`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch

from surefoot.errors import StateMismatch, StateNotRestorable
from surefoot.geometry.grids import Grid
from surefoot.state.entries import Entry, Saved, is_dtensor
from surefoot.state.flat_parameters import Flat, FlatHandle, flat_handle
from surefoot.state.replicas import Replicas
from surefoot.state.tensor_building import Home, built_marks, facts_of
from surefoot.state.tensor_locations import EntryPlacer, Owner, grid_of_dtensor
from surefoot.state.tensor_names import escaped
from surefoot.state.trees import Facts, first_difference, put_together, taken_apart

_WRAPPINGS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names that torch.compile, activation checkpointing and FSDP1 put into a module's path."""


@dataclass(frozen=True, slots=True)
class OptimizerParameter:
    """Pairs an optimizer's parameter with its full name.

    `flat` lists the ranges in it, by their full names.
    """

    name: str
    parameter: torch.Tensor
    flat: Flat | None = None
    spread: bool = False
    """Whether it is a DTensor."""

    @property
    def owner(self) -> Owner:
        return self.name, self.parameter


def named(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, submodule), each once, without the names that wrappers add."""
    seen: set[int] = set()

    def walk(current: torch.nn.Module, path: tuple[str, ...]) -> Iterator[tuple[str, torch.nn.Module]]:
        if id(current) in seen:
            return
        seen.add(id(current))
        yield ".".join(path), current
        parallel = isinstance(current, torch.nn.parallel.DistributedDataParallel)
        for name, child in current.named_children():
            hidden = name in _WRAPPINGS or (parallel and name == "module")
            yield from walk(child, path if hidden else (*path, escaped(name)))

    yield from walk(module, ())


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields each parameter once, under the first of its names."""
    seen: set[int] = set()
    for name, owner in named(module):
        for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=True):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield _under(name, leaf), parameter


def other_names(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """(another name, the name it is saved by) of tied parameters."""
    first = {id(parameter): name for name, parameter in named_parameters(module)}
    parallel = isinstance(module, torch.nn.parallel.DistributedDataParallel)
    for path, owner in module.named_modules(remove_duplicate=False):
        above = escaped(path.removeprefix("module").removeprefix(".") if parallel else path)
        for leaf, parameter in owner._parameters.items():
            name = _joined(above, escaped(leaf))
            if parameter is not None and first.get(id(parameter), name) != name:
                yield name, first[id(parameter)]


def _under(name: str, leaf: str) -> str:
    return f"{name}.{escaped(leaf)}" if name else escaped(leaf)


def flat_handles(module: torch.nn.Module, rank: int) -> Iterator[FlatHandle]:
    """FSDP1's flat parameters, their ranges named from the module's top."""
    for name, owner in named(module):
        handle = flat_handle(owner, rank, lambda leaf, above=name: _joined(above, escaped(leaf)))
        if handle is not None:
            yield handle


def _joined(above: str, leaf: str) -> str:
    return ".".join(part for part in (*above.split("."), *leaf.split(".")) if part and part not in _WRAPPINGS)


class Slots:
    """Remembers a module's parameters, buffers and submodules to detect changes cheaply."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._hooks: list[dict[str, Any]] = []
        self._hooks_of_buffers: list[dict[str, Any]] = []
        self.buffers: list[tuple[str, dict[str, Any], str]] = []
        """(name, the dictionary that it is in, its key there) of each persistent buffer, also where it is None now."""
        for name, owner in named(module):
            self._hooks += [owner._parameters, owner._modules]
            here: dict[str, Any] = owner._buffers
            kept = [leaf for leaf in here if leaf not in owner._non_persistent_buffers_set]
            self.buffers += [(_under(name, leaf), here, leaf) for leaf in kept]
            self._hooks_of_buffers.append(here)
        self._keys = list(self._names())
        self._held = [held for hook in self._hooks for held in hook.values()]

    def are_the_same(self) -> bool:
        """Returns whether parameters and submodules are unchanged; buffers may be replaced."""
        held = chain.from_iterable(map(dict.values, self._hooks))
        return list(self._names()) == self._keys and all(map(is_, held, self._held))

    def _names(self) -> Iterator[str]:
        return chain.from_iterable((*self._hooks, *self._hooks_of_buffers))

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each persistent buffer once."""
        seen: set[int] = set()
        for name, here, leaf in self.buffers:
            buffer = here[leaf]
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield name, buffer


class ModulePart:
    """One module of the program.

    Parameters are taken anew where one was added, removed or replaced. FSDP2's are not taken for replaced while it shows
    whole copies of its shards, as it may between an evaluation and the next step: the shards stay what training changes.
    """

    def __init__(
        self, name: str, module: torch.nn.Module, where: tuple[int, int], lazy: frozenset[int], replicas: Replicas
    ) -> None:
        rank, world = where
        self.name, self._module, self._lazy = name, module, lazy
        self._flat = list(flat_handles(module, rank))
        self._views = {id(p) for h in self._flat for p in (h.flat_parameter, *(view for view, _ in h.parameters))}
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self._of_parameters: list[Entry] = []
        self._take()
        default = replicas.of(name) or _default_grid(module, list(self.parameters.values()), where)
        self._places = EntryPlacer(rank, default, replicas)
        self.everywhere = default.count == world and not self._flat
        self._incoming: dict[str, torch.Tensor] = {}

    def is_stale(self) -> bool:
        """Returns whether parameters or submodules changed since the last `refresh`."""
        return not self._slots.are_the_same()

    def refresh(self, lazy: frozenset[int]) -> None:
        """Takes the present parameters; `lazy` are those that an optimizer has."""
        self._lazy = lazy
        self._take()
        self._places.forget()
        self._of_parameters = []

    def _take(self) -> None:
        self._slots = Slots(self._module)
        if not (self._flat and self.parameters):  # FSDP1 shows views of its flat parameters, new ones at any time
            found = {leaf: p for leaf, p in named_parameters(self._module) if id(p) not in self._views}
            self.parameters = {leaf: self._sharded(leaf, p) for leaf, p in found.items()}
        self.other_names = {f"{self.name}/{other}": f"{self.name}/{own}" for other, own in other_names(self._module)}
        self._extras = {
            owner_name: owner
            for owner_name, owner in named(self._module)
            if type(owner).get_extra_state is not torch.nn.Module.get_extra_state
        }

    def _sharded(self, leaf: str, present: torch.nn.Parameter) -> torch.nn.Parameter:
        known = self.parameters.get(leaf)
        return known if known is not None and is_dtensor(known) and not is_dtensor(present) else present

    def held(self) -> Iterator[OptimizerParameter]:
        """Its parameters as an optimizer knows them."""
        for leaf, parameter in self.parameters.items():
            yield OptimizerParameter(f"{self.name}/{leaf}", parameter, spread=is_dtensor(parameter))
        for handle in self._flat:
            flat = handle.flat.named(f"{self.name}/")
            if not handle.parameters:
                yield OptimizerParameter(f"{self.name}/flat", handle.flat_parameter, flat)
            for view, one in handle.parameters:
                mine = () if one is None else (one.alone(f"{self.name}/"),)
                yield OptimizerParameter(f"{self.name}/flat", view, Flat(mine, flat.same))

    def entries(self) -> Iterator[Entry]:
        """Live entries, in the module's order."""
        yield from self.standing()
        for name, tensor in self._extra_state()[1].items():
            yield from self._places.of(name, tensor, "lowest")

    def values(self) -> Any:
        """Extra state of submodules, where they have any."""
        return self._extra_state()[0]

    def prepare(self, values: Any, saved: Mapping[str, Saved]) -> None:
        """Builds the tensors of extra state; the module's own exist already."""
        self._incoming = built_marks(values, saved, Home(self._places.rank))

    def prove(self, values: Any, saved: Mapping[str, Saved]) -> None:
        """Builds extra state aside and compares it; other tensors exist already."""
        scratch = built_marks(values, saved, Home(self._places.rank, scratch=True))
        for owner_name, tree in values.items():
            path = f"{self.name}.{owner_name}.extra_state"
            live = self._extras[owner_name].get_extra_state()
            if difference := first_difference(put_together(tree, scratch.__getitem__, live, path), live, path):
                raise StateNotRestorable(f"{difference} by a restore: give it as tensors, numbers and text")

    def targets(self) -> Iterator[Entry]:
        """Entries to fill: live tensors, and those that `prepare` made."""
        yield from self.standing()
        for name, tensor in self._incoming.items():
            yield from self._places.of(name, tensor, "lowest")

    def apply(self, values: Any) -> None:
        """Everything is filled: hands extra state back."""
        for owner_name, tree in values.items():
            if owner_name not in self._extras:
                raise StateMismatch(f"{self.name} has no submodule {owner_name!r} with extra state; the checkpoint has")
            owner = self._extras[owner_name]
            live = owner.get_extra_state()
            owner.set_extra_state(put_together(tree, self._incoming.__getitem__, live, f"{self.name}.{owner_name}"))
        self._incoming = {}

    def standing(self) -> Iterator[Entry]:
        """Parameters and buffers."""
        if not self._of_parameters:
            for leaf, parameter in self.parameters.items():
                lazy = id(parameter) in self._lazy
                self._of_parameters += self._places.of(f"{self.name}/{leaf}", parameter, "split", lazy)
        yield from self._of_parameters
        for handle in self._flat:
            keys = [handle.flat_parameter, *(view for view, _ in handle.parameters)]
            lazy = any(id(key) in self._lazy for key in keys)
            yield from self._places.of_flat(f"{self.name}/", "", handle.flat_parameter, handle.flat, lazy)
        for leaf, buffer in self._slots.named_buffers():
            yield from self._places.of(f"{self.name}/{leaf}", buffer, "lowest")

    def _facts_of(self, tensor: torch.Tensor) -> Facts | None:
        return facts_of(f"{self.name}'s extra state", tensor)

    def _extra_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        trees = {
            name: taken_apart(owner.get_extra_state(), f"{self.name}/~extra/{name}", tensors, self._facts_of)
            for name, owner in self._extras.items()
        }
        return trees, tensors


def _default_grid(module: torch.nn.Module, parameters: list[torch.nn.Parameter], where: tuple[int, int]) -> Grid:
    """Ranks that hold a module's plain tensors: DDP's group, those of its sharded tensors' mesh, else all."""
    for _, owner in named(module):
        if isinstance(owner, torch.nn.parallel.DistributedDataParallel):
            import torch.distributed as dist

            return Grid.of(sorted(dist.get_process_group_ranks(owner.process_group)))
    for tensor in parameters:
        if is_dtensor(tensor):
            return grid_of_dtensor(tensor, where[0]).only({})
    return Grid.world(where[1])
