"""Saves an optimizer's state by parameter name, never by index.

Its tensors are shards or replicas like the parameters they belong to; `step` counters and param groups are saved too.
The state built for a restore depends only on the program and the checkpoint, so a restore can be rehearsed before it is
needed. Used by `program`.
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
from surefoot.state.wrapping_optimizers import (
    KnownTensors,
    keeps_optimizers,
    own_numbers,
    partitioned,
    reject_lost_tensors,
    state_of,
)

# ---- incoming optimizer state ----------------------------------------------------------------------------------------
# Builds unfilled optimizer state from the program and the checkpoint. A restore fills it and puts it into the
# optimizer. At the first step the same call builds it without memory and discards it, so that state which could not be
# restored is reported before a restore needs it.


@dataclass(slots=True)
class IncomingState:
    """Contains the optimizer state that a restore fills and then puts into the optimizer.

    `state` is keyed by the id of the parameter; `loose` belongs to no parameter; `groups` maps names to tensors of
    param groups.
    """

    state: dict[int, dict[Any, Any]] = field(default_factory=dict)
    loose: dict[Any, Any] = field(default_factory=dict)
    groups: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuiltOptimizer:
    """Describes an optimizer as it is now.

    `is_on_every_rank`: every rank has all of its parameters. `state` and `tensors` are reused by a restore. `scratch`:
    the state built for it has no memory, is compared and then discarded.
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
    """True if state with the precision of its parameter is converted together with the parameter."""

    def home(self, parameter: torch.Tensor | None = None) -> BuildLocation:
        return BuildLocation(self.rank, parameter, self.scratch)


def built(optimizer: BuiltOptimizer, values: Any, saved: Mapping[str, SavedTensor]) -> IncomingState:
    """Builds, unfilled, all optimizer state that the checkpoint has; changes nothing.

    Existing tensors are reused. Raises StateMismatch if param groups differ.
    """
    if len(values["groups"]) != len(optimizer.groups):
        raise StateMismatch(
            f"{optimizer.name} has {len(optimizer.groups)} param groups and had {len(values['groups'])} in"
            " the checkpoint: build it as before"
        )
    _reject_regrouped(optimizer, values, saved)
    saved_by_parameter: dict[str, dict[str, SavedTensor]] = {}
    for name, saved_tensor in saved.items():
        if name.startswith(f"{optimizer.name}/"):
            full_name, _, leaf = name.removeprefix(f"{optimizer.name}/").rpartition("/")
            if is_plain(leaf):
                saved_by_parameter.setdefault(full_name, {})[leaf] = saved_tensor
    group_of = {id(p): group for group in optimizer.groups for p in group["params"]}
    incoming = IncomingState()
    host_keys = frozenset(values.get("host", ()))
    for named_parameter in optimizer.parameters:
        live = optimizer.state.get(named_parameter.parameter) or {}
        location = optimizer.home(named_parameter.parameter)
        keys_on_host = (
            host_keys | {"step"} if _keeps_counters_on_host(group_of[id(named_parameter.parameter)]) else frozenset()
        )
        if named_parameter.flat is None:
            saved_state = saved_by_parameter.get(named_parameter.name, {})
            if optimizer.convert and named_parameter.name in saved:
                saved_state = {
                    leaf: _convert_with_parameter(
                        leaf, saved_tensor, saved[named_parameter.name], named_parameter.parameter
                    )
                    for leaf, saved_tensor in saved_state.items()
                }
            state = _build_parameter_state(optimizer.name, named_parameter, location, saved_state, (live, keys_on_host))
        else:
            state = _build_flat_state(named_parameter, location, saved_by_parameter, (live, keys_on_host))
        plain_values = values["plain"].get(named_parameter.name)
        if plain_values:
            state |= _insert_into_tree(optimizer, plain_values, saved, location, live)
        if state or live:
            incoming.state[id(named_parameter.parameter)] = state
    incoming.loose = _insert_into_tree(optimizer, values.get("loose", {}), saved, optimizer.home(), {})
    for group_number, group in enumerate(values["groups"]):
        first_parameter = next(iter(optimizer.groups[group_number]["params"]), None)
        location = optimizer.home(first_parameter)
        for placeholder in marks(group):
            incoming.groups[placeholder.name] = _reuse_or_build(
                optimizer.tensors.get(placeholder.name), placeholder, saved, location
            )
    _reject_parameters_without_state(optimizer, values, incoming)
    return incoming


