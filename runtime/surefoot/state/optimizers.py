"""Saves an optimizer's state by parameter name, never by index.

Its tensors are shards or replicas like the parameters they belong to; `step` counters and param groups follow. What is
built for a restore is a function of what stands here and what was saved, so that it can be tried before it is needed.
Used by `program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import torch

from surefoot.errors import ConfigurationError, StateMismatch, StateNotRestorable
from surefoot.geometry.sharding import Grid
from surefoot.staging.host_copies import PLAIN_CLASSES
from surefoot.state.entries import (
    AllowedDifferences,
    Entry,
    SavedTensor,
    dtype_from_name,
    dtype_name,
    escaped,
    is_dtensor,
    is_plain,
    joined,
    local_part,
    unescaped,
)
from surefoot.state.modules import OptimizerParameter
from surefoot.state.tensor_building import (
    BuildLocation,
    build,
    build_like_parameter,
    extract_tensors,
    facts_of,
    first_difference,
    insert_tensors,
    marks,
)
from surefoot.state.tensor_locations import (
    EntryPlacer,
    Replicas,
    declared_ranges,
    grid_of_dtensor,
    is_checkpointable_tensor,
)

# ---- incoming optimizer state ----------------------------------------------------------------------------------------
# Builds the optimizer state that a restore will fill, from the program and the checkpoint. A restore fills it and puts
# it into the optimizer. At the first step the same call builds it without memory and throws it away: so a state that
# could not be restored is reported before a restore needs it.


@dataclass(slots=True)
class IncomingState:
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
    parameters: Sequence[OptimizerParameter]
    groups: Sequence[Mapping[str, Any]]
    is_on_every_rank: bool
    state: Mapping[Any, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scratch: bool = False
    convert: bool = False
    """State of its parameter's precision follows the parameter to another."""

    def home(self, parameter: torch.Tensor | None = None) -> BuildLocation:
        return BuildLocation(self.rank, parameter, self.scratch)


def built(here: BuiltOptimizer, values: Any, saved: Mapping[str, SavedTensor]) -> IncomingState:
    """Builds all state that the checkpoint has, unfilled; changes nothing.

    Tensors that exist already are reused. Raises StateMismatch where param groups differ.
    """
    if len(values["groups"]) != len(here.groups):
        raise StateMismatch(
            f"{here.name} has {len(here.groups)} param groups and had {len(values['groups'])} in"
            " the checkpoint: build it as before"
        )
    _reject_regrouped(here, values, saved)
    wanted: dict[str, dict[str, SavedTensor]] = {}
    for name, what in saved.items():
        if name.startswith(f"{here.name}/"):
            full_name, _, leaf = name.removeprefix(f"{here.name}/").rpartition("/")
            if is_plain(leaf):
                wanted.setdefault(full_name, {})[leaf] = what
    group_of = {id(p): group for group in here.groups for p in group["params"]}
    found = IncomingState()
    host = frozenset(values.get("host", ()))
    for held in here.parameters:
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
    _reject_bare(here, values, found)
    return found


def _following(leaf: str, what: SavedTensor, was: SavedTensor, parameter: torch.Tensor) -> SavedTensor:
    """State of its parameter's shape and precision, in the precision that the parameter has now."""
    follows = leaf != "step" and (what.dtype, what.shape) == (was.dtype, was.shape)
    return SavedTensor(dtype_name(parameter.dtype), what.shape) if follows else what


def _put(
    here: BuiltOptimizer,
    tree: Mapping[Any, Any],
    saved: Mapping[str, SavedTensor],
    home: BuildLocation,
    live: Mapping[Any, Any],
) -> Any:
    made = {}
    for mark in marks(tree):
        tensor, saved_as = here.tensors.get(mark.name), saved.get(mark.name)
        if tensor is not None and saved_as is not None and dtype_name(tensor.dtype) != saved_as.dtype:
            tensor = None  # filled, it would round what was saved
        made[mark.name] = _reused(tensor, mark, saved, home)
    return insert_tensors(dict(tree), made.__getitem__, dict(live), here.name)


def _reused(
    live: torch.Tensor | None, mark: Any, saved: Mapping[str, SavedTensor], home: BuildLocation
) -> torch.Tensor:
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
    home: BuildLocation,
    wanted: Mapping[str, SavedTensor],
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
            built[key] = build_like_parameter(key, name, what, home, dtype_from_name(what.dtype), key in on_host)
    return built


