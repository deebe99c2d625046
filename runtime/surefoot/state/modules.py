"""Names a module's parameters and buffers, and converts checkpoints to torch state dicts and back.

Parameters are replicas (or shards) and may be copied lazily; buffers are saved by the lowest rank of their group; tied
weights once. Used by `program`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import is_
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from surefoot.errors import StateMismatch, StateNotRestorable
from surefoot.format import values
from surefoot.geometry.sharding import Grid
from surefoot.state.entries import (
    Entry,
    SavedTensor,
    dtype_from_name,
    escaped,
    is_dtensor,
    is_plain,
    joined,
    unescaped,
)
from surefoot.state.own_state import OWN, own_states, run_load_hooks
from surefoot.state.tensor_building import (
    BuildLocation,
    Facts,
    TensorPlaceholder,
    built_marks,
    extract_tensors,
    facts_of,
    first_difference,
    insert_tensors,
    marked,
)
from surefoot.state.tensor_locations import (
    EntryPlacer,
    FlatHandle,
    FlatLayout,
    Owner,
    Replicas,
    flat_handle,
    grid_of_dtensor,
)

_WRAPPINGS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names that torch.compile, activation checkpointing and FSDP1 put into a module's path."""

_DATA_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
"""Wrappers whose only child is the model, under the name `module`."""


@dataclass(frozen=True, slots=True)
class OptimizerParameter:
    """Pairs an optimizer's parameter with its full name.

    `flat` lists the ranges in a flat parameter, by their full names; None for other parameters.
    """

    name: str
    parameter: torch.Tensor
    flat: FlatLayout | None = None
    spread: bool = False
    """Whether it is a DTensor."""

    @property
    def owner(self) -> Owner:
        return self.name, self.parameter


def iter_modules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields (name, submodule), each once, without the name parts that wrappers add."""
    visited_ids: set[int] = set()

    def walk(current: torch.nn.Module, path: tuple[str, ...]) -> Iterator[tuple[str, torch.nn.Module]]:
        if id(current) in visited_ids:
            return
        visited_ids.add(id(current))
        yield ".".join(path), current
        is_ddp = isinstance(current, _DATA_PARALLEL)
        for name, child in current.named_children():
            is_wrapper = name in _WRAPPINGS or (is_ddp and name == "module")
            yield from walk(child, path if is_wrapper else (*path, escaped(name)))

    yield from walk(module, ())


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields each parameter once, under the first of its names."""
    yielded_ids: set[int] = set()
    for name, owner in iter_modules(module):
        for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=True):
            if id(parameter) not in yielded_ids:
                yielded_ids.add(id(parameter))
                yield _child_name(name, leaf), parameter


