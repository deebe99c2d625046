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

from surefoot.errors import StateMismatch, StateNotRestorable
from surefoot.format import values
from surefoot.geometry.sharding import Grid
from surefoot.state.entries import Entry, SavedTensor, dtype_from_name, escaped, is_dtensor, is_plain, joined, unescaped
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


@dataclass(frozen=True, slots=True)
class OptimizerParameter:
    """Pairs an optimizer's parameter with its full name.

    `flat` lists the ranges in it, by their full names.
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
    for name, owner in iter_modules(module):
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
    for name, owner in iter_modules(module):
        handle = flat_handle(owner, rank, lambda leaf, above=name: _joined(above, escaped(leaf)))
        if handle is not None:
            yield handle


def _joined(above: str, leaf: str) -> str:
    return ".".join(part for part in (*above.split("."), *leaf.split(".")) if part and part not in _WRAPPINGS)


class ModuleSignature:
    """Remembers a module's parameters, buffers and submodules to detect changes cheaply."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._hooks: list[dict[str, Any]] = []
        self._hooks_of_buffers: list[dict[str, Any]] = []
        self.buffers: list[tuple[str, dict[str, Any], str]] = []
        """(name, the dictionary that it is in, its key there) of each persistent buffer, also where it is None now."""
        for name, owner in iter_modules(module):
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
        self.is_on_every_rank = default.count == world and not self._flat
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
        self._slots = ModuleSignature(self._module)
        if not (self._flat and self.parameters):  # FSDP1 shows views of its flat parameters, new ones at any time
            found = {leaf: p for leaf, p in named_parameters(self._module) if id(p) not in self._views}
            self.parameters = {leaf: self._sharded(leaf, p) for leaf, p in found.items()}
        self.other_names = {f"{self.name}/{other}": f"{self.name}/{own}" for other, own in other_names(self._module)}
        self._extras = {
            owner_name: owner
            for owner_name, owner in iter_modules(self._module)
            if type(owner).get_extra_state is not torch.nn.Module.get_extra_state
        }

    def _sharded(self, leaf: str, present: torch.nn.Parameter) -> torch.nn.Parameter:
        known = self.parameters.get(leaf)
        return known if known is not None and is_dtensor(known) and not is_dtensor(present) else present

    def optimizer_parameters(self) -> Iterator[OptimizerParameter]:
        """Its parameters as an optimizer knows them."""
        for leaf, parameter in self.parameters.items():
            yield OptimizerParameter(f"{self.name}/{leaf}", parameter, spread=is_dtensor(parameter))
        for handle in self._flat:
            flat = handle.flat.with_prefix(f"{self.name}/")
            if not handle.parameters:
                yield OptimizerParameter(f"{self.name}/flat", handle.flat_parameter, flat)
            for view, one in handle.parameters:
                mine = () if one is None else (one.alone(f"{self.name}/"),)
                yield OptimizerParameter(f"{self.name}/flat", view, FlatLayout(mine, flat.same))

    def entries(self) -> Iterator[Entry]:
        """Live entries, in the module's order."""
        yield from self.weights()
        for name, tensor in self._extra_state()[1].items():
            yield from self._places.of(name, tensor, "lowest")

    def values(self) -> Any:
        """Extra state of submodules, where they have any."""
        return self._extra_state()[0]

    def prepare(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds the tensors of extra state; the module's own exist already."""
        self._incoming = built_marks(values, saved, BuildLocation(self._places.rank))

    def check_restorable(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds extra state aside and compares it; other tensors exist already."""
        scratch = built_marks(values, saved, BuildLocation(self._places.rank, scratch=True))
        for owner_name, tree in values.items():
            path = f"{self.name}.{owner_name}.extra_state"
            live = self._extras[owner_name].get_extra_state()
            if difference := first_difference(insert_tensors(tree, scratch.__getitem__, live, path), live, path):
                raise StateNotRestorable(f"{difference} by a restore: give it as tensors, numbers and text")

    def targets(self) -> Iterator[Entry]:
        """Entries to fill: live tensors, and those that `prepare` made."""
        yield from self.weights()
        for name, tensor in self._incoming.items():
            yield from self._places.of(name, tensor, "lowest")

    def apply(self, values: Any) -> None:
        """Everything is filled: hands extra state back."""
        for owner_name, tree in values.items():
            if owner_name not in self._extras:
                raise StateMismatch(f"{self.name} has no submodule {owner_name!r} with extra state; the checkpoint has")
            owner = self._extras[owner_name]
            live = owner.get_extra_state()
            owner.set_extra_state(insert_tensors(tree, self._incoming.__getitem__, live, f"{self.name}.{owner_name}"))
        self._incoming = {}

    def weights(self) -> Iterator[Entry]:
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
            name: extract_tensors(owner.get_extra_state(), f"{self.name}/~extra/{name}", tensors, self._facts_of)
            for name, owner in self._extras.items()
        }
        return trees, tensors


def _default_grid(module: torch.nn.Module, parameters: list[torch.nn.Parameter], where: tuple[int, int]) -> Grid:
    """Ranks that hold a module's plain tensors: DDP's group, those of its sharded tensors' mesh, else all."""
    for _, owner in iter_modules(module):
        if isinstance(owner, torch.nn.parallel.DistributedDataParallel):
            import torch.distributed as dist

            return Grid.of(sorted(dist.get_process_group_ranks(owner.process_group)))
    for tensor in parameters:
        if is_dtensor(tensor):
            return grid_of_dtensor(tensor, where[0]).only({})
    return Grid.world_size(where[1])


# ---- statedicts ------------------------------------------------------------------------------------------------------
# Converts checkpoints to nested state dicts of torch's form, and back.
#     {"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "param_groups": [...]}, "scheduler": {...}}
# Tensors are stand-ins without memory (device `meta`), so that a checkpoint of any size has such a state dict. Used by
# the DCP adapter and by export and import.

OWN_KEY = "surefoot"
"""Where a state dict keeps what belongs to no object: the step, and the seed."""


@dataclass(frozen=True, slots=True)
class StateDict:
    """A nested state dict; `names` maps stand-ins' ids to saved names."""

    tree: dict[str, Any]
    names: dict[int, str] = field(default_factory=dict)


def state_dict_of(tensors: Mapping[str, SavedTensor], values: Mapping[str, Any]) -> StateDict:
    """Builds the state dict of what a checkpoint holds for all ranks.

    What each rank kept to itself (`local/`) is left out.
    """
    found = StateDict({})

    def stand_in(name: str) -> torch.Tensor:
        what = tensors.get(name)
        if what is None:
            raise StateMismatch(f"the values of the checkpoint name tensor {name}, and no rank saved it")
        tensor = torch.empty(what.shape, dtype=dtype_from_name(what.dtype), device="meta")
        found.names[id(tensor)] = name
        return tensor

    parts = values["parts"]
    for part, kept in parts.items():
        if _is_optimizer(kept):
            found.tree[part] = _optimizer(part, kept, tensors, stand_in)
            continue
        prefix = f"{part}/"
        leaves = {n.removeprefix(prefix): n for n in tensors if n.startswith(prefix)}
        if _is_module(kept, leaves):
            found.tree[part] = _with_parts({leaf: stand_in(name) for leaf, name in leaves.items() if "/" not in leaf})
            for owner, tree in kept.items():
                key = f"{unescaped(owner)}._extra_state" if owner else "_extra_state"
                found.tree[part][key] = _together(tree, stand_in, tensors)
        else:
            found.tree[part] = _together(kept, stand_in, tensors)
    for other, own in values.get("tied", {}).items():
        part, _, leaf = other.partition("/")
        if part in found.tree and own in tensors:
            found.tree[part][unescaped(leaf)] = stand_in(own)
    found.tree[OWN_KEY] = {"step": values["step"], "seed": values["seed"]}
    return found


def _is_optimizer(kept: Any) -> bool:
    return isinstance(kept, dict) and {"groups", "plain"} <= set(kept)


def _is_module(kept: Any, leaves: Mapping[str, str]) -> bool:
    """A module has tensors under plain names and, of values, extra state at most; an object's markers name its own."""
    if not isinstance(kept, dict):
        return False
    own = set(marked(kept))
    return any(name not in own and "/" not in leaf for leaf, name in leaves.items())


def _with_parts(leaves: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Tensors by their own names; what a subclass is made of keeps its `:` before the part."""
    named = ((leaf.rpartition(":") if ":" in leaf else (leaf, "", ""), tensor) for leaf, tensor in leaves.items())
    return {f"{unescaped(leaf)}:{part}" if colon else unescaped(leaf or part): t for (leaf, colon, part), t in named}


def _together(tree: Any, stand_in: Callable[[str], torch.Tensor], tensors: Mapping[str, SavedTensor]) -> Any:
    """Put together with stand-ins; a subclass as the dictionary of what it is made of, classes by their names."""
    if isinstance(tree, TensorPlaceholder):
        if tree.name in tensors or not (tree.facts or {}).get("class"):
            return stand_in(tree.name)
        inner = [attribute for attribute, _ in tree.facts["class"]["inner"]] if tree.facts else []
        return {attribute: stand_in(f"{tree.name}:{attribute}") for attribute in inner}
    if isinstance(tree, values.NamedObject):
        return str(tree)
    return values.map_container(tree, lambda _, value: _together(value, stand_in, tensors))


def _optimizer(part: str, kept: Any, tensors: Mapping[str, SavedTensor], stand_in: Any) -> dict[str, Any]:
    state: dict[str, dict[Any, Any]] = {}
    full_names = set(kept.get("bare", ()))
    for name in tensors:
        full_name, _, leaf = name.removeprefix(f"{part}/").rpartition("/")
        if name.startswith(f"{part}/") and full_name[:1] != "~" and is_plain(leaf):
            full_names.add(full_name)
            state.setdefault(_leaf(full_name), {})[unescaped(leaf)] = stand_in(name)
    for full_name, plain in kept["plain"].items():
        full_names.add(full_name)
        state.setdefault(_leaf(full_name), {}).update(_together(plain, stand_in, tensors))
    state |= _together(kept.get("loose", {}), stand_in, tensors)
    groups = [_together(group, stand_in, tensors) for group in kept["groups"]]
    runs = kept.get("members") or [[0, len(full_names)]]
    order = [number for number, count in runs for _ in range(count)]
    members = list(zip(sorted(full_names), order, strict=False)) if len(order) == len(full_names) else []
    for number, group in enumerate(groups):
        group["params"] = [_leaf(name) for name, mine in members if mine == number]
    more: dict[str, Any] = _together(kept.get("more", {}), stand_in, tensors)
    return {"state": state, "param_groups": groups} | more


def _leaf(full_name: str) -> str:
    return unescaped(full_name.partition("/")[2] or full_name)


@dataclass(slots=True)
class ImportedParts:
    """Holds what an importer writes.

    `tensors` maps a name in the checkpoint to its key in the source.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def parts_of(tree: Mapping[str, Any], model: str = "model") -> ImportedParts:
    """Splits a nested state dict into the parts of a program.

    Tensors may be stand-ins. `model` names the weights of a state dict that has nothing but weights at its top.
    """
    if any(isinstance(value, torch.Tensor) for value in tree.values()):
        loose = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
        optimizer = {k: v for k, v in loose.items() if k.startswith(("state.", "param_groups."))}
        weights = {k: v for k, v in loose.items() if k not in optimizer}
        rest = {k: v for k, v in tree.items() if isinstance(v, Mapping)}
        tree = {model: weights, **({"optimizer": optimizer} if optimizer else {}), **rest}
    found = ImportedParts()
    own = tree.get(OWN_KEY)
    modules = {n: sub for n, sub in tree.items() if n != OWN_KEY and _looks_like_module(sub)}
    for name, sub in tree.items():
        if name == OWN_KEY:
            continue
        if name in modules:
            found.tensors |= {f"{name}/{escaped(leaf)}": tensor for leaf, tensor in sub.items()}
            found.values[name] = {}
        elif (nested := _nested_optimizer(sub)) is not None:
            found.values[name] = _optimizer_values(name, nested, modules, found.tensors)
        else:
            found.values[name] = extract_tensors(sub, name, found.tensors)
    found.values = {"parts": found.values, **(own if isinstance(own, Mapping) else {})}
    return found


def _looks_like_module(sub: Any) -> bool:
    flat = isinstance(sub, Mapping) and bool(sub) and all(isinstance(value, torch.Tensor) for value in sub.values())
    return flat and not all(key.startswith(("state.", "param_groups.")) for key in sub)


def _nested_optimizer(sub: Any) -> dict[str, Any] | None:
    """An optimizer's state dict in its nested form, also from keys like `state.layer.weight.exp_avg`."""
    if not isinstance(sub, Mapping) or not sub:
        return None
    if {"state", "param_groups"} <= set(sub):
        state = {str(name): dict(keys) for name, keys in sub["state"].items()}
        return {"state": state, "param_groups": list(sub["param_groups"])}
    if not all(str(key).startswith(("state.", "param_groups.")) for key in sub):
        return None
    options: dict[str, dict[str, Any]] = {}
    state = {}
    for key, value in sub.items():
        kind, _, rest = str(key).partition(".")
        name, _, leaf = rest.rpartition(".")
        (state if kind == "state" else options).setdefault(name, {})[leaf] = value
    groups: list[dict[str, Any]] = []
    for name, option in options.items():
        alike = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == option), None)
        if alike is None:
            groups.append(alike := {**option, "params": []})
        alike["params"].append(name)
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
        kept = {key: value for key, value in group.items() if key != "params"}
        groups.append(extract_tensors(kept, f"{part}/~groups/{number}", tensors))
    return {"groups": groups, "plain": plain, "members": _runs(members) if len(groups) > 1 else []}


def _runs(members: Iterable[tuple[str, int]]) -> list[list[int]]:
    return [[number, len(list(run))] for number, run in groupby(number for _, number in sorted(members))]


def _module_of(name: str, modules: Mapping[str, Any]) -> str:
    having = [module for module, sub in modules.items() if name in sub]
    if having:
        return having[0]
    if len(modules) == 1:
        return next(iter(modules))
    raise StateMismatch(f"the optimizer has state of {name!r}, which is in none of the models {sorted(modules)}")
