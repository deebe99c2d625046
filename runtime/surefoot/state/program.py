"""Collects all of a program's state on this rank and restores it.

`checkpointer` builds it from the objects that the user named. It does not depend on slots, save schedules or tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import is_
from typing import Any, Protocol

import torch

from surefoot.errors import ConfigurationError, StateMismatch, StateNotRestorable
from surefoot.protocol.checkpoints.save_state import OWN_STATE
from surefoot.protocol.progress import NO_ANOMALIES
from surefoot.state import objects
from surefoot.state.entries import (
    AllowedDifferences,
    Entry,
    SavedTensor,
    TensorKinds,
    covers_object,
    dtype_from_name,
    dtype_name,
    fill_from,
    has_overlaps,
    local_name,
    outlines,
)
from surefoot.state.modules import Kind, ModulePart, OptimizerParameter
from surefoot.state.objects import (
    InlinedTensors,
    ObjectPart,
    classify_state,
    encoded,
    read_values,
    value_digest,
    values_blob,
)
from surefoot.state.optimizers import OptimizerPart
from surefoot.state.tensor_locations import Replicas
from surefoot.state.wrapping_optimizers import kept_objects


class ProgramPart(Protocol):
    """Saves and restores one named object of the program."""

    name: str

    @property
    def is_on_every_rank(self) -> bool:
        """Whether every rank of the job has all of the object; False under pipeline parallelism."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Yields the object's live tensors."""
        ...

    def values(self) -> Any:
        """Returns the object's plain values."""
        ...

    def prepare(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds the tensors that a restore will fill."""
        ...

    def targets(self) -> Iterator[Entry]:
        """Yields the entries to fill; valid between `prepare` and `apply`."""
        ...

    def apply(self, values: Any) -> None:
        """Puts the filled tensors and the plain values into the object."""
        ...

    def check_restorable(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds the restored state aside and compares it; changes nothing.

        Raises StateNotRestorable with the first key that a restore would change.
        """
        ...


class Program:
    """Saves and restores all objects given to Checkpointer, on one rank."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        rank_and_world_size: tuple[int, int],
        local: tuple[str, ...] = (),
        seed: int = 0,
        replicas: Any = None,
        anew: tuple[str, ...] = (),
    ) -> None:
        """Sorts the objects into modules, optimizers and others.

        `replicas`: which ranks have the same tensors, if not all of them have.
        """
        rank, world_size = rank_and_world_size
        self._rank, self._world_size, self._local, self._seed = rank, world_size, local, seed
        self.suspect = self._same_world_size = False
        """Whether the last step's loss was an anomaly: NaN, infinite or a spike. The save records it."""
        self.recent: Mapping[str, Any] = {}  # losses and gradient norms, so that a restart keeps its baseline
        self.anomalies = NO_ANOMALIES  # the newest loss anomalies: a restart may come before they are reported
        self._values_by_part: list[tuple[ProgramPart, Any]] = []
        unknown = [name for name in local if name.partition("/")[0] not in objects and "*" not in name]
        unknown = unknown or [name for name in anew if name not in objects]
        if unknown:
            raise ConfigurationError(
                f"{'reset_on_resize' if unknown[0] in anew else 'per_rank'} names {unknown[0]!r}, but there is only {', '.join(objects) or 'nothing'}"
            )
        objects = _with_kept_objects(objects)
        self.optimizers = [o for o in objects.values() if isinstance(o, torch.optim.Optimizer)]
        lazy_ids = self._optimized_ids()
        same_tensors = Replicas(replicas, rank)
        self._modules = [
            ModulePart(name, o, rank_and_world_size, lazy_ids, same_tensors)
            for name, o in objects.items()
            if isinstance(o, torch.nn.Module)
        ]
        self._generators_after: tuple[int, dict[str, Any]] = (-2, {})
        self._reset_on_resize, self._inlined = anew, dict[str, InlinedTensors]()
        self._optimizer_parts = [
            OptimizerPart(name, o, rank_and_world_size, self._parameters_by_id(), same_tensors)
            for name, o in objects.items()
            if isinstance(o, torch.optim.Optimizer)
        ]
        self._object_parts: list[ObjectPart] = []
        for name, subject in objects.items():
            if subject is not None and not isinstance(subject, torch.nn.Module | torch.optim.Optimizer):
                self._inlined[name] = InlinedTensors(subject, classify_state(name, subject))
                part = ObjectPart(name, subject, rank_and_world_size, same_tensors, self._inlined[name])
                self._object_parts.append(part)
        position_by_name = {name: number for number, name in enumerate(objects)}
        other_parts: list[ProgramPart] = [*self._optimizer_parts, *self._object_parts]
        self._parts: list[ProgramPart] = [
            *self._modules,
            *sorted(other_parts, key=lambda part: position_by_name[part.name]),
        ]
        shared = (name for name, inlined in self._inlined.items() if inlined.whose == "all")
        self._watchable = frozenset([*(part.name for part in self._modules), *shared])
        self._verified_entries: Sequence[Entry] | None = None
        self._kinds = TensorKinds()
        self._built = self._structure()
        self._is_built = False
        self._warnings: dict[str, bool] = {}
        self._targets: list[Entry] = []
        self._converted: list[tuple[Entry, torch.Tensor]] = []

    def entries(self) -> list[Entry]:
        """Collects every live tensor under its saved name.

        If there are new tensors, a restore is rehearsed first; raises StateNotRestorable for a key that it would change.
        """
        try:
            self._refresh()
            current_entries = self._as_saved((part, part.entries()) for part in self._parts)
        except ConfigurationError as error:
            raise StateNotRestorable(str(error)) from error
        verified = self._verified_entries
        if verified is None or len(current_entries) != len(verified) or not all(map(is_, current_entries, verified)):
            if verified is None or outlines(current_entries) != outlines(verified):
                self._verify_restorable(current_entries)
                self._compare_with_built()
            self._verified_entries, self._kinds = current_entries, TensorKinds(current_entries)
        return current_entries

    def mark_built(self) -> None:
        """Takes the present program for the one that a fresh start builds before its restore; only the first call counts.

        Parameters that differ at a save can be restored only by a program that makes the same change.
        """
        if not self._is_built:
            self._is_built = True
            self._refresh()
            self._built = self._structure()
            for module in self._modules:
                module.mark_built()

    def take_warnings(self) -> list[str]:
        """Returns sentences about state that a fresh start could not restore, each once."""
        new_warnings = [text for text, is_taken in self._warnings.items() if not is_taken]
        self._warnings = dict.fromkeys(self._warnings, True)
        return new_warnings

    def check_restorable(self) -> None:
        """Rehearses a restore of the program's state, even if that was done before.

        Raises StateNotRestorable with the object, the key, and the remedy.
        """
        self._verified_entries = None
        self.entries()

    def weights(self) -> list[Entry]:
        """Returns the entries of the modules' parameters and buffers."""
        return [entry for part in self._parts if isinstance(part, ModulePart) for entry in part.weights()]

    def values(self, step: int) -> bytes:
        """Encodes the plain values of this rank at `step`."""
        parts = self._plain_values()
        body = {
            **({"loss_anomaly": True} if self.suspect else {}),
            "objects": self._ownership_digests(parts),  # first: manifests are made from it without reading the rest
            "step": step,
            "world_size": self._world_size,
            "seed": self._seed,
            "parts": parts,
            "tied": self._tied_names(),
            **{
                name: dict(record)
                for name, record in (("recent", self.recent), ("anomalies", self.anomalies.stored_values))
                if record
            },
        }
        return values_blob(
            {**body, "random": self._generators_after[1]} if self._generators_after[0] == step - 1 else body
        )

    def shared_values(self) -> dict[str, bytes]:
        """Encodes the plain values of objects that are no module, optimizer or loader, by name."""
        shared = {name for name, inlined in self._inlined.items() if inlined.whose == "all"}
        shared -= {n for n in shared if getattr(self._inlined[n].subject, "elastic", False)}
        return {part.name: encoded({"": part.values()}) for part in self._parts if part.name in shared}

    def unwatched_tensors(self, max_bytes: int) -> dict[str, torch.Tensor]:
        """Returns the smallest tensor of each object that no background copy watches, by name, if it has one."""
        smallest_tensors: dict[str, torch.Tensor] = {}
        for entry in self._verified_entries or ():
            name = entry.name.partition("/")[0]
            if entry.copy_in_background or name not in self._watchable:
                continue
            tensor = entry.local_part()
            limit_bytes = min(max_bytes, smallest_tensors[name].nbytes - 1 if name in smallest_tensors else max_bytes)
            if 0 < tensor.nbytes <= limit_bytes and not tensor.is_inference():
                smallest_tensors[name] = tensor
        return smallest_tensors

    def has_generators_for(self, step: int) -> bool:
        """Returns whether the save of `step` uses generators stored before it, not their current state."""
        return self._generators_after[0] == step - 1

    def save_generators_for_next(self, step: int) -> None:
        """Stores the generators' current state for the save of step `step` + 1."""
        self._generators_after = step, objects.capture_generators()

    def divide(self, tied: Collection[str], saved_world: int, states_of: Callable[[str], list[Any]]) -> list[str]:
        """Divides per-rank state for a restore at another world size.

        Called before `prepare`. `tied` names objects that cannot be divided (`protocol.checkpoints.save_state`);
        `states_of` returns all ranks' states of one object. Returns a sentence for each object that is reset; raises
        StateMismatch for the first one that may not be.
        """
        resized = f"the checkpoint is of {saved_world} ranks and this world has {self._world_size}"
        notices = []
        for name, inlined in self._inlined.items():
            kind, may_reset = type(inlined.subject).__name__, name in self._reset_on_resize
            if may_reset or (inlined.whose != "own" and self._is_named_local(name)):
                notices.append(f"{name} ({kind}) begins anew as the program built it: {resized}")
            elif inlined.whose == "divided":
                inlined.load_state_dicts(states_of(name), self._rank, self._world_size)
            elif inlined.whose == "own":
                raise StateMismatch(
                    f"{name} ({kind}) is each rank's own state, and {resized}: it cannot be divided among them. Train with"
                    f" {saved_world} ranks, use surefoot.ElasticLoader, give it load_state_dicts(states, rank, world), or"
                    f" accept with Checkpointer(reset_on_resize=({name!r},)) that samples are lost and repeated"
                )
            elif name in tied:
                raise StateMismatch(
                    f"{name} ({kind}) did not have the same values on all ranks, and {resized}: whose they should be is"
                    f" not known. Train with {saved_world} ranks, make them equal before step(), or reset it at a resize with"
                    f" Checkpointer(reset_on_resize=({name!r},))"
                )
        return notices

    def prepare(
        self,
        shared: Mapping[str, Any],
        own: Mapping[str, Any] | None,
        saved: Mapping[str, SavedTensor],
        fit: AllowedDifferences = AllowedDifferences(),  # noqa: B008  # it is frozen
    ) -> list[str]:
        """Builds the targets for a checkpoint's tensors.

        `shared` are the lowest rank's values; `own` are this rank's if the world size is unchanged, else None. Returns
        a sentence for each difference that `fit` allows; raises StateMismatch for the first that it does not.
        """
        self._refresh(always=True)  # a program may have grown since the Checkpointer was made
        self._values_by_part, notices = [], list[str]()
        self._same_world_size = (
            own is not None and own["world_size"] == self._world_size and not own.get("weights_only")
        )
        weights_by_name = {entry.name: entry for entry in self.weights()}
        for part in self._parts:
            if part.name not in shared["parts"] and (fit.may_differ(part.name) or shared.get("weights_only")):
                reason = "which has weights alone" if shared.get("weights_only") else "where it may be missing"
                notices.append(f"{part.name} is not in the checkpoint, {reason}: it begins as the program built it")
                continue
            values = self._values_for(part, shared, own)
            if values is _ABSENT:
                continue
            part_saved = saved
            if self._is_local(part.name):
                prefix = local_name(self._rank, "")
                part_saved = {n.removeprefix(prefix): what for n, what in saved.items() if n.startswith(prefix)}
            try:
                if isinstance(part, OptimizerPart):
                    values, part_saved, part_notices = part.fitted(values, part_saved, weights_by_name, fit)
                    notices += part_notices
                part.prepare(values, part_saved)
                describe = getattr(getattr(self._inlined.get(part.name), "subject", None), "describe_differences", None)
                notices += describe(values) if callable(describe) else ()
            except StateMismatch as problem:
                if isinstance(part, ModulePart) or not fit.may_differ(part.name):
                    self._reject_other_weights(
                        saved, fit
                    )  # if the model differs, its optimizer differs for that reason
                    raise
                notices.append(f"{problem}: {part.name} begins as the program built it")
                continue
            self._values_by_part.append((part, values))
        self._reject_ungiven(shared, fit, notices)
        self._fit_targets(saved, fit, notices)
        return notices

    def prepare_weights(self, saved: Mapping[str, SavedTensor], fit: AllowedDifferences) -> list[str]:
        """Builds targets for the modules' weights alone; returns sentences as `prepare` does."""
        self._refresh(always=True)
        notices = list[str]()
        self._values_by_part = []
        self._targets, self._converted = self._select_targets(self.weights(), saved, fit, notices)
        return notices

    def targets(self) -> list[Entry]:
        """Returns the entries to fill, after `prepare`."""
        return self._targets

    def convert(self) -> None:
        """Copies tensors that were read in another precision into the program's; `apply` does it too."""
        with torch.no_grad():
            for entry, buffer in self._converted:
                fill_from(entry, buffer)
        self._converted = []

    def apply_weights(self) -> None:
        """Finishes the restore of the modules' weights alone, after `prepare_weights`."""
        self.convert()
        for module in self._modules:
            module.run_load_hooks()

    def _reject_other_weights(self, saved: Mapping[str, SavedTensor], fit: AllowedDifferences) -> None:
        """Raises StateMismatch if a tensor of a module prepared so far is not as in the checkpoint."""
        for entry in self._as_saved((p, p.targets()) for p, _ in self._values_by_part if isinstance(p, ModulePart)):
            fit.misfit(entry, saved.get(entry.name))

    def _reject_ungiven(self, shared: Mapping[str, Any], fit: AllowedDifferences, notices: list[str]) -> None:
        for name in sorted(set(shared["parts"]) - {part.name for part in self._parts}):
            if not fit.may_differ(name):
                raise StateMismatch(
                    f"the checkpoint has {name!r}, which was not given to Checkpointer: give it too, or leave it out with"
                    f" restore(optional=({name!r},))"
                )
            notices.append(f"the checkpoint has {name!r}, which was not given to Checkpointer: it is left out")

    def _fit_targets(self, saved: Mapping[str, SavedTensor], fit: AllowedDifferences, notices: list[str]) -> None:
        """Selects the entries to fill; raises StateMismatch for a saved tensor that the program lacks."""
        entries = self._as_saved((part, part.targets()) for part, _ in self._values_by_part)
        if not self._same_world_size:
            entries = [entry for entry in entries if entry.sharing != "local"]
        self._targets, self._converted = self._select_targets(entries, saved, fit, notices)
        # with pipeline stages or flat parameters, other ranks have tensors that this one lacks: nothing to check
        if not all(part.is_on_every_rank for part in self._parts):
            return
        target_names, tied = {entry.name for entry in entries}, self._tied_names()
        restored_parts = {part.name for part, _ in self._values_by_part}
        for name in saved:
            if (
                name in target_names
                or name in tied
                or name.startswith("local/")
                or name.partition("/")[0] not in restored_parts
            ):
                continue
            if not self._may_be_left_out(name, fit):
                raise StateMismatch(f"the checkpoint has {name}, which this program lacks: build it as it was saved")
            notices.append(f"the checkpoint has {name}, which this program lacks: it is left out")

    def _may_be_left_out(self, name: str, fit: AllowedDifferences) -> bool:
        """Returns whether a tensor may be left out, by its name or as state of a parameter that may differ."""
        return fit.may_differ(name) or fit.may_differ(name.partition("/")[2].rpartition("/")[0])

    def _select_targets(
        self, entries: Sequence[Entry], saved: Mapping[str, SavedTensor], fit: AllowedDifferences, notices: list[str]
    ) -> tuple[list[Entry], list[tuple[Entry, torch.Tensor]]]:
        """Selects the entries to fill; pairs those of another precision, or expanded, with a buffer to read into first."""
        targets: list[Entry] = []
        converted: list[tuple[Entry, torch.Tensor]] = []
        for entry in entries:
            saved_tensor = saved.get(entry.name)
            if problem := fit.misfit(entry, saved_tensor):
                notices.append(problem)
            elif saved_tensor is not None and (saved_tensor.dtype != entry.dtype or has_overlaps(entry.local_part())):
                buffer = torch.empty(
                    entry.location.box.lengths, dtype=dtype_from_name(saved_tensor.dtype), device="cpu"
                )
                targets.append(Entry(entry.name, buffer, saved_tensor.dtype, entry.location, entry.sharing))
                converted.append((entry, buffer))
            else:
                targets.append(entry)
        return targets, converted

    def apply(self, step: int, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Restores the objects; the generators last, since loading may draw from them."""
        self.convert()
        for part, values in self._values_by_part:
            part.apply(values)
        self._values_by_part, self._targets = [], []
        if own is not None and self._same_world_size:
            objects.restore_generators(own["random"])
        else:
            objects.seed_generators(int(shared["seed"]), self._rank, step)

    def _ownership_digests(self, parts: Mapping[str, Any]) -> dict[str, str]:
        """Returns a digest for each shared object and a marker for each per-rank one, unless it is reset."""
        digests = {}
        for name, inlined in self._inlined.items():
            if name in self._reset_on_resize or inlined.whose == "divided":
                continue
            if inlined.whose == "own":
                digests[name] = OWN_STATE
            elif not self._is_named_local(name):
                digests[name] = value_digest(encoded({f"parts.{name}": parts[name]}))
        return digests

    def _optimized_ids(self) -> frozenset[int]:
        return frozenset(id(p) for o in self.optimizers for group in o.param_groups for p in group["params"])

    def _parameters_by_id(self) -> dict[int, OptimizerParameter]:
        return {id(h.parameter): h for m in reversed(self._modules) for h in m.optimizer_parameters()}

    def _tied_names(self) -> dict[str, str]:
        return {other_name: saved_name for m in self._modules for other_name, saved_name in m.other_names.items()}

    def _plain_values(self) -> dict[str, Any]:
        return {part.name: part.values() for part in self._parts}

    def _refresh(self, always: bool = False) -> None:
        """Collects groups, parameters and tensors that were added, replaced or changed in place since the last save."""
        parts: tuple[ModulePart | OptimizerPart, ...] = (*self._modules, *self._optimizer_parts)
        if always or any(part.is_stale() for part in parts) or not self._kinds.are_the_same():
            lazy_ids = self._optimized_ids()
            for module in self._modules:
                module.refresh(lazy_ids)
            parameters_by_id = self._parameters_by_id()
            for optimizer in self._optimizer_parts:
                optimizer.refresh(parameters_by_id)
            for object_part in self._object_parts:
                object_part.forget()
            self._kinds = TensorKinds()

    def _structure(self) -> dict[str, Kind | int | None]:
        """Returns dtype and shape of each parameter, and the number of each optimizer's groups, by name."""
        kinds: dict[str, Kind | int | None] = {}
        for module in self._modules:
            kinds |= module.parameter_kinds()
        return kinds | {part.name: part.group_count for part in self._optimizer_parts}

    def _compare_with_built(self) -> None:
        """Warns of parameters and param groups that a fresh start would not have, or have otherwise."""
        structure, built = self._structure(), self._built
        changes = [
            f"{name} {_change(built.get(name), structure.get(name))}"
            for name in {**built, **structure}
            if built.get(name) != structure.get(name) and (built.get(name) is not None or name not in built)
        ]
        if changes:
            more = f", and {len(changes) - MAX_NAMED_CHANGES} more" if len(changes) > MAX_NAMED_CHANGES else ""
            text = (
                f"the program is not as it was at restore(): {'; '.join(changes[:MAX_NAMED_CHANGES])}{more}. Its state is"
                " saved as it is now, and a fresh start can restore it only if it makes the same change before restore():"
                " latest() gives the step that it will restore"
            )
            self._warnings.setdefault(text, False)

    def _verify_restorable(self, entries: Sequence[Entry]) -> None:
        """Encodes and decodes the plain values, then has each part rehearse its restore."""
        encoded_values = encoded({"parts": self._plain_values()})
        decoded_values = read_values(encoded_values)
        if encoded(decoded_values) != encoded_values:
            raise StateNotRestorable("plain values of the program come back as others: that is a fault of surefoot")
        prefix = local_name(self._rank, "")
        saved = {e.name.removeprefix(prefix): SavedTensor(e.dtype, e.location.shape) for e in entries}
        for part in self._parts:
            try:
                part.check_restorable(decoded_values["parts"][part.name], saved)
            except StateMismatch as problem:
                raise StateNotRestorable(f"what {part.name} holds could not be restored: {problem}") from problem

    def _values_for(self, part: ProgramPart, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> Any:
        if part.name in self._inlined and own is not None and self._same_world_size:
            shared = {"parts": self._inlined[part.name].own_parts(part.name, own["parts"], shared["parts"])}
        elif self._is_local(part.name) or part.name in self._reset_on_resize:
            return _ABSENT  # `divide` has restored or reset it
        if part.name not in shared["parts"]:
            raise StateMismatch(
                f"the checkpoint has no {part.name!r}: it was not given to Checkpointer when it was saved; let it begin as"
                f" it is with restore(optional=({part.name!r},))"
            )
        return shared["parts"][part.name]

    def _as_saved(self, parts: Iterable[tuple[ProgramPart, Iterator[Entry]]]) -> list[Entry]:
        """Collects all entries, with per-rank ones renamed."""
        saved_entries: list[Entry] = []
        for part, entries in parts:
            saved_entries += (
                map(self._rename_if_per_rank, entries) if self._local or part.name in self._inlined else entries
            )
        return saved_entries

    def _rename_if_per_rank(self, entry: Entry) -> Entry:
        if self._is_local(entry.name.partition("/")[0]) or self._is_local(entry.name):
            if entry.window is not None:
                raise ConfigurationError(
                    f"{entry.name} is named local and lies in a tensor with others: it cannot be this rank's own affair"
                )
            return entry.as_per_rank(self._rank)
        return entry

    def _is_local(self, name: str) -> bool:
        inlined = self._inlined.get(name)
        return (inlined is not None and inlined.whose != "all") or self._is_named_local(name)

    def _is_named_local(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) or covers_object(pattern, name) for pattern in self._local)


def _with_kept_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the optimizers, schedulers and scalers that optimizers keep in their attributes, as `optimizer.attribute`."""
    expanded: dict[str, Any] = {}
    known_ids = {id(subject) for subject in objects.values()}

    def add(name: str, subject: Any) -> None:
        expanded[name] = subject
        for attribute, kept in kept_objects(subject) if isinstance(subject, torch.optim.Optimizer) else ():
            if id(kept) not in known_ids:
                known_ids.add(id(kept))
                add(f"{name}.{attribute}", kept)

    for name, subject in objects.items():
        add(name, subject)
    return expanded


_ABSENT = object()

MAX_NAMED_CHANGES = 4


def _change(built: Kind | int | None, current: Kind | int | None) -> str:
    """Completes the sentence about one parameter, or one optimizer's number of groups."""
    if isinstance(current, int) or isinstance(built, int):
        return f"has {current} param groups and had {built}"
    if built is None or current is None:
        return "is new" if built is None else "is gone"
    (dtype, shape), (built_dtype, built_shape) = current, built
    if dtype != built_dtype:
        return f"is {dtype_name(dtype)} and was {dtype_name(built_dtype)}"
    return f"has shape {tuple(shape)} and had {tuple(built_shape)}"
