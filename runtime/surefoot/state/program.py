"""All of a training program's state on this rank: named tensors, plain values, and how both come back.

Built by `checkpointer` from what the user named; knows nothing of slots, steps' schedules or tiers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch

from surefoot.errors import ConfigurationError, StateMismatch
from surefoot.format.values import decode_values, encode_values
from surefoot.protocol.ties import OWN
from surefoot.state import rng
from surefoot.state.entries import Entry, Saved, local_name
from surefoot.state.modules import ModulePart
from surefoot.state.objects import ObjectPart
from surefoot.state.optimizers import OptimizerPart
from surefoot.state.ownership import Inlined, value_digest, whose_state
from surefoot.state.replicas import Replicas


class Part(Protocol):
    """One named object of the program."""

    name: str

    @property
    def everywhere(self) -> bool:
        """Whether every rank of the job has all of it (not so under pipeline parallelism)."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Its live tensors."""
        ...

    def values(self) -> Any:
        """What is plain of it."""
        ...

    def prepare(self, values: Any, saved: Mapping[str, Saved]) -> None:
        """Makes what a restore is to fill."""
        ...

    def targets(self) -> Iterator[Entry]:
        """What a restore fills; valid between `prepare` and `apply`."""
        ...

    def apply(self, values: Any) -> None:
        """Takes over what was filled, and the plain values."""
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
        self._rank, self._world, self._local, self._seed = rank, world, local, seed
        self._restoring: list[tuple[Part, Any]] = []
        self._same_world = False
        unknown = [name for name in local if name.partition("/")[0] not in objects and "*" not in name]
        unknown = unknown or [name for name in anew if name not in objects]
        if unknown:
            raise ConfigurationError(
                f"{'anew' if unknown[0] in anew else 'local'} names {unknown[0]!r}, but there is only {', '.join(objects) or 'nothing'}"
            )
        self.optimizers = [o for o in objects.values() if isinstance(o, torch.optim.Optimizer)]
        lazy = frozenset(id(p) for o in self.optimizers for group in o.param_groups for p in group["params"])
        same = Replicas(replicas, rank)
        modules = [
            ModulePart(name, o, where, lazy, same) for name, o in objects.items() if isinstance(o, torch.nn.Module)
        ]
        self._tied = {other: own for m in modules for other, own in m.other_names.items()}
        held = {id(h.parameter): h for m in reversed(modules) for h in m.held()}
        self._random_before: tuple[int, dict[str, Any]] = (-2, {})
        self._anew, self._inlined = anew, dict[str, Inlined]()
        self._parts: list[Part] = [*modules]
        for name, subject in objects.items():
            if isinstance(subject, torch.optim.Optimizer):
                self._parts.append(OptimizerPart(name, subject, where, held, same))
            elif subject is not None and not isinstance(subject, torch.nn.Module):
                self._inlined[name] = Inlined(subject, whose_state(name, subject))
                self._parts.append(ObjectPart(name, subject, where, same, self._inlined[name]))

    def entries(self) -> list[Entry]:
        """Every live tensor, under the name it is saved by."""
        return [self._own(entry) for part in self._parts for entry in part.entries()]

    def standing(self) -> list[Entry]:
        """Parameters and buffers of its modules alone: what weights are."""
        return [entry for part in self._parts if isinstance(part, ModulePart) for entry in part.standing()]

    def values(self, step: int) -> bytes:
        """The blob of plain values of this rank at `step`."""
        parts = {part.name: part.values() for part in self._parts}
        body = {
            "objects": self._told(parts),  # first: manifests are made from it without reading the rest
            "step": step,
            "world": self._world,
            "seed": self._seed,
            "parts": parts,
            "tied": self._tied,
        }
        drawn_at, before = self._random_before
        return values_blob({**body, "random": before} if drawn_at == step - 1 else body)

    def look_ahead(self, step: int) -> None:
        """What is drawn from here on belongs behind step `step` + 1, which is saved with the generators as they are now."""
        self._random_before = step, rng.captured()

    def divide(self, tied: Collection[str], saved_world: int, states_of: Callable[[str], list[Any]]) -> list[str]:
        """Before `prepare`, in a world of another size: what each rank had of its own is divided by whoever can.

        `tied` are the checkpoint's objects that cannot be (`protocol.ties`), `states_of` gives all ranks' of one. Returns
        a sentence for each object that begins anew; StateMismatch that names the first which may not.
        """
        resized = f"the checkpoint is of {saved_world} ranks and this world has {self._world}"
        told = []
        for name, inlined in self._inlined.items():
            kind, may = type(inlined.subject).__name__, name in self._anew
            if may or (inlined.whose != "own" and self._is_named_local(name)):
                told.append(f"{name} ({kind}) begins anew as the program built it: {resized}")
            elif inlined.whose == "divided":
                inlined.load_state_dicts(states_of(name), self._rank, self._world)
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

    def prepare(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, saved: Mapping[str, Saved]) -> None:
        """Makes room for what a checkpoint has. `shared` are the lowest rank's values; `own` this rank's of a world
        of the same size, else None. Raises StateMismatch that names what program and checkpoint disagree about."""
        self._restoring = []
        self._same_world = own is not None and own["world"] == self._world
        for part in self._parts:
            values = self._values_for(part, shared, own)
            if values is _ABSENT:
                continue
            mine = saved
            if self._is_local(part.name):
                prefix = local_name(self._rank, "")
                mine = {n.removeprefix(prefix): what for n, what in saved.items() if n.startswith(prefix)}
            part.prepare(values, mine)
            self._restoring.append((part, values))
        gone = sorted(set(shared["parts"]) - {part.name for part in self._parts})
        if gone:
            raise StateMismatch(f"the checkpoint has {gone[0]!r}, which was not given to Checkpointer: give it too")
        targets = {entry.name: entry for entry in self.targets()}
        shared_by_all = {n: what for n, what in saved.items() if n not in self._tied}
        _check(targets, shared_by_all, complete=all(part.everywhere for part in self._parts))

    def targets(self) -> list[Entry]:
        """What a restore fills, after `prepare`."""
        found = [self._own(entry) for part, _ in self._restoring for entry in part.targets()]
        if self._same_world:
            return found
        return [entry for entry in found if entry.sharing != "local"]

    def apply(self, step: int, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Takes over what was filled; then the generators, last, so that nothing here moves them on."""
        for part, values in self._restoring:
            part.apply(values)
        self._restoring = []
        if own is not None and self._same_world:
            rng.returned(own["random"])
        else:
            rng.derived(int(shared["seed"]), self._rank, step)

    def _told(self, parts: Mapping[str, Any]) -> dict[str, str]:
        """Of each object what all ranks should have alike, or that each has its own; nothing of what may begin anew."""
        told = {}
        for name, inlined in self._inlined.items():
            if name in self._anew or inlined.whose == "divided":
                continue
            if inlined.whose == "own":
                told[name] = OWN
            elif not self._is_named_local(name):
                told[name] = value_digest(encode_values({"": parts[name]}, _torch_bytes))
        return told

    def _values_for(self, part: Part, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> Any:
        if part.name in self._inlined and own is not None and self._same_world:
            shared = own  # at the same size each rank gets back what it saved
        elif self._is_local(part.name) or part.name in self._anew:
            return _ABSENT  # divided before, or begins anew
        if part.name not in shared["parts"]:
            raise StateMismatch(
                f"the checkpoint has no {part.name!r}: it was not given to Checkpointer when it was saved"
            )
        return shared["parts"][part.name]

    def _own(self, entry: Entry) -> Entry:
        if not self._local and entry.name.partition("/")[0] not in self._inlined:
            return entry
        if self._is_local(entry.name.partition("/")[0]) or self._is_local(entry.name):
            if entry.window is not None:
                raise ConfigurationError(
                    f"{entry.name} is named local and lies in a tensor with others: it cannot be this rank's own affair"
                )
            return entry.kept_local(self._rank)
        return entry

    def _is_local(self, name: str) -> bool:
        inlined = self._inlined.get(name)
        return (inlined is not None and inlined.whose != "all") or self._is_named_local(name)

    def _is_named_local(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._local)


_ABSENT = object()


def values_blob(body: Mapping[str, Any]) -> bytes:
    """A rank's values, with the state of this process' generators unless `body` says another."""
    return encode_values({**body, "random": body.get("random") or rng.captured()}, _torch_bytes)


def read_values(blob: bytes) -> dict[str, Any]:
    """What `Program.values` wrote."""
    return decode_values(blob, _torch_value)


def _check(targets: Mapping[str, Entry], saved: Mapping[str, Saved], complete: bool) -> None:
    for name, entry in targets.items():
        what = saved.get(name)
        if what is None:
            raise StateMismatch(f"the checkpoint has no {name}: the program has changed since it was saved")
        if what.shape != entry.place.shape:
            raise StateMismatch(f"{name} has shape {entry.place.shape} here and {what.shape} in the checkpoint")
        if what.dtype != entry.dtype:
            raise StateMismatch(f"{name} is {entry.dtype} here and {what.dtype} in the checkpoint")
    if complete:
        for name in saved:
            if name not in targets and not name.startswith("local/"):
                raise StateMismatch(f"the checkpoint has {name}, which this program lacks: build it as it was saved")


def _torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    found = buffer.getvalue()
    _torch_value(found)  # what cannot come back must not be saved
    return found


def _torch_value(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
