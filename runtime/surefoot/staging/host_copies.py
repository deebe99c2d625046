"""Copies tensors block by block into staging slots, and digests the source and the copy.

The arrays behind a copy alias the live tensor and the slot; preparing costs microseconds and running releases the GIL.
A copy behind the training goes by way of memory of the copying thread's own: what is compared with the digest taken at
the step is what is laid into the slot, whatever becomes of the tensor meanwhile. Used by `stager`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, product
from math import prod
from operator import ne
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from surefoot import metrics

_log = logging.getLogger(__name__)


# ---- blocks ----------------------------------------------------------------------------------------------------------
# Computes the strided copies that tile a tensor into blocks. Arithmetic only. A piece's blocks stand in row-major order
# of tiles and the tiles at the far edges are clipped. So all full tiles are one strided copy, and each combination of
# clipped dimensions is one more: at most 2^n for n dimensions, and in practice the main area, the right edge, the
# bottom edge and the corner.


@dataclass(frozen=True, slots=True)
class Region:
    """One strided copy: tiles of equal extent.

    `counts` tiles of `extents` elements. `corner` is the first element in the source; `start` the first in the
    piece's stream. `tile_strides` and `element_strides` are the stream's, in elements; the source's follow from its
    own strides (a tile step along d is extents[d] source elements, since only the last tile of a row is clipped).
    """

    counts: tuple[int, ...]
    extents: tuple[int, ...]
    offset: tuple[int, ...]
    start: int
    tile_strides: tuple[int, ...]
    element_strides: tuple[int, ...]


@lru_cache(maxsize=4096)
def regions(lengths: tuple[int, ...], tile: tuple[int, ...]) -> tuple[Region, ...]:
    """The regions of a piece; together they cover each element once."""
    return tuple(_regions(lengths, tile))


def _regions(lengths: tuple[int, ...], tile: tuple[int, ...]) -> Iterator[Region]:
    choices = []
    for n, t in zip(lengths, tile, strict=True):
        whole, rest = divmod(n, t)
        # (number of tiles, extent of each, index of the first)
        choices.append([(c, e, first) for c, e, first in ((whole, t, 0), (1, rest, whole)) if c and e])
    for chosen in product(*choices):
        counts = tuple(c for c, _, _ in chosen)
        extents = tuple(e for _, e, _ in chosen)
        corner = tuple(first * t for (_, _, first), t in zip(chosen, tile, strict=True))
        # Stepping one element row further in dimension d skips, in the stream, the band of all later dimensions,
        # as high as the tiles chosen in the earlier ones.
        bands = tuple(prod(extents[:d]) * prod(lengths[d + 1 :]) for d in range(len(lengths)))
        yield Region(
            counts=counts,
            extents=extents,
            offset=corner,
            start=sum(c * band for c, band in zip(corner, bands, strict=True)),
            tile_strides=tuple(e * band for e, band in zip(extents, bands, strict=True)),
            element_strides=tuple(prod(extents[d + 1 :]) for d in range(len(lengths))),
        )


def bands(
    lengths: tuple[int, ...], tile: tuple[int, ...], itemsize: int, limit_bytes: int
) -> Iterator[tuple[slice, ...]]:
    """Yields parts of a piece in stream order, about `limit_bytes` each.

    Each has whole tiles, at least one, and is contiguous in the stream, laid out as a piece of its own: rows of tiles
    along dimension 0, and of a row that is larger than the limit, stretches of its tiles along the next dimension.
    """
    if 0 not in lengths:
        yield from _bands(lengths, tile, itemsize, limit_bytes)


def _bands(
    lengths: tuple[int, ...], tile: tuple[int, ...], scale: int, limit_bytes: int
) -> Iterator[tuple[slice, ...]]:
    """`scale` is what one element of these dimensions stands for, in bytes."""
    if not lengths:
        yield ()
        return
    row_bytes = scale * prod(lengths[1:])
    if row_bytes * tile[0] <= limit_bytes or len(lengths) == 1:
        rows = max(1, limit_bytes // (row_bytes * tile[0])) * tile[0]
        rest = tuple(slice(0, n) for n in lengths[1:])
        for first in range(0, lengths[0], rows):
            yield slice(first, min(first + rows, lengths[0])), *rest
        return
    for first in range(0, lengths[0], tile[0]):
        last = min(first + tile[0], lengths[0])
        for rest in _bands(lengths[1:], tile[1:], scale * (last - first), limit_bytes):
            yield slice(first, last), *rest


# ---- arena -----------------------------------------------------------------------------------------------------------
# Presents staging memory as arrays: equal slots in one shared mapping. No torch here except to pin: a slot is bytes.
# Used by `checkpointer`, which asks its link for the memory.

Bytes = npt.NDArray[np.uint8]


class Arena:
    """`slots` slots of `slot_bytes` each over one writable memory."""

    def __init__(self, memory: memoryview, slots: int, slot_bytes: int) -> None:
        self._bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        if self._bytes.size < slots * slot_bytes:
            raise ValueError(f"an arena of {self._bytes.size} bytes has no room for {slots} slots of {slot_bytes}")
        self.slots, self.slot_bytes = slots, slot_bytes
        self._pinned = False

    def slot_view(self, index: int) -> Bytes:
        """The bytes of one slot, writable."""
        if not 0 <= index < self.slots:
            raise ValueError(f"slot {index} is not one of {self.slots}")
        return self._bytes[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def pin(self) -> None:
        """Registers the memory with CUDA once; device copies need no bounce buffer.

        Where that is refused (a limit of locked memory), copies go through CUDA's own buffer, and take longer.
        """
        if self._pinned:
            return

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(self._bytes.ctypes.data, self._bytes.size, 0))
        except RuntimeError as refused:
            metrics.fallbacks.labels("staging_not_pinned").inc()
            _log.warning("staging memory cannot be pinned, so copies from the device take longer: %s", refused)
            return
        self._pinned = True

    def close(self) -> None:
        """Unpins. The mapping itself belongs to the link."""
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.cuda.check_error(runtime.cudaHostUnregister(self._bytes.ctypes.data))
            self._pinned = False


# ---- host copies -----------------------------------------------------------------------------------------------------

BAND_BYTES = 1024 * 1024
"""Largest copy on the CPU, and what one digest covers: it stays in a core's cache between its two passes, is long enough
for the GIL to be let go, and whoever waits for a copy under way waits for no more than this much."""

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)
"""Of tensors that are their memory and nothing else; a subclass may be anything."""

_MAX_VIEWS = 4096

Array = np.ndarray[Any, Any]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as a type that numpy copies, bit by bit."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    word = _WORDS[plain.element_size()]
    return plain if plain.dtype == word else plain.view(word)


class Scratch(threading.local):
    """Holds each thread's copy buffer and views of it, between saves."""

    def __init__(self) -> None:
        self._memory: Bytes = np.ones(BAND_BYTES, dtype=np.uint8)  # ones: written, so that the pages are there
        self._views: dict[tuple[Any, ...], tuple[Array, list[Array]]] = {}

    def of(self, copy: Copy) -> tuple[Bytes, Array, list[Array]]:
        """A band's bytes, their array in source order, and its tiled regions."""
        size = copy.target.size
        if size > self._memory.size or len(self._views) > _MAX_VIEWS:
            self._views.clear()
            self._memory = np.ones(max(size, self._memory.size), dtype=np.uint8)
        key = (copy.source.shape, copy.source.dtype, copy.tile)
        if key not in self._views:
            whole = self._memory[:size].view(copy.source.dtype).reshape(copy.source.shape)
            self._views[key] = whole, [_tiles(whole, region) for region in regions(whole.shape, copy.tile)]
        return self._memory[:size], *self._views[key]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies whole tiles of a piece from the program to its slot."""

    source: Array
    target: Bytes
    tile: tuple[int, ...]
    views: tuple[tuple[Array, Array], ...]
    """Strided views of source and target, alike in shape."""
    flat: Bytes | None
    """The source's bytes in its order, where they lie in memory so."""
    is_contiguous: bool
    """The target has the source's order."""

    @property
    def size_bytes(self) -> int:
        return self.target.nbytes

    def run(self) -> None:
        """Copies what is there now."""
        for source, target in self.views:
            np.copyto(target, source)

    def digest(self, scratch: Scratch) -> int:
        """Digests the source's present bytes, in the source's order."""
        if self.flat is not None:
            return _digest(self.flat)
        landed, whole, _ = scratch.of(self)
        np.copyto(whole, self.source)
        return _digest(landed)

    def run_verified(self, digest: int, scratch: Scratch) -> bool:
        """Copies; returns whether the copied bytes have this digest."""
        if self.is_contiguous:
            self.run()
            return _digest(self.target) == digest
        landed, whole, parts = scratch.of(self)
        np.copyto(whole, self.source)
        for (_, target), part in zip(self.views, parts, strict=True):
            np.copyto(target, part)
        return _digest(landed) == digest