def _convert_with_parameter(
    leaf: str, saved_tensor: SavedTensor, saved_parameter: SavedTensor, parameter: torch.Tensor
) -> SavedTensor:
    """Returns state in the parameter's present precision, if it was saved with its shape and precision."""
    follows = leaf != "step" and (saved_tensor.dtype, saved_tensor.shape) == (
        saved_parameter.dtype,
        saved_parameter.shape,
    )
    return SavedTensor(dtype_name(parameter.dtype), saved_tensor.shape) if follows else saved_tensor


def _insert_into_tree(
    optimizer: BuiltOptimizer,
    tree: Mapping[Any, Any],
    saved: Mapping[str, SavedTensor],
    location: BuildLocation,
    live: Mapping[Any, Any],
) -> Any:
    tensors_by_name = {}
    for placeholder in marks(tree):
        tensor, saved_as = optimizer.tensors.get(placeholder.name), saved.get(placeholder.name)
        if tensor is not None and saved_as is not None and dtype_name(tensor.dtype) != saved_as.dtype:
            tensor = None  # reading into it would round the saved values
        tensors_by_name[placeholder.name] = _reuse_or_build(tensor, placeholder, saved, location)
    return insert_tensors(dict(tree), tensors_by_name.__getitem__, dict(live), optimizer.name)


def _reuse_or_build(
    live: torch.Tensor | None, placeholder: Any, saved: Mapping[str, SavedTensor], location: BuildLocation
) -> torch.Tensor:
    saved_tensor = saved.get(placeholder.name)
    # CUDA graphs and schedulers refer to the program's own tensor: fill it in place
    is_plain_memory = type(live) in PLAIN_CLASSES and set(placeholder.facts or ()) <= {"device"}
    if live is not None and saved_tensor is not None and is_plain_memory and tuple(live.shape) == saved_tensor.shape:
        return live
    tensor = build(placeholder.name, placeholder.facts, saved, location)
    if tensor is None:
        raise StateMismatch(f"the checkpoint names {placeholder.name} in its values, and no rank saved that tensor")
    return tensor


def _build_parameter_state(
    part: str,
    named_parameter: OptimizerParameter,
    location: BuildLocation,
    saved_state: Mapping[str, SavedTensor],
    live_and_host_keys: tuple[Mapping[Any, Any], frozenset[str]],
) -> dict[Any, Any]:
    live, keys_on_host = live_and_host_keys
    state: dict[Any, Any] = {}
    for leaf, saved_tensor in saved_state.items():
        key = unescaped(leaf)
        value = live.get(key)
        if isinstance(value, torch.Tensor) and tuple(value.shape) == saved_tensor.shape:
            state[key] = value
        else:
            name = f"{part}/{named_parameter.name}/{leaf}"
            state[key] = build_like_parameter(
                key, name, saved_tensor, location, dtype_from_name(saved_tensor.dtype), key in keys_on_host
            )
    return state


def _build_flat_state(
    named_parameter: OptimizerParameter,
    location: BuildLocation,
    saved_by_parameter: Mapping[str, Mapping[str, SavedTensor]],
    live_and_host_keys: tuple[Mapping[Any, Any], frozenset[str]],
) -> dict[Any, Any]:
    """Builds one tensor for all ranges of a flat parameter, and one counter."""
    assert named_parameter.flat is not None, "the caller looked"
    live, keys_on_host = live_and_host_keys
    memory = local_part(named_parameter.parameter)
    state: dict[Any, Any] = {}
    for flat_range in named_parameter.flat.ranges:
        for leaf, saved_tensor in saved_by_parameter.get(flat_range.name, {}).items():
            key = unescaped(leaf)
            shape = tuple(memory.shape) if saved_tensor.shape == flat_range.shape else saved_tensor.shape
            value = state.get(key, live.get(key))
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                device = (
                    torch.device("cpu")
                    if saved_tensor.shape != flat_range.shape and key in keys_on_host
                    else memory.device
                )
                device = torch.device("meta") if location.scratch else device
                value = torch.zeros(shape, dtype=dtype_from_name(saved_tensor.dtype), device=device)
            state[key] = value
    return state


