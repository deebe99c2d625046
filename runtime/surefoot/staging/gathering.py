"""Copies small host tensors into a slot by a few calls.

Of a small tensor, asking Python anything takes longer than its copy. So whatever lies side by side in the stream is
gathered by one call of torch, without the GIL; and what must be asked at each save, whether every tensor still lies where
it did when that was prepared, is asked of all in one pass. Used by `stager`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import ne
from typing import Any

import torch

from surefoot.staging.host_copies import BAND_BYTES, PLAIN_CLASSES, elements, is_straight
from surefoot.staging.pieces import CopySource, CopyTarget

SMALL_BYTES = 64 * 1024
"""Pieces up to this size are copied inside the call: handing one over costs more than copying it."""

_MOST_SLOTS = 4
_ASKED: tuple[Any, ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.is_contiguous,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]  # a getter of C
    torch.Tensor.numel,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
"""What a prepared view depends on, beside its class. Memory on a device, or that was freed, has another address."""


@dataclass(frozen=True, slots=True)
class GatherCopy:
    """Copies tensors one behind the other to their part of a slot."""

    sources: list[torch.Tensor]
    target: torch.Tensor

    @property
    def size_bytes(self) -> int:
        return self.target.nbytes

    def run(self) -> None:
        """Copies what is there now."""
        torch.cat(self.sources, out=self.target)


class _Run:
    """Pieces that follow each other in the stream, of words of one size."""

    def __init__(self, first: CopySource) -> None:
        self.start = self.stop = first.start
        self.tensors: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = []
        self._facts: list[list[Any]] = []

    def takes(self, source: CopySource, view: torch.Tensor) -> bool:
        """Whether a piece goes on where this ends."""
        room = source.stop - self.start <= BAND_BYTES
        return room and source.start == self.stop and view.dtype == self.views[0].dtype

    def append(self, source: CopySource, view: torch.Tensor) -> None:
        self.tensors.append(_own(source))
        self.views.append(view)
        self.stop = source.stop

    def note(self) -> None:
        """Keeps what the views depend on."""
        self._facts = _facts(self.tensors)

    def refreshed(self) -> bool:
        """Looks at its tensors again; False if one no longer fits."""
        facts = _facts(self.tensors)
        if facts == self._facts:
            return True
        if not all(self._retaken(number) for number in set(_differing(facts, self._facts))):
            return False
        self._facts = facts
        return True

    def _retaken(self, number: int) -> bool:
        """Takes the view of a tensor that moved."""
        tensor = self.tensors[number]
        if not _is_plain(tensor):
            return False
        before, view = self.views[number], _view(tensor)
        self.views[number] = view
        return view.dtype == before.dtype and view.shape == before.shape


class SmallTensors:
    """Prepares gather copies of the small tensors of one save plan.

    Views alias the tensors' memory, and are taken again of those that moved since the last save.
    """

    def __init__(self, sources: Iterable[CopySource]) -> None:
        """`sources` for which `gatherable` holds."""
        self.places: dict[int, tuple[_Run, int, int]] = {}
        """Run, number in it and end of each piece, by its start in the stream."""
        self._runs: list[_Run] = []
        self._targets: dict[tuple[int, int], list[torch.Tensor]] = {}
        for source in sorted(sources, key=lambda source: source.start):
            view = _view(_own(source))
            if not (self._runs and self._runs[-1].takes(source, view)):
                self._runs.append(_Run(source))
            run = self._runs[-1]
            self.places[source.start] = run, len(run.tensors), source.stop
            run.append(source, view)
        for run in self._runs:
            run.note()

    def copies(self, room: CopyTarget) -> list[GatherCopy]:
        """The copies into one slot."""
        where = (room.address, room.into.nbytes)
        if where not in self._targets:
            if len(self._targets) >= _MOST_SLOTS:  # of memory that was given up
                self._targets.clear()
            self._targets[where] = [_target(run, room) for run in self._runs]
        return [GatherCopy(r.views, t) for r, t in zip(self._runs, self._targets[where], strict=True)]

    def replace(self, source: CopySource) -> bool:
        """Takes another tensor for a piece; False if it differs.

        `refreshed` looks at its memory.
        """
        run, number, stop = self.places[source.start]
        if stop != source.stop or not gatherable(source):
            return False
        run.tensors[number] = _own(source)
        return True

    def refreshed(self) -> bool:
        """Looks at all tensors again; False if one no longer fits."""
        return all(run.refreshed() for run in self._runs)


class GatheredSources:
    """Divides a save's sources into small tensors and the others."""

    def __init__(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> None:
        self._known = set(map(id, (*eager, *lazy)))
        self.small = SmallTensors(source for source in (*eager, *lazy) if gatherable(source))
        self._divide(eager, lazy)

    def hold_for(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> bool:
        """Brings it up to date; False if it must be made anew."""
        if eager is not self._eager or lazy is not self._lazy:
            present = set(map(id, (*eager, *lazy)))
            fresh = [source for source in (*eager, *lazy) if id(source) not in self._known]
            if len(present) != len(self._known) or not all(map(self._takes, fresh)):
                return False
            self._known = present
            self._divide(eager, lazy)
        return self.small.refreshed()

    def _takes(self, source: CopySource) -> bool:
        return self.small.replace(source) if source.start in self.small.places else not gatherable(source)

    def _divide(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> None:
        self._eager, self._lazy = eager, lazy
        places = self.small.places
        self.eager = [source for source in eager if source.start not in places]
        self.lazy = [source for source in lazy if source.start not in places]


def gatherable(source: CopySource) -> bool:
    """Whether a piece is all of a small contiguous host tensor."""
    tensor = source.own
    if tensor is None or not 0 < source.size_bytes <= SMALL_BYTES or not _is_plain(tensor):
        return False
    return tensor.nbytes == source.size_bytes and is_straight(tuple(tensor.shape), source.tile)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in this process' memory in their order, as they are."""
    if type(tensor) not in PLAIN_CLASSES or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    freed = tensor.data_ptr() == 0 and tensor.numel() > 0
    return tensor.is_contiguous() and not (freed or tensor.is_conj() or tensor.is_neg())


def _own(source: CopySource) -> torch.Tensor:
    assert source.own is not None, "the caller asked `gatherable`"
    return source.own


def _view(tensor: torch.Tensor) -> torch.Tensor:
    return elements(tensor).reshape(-1)


def _target(run: _Run, room: CopyTarget) -> torch.Tensor:
    part = room.into[run.start - room.origin : run.stop - room.origin]
    return torch.from_numpy(part).view(run.views[0].dtype)


def _facts(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """What `_ASKED` says of all; the types alone where one is not plain, whose answers are its own affair."""
    kinds = list(map(type, tensors))
    if not set(kinds).issubset(PLAIN_CLASSES):
        return [kinds]
    return [kinds, *(list(map(asked, tensors)) for asked in _ASKED)]


def _differing(now: Sequence[Sequence[Any]], before: Sequence[Sequence[Any]]) -> Iterator[int]:
    """Numbers of the tensors of which something is not what it was."""
    for here, there in zip(now, before, strict=False):
        yield from compress(range(len(here)), map(ne, here, there))
