"""Converts checkpoints to nested state dicts of torch's form, and back.

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "param_groups": [...]}, "scheduler": {...}}

Tensors are stand-ins without memory (device `meta`), so that a checkpoint of any size has such a state dict. Used by
the DCP adapter and by export and import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from surefoot.errors import StateMismatch
from surefoot.format import kinds
from surefoot.state.entries import Saved, dtype_named
from surefoot.state.tensor_names import escaped, is_plain, joined, unescaped
from surefoot.state.trees import Mark, marked, taken_apart

OWN_KEY = "surefoot"
"""Where a state dict keeps what belongs to no object: the step, and the seed."""


@dataclass(frozen=True, slots=True)
class StateDict:
    """A nested state dict; `names` maps stand-ins' ids to saved names."""

    tree: dict[str, Any]
    names: dict[int, str] = field(default_factory=dict)


def state_dict_of(tensors: Mapping[str, Saved], values: Mapping[str, Any]) -> StateDict:
    """Builds the state dict of what a checkpoint holds for all ranks.

    What each rank kept to itself (`local/`) is left out.
    """
    found = StateDict({})

    def stand_in(name: str) -> torch.Tensor:
        what = tensors.get(name)
        if what is None:
            raise StateMismatch(f"the values of the checkpoint name tensor {name}, and no rank saved it")
        tensor = torch.empty(what.shape, dtype=dtype_named(what.dtype), device="meta")
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


def _together(tree: Any, stand_in: Callable[[str], torch.Tensor], tensors: Mapping[str, Saved]) -> Any:
    """Put together with stand-ins; a subclass as the dictionary of what it is made of, classes by their names."""
    if isinstance(tree, Mark):
        if tree.name in tensors or not (tree.facts or {}).get("class"):
            return stand_in(tree.name)
        inner = [attribute for attribute, _ in tree.facts["class"]["inner"]] if tree.facts else []
        return {attribute: stand_in(f"{tree.name}:{attribute}") for attribute in inner}
    if isinstance(tree, kinds.Named):
        return str(tree)
    return kinds.mapped(tree, lambda _, value: _together(value, stand_in, tensors))


def _optimizer(part: str, kept: Any, tensors: Mapping[str, Saved], stand_in: Any) -> dict[str, Any]:
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
            found.values[name] = taken_apart(sub, name, found.tensors)
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
                plain.setdefault(full_name, {})[key] = taken_apart(value, path, tensors, join=joined)
    groups = []
    members: list[tuple[str, int]] = []
    for number, group in enumerate(nested["param_groups"]):
        members += [(f"{_module_of(name, modules)}/{escaped(name)}", number) for name in group.get("params", ())]
        kept = {key: value for key, value in group.items() if key != "params"}
        groups.append(taken_apart(kept, f"{part}/~groups/{number}", tensors))
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