def _reject_regrouped(optimizer: BuiltOptimizer, values: Any, saved: Mapping[str, SavedTensor]) -> None:
    """Raises StateMismatch if a parameter moved to another group since it was saved.

    It would silently get the other group's learning rate and decay. The saved runs can only be mapped to names if the
    rank that wrote them had every parameter; otherwise nothing is checked.
    """
    if not (values.get("members") and values.get("everywhere") and optimizer.is_on_every_rank):
        return
    prefix = f"{optimizer.name}/"
    names = {n.removeprefix(prefix).rpartition("/")[0] for n in saved if n.startswith(prefix)}
    names = {n for n in names if not n.startswith("~")} | set(values["plain"]) | set(values.get("bare", ()))
    group_numbers = [group for group, count in values["members"] for _ in range(count)]
    if len(group_numbers) != len(names):
        return
    old_group_of = dict(zip(sorted(names), group_numbers, strict=True))
    new_group_of = {id(p): number for number, group in enumerate(optimizer.groups) for p in group["params"]}
    for named_parameter in optimizer.parameters:
        old_group, new_group = old_group_of.get(named_parameter.name), new_group_of[id(named_parameter.parameter)]
        if old_group is not None and old_group != new_group:
            raise StateMismatch(
                f"{optimizer.name} has {named_parameter.name} in param group {new_group}, and it was in group"
                f" {old_group} when it was saved: it would get the other group's learning rate and decay. Build the groups as before"
            )


def _reject_parameters_without_state(optimizer: BuiltOptimizer, values: Any, incoming: IncomingState) -> None:
    """Raises StateMismatch for a parameter without saved state whose peers have state.

    Such a parameter was not given to the optimizer when it was saved.
    """
    bare_names = frozenset(values["bare"]) if "bare" in values else None
    if bare_names is None or not optimizer.is_on_every_rank or not incoming.state:
        return
    for named_parameter in optimizer.parameters:
        if not incoming.state.get(id(named_parameter.parameter)) and named_parameter.name not in bare_names:
            raise StateMismatch(
                f"{optimizer.name} has {named_parameter.name} among its parameters, and no state of it is in"
                " the checkpoint, where others have theirs: it was not given to that optimizer when it was saved"
            )


def _keeps_counters_on_host(group: Mapping[str, Any]) -> bool:
    """Returns whether the group's `step` is on the host: torch keeps it there unless a kernel needs it."""
    return not (group.get("capturable") or group.get("fused"))


# ---- optimizers ------------------------------------------------------------------------------------------------------

OWN = "~own"
"""Leaf name for a flat tensor that belongs to no model: the optimizer's own copy of the weights in its ranges."""
GROUPS, LOOSE = "~groups", "~state"
"""Path parts for tensors of param groups, and for state that belongs to no parameter."""

