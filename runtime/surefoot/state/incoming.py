"""Computes what a restore fills of an optimizer, from program and checkpoint.

The same call makes what is filled when a job goes on, and at the first step a scratch copy without memory, so that what
could not be restored is known before it is needed. Called by `optimizers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from surefoot.errors import StateMismatch
from surefoot.staging.host_copies import PLAIN_CLASSES
from surefoot.state.entries import Saved, dtype_name, dtype_named, local_part
from surefoot.state.modules import OptimizerParameter
from surefoot.state.tensor_building import Home, build, build_beside
from surefoot.state.tensor_names import is_plain, unescaped
from surefoot.state.trees import marks, put_together


@dataclass(slots=True)
class Incoming:
    """Holds what a restore fills and then puts into the optimizer.

    `state` is by the id of its parameter, `loose` belongs to no parameter, `groups` are tensors of param groups by
    name.
    """

    state: dict[int, dict[Any, Any]] = field(default_factory=dict)
    loose: dict[Any, Any] = field(default_factory=dict)
    groups: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuiltOptimizer:
    """Describes an optimizer as it is now.

    `everywhere`: every rank has all of it. `scratch`: what is built for it is compared and thrown away.
    """

    name: str
    rank: int
    held: Sequence[OptimizerParameter]
    groups: Sequence[Mapping[str, Any]]
    everywhere: bool
    state: Mapping[Any, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scratch: bool = False
    convert: bool = False
    """State of its parameter's precision follows the parameter to another."""

    def home(self, parameter: torch.Tensor | None = None) -> Home:
        return Home(self.rank, parameter, self.scratch)


def built(here: BuiltOptimizer, values: Any, saved: Mapping[str, Saved]) -> Incoming:
    """Builds all state that the checkpoint has, unfilled; changes nothing.

    Tensors that exist already are reused. Raises StateMismatch where param groups differ.
    """
    if len(values["groups"]) != len(here.groups):
        raise StateMismatch(
            f"{here.name} has {len(here.groups)} param groups and had {len(values['groups'])} in"
            " the checkpoint: build it as before"
        )
    _refuse_regrouped(here, values, saved)
    wanted: dict[str, dict[str, Saved]] = {}
    for name, what in saved.items():
        if name.startswith(f"{here.name}/"):
            full_name, _, leaf = name.removeprefix(f"{here.name}/").rpartition("/")
            if is_plain(leaf):
                wanted.setdefault(full_name, {})[leaf] = what
    group_of = {id(p): group for group in here.groups for p in group["params"]}
    found = Incoming()
    host = frozenset(values.get("host", ()))
    for held in here.held:
        live = here.state.get(held.parameter) or {}
        home = here.home(held.parameter)
        on_host = host | {"step"} if _keeps_counters_on_host(group_of[id(held.parameter)]) else frozenset()
        if held.flat is None:
            of_it = wanted.get(held.name, {})
            if here.convert and held.name in saved:
                of_it = {leaf: _following(leaf, what, saved[held.name], held.parameter) for leaf, what in of_it.items()}
            state = _built_one(here.name, held, home, of_it, (live, on_host))
        else:
            state = _built_flat(held, home, wanted, (live, on_host))
        kept = values["plain"].get(held.name)
        if kept:
            state |= _put(here, kept, saved, home, live)
        if state or live:
            found.state[id(held.parameter)] = state
    found.loose = _put(here, values.get("loose", {}), saved, here.home(), {})
    for number, group in enumerate(values["groups"]):
        first = next(iter(here.groups[number]["params"]), None)
        home = here.home(first)
        for mark in marks(group):
            found.groups[mark.name] = _reused(here.tensors.get(mark.name), mark, saved, home)
    _refuse_bare(here, values, found)
    return found


def _following(leaf: str, what: Saved, was: Saved, parameter: torch.Tensor) -> Saved:
    """State of its parameter's shape and precision, in the precision that the parameter has now."""
    follows = leaf != "step" and (what.dtype, what.shape) == (was.dtype, was.shape)
    return Saved(dtype_name(parameter.dtype), what.shape) if follows else what


def _put(
    here: BuiltOptimizer, tree: Mapping[Any, Any], saved: Mapping[str, Saved], home: Home, live: Mapping[Any, Any]
) -> Any:
    made = {}
    for mark in marks(tree):
        tensor, saved_as = here.tensors.get(mark.name), saved.get(mark.name)
        if tensor is not None and saved_as is not None and dtype_name(tensor.dtype) != saved_as.dtype:
            tensor = None  # filled, it would round what was saved
        made[mark.name] = _reused(tensor, mark, saved, home)
    return put_together(dict(tree), made.__getitem__, dict(live), here.name)