def copies_of(source: torch.Tensor, tile: tuple[int, ...], target: Bytes) -> list[Copy]:
    """Prepares the copies of a host tensor, cut into tiles, to `target`.

    `target` is exactly the piece's bytes; ValueError if not.
    """
    array: Array = elements(source).numpy()
    if array.nbytes != target.size:
        raise ValueError(f"a piece of {array.nbytes} bytes was given {target.size} bytes of stream")
    if array.size == 0:
        return []
    return [_copy(band, tile, part) for band, part in _banded(array, tile, target)]


def is_straight(shape: tuple[int, ...], tile: tuple[int, ...]) -> bool:
    """Whether a piece's stream has the piece's own order of elements."""
    return all(t >= n for t, n in zip(tile[1:], shape[1:], strict=True))


def _digest(content: Bytes) -> int:
    return xxh3_64_intdigest(content.data)


def _banded(array: Array, tile: tuple[int, ...], target: Bytes) -> Iterator[tuple[Array, Bytes]]:
    if target.size <= BAND_BYTES:
        yield array, target
        return
    start = 0
    for part in bands(array.shape, tile, array.itemsize, BAND_BYTES):
        band = array[part]
        yield band, target[start : start + band.nbytes]
        start += band.nbytes


def _copy(source: Array, tile: tuple[int, ...], target: Bytes) -> Copy:
    flat = source.reshape(-1).view(np.uint8) if source.flags.c_contiguous else None
    straight = is_straight(source.shape, tile)
    if flat is not None and straight:
        return Copy(source, target, tile, ((flat, target),), flat, straight)
    pairs = tuple((_tiles(source, r), _laid(source.dtype, r, target)) for r in regions(source.shape, tile))
    return Copy(source, target, tile, pairs, flat, straight)