_SIMPLE = (type(None), bool, int, float, str)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class OptimizerPart:
    """Saves one optimizer; `parameters_by_id` gives its parameters their names."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        rank_and_world_size: tuple[int, int],
        parameters_by_id: Mapping[int, OptimizerParameter],
        replicas: Replicas,
    ) -> None:
        rank, world_size = rank_and_world_size
        self.name, self._optimizer, self._where, self._replicas = name, optimizer, rank_and_world_size, replicas
        self._inner, own_ids = partitioned(optimizer)
        if state_of(self._inner) is None and not keeps_optimizers(optimizer):
            raise ConfigurationError(
                f"{name} is a {type(optimizer).__name__} without .state, and no attribute of it is an optimizer: give"
                " Checkpointer the optimizer that has the state"
            )
        self._built_numbers = own_numbers(optimizer)
        default = Grid.world_size(world_size) if own_ids is None else Grid.alone(rank)
        self._partitioned = own_ids is not None
        self._placer = EntryPlacer(rank, default, replicas if own_ids is None else Replicas(None, rank))
        self._group_placer = EntryPlacer(rank, Grid.world_size(world_size), replicas.of_objects())
        self._incoming = IncomingState()
        self._convert = False
        self._facts: dict[str, tuple[torch.Tensor, Any]] = {}
        self._as_built = describe_built(self._inner)
        self.refresh(parameters_by_id)

    def refresh(self, parameters_by_id: Mapping[int, OptimizerParameter]) -> None:
        """Collects the optimizer's current parameters and drops cached entries."""
        rank, _ = self._where
        _, own_ids = partitioned(self._optimizer)
        self._own_flat: list[OptimizerParameter] = []
        self._last_parameter_ids = self._current_parameter_ids()
        self._named_parameters = [
            self._named_parameter_of(description, p, parameters_by_id, rank)
            for description, p in self._described_parameters()
        ]
        if own_ids is not None:
            self._named_parameters = [h for h in self._named_parameters if id(h.parameter) in own_ids]
        self._entries_by_parameter: dict[int, dict[Any, tuple[Any, list[Entry]]]] = {
            id(h.parameter): {} for h in self._named_parameters
        }
        self._placer.forget()
        self._group_placer.forget()
        self._facts.clear()
        self.is_on_every_rank = own_ids is None and all(
            _is_on_every_rank(h, self._replicas, self._where) for h in self._named_parameters
        )

    def is_stale(self) -> bool:
        """Returns whether its parameters changed since the last `refresh`."""
        return self._current_parameter_ids() != self._last_parameter_ids

    @property
    def group_count(self) -> int:
        """Number of param groups."""
        return len(self._optimizer.param_groups)

    def entries(self) -> Iterator[Entry]:
        """Returns the entries of live state tensors; none before the first step."""
        state = self._state
        live = (
            (named_parameter, state[named_parameter.parameter])
            for named_parameter in self._named_parameters
            if named_parameter.parameter in state
        )
        return iter(self._entries(live, self._loose(), self._group_tensors()))

    def values(self) -> Any:
        """Collects the values that tensors' names and types do not carry.

        These are param groups without parameters, plain or nested state, `bare` parameters (without state), and the
        rest of `state_dict`. With several groups, `members` maps parameters to groups as runs over sorted names;
        `everywhere`: the runs cover the names of all ranks.
        """
        plain: dict[str, Any] = {}
        bare_names: list[str] = []
        host_keys: set[Any] = set()
        on_device = any(
            named_parameter.parameter.device.type != "cpu" for named_parameter in self._named_parameters[:1]
        )
        states = self._state
        for named_parameter in self._named_parameters:
            parameter = named_parameter.parameter
            state = states.get(parameter)
            if not state:
                bare_names += _saved_names_of(named_parameter)
                continue
            indirect_keys = [k for k, v in state.items() if type(v) not in _TENSORS or type(k) is not str]
            if named_parameter.spread:
                indirect_keys = [k for k, v in state.items() if not self._is_direct(named_parameter, k, v)]
            if indirect_keys:
                plain_state = {
                    k: self._plain_value_of(named_parameter, k, state[k])
                    for k in indirect_keys
                    if not self._is_direct(named_parameter, k, state[k])
                }
                plain |= {named_parameter.name: plain_state} if plain_state else {}
            if on_device:
                host_keys |= {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
        ignored: dict[str, torch.Tensor] = {}
        groups = [self._plain_group(i, group, ignored) for i, group in self._groups()]
        loose = {
            k: extract_tensors(v, self._loose_name(k), ignored, self._facts_finder(k)) for k, v in self._loose().items()
        }
        reject_lost_tensors(self.name, self._optimizer)
        numbers = {k: v for k, v in own_numbers(self._optimizer).items() if self._built_numbers.get(k) != v}
        return {
            "groups": groups,
            "plain": plain,
            "members": self._group_runs() if len(groups) > 1 else [],
            **({"everywhere": True} if len(groups) > 1 and self.is_on_every_rank else {}),
            "bare": bare_names,
            "host": sorted(k for k in host_keys if isinstance(k, str)),
            "loose": loose,
            "more": self._extra_state(),
            **({"numbers": numbers} if numbers else {}),
            "built": self._as_built,
        }

    def fitted(
        self,
        values: Any,
        saved: Mapping[str, SavedTensor],
        entries_by_name: Mapping[str, Entry],
        fit: AllowedDifferences,
    ) -> tuple[Any, Mapping[str, SavedTensor], list[str]]:
        """Drops the saved state of parameters that may differ and do.

        Those begin without state. Returns values, tensors and a sentence for each, and one for options that the saved ones
        replace. Raises StateMismatch for an optimizer of another class.
        """
        self._convert = fit.convert_dtypes
        differences = list(describe_replaced_options(self.name, values, self._as_built))
        if fit.strict and not fit.optional:
            return values, saved, differences
        names_with_state = {
            n.removeprefix(f"{self.name}/").rpartition("/")[0] for n in saved if n.startswith(f"{self.name}/")
        }
        names_with_state |= set(values["plain"]) | set(values.get("bare", ()))
        names_to_reset = set[str]()
        for named_parameter in self._named_parameters:
            saved_tensor, entry = saved.get(named_parameter.name), entries_by_name.get(named_parameter.name)
            shape_differs = entry is not None and (saved_tensor is None or saved_tensor.shape != entry.location.shape)
            may_differ = fit.may_differ(named_parameter.name) or fit.may_differ(f"{self.name}/{named_parameter.name}")
            if (
                may_differ
                and named_parameter.flat is None
                and (shape_differs or named_parameter.name not in names_with_state)
            ):
                names_to_reset.add(named_parameter.name)
                differences.append(
                    f"{self.name} has no state of {named_parameter.name} as it is here: it begins without"
                )
        if not names_to_reset:
            return values, saved, differences
        prefixes = tuple(f"{self.name}/{name}/" for name in names_to_reset)
        plain = {name: plain_state for name, plain_state in values["plain"].items() if name not in names_to_reset}
        bare = [*values.get("bare", ()), *names_to_reset]
        return (
            {**values, "plain": plain, "bare": bare},
            {n: w for n, w in saved.items() if not n.startswith(prefixes)},
            differences,
        )

    def prepare(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds a state tensor for each saved one; the optimizer stays unchanged.

        No step is taken for it: a step would change parameters.
        """
        self._incoming = built(self._describe_current(), values, saved)

    def targets(self) -> Iterator[Entry]:
        """Returns the entries to fill, after `prepare`."""
        incoming = self._incoming
        live = (
            (named_parameter, incoming.state[id(named_parameter.parameter)])
            for named_parameter in self._named_parameters
            if id(named_parameter.parameter) in incoming.state
        )
        return iter(self._entries(live, incoming.loose, incoming.groups))

    def apply(self, values: Any) -> None:
        """Puts the filled state and param groups into the optimizer."""
        incoming, self._incoming = self._incoming, IncomingState()
        live_groups = [{key: value for key, value in group.items() if key != "params"} for _, group in self._groups()]
        if values.get("more"):
            packed = self._optimizer.state_dict()
            self._optimizer.load_state_dict({**packed, "state": {}, **values["more"]})
        for (_, group), live, saved_group in zip(self._groups(), live_groups, values["groups"], strict=True):
            restored = insert_tensors(saved_group, incoming.groups.__getitem__, live, f"{self.name}/groups")
            group.update(live | restored)  # `load_state_dict` may have converted these values
        vars(self._optimizer).update(values.get("numbers", {}))
        state = self._state
        for named_parameter in self._named_parameters:
            if id(named_parameter.parameter) in incoming.state:
                state[named_parameter.parameter] = incoming.state[id(named_parameter.parameter)]
            else:
                state.pop(named_parameter.parameter, None)
        for key in self._loose():
            del state[key]
        state.update(incoming.loose)
        for hook in getattr(self._optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(self._optimizer)

    def check_restorable(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds the state as a fresh program would and compares it."""
        scratch = built(self._describe_current(scratch=True), values, saved)
        for named_parameter in self._named_parameters:
            live = self._state.get(named_parameter.parameter) or {}
            path = f"{self.name}/{named_parameter.name}"
            if difference := first_difference(scratch.state.get(id(named_parameter.parameter), {}), dict(live), path):
                raise StateNotRestorable(f"{difference} by a restore: {_REMEDY}")
        if difference := first_difference(scratch.loose, self._loose(), f"{self.name}/{LOOSE}"):
            raise StateNotRestorable(f"{difference} by a restore: {_REMEDY}")
        for (_, group), saved_group in zip(self._groups(), values["groups"], strict=True):
            live = {key: value for key, value in group.items() if key != "params"}
            restored = insert_tensors(saved_group, scratch.groups.__getitem__, live, f"{self.name}/groups")
            if difference := first_difference(restored, live, f"{self.name}/groups"):
                raise StateNotRestorable(f"{difference} by a restore: {_REMEDY}")

    # ---- what is saved ---------------------------------------------------------------------------------------------

    def _entries(
        self,
        state: Iterable[tuple[OptimizerParameter, Mapping[Any, Any]]],
        loose: Mapping[Any, Any],
        groups: Mapping[str, torch.Tensor],
    ) -> list[Entry]:
        """Collects the entries of this state; those of unchanged tensors come from a cache."""
        entries: list[Entry] = []
        for named_parameter in self._own_flat:
            assert named_parameter.flat is not None, "only described tensors are the optimizer's own"
            entries += self._placer.of_flat(
                f"{self.name}/", f"/{OWN}", named_parameter.parameter, named_parameter.flat, lazy=True
            )
        for named_parameter, keys in state:
            cached_entries = self._entries_by_parameter[id(named_parameter.parameter)]
            for key, value in keys.items():
                if type(value) in _SIMPLE:
                    continue
                cached = cached_entries.get(key)
                # a dict or list may contain other tensors although it is the same object
                if cached is None or cached[0] is not value or type(value) in (dict, list):
                    cached = cached_entries[key] = (value, self._entries_under(named_parameter, key, value))
                entries += cached[1]
        for name, value in (*self._deeper_tensors(loose).items(), *groups.items()):
            entries += self._group_placer.of(name, value, "lowest")
        return entries

    def _deeper_tensors(self, loose: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for key, value in loose.items():
            extract_tensors(value, self._loose_name(key), tensors)
        return tensors

    def _entries_under(self, named_parameter: OptimizerParameter, key: Any, value: Any) -> list[Entry]:
        """Returns the entries of one key of a parameter's state."""
        if type(key) is str and isinstance(value, torch.Tensor):
            return list(self._state_entries(named_parameter, escaped(key), value))
        tensors: dict[str, torch.Tensor] = {}
        extract_tensors(value, self._state_name(named_parameter, key), tensors, join=joined)
        if tensors:
            self._reject_flat(named_parameter, key)
        items = tensors.items()
        return [e for name, t in items for e in self._placer.of(name, t, "split", True, named_parameter.owner)]

    def _state_entries(self, named_parameter: OptimizerParameter, leaf: str, value: torch.Tensor) -> Iterator[Entry]:
        if named_parameter.flat is None:
            yield from self._placer.of(
                f"{self.name}/{named_parameter.name}/{leaf}", value, "split", True, named_parameter.owner
            )
        elif value.shape == local_part(named_parameter.parameter).shape and value.dim() == 1:
            yield from self._placer.of_flat(f"{self.name}/", f"/{leaf}", value, named_parameter.flat, lazy=True)
        else:
            yield from self._placer.of_flat_scalar(f"{self.name}/", f"/{leaf}", value, named_parameter.flat)

    def _is_direct(self, named_parameter: OptimizerParameter, key: Any, value: Any) -> bool:
        """Returns whether a tensor can be rebuilt from its name, type and shape alone."""
        if type(key) is not str or not isinstance(value, torch.Tensor):
            return False
        if named_parameter.flat is not None or (type(value) in _TENSORS and not is_dtensor(named_parameter.parameter)):
            return True
        return (
            self._facts_relative_to_parameter(self._state_name(named_parameter, key), value, named_parameter.parameter)
            is None
        )

    def _plain_value_of(self, named_parameter: OptimizerParameter, key: Any, value: Any) -> Any:
        if type(value) in _SIMPLE:
            return value
        name, parameter = self._state_name(named_parameter, key), named_parameter.parameter
        if isinstance(value, torch.Tensor):
            return extract_tensors(
                value, name, {}, lambda tensor: self._facts_relative_to_parameter(name, tensor, parameter)
            )
        return extract_tensors(value, name, {}, lambda tensor: facts_of(name, tensor, parameter), joined)

    def _facts_finder(self, key: Any) -> Any:
        return lambda tensor: facts_of(f"{self.name}/{key}", tensor)

    def _facts_relative_to_parameter(self, name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> Any:
        """Returns `facts_of` a tensor, cached because a subclass is the same at each save."""
        cached = self._facts.get(name)
        if cached is None or cached[0] is not tensor:
            cached = self._facts[name] = (tensor, facts_of(name, tensor, parameter))
        return cached[1]

    def _state_name(self, named_parameter: OptimizerParameter, key: Any) -> str:
        return f"{self.name}/{named_parameter.name}/{escaped(key)}"

    def _loose_name(self, key: Any) -> str:
        return f"{self.name}/{LOOSE}/{escaped(key)}"

    def _reject_flat(self, named_parameter: OptimizerParameter, key: Any) -> None:
        if named_parameter.flat is not None:
            raise StateNotRestorable(
                f"{self.name}/{named_parameter.name}/{key} holds tensors within a value, beside a flat"
                " parameter of several ranges: only tensors of its own size, and counters, can be parted by those ranges"
            )

    def _loose(self) -> dict[Any, Any]:
        """Returns the state under keys that are not parameters."""
        state = self._state
        if len(state) <= len(self._named_parameters) and all(isinstance(key, torch.Tensor) for key in state):
            return {}
        return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}

    def _extra_state(self) -> dict[str, Any]:
        """Returns what an overridden or hooked `state_dict` adds to state and param groups."""
        optimizer: Any = self._optimizer
        has_own_state_dict = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
        if self._partitioned or not (
            has_own_state_dict or getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
        ):
            return {}
        ignored: dict[str, torch.Tensor] = {}
        state_dict, known = optimizer.state_dict(), KnownTensors(optimizer)
        if unknown := known.first_unknown(state_dict.get("state", {}), "state"):
            raise StateNotRestorable(
                f"{unknown} of {self.name} is a tensor that {type(optimizer).__name__}.state_dict() has, and neither"
                " optimizer.state nor an optimizer in its attributes: keep it in optimizer.state"
            )
        extra_values = {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}
        # tensors of an inner optimizer are saved under its own name, and so are its groups
        extra_values = {k: v for k, v in extra_values.items() if not known.has_all_of(v)}
        tree = {k: extract_tensors(v, f"{self.name}/~more/{escaped(k)}", ignored) for k, v in extra_values.items()}
        if ignored:
            raise StateNotRestorable(
                f"{next(iter(ignored))} is a tensor that {type(optimizer).__name__}.state_dict() has beside state and"
                " param_groups: keep it in optimizer.state, under a name"
            )
        return tree

    @property
    def _state(self) -> Any:
        state = state_of(self._inner)
        return {} if state is None else state

    def _describe_current(self, scratch: bool = False) -> BuiltOptimizer:
        groups = self._optimizer.param_groups
        if scratch:
            return BuiltOptimizer(
                self.name, self._where[0], self._named_parameters, groups, self.is_on_every_rank, scratch=True
            )
        state, tensors = self._state, self._group_tensors() | self._deeper_tensors(self._loose())
        for named_parameter in self._named_parameters:
            for key, value in (state.get(named_parameter.parameter) or {}).items():
                if not self._is_direct(named_parameter, key, value):
                    extract_tensors(value, self._state_name(named_parameter, key), tensors, join=joined)
        return BuiltOptimizer(
            self.name,
            self._where[0],
            self._named_parameters,
            groups,
            self.is_on_every_rank,
            state,
            tensors,
            convert=self._convert,
        )

    # ---- how -------------------------------------------------------------------------------------------------------

    def _current_parameter_ids(self) -> list[int]:
        groups = self._optimizer.param_groups
        return [len(groups), *map(id, chain.from_iterable(group["params"] for group in groups))]

    def _described_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield f"parameter {position} of group {index}", parameter

    def _named_parameter_of(
        self, description: str, parameter: torch.Tensor, parameters_by_id: Mapping[int, OptimizerParameter], rank: int
    ) -> OptimizerParameter:
        if id(parameter) in parameters_by_id:
            return parameters_by_id[id(parameter)]
        flat = declared_ranges(parameter, rank)
        if flat is None:
            raise ConfigurationError(
                f"{description} of {self.name} belongs to no model given to Checkpointer. It has the shape {tuple(parameter.shape)}. Give"
                " its model too; a parameter of no model is given by a name of its own as torch.nn.ParameterList([parameter])."
                " Build the optimizer after a model was sharded or its parameters were replaced. For an optimizer's own flat"
                " tensors call surefoot.describe_flat"
            )
        own_flat = OptimizerParameter(f"flat {len(self._own_flat)}", parameter, flat)
        self._own_flat.append(own_flat)
        return own_flat

    def _group_runs(self) -> list[list[int]]:
        index = {id(p): i for i, group in self._groups() for p in group["params"]}
        names = sorted((name, index[id(h.parameter)]) for h in self._named_parameters for name in _saved_names_of(h))
        return [[group, len(list(run))] for group, run in groupby(number for _, number in names)]

    def _groups(self) -> list[tuple[int, dict[str, Any]]]:
        return list(enumerate(self._optimizer.param_groups))

    def _plain_group(self, index: int, group: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        plain = {key: value for key, value in group.items() if key != "params"}
        path = f"{self.name}/{GROUPS}/{index}"
        tree: dict[str, Any] = extract_tensors(plain, path, tensors, self._facts_finder(f"groups/{index}"))
        return tree

    def _group_tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for index, group in self._groups():
            if not all(type(value) in _SIMPLE for key, value in group.items() if key != "params"):
                self._plain_group(index, group, tensors)
        return tensors


def describe_built(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's class and its options as the program built it, to compare with those of a later program."""
    options = [{k: v for k, v in group.items() if _is_option(v)} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "options": options}


def _is_option(value: Any) -> bool:
    return type(value) in _SIMPLE or (type(value) is tuple and all(type(item) in _SIMPLE for item in value))


def describe_replaced_options(name: str, values: Mapping[str, Any], built: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for param groups that the program builds with other options than the program that saved them did.

    Options that change in training, such as a scheduled `lr`, do not matter: both programs are compared as they were built.

    Raises:
        StateMismatch: The optimizer is of another class.
    """
    saved = values.get("built")
    if saved is None:
        return  # imported from another format
    if saved["class"] != built["class"]:
        raise StateMismatch(
            f"{name} is {built['class']} here and {saved['class']} in the checkpoint: neither its state nor its options fit."
            f" Build it as it was saved, or let it begin without state with restore(optional=({name!r},))"
        )
    groups = zip(saved["options"], built["options"], values["groups"], strict=False)
    for index, (before, here, restored) in enumerate(groups):
        changed = [k for k, value in here.items() if k in before and k in restored and before[k] != value]
        if changed:
            group = f" (param group {index})" if len(built["options"]) > 1 else ""
            options, saved_options = (", ".join(f"{k}={of[k]!r}" for k in changed) for of in (here, before))
            yield (
                f"{name}{group} is built with {options} and was built with {saved_options} when this run began: the checkpoint's"
                " options stay. To change them, set them in param_groups after restore()"
            )


_REMEDY = "keep it as tensors, numbers and text under text keys, or leave it out of the optimizer's state"


def _is_on_every_rank(
    named_parameter: OptimizerParameter, replicas: Replicas, rank_and_world_size: tuple[int, int]
) -> bool:
    if named_parameter.flat is not None or is_checkpointable_tensor(named_parameter.parameter):
        return False
    if is_dtensor(named_parameter.parameter):
        return grid_of_dtensor(named_parameter.parameter, rank_and_world_size[0]).count == rank_and_world_size[1]
    grid = replicas.of(named_parameter.name)
    return grid is None or grid.count == rank_and_world_size[1]


def _saved_names_of(named_parameter: OptimizerParameter) -> list[str]:
    return [named_parameter.name] if named_parameter.flat is None else [r.name for r in named_parameter.flat.ranges]