def _built_flat(
    held: OptimizerParameter,
    home: BuildLocation,
    wanted: Mapping[str, Mapping[str, SavedTensor]],
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
                value = torch.zeros(shape, dtype=dtype_from_name(what.dtype), device=device)
            built[key] = value
    return built


def _reject_regrouped(here: BuiltOptimizer, values: Any, saved: Mapping[str, SavedTensor]) -> None:
    """A parameter that another group has now would get that group's learning rate and decay, under unchanged counts.

    Which names the saved runs are of is known where the rank that wrote them had every parameter.
    """
    if not (values.get("members") and values.get("everywhere") and here.is_on_every_rank):
        return
    prefix = f"{here.name}/"
    names = {n.removeprefix(prefix).rpartition("/")[0] for n in saved if n.startswith(prefix)}
    names = {n for n in names if not n.startswith("~")} | set(values["plain"]) | set(values.get("bare", ()))
    order = [group for group, count in values["members"] for _ in range(count)]
    if len(order) != len(names):
        return
    was = dict(zip(sorted(names), order, strict=True))
    now = {id(p): number for number, group in enumerate(here.groups) for p in group["params"]}
    for held in here.parameters:
        before, here_now = was.get(held.name), now[id(held.parameter)]
        if before is not None and before != here_now:
            raise StateMismatch(
                f"{here.name} has {held.name} in param group {here_now}, and it was in group {before} when it was saved:"
                " it would get the other group's learning rate and decay. Build the groups as before"
            )


def _reject_bare(here: BuiltOptimizer, values: Any, found: IncomingState) -> None:
    """A parameter without state among others that have some was not in the optimizer when it was saved."""
    had = frozenset(values["bare"]) if "bare" in values else None
    if had is None or not here.is_on_every_rank or not found.state:
        return
    for held in here.parameters:
        if not found.state.get(id(held.parameter)) and held.name not in had:
            raise StateMismatch(
                f"{here.name} has {held.name} among its parameters, and no state of it is in the checkpoint, where"
                " others have theirs: it was not given to that optimizer when it was saved"
            )


def _keeps_counters_on_host(group: Mapping[str, Any]) -> bool:
    """torch's optimizers keep `step` on the host unless a kernel needs it."""
    return not (group.get("capturable") or group.get("fused"))


# ---- optimizers ------------------------------------------------------------------------------------------------------

OWN = "~own"
"""Leaf of a flat tensor that belongs to no model: the optimizer's own weights of the ranges in it."""
GROUPS, LOOSE = "~groups", "~state"
"""Where names of param groups' tensors stand, and of state that belongs to no parameter."""

_SIMPLE = (type(None), bool, int, float, str)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class OptimizerPart:
    """Saves one optimizer; `held` maps parameter ids to names."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        where: tuple[int, int],
        held: Mapping[int, OptimizerParameter],
        replicas: Replicas,
    ) -> None:
        rank, world = where
        self.name, self._optimizer, self._where, self._replicas = name, optimizer, where, replicas
        self._inner, mine = _partitioned(optimizer)
        default = Grid.world_size(world) if mine is None else Grid.alone(rank)
        self._partitioned = mine is not None
        self._places = EntryPlacer(rank, default, replicas if mine is None else Replicas(None, rank))
        self._groups_places = EntryPlacer(rank, Grid.world_size(world), replicas.of_objects())
        self._incoming = IncomingState()
        self._convert = False
        self._facts: dict[str, tuple[torch.Tensor, Any]] = {}
        self.refresh(held)

    def refresh(self, held: Mapping[int, OptimizerParameter]) -> None:
        """Takes its parameters as they are now."""
        rank, _ = self._where
        _, mine = _partitioned(self._optimizer)
        self._own_flat: list[OptimizerParameter] = []
        self._seen = self._present()
        self._held = [self._known(place, p, held, rank) for place, p in self._parameters()]
        if mine is not None:
            self._held = [h for h in self._held if id(h.parameter) in mine]
        self._found: dict[int, dict[Any, tuple[Any, list[Entry]]]] = {id(h.parameter): {} for h in self._held}
        self.is_on_every_rank = mine is None and all(_everywhere(h, self._replicas, self._where) for h in self._held)

    def is_stale(self) -> bool:
        """Whether it has other parameters than when it was looked at last."""
        return self._present() != self._seen

    def entries(self) -> Iterator[Entry]:
        """Live state tensors; empty before the first step."""
        state = self._inner.state
        live = ((held, state[held.parameter]) for held in self._held if held.parameter in state)
        return iter(self._entries(live, self._loose(), self._group_tensors()))

    def values(self) -> Any:
        """Collects what tensors' names and types do not say.

        These are param groups without parameters, plain or nested state, `bare` parameters (without state), and the
        rest of `state_dict`. `members` maps parameters to groups, as runs over sorted names, if there are several;
        `everywhere`: over all ranks' names.
        """
        plain: dict[str, Any] = {}
        bare: list[str] = []
        away: set[Any] = set()
        on_device = any(held.parameter.device.type != "cpu" for held in self._held[:1])
        state_of = self._inner.state
        for held in self._held:
            parameter = held.parameter
            state = state_of.get(parameter)
            if not state:
                bare += _names(held)
                continue
            odd = [k for k, v in state.items() if type(v) not in _TENSORS or type(k) is not str]
            if held.spread:
                odd = [k for k, v in state.items() if not self._is_direct(held, k, v)]
            if odd:
                kept = {k: self._apart(held, k, state[k]) for k in odd if not self._is_direct(held, k, state[k])}
                plain |= {held.name: kept} if kept else {}
            if on_device:
                away |= {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
        ignored: dict[str, torch.Tensor] = {}
        groups = [self._group(i, group, ignored) for i, group in self._groups()]
        loose = {
            k: extract_tensors(v, self._loose_name(k), ignored, self._facts_alone(k)) for k, v in self._loose().items()
        }
        return {
            "groups": groups,
            "plain": plain,
            "members": self._members() if len(groups) > 1 else [],
            **({"everywhere": True} if len(groups) > 1 and self.is_on_every_rank else {}),
            "bare": bare,
            "host": sorted(k for k in away if isinstance(k, str)),
            "loose": loose,
            "more": self._more(),
        }

    def fitted(
        self, values: Any, saved: Mapping[str, SavedTensor], standing: Mapping[str, Entry], fit: AllowedDifferences
    ) -> tuple[Any, Mapping[str, SavedTensor], list[str]]:
        """Drops the saved state of parameters that may differ and do.

        Those begin without state. Returns values, tensors and a sentence for each.
        """
        self._convert = fit.convert_dtypes
        told: list[str] = []
        if fit.strict and not fit.optional:
            return values, saved, told
        had = {n.removeprefix(f"{self.name}/").rpartition("/")[0] for n in saved if n.startswith(f"{self.name}/")}
        had |= set(values["plain"]) | set(values.get("bare", ()))
        gone = set[str]()
        for held in self._held:
            what, entry = saved.get(held.name), standing.get(held.name)
            other = entry is not None and (what is None or what.shape != entry.location.shape)
            may = fit.may_differ(held.name) or fit.may_differ(f"{self.name}/{held.name}")
            if may and held.flat is None and (other or held.name not in had):
                gone.add(held.name)
                told.append(f"{self.name} has no state of {held.name} as it is here: it begins without")
        if not gone:
            return values, saved, told
        prefixes = tuple(f"{self.name}/{name}/" for name in gone)
        plain = {name: kept for name, kept in values["plain"].items() if name not in gone}
        bare = [*values.get("bare", ()), *gone]
        return (
            {**values, "plain": plain, "bare": bare},
            {n: w for n, w in saved.items() if not n.startswith(prefixes)},
            told,
        )

    def prepare(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds a state tensor for each saved one; the optimizer stays unchanged.

        No step is taken for it: a step would change parameters.
        """
        self._incoming = built(self._standing(), values, saved)

    def targets(self) -> Iterator[Entry]:
        """Entries to fill, after `prepare`."""
        coming = self._incoming
        live = ((held, coming.state[id(held.parameter)]) for held in self._held if id(held.parameter) in coming.state)
        return iter(self._entries(live, coming.loose, coming.groups))

    def apply(self, values: Any) -> None:
        """Puts the filled state and param groups into the optimizer."""
        coming, self._incoming = self._incoming, IncomingState()
        here = [{key: value for key, value in group.items() if key != "params"} for _, group in self._groups()]
        if values.get("more"):
            packed = self._optimizer.state_dict()
            self._optimizer.load_state_dict({**packed, "state": {}, **values["more"]})
        for (_, group), live, saved_group in zip(self._groups(), here, values["groups"], strict=True):
            again = insert_tensors(saved_group, coming.groups.__getitem__, live, f"{self.name}/groups")
            group.update(live | again)  # what `load_state_dict` made of them is not what was saved
        state = self._inner.state
        for held in self._held:
            if id(held.parameter) in coming.state:
                state[held.parameter] = coming.state[id(held.parameter)]
            else:
                state.pop(held.parameter, None)
        for key in self._loose():
            del state[key]
        state.update(coming.loose)

    def check_restorable(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds the state as a fresh program would and compares it."""
        scratch = built(self._standing(scratch=True), values, saved)
        for held in self._held:
            live = self._inner.state.get(held.parameter) or {}
            path = f"{self.name}/{held.name}"
            if difference := first_difference(scratch.state.get(id(held.parameter), {}), dict(live), path):
                raise StateNotRestorable(f"{difference} by a restore: {_WAY_OUT}")
        if difference := first_difference(scratch.loose, self._loose(), f"{self.name}/{LOOSE}"):
            raise StateNotRestorable(f"{difference} by a restore: {_WAY_OUT}")
        for (_, group), saved_group in zip(self._groups(), values["groups"], strict=True):
            live = {key: value for key, value in group.items() if key != "params"}
            again = insert_tensors(saved_group, scratch.groups.__getitem__, live, f"{self.name}/groups")
            if difference := first_difference(again, live, f"{self.name}/groups"):
                raise StateNotRestorable(f"{difference} by a restore: {_WAY_OUT}")

    # ---- what is saved ---------------------------------------------------------------------------------------------

    def _entries(
        self,
        state: Iterable[tuple[OptimizerParameter, Mapping[Any, Any]]],
        loose: Mapping[Any, Any],
        groups: Mapping[str, torch.Tensor],
    ) -> list[Entry]:
        found: list[Entry] = []
        for held in self._own_flat:
            assert held.flat is not None, "only described tensors are the optimizer's own"
            found += self._places.of_flat(f"{self.name}/", f"/{OWN}", held.parameter, held.flat, lazy=True)
        for held, keys in state:
            known = self._found[id(held.parameter)]
            for key, value in keys.items():
                if type(value) in _SIMPLE:
                    continue
                before = known.get(key)
                if before is None or before[0] is not value or type(value) in (dict, list):
                    before = known[key] = (value, self._entries_under(held, key, value))
                found += before[1]
        for name, value in (*self._deeper_tensors(loose).items(), *groups.items()):
            found += self._groups_places.of(name, value, "lowest")
        return found

    def _deeper_tensors(self, loose: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
        deeper: dict[str, torch.Tensor] = {}
        for key, value in loose.items():
            extract_tensors(value, self._loose_name(key), deeper)
        return deeper

    def _entries_under(self, held: OptimizerParameter, key: Any, value: Any) -> list[Entry]:
        """The entries of one key of a parameter's state."""
        if type(key) is str and isinstance(value, torch.Tensor):
            return list(self._state_entries(held, escaped(key), value))
        tensors: dict[str, torch.Tensor] = {}
        extract_tensors(value, self._state_name(held, key), tensors, join=joined)
        if tensors:
            self._reject_flat(held, key)
        named = tensors.items()
        return [e for name, t in named for e in self._places.of(name, t, "split", True, held.owner)]

    def _state_entries(self, held: OptimizerParameter, leaf: str, value: torch.Tensor) -> Iterator[Entry]:
        if held.flat is None:
            yield from self._places.of(f"{self.name}/{held.name}/{leaf}", value, "split", True, held.owner)
        elif value.shape == local_part(held.parameter).shape and value.dim() == 1:
            yield from self._places.of_flat(f"{self.name}/", f"/{leaf}", value, held.flat, lazy=True)
        else:
            yield from self._places.of_flat_scalar(f"{self.name}/", f"/{leaf}", value, held.flat)

    def _is_direct(self, held: OptimizerParameter, key: Any, value: Any) -> bool:
        """Whether a tensor's name, type and shape say all of it."""
        if type(key) is not str or not isinstance(value, torch.Tensor):
            return False
        if held.flat is not None or (type(value) in _TENSORS and not is_dtensor(held.parameter)):
            return True
        return self._facts_relative_to_parameter(self._state_name(held, key), value, held.parameter) is None

    def _apart(self, held: OptimizerParameter, key: Any, value: Any) -> Any:
        if type(value) in _SIMPLE:
            return value
        name, parameter = self._state_name(held, key), held.parameter
        if isinstance(value, torch.Tensor):
            return extract_tensors(
                value, name, {}, lambda tensor: self._facts_relative_to_parameter(name, tensor, parameter)
            )
        return extract_tensors(value, name, {}, lambda tensor: facts_of(name, tensor, parameter), joined)

    def _facts_alone(self, key: Any) -> Any:
        return lambda tensor: facts_of(f"{self.name}/{key}", tensor)

    def _facts_relative_to_parameter(self, name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> Any:
        """Remembered: a subclass is the same at each save."""
        known = self._facts.get(name)
        if known is None or known[0] is not tensor:
            known = self._facts[name] = (tensor, facts_of(name, tensor, parameter))
        return known[1]

    def _state_name(self, held: OptimizerParameter, key: Any) -> str:
        return f"{self.name}/{held.name}/{escaped(key)}"

    def _loose_name(self, key: Any) -> str:
        return f"{self.name}/{LOOSE}/{escaped(key)}"

    def _reject_flat(self, held: OptimizerParameter, key: Any) -> None:
        if held.flat is not None:
            raise StateNotRestorable(
                f"{self.name}/{held.name}/{key} holds tensors within a value, beside a flat parameter of several ranges:"
                " only tensors of its own size, and counters, can be parted by those ranges"
            )

    def _loose(self) -> dict[Any, Any]:
        """State under keys that are no parameters."""
        state = self._inner.state
        if len(state) <= len(self._held) and all(isinstance(key, torch.Tensor) for key in state):
            return {}
        return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}

    def _more(self) -> dict[str, Any]:
        """What the optimizer's own `state_dict` has beside state and groups; asked of those alone that say more."""
        optimizer: Any = self._optimizer
        says_more = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
        if self._partitioned or not (says_more or getattr(optimizer, "_optimizer_state_dict_post_hooks", None)):
            return {}
        ignored: dict[str, torch.Tensor] = {}
        more = {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")}
        tree = {k: extract_tensors(v, f"{self.name}/~more/{escaped(k)}", ignored) for k, v in more.items()}
        if ignored:
            raise StateNotRestorable(
                f"{next(iter(ignored))} is a tensor that {type(optimizer).__name__}.state_dict() has beside state and"
                " param_groups: keep it in optimizer.state, under a name"
            )
        return tree

    def _standing(self, scratch: bool = False) -> BuiltOptimizer:
        groups = self._optimizer.param_groups
        if scratch:
            return BuiltOptimizer(self.name, self._where[0], self._held, groups, self.is_on_every_rank, scratch=True)
        state, tensors = self._inner.state, self._group_tensors() | self._deeper_tensors(self._loose())
        for held in self._held:
            for key, value in (state.get(held.parameter) or {}).items():
                if not self._is_direct(held, key, value):
                    extract_tensors(value, self._state_name(held, key), tensors, join=joined)
        return BuiltOptimizer(
            self.name, self._where[0], self._held, groups, self.is_on_every_rank, state, tensors, convert=self._convert
        )

    # ---- how -------------------------------------------------------------------------------------------------------

    def _present(self) -> list[int]:
        groups = self._optimizer.param_groups
        return [len(groups), *map(id, chain.from_iterable(group["params"] for group in groups))]

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield f"parameter {position} of group {index}", parameter

    def _known(
        self, place: str, parameter: torch.Tensor, held: Mapping[int, OptimizerParameter], rank: int
    ) -> OptimizerParameter:
        if id(parameter) in held:
            return held[id(parameter)]
        flat = declared_ranges(parameter, rank)
        if flat is None:
            raise ConfigurationError(
                f"{place} of {self.name} belongs to no model given to Checkpointer: give that model too, and build the"
                " optimizer after sharding it, and again after a model's parameters were replaced; of an optimizer's own"
                " flat tensors, surefoot.describe_flat says what they hold"
            )
        own = OptimizerParameter(f"flat {len(self._own_flat)}", parameter, flat)
        self._own_flat.append(own)
        return own

    def _members(self) -> list[list[int]]:
        index = {id(p): i for i, group in self._groups() for p in group["params"]}
        names = sorted((name, index[id(h.parameter)]) for h in self._held for name in _names(h))
        return [[group, len(list(run))] for group, run in groupby(number for _, number in names)]

    def _groups(self) -> list[tuple[int, dict[str, Any]]]:
        return list(enumerate(self._optimizer.param_groups))

    def _group(self, index: int, group: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        plain = {key: value for key, value in group.items() if key != "params"}
        path = f"{self.name}/{GROUPS}/{index}"
        tree: dict[str, Any] = extract_tensors(plain, path, tensors, self._facts_alone(f"groups/{index}"))
        return tree

    def _group_tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for index, group in self._groups():
            if not all(type(value) in _SIMPLE for key, value in group.items() if key != "params"):
                self._group(index, group, tensors)
        return tensors


_WAY_OUT = "keep it as tensors, numbers and text under text keys, or leave it out of the optimizer's state"


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


def _everywhere(held: OptimizerParameter, replicas: Replicas, where: tuple[int, int]) -> bool:
    if held.flat is not None or is_checkpointable_tensor(held.parameter):
        return False
    if is_dtensor(held.parameter):
        return grid_of_dtensor(held.parameter, where[0]).count == where[1]
    told = replicas.of(held.name)
    return told is None or told.count == where[1]


def _names(held: OptimizerParameter) -> list[str]:
    return [held.name] if held.flat is None else [r.name for r in held.flat.ranges]