def _tiles(array: Array, region: Region) -> Array:
    """Views one region of an array as tiles of elements."""
    corner = array[tuple(slice(c, None) for c in region.offset)] if region.offset else array
    tile_strides = tuple(s * e for s, e in zip(array.strides, region.extents, strict=True))
    shape = (*region.counts, *region.extents)
    return np.lib.stride_tricks.as_strided(corner, shape, (*tile_strides, *array.strides), writeable=False)


def _laid(dtype: np.dtype[Any], region: Region, target: Bytes) -> Array:
    """Views the same region in the stream."""
    size = dtype.itemsize
    strides = tuple(s * size for s in (*region.tile_strides, *region.element_strides))
    shape = (*region.counts, *region.extents)
    return np.ndarray(shape, dtype=dtype, buffer=target.data, offset=region.start * size, strides=strides)


# ---- pieces of a copy ------------------------------------------------------------------------------------------------
# Defines what is copied, where to, and how it ended.


@dataclass(frozen=True, slots=True)
class CopySource:
    """Describes one piece to copy.

    `read()` gives the live part of the tensor; `holder()` the tensor whose version counter shows changes.
    """

    name: str
    read: Callable[[], torch.Tensor]
    server: Callable[[], torch.Tensor]
    tile: tuple[int, ...]
    start: int
    stop: int
    within: tuple[slice, ...] = ()
    """Which part of `holder` it is."""
    own: torch.Tensor | None = None
    """The program's tensor itself, where it is a plain one and the piece is all of it."""

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Describes where pieces go: `into` begins at byte `origin` of the stream.

    It is mapped at `address` of this process.
    """

    into: Bytes
    stream_offset: int
    address: int

    @staticmethod
    def of(into: Bytes, origin: int = 0) -> CopyTarget:
        return CopyTarget(into, origin, into.ctypes.data)

    def part(self, source: CopySource) -> Bytes:
        return self.into[source.start - self.stream_offset : source.stop - self.stream_offset]


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """Reports how a save's copies ended: changed tensors, and any error."""

    changed: tuple[str, ...] = ()
    error: Exception | None = None

    @property
    def is_complete(self) -> bool:
        return not self.changed and self.error is None


# ---- gathering of small tensors --------------------------------------------------------------------------------------
# Copies small host tensors into a slot by a few calls. Of a small tensor, asking Python anything takes longer than its
# copy. So whatever lies side by side in the stream is gathered by one call of torch, without the GIL; and what must be
# asked at each save, whether every tensor still lies where it did when that was prepared, is asked of all in one pass.

SMALL_BYTES = 64 * 1024
"""Pieces up to this size are copied inside the call: handing one over costs more than copying it."""

_MAX_SLOTS = 4
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
            if len(self._targets) >= _MAX_SLOTS:  # of memory that was given up
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

    def prepare_for(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> bool:
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
    part = room.into[run.start - room.stream_offset : run.stop - room.stream_offset]
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
