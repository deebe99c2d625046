"""Collects all of a program's state on this rank and restores it.

Built by `checkpointer` from what the user named; knows nothing of slots, steps' schedules or tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import is_
from typing import Any, Protocol

import torch

from surefoot.errors import ConfigurationError, StateMismatch, StateNotRestorable
from surefoot.protocol.checkpoints.save_state import OWN
from surefoot.protocol.progress import NO_ANOMALIES
from surefoot.state import objects
from surefoot.state.entries import AllowedDifferences, Entry, SavedTensor, dtype_from_name, local_name, outlines
from surefoot.state.modules import ModulePart, OptimizerParameter
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


class ProgramPart(Protocol):
    """Saves and restores one named object of the program."""

    name: str

    @property
    def is_on_every_rank(self) -> bool:
        """Whether every rank of the job has all of it (not so under pipeline parallelism)."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Its live tensors."""
        ...

    def values(self) -> Any:
        """The object's plain values."""
        ...

    def prepare(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Makes what a restore is to fill."""
        ...

    def targets(self) -> Iterator[Entry]:
        """Entries to fill; valid between `prepare` and `apply`."""
        ...

    def apply(self, values: Any) -> None:
        """Takes over what was filled, and the plain values."""
        ...

    def check_restorable(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds the restored state aside and compares it; changes nothing.

        Raises StateNotRestorable that names the first key which would not come back as it is.
        """
        ...


class Program:
    """Everything named to Checkpointer, on one rank of a world."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        where: tuple[int, int],
        local: tuple[str, ...] = (),
        seed: int = 0,
        replicas: Any = None,
        anew: tuple[str, ...] = (),
    ) -> None:
        """`where`: rank and world. `replicas`: which ranks hold the same, where that is not all of them."""
        rank, world = where
        self._rank, self._world_size, self._local, self._seed = rank, world, local, seed
        self.suspect = self._same_world_size = False
        """Whether the last step's loss was no number, or out of its band: what is saved of it says so."""
        self.recent: Mapping[str, Any] = {}  # losses and gradient norms, by which a restart goes on judging
        self.anomalies = NO_ANOMALIES  # the newest odd steps: a restart may come before anybody heard of them
        self._restoring: list[tuple[ProgramPart, Any]] = []
        unknown = [name for name in local if name.partition("/")[0] not in objects and "*" not in name]
        unknown = unknown or [name for name in anew if name not in objects]
        if unknown:
            raise ConfigurationError(
                f"{'anew' if unknown[0] in anew else 'local'} names {unknown[0]!r}, but there is only {', '.join(objects) or 'nothing'}"
            )
        self.optimizers = [o for o in objects.values() if isinstance(o, torch.optim.Optimizer)]
        lazy = self._optimized()
        same = Replicas(replicas, rank)
        self._modules = [
            ModulePart(name, o, where, lazy, same) for name, o in objects.items() if isinstance(o, torch.nn.Module)
        ]
        self._random_before: tuple[int, dict[str, Any]] = (-2, {})
        self._reset_on_resize, self._inlined = anew, dict[str, InlinedTensors]()
        self._optimizer_parts = [
            OptimizerPart(name, o, where, self._parameters_by_id(), same)
            for name, o in objects.items()
            if isinstance(o, torch.optim.Optimizer)
        ]
        others = []
        for name, subject in objects.items():
            if subject is not None and not isinstance(subject, torch.nn.Module | torch.optim.Optimizer):
                self._inlined[name] = InlinedTensors(subject, classify_state(name, subject))
                others.append(ObjectPart(name, subject, where, same, self._inlined[name]))
        order = {name: number for number, name in enumerate(objects)}
        rest: list[ProgramPart] = [*self._optimizer_parts, *others]
        self._parts: list[ProgramPart] = [*self._modules, *sorted(rest, key=lambda part: order[part.name])]
        shared = (name for name, inlined in self._inlined.items() if inlined.whose == "all")
        self._watchable = frozenset([*(part.name for part in self._modules), *shared])
        self._proved: Sequence[Entry] | None = None
        self._targets: list[Entry] = []
        self._converted: list[tuple[Entry, torch.Tensor]] = []

    def entries(self) -> list[Entry]:
        """Collects every live tensor under its saved name.

        New tensors are restored aside first. Raises StateNotRestorable for what would not come back.
        """
        try:
            self._refresh()
            found = self._owned((part, part.entries()) for part in self._parts)
        except ConfigurationError as error:
            raise StateNotRestorable(str(error)) from error
        known = self._proved
        if known is None or len(found) != len(known) or not all(map(is_, found, known)):
            if known is None or outlines(found) != outlines(known):
                self._prove(found)
            self._proved = found
        return found

    def check_restorable(self) -> None:
        """Restores the program's state aside, even if it was done before.

        Raises StateNotRestorable that names the object, the key, and what to do.
        """
        self._proved = None
        self.entries()

    def weights(self) -> list[Entry]:
        """Parameters and buffers of its modules alone: what weights are."""
        return [entry for part in self._parts if isinstance(part, ModulePart) for entry in part.weights()]

    def values(self, step: int) -> bytes:
        """The blob of plain values of this rank at `step`."""
        parts = self._plain()
        body = {
            **({"loss_anomaly": True} if self.suspect else {}),
            "objects": self._ownership_digests(parts),  # first: manifests are made from it without reading the rest
            "step": step,
            "world_size": self._world_size,
            "seed": self._seed,
            "parts": parts,
            "tied": self._tied(),
            **{
                name: dict(told)
                for name, told in (("recent", self.recent), ("anomalies", self.anomalies.saved))
                if told
            },
        }
        return values_blob({**body, "random": self._random_before[1]} if self._random_before[0] == step - 1 else body)

    def shared_values(self) -> dict[str, bytes]:
        """The plain values of objects that are no module, optimizer or loader, encoded, by name."""
        shared = {name for name, inlined in self._inlined.items() if inlined.whose == "all"}
        shared -= {n for n in shared if getattr(self._inlined[n].subject, "elastic", False)}
        return {part.name: encoded({"": part.values()}) for part in self._parts if part.name in shared}

    def unwatched_tensors(self, max_bytes: int) -> dict[str, torch.Tensor]:
        """The smallest tensor of each object that no copy in background watches, by name; an object may have none."""
        found: dict[str, torch.Tensor] = {}
        for entry in self._proved or ():
            name = entry.name.partition("/")[0]
            if entry.copy_in_background or name not in self._watchable:
                continue
            tensor = entry.local_part()
            smallest = min(max_bytes, found[name].nbytes - 1 if name in found else max_bytes)
            if 0 < tensor.nbytes <= smallest and not tensor.is_inference():
                found[name] = tensor
        return found

    def has_generators_for(self, step: int) -> bool:
        """Whether the save of `step` takes the generators as they were before, not as they are."""
        return self._random_before[0] == step - 1

    def save_generators_for_next(self, step: int) -> None:
        """Keeps the present generators for the save of step `step` + 1."""
        self._random_before = step, objects.capture_generators()

    def divide(self, tied: Collection[str], saved_world: int, states_of: Callable[[str], list[Any]]) -> list[str]:
        """Divides each rank's own state among a world of another size.

        Called before `prepare`. `tied` names objects that cannot be divided (`protocol.checkpoints.save_state`), `states_of` gives all
        ranks' states of one. Returns a sentence for each object that begins anew; raises StateMismatch for the first
        that may not.
        """
        resized = f"the checkpoint is of {saved_world} ranks and this world has {self._world_size}"
        told = []
        for name, inlined in self._inlined.items():
            kind, may = type(inlined.subject).__name__, name in self._reset_on_resize
            if may or (inlined.whose != "own" and self._is_named_local(name)):
                told.append(f"{name} ({kind}) begins anew as the program built it: {resized}")
            elif inlined.whose == "divided":
                inlined.load_state_dicts(states_of(name), self._rank, self._world_size)
            elif inlined.whose == "own":
                raise StateMismatch(
                    f"{name} ({kind}) is each rank's own state, and {resized}: it cannot be divided among them. Train with"
                    f" {saved_world} ranks, use surefoot.ElasticLoader, give it load_state_dicts(states, rank, world), or"
                    f" accept with Checkpointer(anew=({name!r},)) that samples are lost and repeated"
                )
            elif name in tied:
                raise StateMismatch(
                    f"{name} ({kind}) did not have the same values on all ranks, and {resized}: whose they should be is"
                    f" not known. Train with {saved_world} ranks, make them equal before step(), or let it begin anew with"
                    f" Checkpointer(anew=({name!r},))"
                )
        return told

    def prepare(
        self,
        shared: Mapping[str, Any],
        own: Mapping[str, Any] | None,
        saved: Mapping[str, SavedTensor],
        fit: AllowedDifferences = AllowedDifferences(),  # noqa: B008  # it is frozen
    ) -> list[str]:
        """Builds targets for what a checkpoint has.

        `shared` are the lowest rank's values; `own` this rank's of a world of the same size, else None. Returns a
        sentence for each difference that `fit` allows; raises StateMismatch for the first that it does not.
        """
        self._restoring, told = [], list[str]()
        self._same_world_size = (
            own is not None and own["world_size"] == self._world_size and not own.get("weights_only")
        )
        standing = {entry.name: entry for entry in self.weights()}
        for part in self._parts:
            if part.name not in shared["parts"] and (fit.may_differ(part.name) or shared.get("weights_only")):
                why = "which has weights alone" if shared.get("weights_only") else "where it may be missing"
                told.append(f"{part.name} is not in the checkpoint, {why}: it begins as the program built it")
                continue
            values = self._values_for(part, shared, own)
            if values is _ABSENT:
                continue
            mine = saved
            if self._is_local(part.name):
                prefix = local_name(self._rank, "")
                mine = {n.removeprefix(prefix): what for n, what in saved.items() if n.startswith(prefix)}
            try:
                if isinstance(part, OptimizerPart):
                    values, mine, more = part.fitted(values, mine, standing, fit)
                    told += more
                part.prepare(values, mine)
            except StateMismatch as problem:
                if isinstance(part, ModulePart) or not fit.may_differ(part.name):
                    raise
                told.append(f"{problem}: {part.name} begins as the program built it")
                continue
            self._restoring.append((part, values))
        self._lacking(shared, fit, told)
        self._fit_targets(saved, fit, told)
        return told

    def prepare_weights(self, saved: Mapping[str, SavedTensor], fit: AllowedDifferences) -> list[str]:
        """Builds targets for modules' own tensors alone; returns as `prepare` does."""
        told = list[str]()
        self._restoring = []
        self._targets, self._converted = self._fitting(self.weights(), saved, fit, told)
        return told

    def targets(self) -> list[Entry]:
        """Entries to fill, after `prepare`."""
        return self._targets

    def convert(self) -> None:
        """Copies what was read in another precision; `apply` does it too."""
        with torch.no_grad():
            for entry, read in self._converted:
                entry.local_part().copy_(read)
        self._converted = []

    def _lacking(self, shared: Mapping[str, Any], fit: AllowedDifferences, told: list[str]) -> None:
        for name in sorted(set(shared["parts"]) - {part.name for part in self._parts}):
            if not fit.may_differ(name):
                raise StateMismatch(
                    f"the checkpoint has {name!r}, which was not given to Checkpointer: give it too, or leave it out with"
                    f" restore(optional=({name!r},))"
                )
            told.append(f"the checkpoint has {name!r}, which was not given to Checkpointer: it is left out")

    def _fit_targets(self, saved: Mapping[str, SavedTensor], fit: AllowedDifferences, told: list[str]) -> None:
        found = self._owned((part, part.targets()) for part, _ in self._restoring)
        if not self._same_world_size:
            found = [entry for entry in found if entry.sharing != "local"]
        self._targets, self._converted = self._fitting(found, saved, fit, told)
        if not all(part.is_on_every_rank for part in self._parts):
            return
        known, tied = {entry.name for entry in found}, self._tied()
        whole = {part.name for part, _ in self._restoring}
        for name in saved:
            if name in known or name in tied or name.startswith("local/") or name.partition("/")[0] not in whole:
                continue
            if not self._may_be_left_out(name, fit):
                raise StateMismatch(f"the checkpoint has {name}, which this program lacks: build it as it was saved")
            told.append(f"the checkpoint has {name}, which this program lacks: it is left out")

    def _may_be_left_out(self, name: str, fit: AllowedDifferences) -> bool:
        """Whether a tensor may be left out: by its own name, or as state of a parameter that may differ."""
        return fit.may_differ(name) or fit.may_differ(name.partition("/")[2].rpartition("/")[0])

    def _fitting(
        self, entries: Sequence[Entry], saved: Mapping[str, SavedTensor], fit: AllowedDifferences, told: list[str]
    ) -> tuple[list[Entry], list[tuple[Entry, torch.Tensor]]]:
        """Selects what can be filled, and what of it is read aside first, in the precision that it was saved in."""
        targets: list[Entry] = []
        converted: list[tuple[Entry, torch.Tensor]] = []
        for entry in entries:
            what = saved.get(entry.name)
            if problem := fit.misfit(entry, what):
                told.append(problem)
            elif what is not None and what.dtype != entry.dtype:
                read = torch.empty(entry.location.box.lengths, dtype=dtype_from_name(what.dtype), device="cpu")
                targets.append(Entry(entry.name, read, what.dtype, entry.location, entry.sharing))
                converted.append((entry, read))
            else:
                targets.append(entry)
        return targets, converted

    def apply(self, step: int, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Restores the objects; the generators last, since loading may draw from them."""
        self.convert()
        for part, values in self._restoring:
            part.apply(values)
        self._restoring, self._targets = [], []
        if own is not None and self._same_world_size:
            objects.restore_generators(own["random"])
        else:
            objects.seed_generators(int(shared["seed"]), self._rank, step)

    def _ownership_digests(self, parts: Mapping[str, Any]) -> dict[str, str]:
        """Of each object what all ranks should have alike, or that each has its own; nothing of what may begin anew."""
        told = {}
        for name, inlined in self._inlined.items():
            if name in self._reset_on_resize or inlined.whose == "divided":
                continue
            if inlined.whose == "own":
                told[name] = OWN
            elif not self._is_named_local(name):
                told[name] = value_digest(encoded({f"parts.{name}": parts[name]}))
        return told

    def _optimized(self) -> frozenset[int]:
        return frozenset(id(p) for o in self.optimizers for group in o.param_groups for p in group["params"])

    def _parameters_by_id(self) -> dict[int, OptimizerParameter]:
        return {id(h.parameter): h for m in reversed(self._modules) for h in m.optimizer_parameters()}

    def _tied(self) -> dict[str, str]:
        return {other: own for m in self._modules for other, own in m.other_names.items()}

    def _plain(self) -> dict[str, Any]:
        return {part.name: part.values() for part in self._parts}

    def _refresh(self) -> None:
        """Takes groups and parameters that were added or replaced since the last save."""
        stale = [part for part in self._modules if part.is_stale()]
        if stale or any(part.is_stale() for part in self._optimizer_parts):
            lazy = self._optimized()
            for module in self._modules:
                module.refresh(lazy)
            held = self._parameters_by_id()
            for optimizer in self._optimizer_parts:
                optimizer.refresh(held)

    def _prove(self, entries: Sequence[Entry]) -> None:
        text = encoded({"parts": self._plain()})
        back = read_values(text)
        if encoded(back) != text:
            raise StateNotRestorable("plain values of the program come back as others: that is a fault of surefoot")
        prefix = local_name(self._rank, "")
        saved = {e.name.removeprefix(prefix): SavedTensor(e.dtype, e.location.shape) for e in entries}
        for part in self._parts:
            try:
                part.check_restorable(back["parts"][part.name], saved)
            except StateMismatch as problem:
                raise StateNotRestorable(f"what {part.name} holds could not be restored: {problem}") from problem

    def _values_for(self, part: ProgramPart, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> Any:
        if part.name in self._inlined and own is not None and self._same_world_size:
            shared = {"parts": self._inlined[part.name].own_parts(part.name, own["parts"], shared["parts"])}
        elif self._is_local(part.name) or part.name in self._reset_on_resize:
            return _ABSENT  # divided before, or begins anew
        if part.name not in shared["parts"]:
            raise StateMismatch(
                f"the checkpoint has no {part.name!r}: it was not given to Checkpointer when it was saved; let it begin as"
                f" it is with restore(optional=({part.name!r},))"
            )
        return shared["parts"][part.name]

    def _owned(self, parts: Iterable[tuple[ProgramPart, Iterator[Entry]]]) -> list[Entry]:
        """All entries, those that are this rank's own affair under its own names."""
        found: list[Entry] = []
        for part, entries in parts:
            found += map(self._own, entries) if self._local or part.name in self._inlined else entries
        return found

    def _own(self, entry: Entry) -> Entry:
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
        return any(fnmatchcase(name, pattern) for pattern in self._local)


_ABSENT = object()