def _reused(live: torch.Tensor | None, mark: Any, saved: Mapping[str, Saved], home: Home) -> torch.Tensor:
    what = saved.get(mark.name)
    # a graph of the device, and a schedule, read the tensor that the program made: it is filled where it lies
    plain = type(live) in PLAIN_CLASSES and set(mark.facts or ()) <= {"device"}
    if live is not None and what is not None and plain and tuple(live.shape) == what.shape:
        return live
    made = build(mark.name, mark.facts, saved, home)
    if made is None:
        raise StateMismatch(f"the checkpoint names {mark.name} in its values, and no rank saved that tensor")
    return made


def _built_one(
    part: str,
    held: OptimizerParameter,
    home: Home,
    wanted: Mapping[str, Saved],
    counters: tuple[Mapping[Any, Any], frozenset[str]],
) -> dict[Any, Any]:
    live, on_host = counters
    built: dict[Any, Any] = {}
    for leaf, what in wanted.items():
        key = unescaped(leaf)
        value = live.get(key)
        if isinstance(value, torch.Tensor) and tuple(value.shape) == what.shape:
            built[key] = value
        else:
            name = f"{part}/{held.name}/{leaf}"
            built[key] = build_beside(key, name, what, home, dtype_named(what.dtype), key in on_host)
    return built


def _built_flat(
    held: OptimizerParameter,
    home: Home,
    wanted: Mapping[str, Mapping[str, Saved]],
    counters: tuple[Mapping[Any, Any], frozenset[str]],
) -> dict[Any, Any]:
    """Builds one tensor for all ranges of a flat parameter, and one counter."""
    assert held.flat is not None, "the caller looked"
    live, on_host = counters
    memory = local_part(held.parameter)
    built: dict[Any, Any] = {}
    for r in held.flat.ranges:
        for leaf, what in wanted.get(r.name, {}).items():
            key = unescaped(leaf)
            shape = tuple(memory.shape) if what.shape == r.shape else what.shape
            value = built.get(key, live.get(key))
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                device = torch.device("cpu") if what.shape != r.shape and key in on_host else memory.device
                device = torch.device("meta") if home.scratch else device
                value = torch.zeros(shape, dtype=dtype_named(what.dtype), device=device)
            built[key] = value
    return built


def _refuse_regrouped(here: BuiltOptimizer, values: Any, saved: Mapping[str, Saved]) -> None:
    """A parameter that another group has now would get that group's learning rate and decay, under unchanged counts.

    Which names the saved runs are of is known where the rank that wrote them had every parameter.
    """
    if not (values.get("members") and values.get("everywhere") and here.everywhere):
        return
    prefix = f"{here.name}/"
    names = {n.removeprefix(prefix).rpartition("/")[0] for n in saved if n.startswith(prefix)}
    names = {n for n in names if not n.startswith("~")} | set(values["plain"]) | set(values.get("bare", ()))
    order = [group for group, count in values["members"] for _ in range(count)]
    if len(order) != len(names):
        return
    was = dict(zip(sorted(names), order, strict=True))
    now = {id(p): number for number, group in enumerate(here.groups) for p in group["params"]}
    for held in here.held:
        before, here_now = was.get(held.name), now[id(held.parameter)]
        if before is not None and before != here_now:
            raise StateMismatch(
                f"{here.name} has {held.name} in param group {here_now}, and it was in group {before} when it was saved:"
                " it would get the other group's learning rate and decay. Build the groups as before"
            )


def _refuse_bare(here: BuiltOptimizer, values: Any, found: Incoming) -> None:
    """A parameter without state among others that have some was not in the optimizer when it was saved."""
    had = frozenset(values["bare"]) if "bare" in values else None
    if had is None or not here.everywhere or not found.state:
        return
    for held in here.held:
        if not found.state.get(id(held.parameter)) and held.name not in had:
            raise StateMismatch(
                f"{here.name} has {held.name} among its parameters, and no state of it is in the checkpoint, where"
                " others have theirs: it was not given to that optimizer when it was saved"
            )


def _keeps_counters_on_host(group: Mapping[str, Any]) -> bool:
    """torch's optimizers keep `step` on the host unless a kernel needs it."""
    return not (group.get("capturable") or group.get("fused"))