def other_names(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (other name, saved name) of tied parameters."""
    first_names_by_id = {id(parameter): name for name, parameter in named_parameters(module)}
    is_ddp = isinstance(module, _DATA_PARALLEL)
    for path, owner in module.named_modules(remove_duplicate=False):
        parent_name = escaped(path.removeprefix("module").removeprefix(".") if is_ddp else path)
        for leaf, parameter in owner._parameters.items():
            name = _join_names(parent_name, escaped(leaf))
            if parameter is not None and first_names_by_id.get(id(parameter), name) != name:
                yield name, first_names_by_id[id(parameter)]


def _child_name(name: str, leaf: str) -> str:
    return f"{name}.{escaped(leaf)}" if name else escaped(leaf)


def flat_handles(module: torch.nn.Module, rank: int) -> Iterator[FlatHandle]:
    """Yields FSDP1's flat parameters, with their ranges named relative to the module."""
    for name, owner in iter_modules(module):
        handle = flat_handle(owner, rank, lambda leaf, above=name: _join_names(above, escaped(leaf)))
        if handle is not None:
            yield handle


def _join_names(parent_name: str, leaf: str) -> str:
    return ".".join(part for part in (*parent_name.split("."), *leaf.split(".")) if part and part not in _WRAPPINGS)


class ModuleSignature:
    """Remembers a module's parameters, buffers and submodules to detect changes cheaply."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._dictionaries: list[dict[str, Any]] = []
        self._buffer_dictionaries: list[dict[str, Any]] = []
        self.buffers: list[tuple[str, dict[str, Any], str]] = []
        """(name, owning module's buffers, key in them) of each persistent buffer, including those that are None now."""
        for name, owner in iter_modules(module):
            self._dictionaries += [owner._parameters, owner._modules]
            module_buffers: dict[str, Any] = owner._buffers
            persistent_names = [leaf for leaf in module_buffers if leaf not in owner._non_persistent_buffers_set]
            self.buffers += [(_child_name(name, leaf), module_buffers, leaf) for leaf in persistent_names]
            self._buffer_dictionaries.append(module_buffers)
        self._buffer_places = {name: (module_buffers, leaf) for name, module_buffers, leaf in self.buffers}
        self._keys = list(self._names())
        self._dictionary_values = [value for dictionary in self._dictionaries for value in dictionary.values()]

    def are_the_same(self) -> bool:
        """Returns whether parameters and submodules are unchanged; buffers may be replaced."""
        values = chain.from_iterable(map(dict.values, self._dictionaries))
        return list(self._names()) == self._keys and all(map(is_, values, self._dictionary_values))

    def _names(self) -> Iterator[str]:
        return chain.from_iterable((*self._dictionaries, *self._buffer_dictionaries))

    def buffer(self, name: str) -> torch.Tensor | None:
        """Returns a persistent buffer by its name; None where there is none now."""
        dictionary, leaf = self._buffer_places.get(name, ({}, ""))
        found: torch.Tensor | None = dictionary.get(leaf)
        return found

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each persistent buffer once."""
        yielded_ids: set[int] = set()
        for name, module_buffers, leaf in self.buffers:
            buffer = module_buffers[leaf]
            if buffer is not None and id(buffer) not in yielded_ids:
                yielded_ids.add(id(buffer))
                yield name, buffer


Kind = tuple[torch.dtype, tuple[int, ...]]
"""A tensor's dtype and shape."""

BUFFERS = "~buffers"
"""Key among a module's values for buffers whose type or shape is not the one that the program builds."""


def _kind_of(tensor: torch.Tensor | None) -> Kind | None:
    """Describes a tensor; None without one, or without a shape yet (LazyLinear)."""
    if tensor is None or is_lazy(tensor):
        return None
    return tensor.dtype, tensor.shape


def _extra_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {owner: tree for owner, tree in values.items() if owner != BUFFERS}


class ModulePart:
    """One module of the program.

    Parameters are collected again when one was added, removed or replaced. FSDP2 may show gathered copies of its shards
    between an evaluation and the next step; these do not count as replaced, because training changes the shards.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        rank_and_world_size: tuple[int, int],
        lazy_ids: frozenset[int],
        replicas: Replicas,
    ) -> None:
        rank, world_size = rank_and_world_size
        self.name, self._module, self._lazy = name, module, lazy_ids
        self._flat = list(flat_handles(module, rank))
        self._flat_parameter_ids = {
            id(p) for h in self._flat for p in (h.flat_parameter, *(view for view, _ in h.parameters))
        }
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self._parameter_entries: list[Entry] = []
        self._collect()
        self._built_buffers = self._buffer_kinds()
        default = replicas.of(name) or _default_grid(module, list(self.parameters.values()), rank_and_world_size)
        self._placer = EntryPlacer(rank, default, replicas)
        self.is_on_every_rank = default.count == world_size and not self._flat
        self._incoming: dict[str, torch.Tensor] = {}
        self._incoming_buffers: dict[str, torch.Tensor | None] = {}

    def is_stale(self) -> bool:
        """Returns whether parameters or submodules changed since the last `refresh`."""
        return not self._signature.are_the_same()

    def mark_built(self) -> None:
        """Takes the present buffers for those that a fresh start builds before its restore."""
        self._built_buffers = self._buffer_kinds()

    def refresh(self, lazy_ids: frozenset[int]) -> None:
        """Collects the current parameters; `lazy` has the ids of those that belong to an optimizer."""
        self._lazy = lazy_ids
        self._collect()
        self._placer.forget()
        self._parameter_entries = []

    def _collect(self) -> None:
        self._signature = ModuleSignature(self._module)
        if not (self._flat and self.parameters):  # FSDP1 shows views of its flat parameters, new ones at any time
            parameters = {
                leaf: p for leaf, p in named_parameters(self._module) if id(p) not in self._flat_parameter_ids
            }
            self.parameters = {leaf: self._keep_sharded(leaf, p) for leaf, p in parameters.items()}
        self.other_names = {
            f"{self.name}/{other_name}": f"{self.name}/{saved_name}"
            for other_name, saved_name in other_names(self._module)
        }
        self._extras = {
            owner_name: owner
            for owner_name, owner in iter_modules(self._module)
            if type(owner).get_extra_state is not torch.nn.Module.get_extra_state
        } | own_states(self.name, iter_modules(self._module), bool(self._flat))

    def _keep_sharded(self, leaf: str, present: torch.nn.Parameter) -> torch.nn.Parameter:
        previous = self.parameters.get(leaf)
        return previous if previous is not None and is_dtensor(previous) and not is_dtensor(present) else present

    def optimizer_parameters(self) -> Iterator[OptimizerParameter]:
        """Yields the module's parameters as an optimizer refers to them."""
        for leaf, parameter in self.parameters.items():
            yield OptimizerParameter(f"{self.name}/{leaf}", parameter, spread=is_dtensor(parameter))
        for handle in self._flat:
            flat = handle.flat.with_prefix(f"{self.name}/")
            if not handle.parameters:
                yield OptimizerParameter(f"{self.name}/flat", handle.flat_parameter, flat)
            for view, flat_range in handle.parameters:
                ranges = () if flat_range is None else (flat_range.alone(f"{self.name}/"),)
                yield OptimizerParameter(f"{self.name}/flat", view, FlatLayout(ranges, flat.same))

    def entries(self) -> Iterator[Entry]:
        """Yields live entries, in the module's order."""
        yield from self.weights()
        for name, tensor in self._extra_state()[1].items():
            yield from self._placer.of(name, tensor, "lowest")

    def values(self) -> Any:
        """Returns the extra state of submodules that have any, and the buffers that training has made others."""
        changed = self._changed_buffers()
        return self._extra_state()[0] | ({BUFFERS: changed} if changed else {})

    def prepare(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds the tensors of extra state, and buffers that training made others; the module's own exist already."""
        self._incoming = built_marks(_extra_values(values), saved, BuildLocation(self._placer.rank))
        self._incoming_buffers = {}
        kinds = self._buffer_kinds()
        for leaf, device in values.get(BUFFERS, {}).items():
            saved_tensor = saved.get(f"{self.name}/{leaf}")
            if device is None:
                self._incoming_buffers[leaf] = None
            elif saved_tensor is not None and kinds.get(leaf) != (
                dtype_from_name(saved_tensor.dtype),
                saved_tensor.shape,
            ):
                live = self._signature.buffer(leaf)
                parameter = next(iter(self.parameters.values()), None)
                location = BuildLocation(self._placer.rank, parameter).device(device)
                dtype = dtype_from_name(saved_tensor.dtype)
                where = location if live is None else live.device
                self._incoming_buffers[leaf] = torch.empty(saved_tensor.shape, dtype=dtype, device=where)

    def check_restorable(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds extra state aside and compares it; other tensors exist already."""
        scratch = built_marks(values, saved, BuildLocation(self._placer.rank, scratch=True))
        for owner_name, tree in _extra_values(values).items():
            path = f"{self.name}.{owner_name}.extra_state"
            live = self._extras[owner_name].get_extra_state()
            if difference := first_difference(insert_tensors(tree, scratch.__getitem__, live, path), live, path):
                raise StateNotRestorable(f"{difference} by a restore: give it as tensors, numbers and text")

    def targets(self) -> Iterator[Entry]:
        """Entries to fill: live tensors, and those that `prepare` made."""
        yield from self._parameters_and_flat()
        for leaf, buffer in {**dict(self._signature.named_buffers()), **self._incoming_buffers}.items():
            if buffer is not None:
                yield from self._placer.of(f"{self.name}/{leaf}", buffer, "lowest")
        for name, tensor in self._incoming.items():
            yield from self._placer.of(name, tensor, "lowest")

    def apply(self, values: Any) -> None:
        """Gives restored extra state and buffers back to their submodules, after all targets were filled."""
        for leaf, buffer in self._incoming_buffers.items():
            self._set_buffer(leaf, buffer)
        self._incoming_buffers = {}
        for owner_name, tree in _extra_values(values).items():
            if owner_name not in self._extras:
                raise StateMismatch(f"{self.name} has no submodule {owner_name!r} with extra state; the checkpoint has")
            owner = self._extras[owner_name]
            live = owner.get_extra_state()
            owner.set_extra_state(insert_tensors(tree, self._incoming.__getitem__, live, f"{self.name}.{owner_name}"))
        self._incoming = {}
        self.run_load_hooks()

    def run_load_hooks(self) -> None:
        """Runs the hooks of `load_state_dict`; none before a load under FSDP1, whose parameters are views of shards."""
        run_load_hooks(self.name, {} if self._flat else dict(iter_modules(self._module)))

    def weights(self) -> Iterator[Entry]:
        """Yields entries of parameters and buffers."""
        yield from self._parameters_and_flat()
        for leaf, buffer in self._signature.named_buffers():
            yield from self._placer.of(f"{self.name}/{leaf}", buffer, "lowest")

    def parameter_kinds(self) -> dict[str, Kind | None]:
        """Returns dtype and shape of the parameters that are not flat, by full name."""
        return {f"{self.name}/{leaf}": _kind_of(parameter) for leaf, parameter in self.parameters.items()}

    def _buffer_kinds(self) -> dict[str, Kind | None]:
        return {leaf: _kind_of(dictionary[key]) for leaf, dictionary, key in self._signature.buffers}

    def _changed_buffers(self) -> dict[str, str | None]:
        """Maps buffers whose type or shape the program changed to their device; None: the buffer is None now.

        Observers, memory banks and lazily made buffers change so, and a fresh program has them as they were.
        """
        changed: dict[str, str | None] = {}
        for leaf, kind in self._buffer_kinds().items():
            if self._built_buffers.get(leaf) != kind:
                buffer = self._signature.buffer(leaf)
                changed[leaf] = None if buffer is None else buffer.device.type
        return changed

    def _set_buffer(self, leaf: str, buffer: torch.Tensor | None) -> None:
        live, (path, _, key) = self._signature.buffer(leaf), leaf.rpartition(".")
        if live is not None and buffer is not None:
            live.data = buffer  # others may refer to it
            return
        owner = dict(iter_modules(self._module)).get(path)
        if owner is None or (unescaped(key) not in owner._buffers and hasattr(owner, unescaped(key))):
            raise StateMismatch(
                f"the checkpoint has the buffer {self.name}/{leaf}, which this program lacks: register it before restore()"
            )
        if unescaped(key) in owner._buffers:
            owner._buffers[unescaped(key)] = buffer
        elif buffer is not None:
            owner.register_buffer(unescaped(key), buffer)

    def _parameters_and_flat(self) -> Iterator[Entry]:
        if not self._parameter_entries:
            for leaf, parameter in self.parameters.items():
                lazy = id(parameter) in self._lazy
                self._parameter_entries += self._placer.of(f"{self.name}/{leaf}", parameter, "split", lazy)
        yield from self._parameter_entries
        for handle in self._flat:
            parameters = [handle.flat_parameter, *(view for view, _ in handle.parameters)]
            lazy = any(id(key) in self._lazy for key in parameters)
            yield from self._placer.of_flat(f"{self.name}/", "", handle.flat_parameter, handle.flat, lazy)

    def _facts_of(self, tensor: torch.Tensor) -> Facts | None:
        return facts_of(f"{self.name}'s extra state", tensor)

    def _extra_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        states = {name: owner.get_extra_state() for name, owner in self._extras.items()}
        trees = {
            name: extract_tensors(state, f"{self.name}/~extra/{name}", tensors, self._facts_of)
            for name, state in states.items()
            if state or not name.startswith(OWN)
        }
        return trees, tensors


def _default_grid(
    module: torch.nn.Module, parameters: list[torch.nn.Parameter], rank_and_world_size: tuple[int, int]
) -> Grid:
    """Returns the ranks with a module's plain tensors: DDP's group, else its DTensors' mesh, else all."""
    for _, owner in iter_modules(module):
        if isinstance(owner, torch.nn.parallel.DistributedDataParallel):
            import torch.distributed as dist

            return Grid.of(sorted(dist.get_process_group_ranks(owner.process_group)))
    for tensor in parameters:
        if is_dtensor(tensor):
            return grid_of_dtensor(tensor, rank_and_world_size[0]).only({})
    return Grid.world_size(rank_and_world_size[1])


# ---- statedicts ------------------------------------------------------------------------------------------------------
# Converts checkpoints to nested state dicts of torch's form, and back.
#     {"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "param_groups": [...]}, "scheduler": {...}}
# Tensors are stand-ins without memory (device `meta`), so that a checkpoint of any size has such a state dict. Used by
# the DCP adapter and by export and import.

OWN_KEY = "surefoot"
"""Key of a state dict for values that belong to no object: the step and the seed."""


@dataclass(frozen=True, slots=True)
class StateDict:
    """A nested state dict; `names` maps stand-ins' ids to saved names."""

    tree: dict[str, Any]
    names: dict[int, str] = field(default_factory=dict)


def state_dict_of(tensors: Mapping[str, SavedTensor], values: Mapping[str, Any]) -> StateDict:
    """Builds the state dict of a checkpoint's shared state.

    Per-rank state (`local/`) is left out.
    """
    state_dict = StateDict({})

    def stand_in(name: str) -> torch.Tensor:
        saved = tensors.get(name)
        if saved is None:
            raise StateMismatch(f"the values of the checkpoint name tensor {name}, and no rank saved it")
        tensor = torch.empty(saved.shape, dtype=dtype_from_name(saved.dtype), device="meta")
        state_dict.names[id(tensor)] = name
        return tensor

    parts = values["parts"]
    for part, part_values in parts.items():
        if _is_optimizer(part_values):
            state_dict.tree[part] = _optimizer_state_dict(part, part_values, tensors, stand_in)
            continue
        prefix = f"{part}/"
        leaves = {n.removeprefix(prefix): n for n in tensors if n.startswith(prefix)}
        if _is_module(part_values, leaves):
            state_dict.tree[part] = _leaves_by_own_name(
                {leaf: stand_in(name) for leaf, name in leaves.items() if "/" not in leaf}
            )
            for owner, tree in _extra_values(part_values).items():
                if owner.startswith(OWN):
                    path = unescaped(owner.removeprefix(OWN))
                    added = _assemble(tree, stand_in, tensors)
                    state_dict.tree[part] |= {f"{path}.{key}" if path else key: value for key, value in added.items()}
                    continue
                key = f"{unescaped(owner)}._extra_state" if owner else "_extra_state"
                state_dict.tree[part][key] = _assemble(tree, stand_in, tensors)
        else:
            state_dict.tree[part] = _assemble(part_values, stand_in, tensors)
    for other_name, saved_name in values.get("tied", {}).items():
        part, _, leaf = other_name.partition("/")
        if part in state_dict.tree and saved_name in tensors:
            state_dict.tree[part][unescaped(leaf)] = stand_in(saved_name)
    state_dict.tree[OWN_KEY] = {"step": values["step"], "seed": values["seed"]}
    return state_dict


def _is_optimizer(part_values: Any) -> bool:
    return isinstance(part_values, dict) and {"groups", "plain"} <= set(part_values)


def _is_module(part_values: Any, leaves: Mapping[str, str]) -> bool:
    """Returns whether a part is a module: it has tensors that no mark in its values refers to.

    A module's values are at most extra state; the tensors of other objects are all marked in their values.
    """
    if not isinstance(part_values, dict):
        return False
    marked_names = set(marked(part_values))
    return any(name not in marked_names and "/" not in leaf for leaf, name in leaves.items())


def _leaves_by_own_name(leaves: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Maps decoded names to tensors; inner tensors of a subclass keep the `:` before their attribute."""
    split_names = ((leaf.rpartition(":") if ":" in leaf else (leaf, "", ""), tensor) for leaf, tensor in leaves.items())
    return {
        f"{unescaped(leaf)}:{part}" if colon else unescaped(leaf or part): t for (leaf, colon, part), t in split_names
    }


def _assemble(tree: Any, stand_in: Callable[[str], torch.Tensor], tensors: Mapping[str, SavedTensor]) -> Any:
    """Fills a tree with stand-ins; tensor subclasses become dicts of inner tensors, classes their names."""
    if isinstance(tree, TensorPlaceholder):
        if tree.name in tensors or not (tree.facts or {}).get("class"):
            return stand_in(tree.name)
        inner_attributes = [attribute for attribute, _ in tree.facts["class"]["inner"]] if tree.facts else []
        return {attribute: stand_in(f"{tree.name}:{attribute}") for attribute in inner_attributes}
    if isinstance(tree, values.NamedObject):
        return str(tree)
    return values.map_container(tree, lambda _, value: _assemble(value, stand_in, tensors))


def _optimizer_state_dict(
    part: str, part_values: Any, tensors: Mapping[str, SavedTensor], stand_in: Any
) -> dict[str, Any]:
    """Builds torch's form of an optimizer's state dict, with stand-ins for tensors."""
    state: dict[str, dict[Any, Any]] = {}
    # a parameter's name occurs in a tensor's name, in its plain values, or, without state, among the bare ones
    full_names = set(part_values.get("bare", ()))
    for name in tensors:
        full_name, _, leaf = name.removeprefix(f"{part}/").rpartition("/")
        if name.startswith(f"{part}/") and full_name[:1] != "~" and is_plain(leaf):
            full_names.add(full_name)
            state.setdefault(_parameter_name(full_name), {})[unescaped(leaf)] = stand_in(name)
    for full_name, plain in part_values["plain"].items():
        full_names.add(full_name)
        state.setdefault(_parameter_name(full_name), {}).update(_assemble(plain, stand_in, tensors))
    state |= _assemble(part_values.get("loose", {}), stand_in, tensors)
    groups = [_assemble(group, stand_in, tensors) for group in part_values["groups"]]
    # `members` has (group, count) over the sorted names; without it all parameters are in group 0
    runs = part_values.get("members") or [[0, len(full_names)]]
    group_numbers = [number for number, count in runs for _ in range(count)]
    members = (
        list(zip(sorted(full_names), group_numbers, strict=False)) if len(group_numbers) == len(full_names) else []
    )
    for number, group in enumerate(groups):
        group["params"] = [_parameter_name(name) for name, group_number in members if group_number == number]
    extra_keys: dict[str, Any] = _assemble(part_values.get("more", {}), stand_in, tensors)
    return {"state": state, "param_groups": groups} | extra_keys


def _parameter_name(full_name: str) -> str:
    return unescaped(full_name.partition("/")[2] or full_name)


@dataclass(slots=True)
class ImportedParts:
    """Collects the tensors and values that an importer writes.

    `tensors` maps a name in the checkpoint to its tensor or stand-in in the source.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def parts_of(tree: Mapping[str, Any], model: str = "model") -> ImportedParts:
    """Splits a nested state dict into the parts of a program.

    Tensors may be stand-ins. `model` is the part name for the weights of a state dict with only weights at its top.
    """
    if any(isinstance(value, torch.Tensor) for value in tree.values()):
        flat_keys = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
        optimizer = {k: v for k, v in flat_keys.items() if k.startswith(("state.", "param_groups."))}
        weights = {k: v for k, v in flat_keys.items() if k not in optimizer}
        nested_parts = {k: v for k, v in tree.items() if isinstance(v, Mapping)}
        tree = {model: weights, **({"optimizer": optimizer} if optimizer else {}), **nested_parts}
    parts = ImportedParts()
    own_values = tree.get(OWN_KEY)
    modules = {n: subtree for n, subtree in tree.items() if n != OWN_KEY and _looks_like_module(subtree)}
    for name, subtree in tree.items():
        if name == OWN_KEY:
            continue
        if name in modules:
            parts.tensors |= {f"{name}/{escaped(leaf)}": tensor for leaf, tensor in subtree.items()}
            parts.values[name] = {}
        elif (nested := _nested_optimizer(subtree)) is not None:
            parts.values[name] = _optimizer_values(name, nested, modules, parts.tensors)
        else:
            parts.values[name] = extract_tensors(subtree, name, parts.tensors)
    parts.values = {"parts": parts.values, **(own_values if isinstance(own_values, Mapping) else {})}
    return parts


def _looks_like_module(subtree: Any) -> bool:
    is_flat = (
        isinstance(subtree, Mapping)
        and bool(subtree)
        and all(isinstance(value, torch.Tensor) for value in subtree.values())
    )
    return is_flat and not all(key.startswith(("state.", "param_groups.")) for key in subtree)


def _nested_optimizer(subtree: Any) -> dict[str, Any] | None:
    """Returns an optimizer's state dict in nested form; None if it is not an optimizer's.

    Flat keys such as `state.layer.weight.exp_avg` are accepted too.
    """
    if not isinstance(subtree, Mapping) or not subtree:
        return None
    if {"state", "param_groups"} <= set(subtree):
        state = {str(name): dict(keys) for name, keys in subtree["state"].items()}
        return {"state": state, "param_groups": list(subtree["param_groups"])}
    if not all(str(key).startswith(("state.", "param_groups.")) for key in subtree):
        return None
    options: dict[str, dict[str, Any]] = {}
    state = {}
    for key, value in subtree.items():
        kind, _, full_key = str(key).partition(".")
        name, _, leaf = full_key.rpartition(".")
        (state if kind == "state" else options).setdefault(name, {})[leaf] = value
    groups: list[dict[str, Any]] = []
    for name, group_options in options.items():
        group = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == group_options), None)
        if group is None:
            groups.append(group := {**group_options, "params": []})
        group["params"].append(name)
    return {"state": state, "param_groups": groups}


def _optimizer_values(
    part: str, nested: dict[str, Any], modules: Mapping[str, Any], tensors: dict[str, Any]
) -> dict[str, Any]:
    plain: dict[str, dict[str, Any]] = {}
    for name, keys in nested["state"].items():
        full_name = f"{_module_of(name, modules)}/{escaped(name)}"
        for key, value in keys.items():
            path = f"{part}/{full_name}/{escaped(key)}"
            if isinstance(value, torch.Tensor) and type(key) is str:
                tensors[path] = value
            else:
                plain.setdefault(full_name, {})[key] = extract_tensors(value, path, tensors, join=joined)
    groups = []
    members: list[tuple[str, int]] = []
    for number, group in enumerate(nested["param_groups"]):
        members += [(f"{_module_of(name, modules)}/{escaped(name)}", number) for name in group.get("params", ())]
        group_options = {key: value for key, value in group.items() if key != "params"}
        groups.append(extract_tensors(group_options, f"{part}/~groups/{number}", tensors))
    return {"groups": groups, "plain": plain, "members": _run_lengths(members) if len(groups) > 1 else []}


def _run_lengths(members: Iterable[tuple[str, int]]) -> list[list[int]]:
    return [[number, len(list(run))] for number, run in groupby(number for _, number in sorted(members))]


def _module_of(name: str, modules: Mapping[str, Any]) -> str:
    matching_modules = [module for module, subtree in modules.items() if name in subtree]
    if matching_modules:
        return matching_modules[0]
    if len(modules) == 1:
        return next(iter(modules))
    raise StateMismatch(f"the optimizer has state of {name!r}, which is in none of the models {sorted(modules)}")
