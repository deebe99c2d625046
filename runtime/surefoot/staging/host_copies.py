"""Copies host tensors block by block into staging slots, and digests sources and copies.

The arrays of a copy alias the live tensor and the slot; preparing one takes microseconds, and running it releases the
GIL. A copy in the background goes through a buffer of the copying thread, so that the bytes compared with the digest
taken at the step are the bytes written to the slot, even if the tensor changes in between. Used by `stager`.
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
# Computes the strided copies that tile a tensor into blocks; arithmetic only. A piece's blocks are in row-major order
# of its tiles, and tiles at the far edges are clipped. All full tiles are one strided copy, and each combination of
# clipped dimensions is another: at most 2^n for n dimensions, in practice the main area, the right edge, the bottom
# edge and the corner.


@dataclass(frozen=True, slots=True)
class Region:
    """The tiles of a piece that have equal extents, which one strided copy can move.

    The source's tile strides follow from its element strides: a step of one tile along dimension d is extents[d] elements,
    since only the last tile of a row is clipped.
    """

    counts: tuple[int, ...]
    """Number of tiles along each dimension."""
    extents: tuple[int, ...]
    """Elements of each tile along each dimension."""
    offset: tuple[int, ...]
    """Coordinates of the first element in the source."""
    start: int
    """Index of the first element in the piece's stream."""
    tile_strides: tuple[int, ...]
    """Distance between tiles in the stream along each dimension, in elements."""
    element_strides: tuple[int, ...]
    """Distance between elements in the stream along each dimension, in elements."""


@lru_cache(maxsize=4096)
def split_into_regions(lengths: tuple[int, ...], tile: tuple[int, ...]) -> tuple[Region, ...]:
    """Returns the regions of a piece, which together cover each element once."""
    return tuple(_regions(lengths, tile))


def _regions(lengths: tuple[int, ...], tile: tuple[int, ...]) -> Iterator[Region]:
    choices = []
    for n, t in zip(lengths, tile, strict=True):
        full_tiles, clipped = divmod(n, t)
        # (number of tiles, extent of each, index of the first)
        choices.append([(c, e, first) for c, e, first in ((full_tiles, t, 0), (1, clipped, full_tiles)) if c and e])
    for chosen in product(*choices):
        counts = tuple(c for c, _, _ in chosen)
        extents = tuple(e for _, e, _ in chosen)
        corner = tuple(first * t for (_, _, first), t in zip(chosen, tile, strict=True))
        # In the stream, a step of one element along dimension d skips a band: the full length of all later dimensions
        # times the tile extents of the earlier ones.
        bands = tuple(prod(extents[:d]) * prod(lengths[d + 1 :]) for d in range(len(lengths)))
        yield Region(
            counts=counts,
            extents=extents,
            offset=corner,
            start=sum(c * band for c, band in zip(corner, bands, strict=True)),
            tile_strides=tuple(e * band for e, band in zip(extents, bands, strict=True)),
            element_strides=tuple(prod(extents[d + 1 :]) for d in range(len(lengths))),
        )


def split_into_band_slices(
    lengths: tuple[int, ...], tile: tuple[int, ...], itemsize: int, limit_bytes: int
) -> Iterator[tuple[slice, ...]]:
    """Yields parts of a piece in stream order, each of about `limit_bytes`.

    Each part consists of at least one whole tile, is contiguous in the stream, and has the layout of a piece of its own:
    rows of tiles along dimension 0 or, if a row exceeds the limit, consecutive tiles of it along the next dimension.
    """
    if 0 not in lengths:
        yield from _bands(lengths, tile, itemsize, limit_bytes)


def _bands(
    lengths: tuple[int, ...], tile: tuple[int, ...], scale: int, limit_bytes: int
) -> Iterator[tuple[slice, ...]]:
    """Yields the bands; `scale` is the number of bytes for each element of these dimensions."""
    if not lengths:
        yield ()
        return
    row_bytes = scale * prod(lengths[1:])
    if row_bytes * tile[0] <= limit_bytes or len(lengths) == 1:
        rows = max(1, limit_bytes // (row_bytes * tile[0])) * tile[0]
        later_slices = tuple(slice(0, n) for n in lengths[1:])
        for start in range(0, lengths[0], rows):
            yield slice(start, min(start + rows, lengths[0])), *later_slices
        return
    for start in range(0, lengths[0], tile[0]):
        stop = min(start + tile[0], lengths[0])
        for later_slices in _bands(lengths[1:], tile[1:], scale * (stop - start), limit_bytes):
            yield slice(start, stop), *later_slices


# ---- arena -----------------------------------------------------------------------------------------------------------
# Presents staging memory, one shared mapping, as equal slots of bytes. Torch is used only to pin it. `checkpointer`
# creates the arena with the memory that its link provides.

Bytes = npt.NDArray[np.uint8]


class Arena:
    """Staging memory, divided into `slots` slots of `slot_bytes` each."""

    def __init__(self, memory: memoryview, slots: int, slot_bytes: int) -> None:
        self._bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        if self._bytes.size < slots * slot_bytes:
            raise ValueError(
                f"an arena of {self._bytes.size} bytes is too small for {slots} slots of {slot_bytes} bytes"
            )
        self.slots, self.slot_bytes = slots, slot_bytes
        self._pinned = False

    def slot_view(self, index: int) -> Bytes:
        """Returns the writable bytes of one slot."""
        if not 0 <= index < self.slots:
            raise ValueError(f"slot {index} does not exist: the arena has {self.slots} slots")
        return self._bytes[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def pin(self) -> None:
        """Registers the memory with CUDA once, so that device copies need no bounce buffer.

        If CUDA rejects that (locked memory is limited), copies go through CUDA's own buffer and take longer.
        """
        if self._pinned:
            return

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(self._bytes.ctypes.data, self._bytes.size, 0))
        except RuntimeError as problem:
            metrics.fallbacks.labels("staging_not_pinned").inc()
            _log.warning("staging memory cannot be pinned, so copies from the device take longer: %s", problem)
            return
        self._pinned = True

    def close(self) -> None:
        """Unpins the memory; the link that mapped it also unmaps it."""
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.cuda.check_error(runtime.cudaHostUnregister(self._bytes.ctypes.data))
            self._pinned = False


# ---- host copies -----------------------------------------------------------------------------------------------------

BAND_BYTES = 1024 * 1024
"""Largest single copy on the CPU, with one digest. It stays in a core's cache between its two passes and is long enough
for the GIL to be released, and waiting for a running copy takes no longer than this."""

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)
"""Classes whose tensors are fully described by their memory, which is not known of a subclass."""

_MAX_VIEWS = 4096

Array = np.ndarray[Any, Any]
_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_integer_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as an integer type of its element size, which numpy can copy; resolves lazy conj and neg bits."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    word = _INTEGER_TYPES[plain.element_size()]
    return plain if plain.dtype == word else plain.view(word)


class CopyBuffers(threading.local):
    """Each thread's copy buffer and views of it, which are reused between saves."""

    def __init__(self) -> None:
        self._memory: Bytes = np.ones(BAND_BYTES, dtype=np.uint8)  # written, so that its pages exist
        self._views: dict[tuple[Any, ...], tuple[Array, list[Array]]] = {}

    def views_for(self, copy: Copy) -> tuple[Bytes, Array, list[Array]]:
        """Returns a band's bytes in the buffer, their array in source order, and its tiled regions."""
        size = copy.target.size
        if size > self._memory.size or len(self._views) > _MAX_VIEWS:
            self._views.clear()
            self._memory = np.ones(max(size, self._memory.size), dtype=np.uint8)
        key = (copy.source.shape, copy.source.dtype, copy.tile)
        if key not in self._views:
            array = self._memory[:size].view(copy.source.dtype).reshape(copy.source.shape)
            self._views[key] = array, [_tiles(array, region) for region in split_into_regions(array.shape, copy.tile)]
        return self._memory[:size], *self._views[key]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of whole tiles of a piece from the program's memory to the slot."""

    source: Array
    target: Bytes
    tile: tuple[int, ...]
    views: tuple[tuple[Array, Array], ...]
    """Pairs of strided views of source and target with equal shapes."""
    flat: Bytes | None
    """The source's bytes in source order; None: they are not contiguous in memory."""
    is_contiguous: bool
    """Whether the target has the source's order of elements."""

    @property
    def size_bytes(self) -> int:
        return self.target.nbytes

    def run(self) -> None:
        """Copies the source's current bytes."""
        for source, target in self.views:
            np.copyto(target, source)

    def digest(self, scratch: CopyBuffers) -> int:
        """Digests the source's current bytes, in source order."""
        if self.flat is not None:
            return _digest(self.flat)
        buffer, array, _ = scratch.views_for(self)
        np.copyto(array, self.source)
        return _digest(buffer)

    def run_verified(self, digest: int, scratch: CopyBuffers) -> bool:
        """Copies the source; returns whether the copied bytes have this digest."""
        if self.is_contiguous:
            self.run()
            return _digest(self.target) == digest
        # Through the buffer, so that the digested bytes are the ones written to the slot.
        buffer, array, parts = scratch.views_for(self)
        np.copyto(array, self.source)
        for (_, target), part in zip(self.views, parts, strict=True):
            np.copyto(target, part)
        return _digest(buffer) == digest


def prepare_copies(source: torch.Tensor, tile: tuple[int, ...], target: Bytes) -> list[Copy]:
    """Prepares the copies of a host tensor, cut into tiles, to `target`.

    Raises ValueError unless `target` has exactly the piece's size.
    """
    array: Array = np.from_dlpack(as_integer_elements(source))  # numpy() would forbid the program to resize_ it later
    if array.nbytes != target.size:
        raise ValueError(f"a piece of {array.nbytes} bytes cannot be copied to {target.size} bytes of the stream")
    if array.size == 0:
        return []
    return [_build_copy(band, tile, part) for band, part in _split_into_bands(array, tile, target)]


def has_stream_order(shape: tuple[int, ...], tile: tuple[int, ...]) -> bool:
    """Whether the elements have the same order in a piece's stream as in the piece."""
    return all(t >= n for t, n in zip(tile[1:], shape[1:], strict=True))


def _digest(content: Bytes) -> int:
    return xxh3_64_intdigest(content.data)


def _split_into_bands(array: Array, tile: tuple[int, ...], target: Bytes) -> Iterator[tuple[Array, Bytes]]:
    if target.size <= BAND_BYTES:
        yield array, target
        return
    start = 0
    for part in split_into_band_slices(array.shape, tile, array.itemsize, BAND_BYTES):
        band = array[part]
        yield band, target[start : start + band.nbytes]
        start += band.nbytes


def _build_copy(source: Array, tile: tuple[int, ...], target: Bytes) -> Copy:
    flat = source.reshape(-1).view(np.uint8) if source.flags.c_contiguous else None
    same_order = has_stream_order(source.shape, tile)
    if flat is not None and same_order:
        return Copy(source, target, tile, ((flat, target),), flat, same_order)
    pairs = tuple(
        (_tiles(source, r), _stream_tiles(source.dtype, r, target)) for r in split_into_regions(source.shape, tile)
    )
    return Copy(source, target, tile, pairs, flat, same_order)


def _tiles(array: Array, region: Region) -> Array:
    """Views one region of an array as tiles of elements."""
    corner = array[tuple(slice(c, None) for c in region.offset)] if region.offset else array
    tile_strides = tuple(s * e for s, e in zip(array.strides, region.extents, strict=True))
    shape = (*region.counts, *region.extents)
    return np.lib.stride_tricks.as_strided(corner, shape, (*tile_strides, *array.strides), writeable=False)


def _stream_tiles(dtype: np.dtype[Any], region: Region, target: Bytes) -> Array:
    """Views one region of the stream as tiles of elements."""
    size = dtype.itemsize
    strides = tuple(s * size for s in (*region.tile_strides, *region.element_strides))
    shape = (*region.counts, *region.extents)
    return np.ndarray(shape, dtype=dtype, buffer=target.data, offset=region.start * size, strides=strides)


# ---- pieces of a copy ------------------------------------------------------------------------------------------------
# Defines the source, the target and the outcome of a save's copies.


@dataclass(frozen=True, slots=True)
class CopySource:
    """A piece of a tensor to copy."""

    name: str
    read: Callable[[], torch.Tensor]
    """Returns the live piece of the tensor."""
    versioned_tensor: Callable[[], torch.Tensor]
    """Returns the tensor that owns the piece's memory and whose version counter shows changes."""
    tile: tuple[int, ...]
    """Shape of the piece's blocks."""
    start: int
    """First byte of the piece in the stream."""
    stop: int
    """End of the piece in the stream, in bytes."""
    owner_slices: tuple[slice, ...] = ()
    """Slices of the owning tensor that make up the piece."""
    plain_tensor: torch.Tensor | None = None
    """The program's tensor if it is a plain one and the piece is all of it, else None."""

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Memory to which pieces of a stream are copied."""

    memory: Bytes
    stream_offset: int
    """Byte of the stream at which the memory begins."""
    address: int
    """Address of the memory in this process."""

    @staticmethod
    def of(into: Bytes, origin: int = 0) -> CopyTarget:
        return CopyTarget(into, origin, into.ctypes.data)

    def memory_of(self, source: CopySource) -> Bytes:
        """Returns the memory of one piece."""
        return self.memory[source.start - self.stream_offset : source.stop - self.stream_offset]


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """The result of a save's copies."""

    changed: tuple[str, ...] = ()
    """Names of the tensors that changed before they were copied."""
    error: Exception | None = None
    """Why copies failed; None: none failed."""

    @property
    def is_complete(self) -> bool:
        return not self.changed and self.error is None


# ---- gathering of small tensors --------------------------------------------------------------------------------------
# Copies many small host tensors into a slot with a few calls, since for a small tensor any Python call takes longer
# than the copy. One call of torch, without the GIL, gathers all tensors that are adjacent in the stream. Each save must
# check whether every tensor is still at the address at which it was prepared; one pass checks that for all.

SMALL_BYTES = 64 * 1024
"""Pieces up to this size are copied inside the call, because passing one to another thread costs more than copying it."""

_MAX_CACHED_SLOTS = 4
_VIEW_PROPERTIES: tuple[Any, ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.is_contiguous,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]  # a getter of C
    torch.Tensor.numel,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
"""Properties on which a prepared view depends, in addition to its class. A tensor that moved to a device, or whose
memory was freed, has another address."""


@dataclass(frozen=True, slots=True)
class GatherCopy:
    """A copy of adjacent tensors to their part of a slot."""

    sources: list[torch.Tensor]
    target: torch.Tensor

    @property
    def size_bytes(self) -> int:
        return self.target.nbytes

    def run(self) -> None:
        """Copies the tensors' current bytes."""
        torch.cat(self.sources, out=self.target)


class _Run:
    """Pieces that are adjacent in the stream and have one element size."""

    def __init__(self, first: CopySource) -> None:
        self.start = self.stop = first.start
        self.tensors: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = []
        self._facts: list[list[Any]] = []

    def can_append(self, source: CopySource, view: torch.Tensor) -> bool:
        """Whether a piece can be appended: it continues the run, has its type, and fits into one band."""
        has_room = source.stop - self.start <= BAND_BYTES
        return has_room and source.start == self.stop and view.dtype == self.views[0].dtype

    def append(self, source: CopySource, view: torch.Tensor) -> None:
        self.tensors.append(_own_tensor(source))
        self.views.append(view)
        self.stop = source.stop

    def store_facts(self) -> None:
        """Stores the properties on which the views depend."""
        self._facts = _facts(self.tensors)

    def refresh_views(self) -> bool:
        """Updates the views of tensors that moved; False if a tensor no longer fits."""
        facts = _facts(self.tensors)
        if facts == self._facts:
            return True
        if not all(self._replace_view(number) for number in set(_changed_indexes(facts, self._facts))):
            return False
        self._facts = facts
        return True

    def _replace_view(self, number: int) -> bool:
        """Replaces the view of a tensor that moved; False if it is no longer plain or its type or shape differs."""
        tensor = self.tensors[number]
        if not _is_plain(tensor):
            return False
        old_view, view = self.views[number], _flat_view(tensor)
        self.views[number] = view
        return view.dtype == old_view.dtype and view.shape == old_view.shape


class SmallTensors:
    """Prepares gather copies of the small tensors of one save plan.

    Views alias the tensors' memory, and are replaced for tensors that moved since the last save.
    """

    def __init__(self, sources: Iterable[CopySource]) -> None:
        """Prepares the copies of `sources`, all of which must be `gatherable`."""
        self.locations: dict[int, tuple[_Run, int, int]] = {}
        """Run, index in it, and end in the stream of each piece, by its start in the stream."""
        self._runs: list[_Run] = []
        self._targets: dict[tuple[int, int], list[torch.Tensor]] = {}
        for source in sorted(sources, key=lambda source: source.start):
            view = _flat_view(_own_tensor(source))
            if not (self._runs and self._runs[-1].can_append(source, view)):
                self._runs.append(_Run(source))
            run = self._runs[-1]
            self.locations[source.start] = run, len(run.tensors), source.stop
            run.append(source, view)
        for run in self._runs:
            run.store_facts()

    def prepare_copies(self, room: CopyTarget) -> list[GatherCopy]:
        """Returns the copies into one slot."""
        slot_key = (room.address, room.memory.nbytes)
        if slot_key not in self._targets:
            if len(self._targets) >= _MAX_CACHED_SLOTS:  # some are slots of memory that is no longer used
                self._targets.clear()
            self._targets[slot_key] = [_target_of(run, room) for run in self._runs]
        return [GatherCopy(r.views, t) for r, t in zip(self._runs, self._targets[slot_key], strict=True)]

    def replace(self, source: CopySource) -> bool:
        """Replaces the tensor of a piece; False if it cannot be gathered there. Call `refresh_views` afterwards."""
        run, number, stop = self.locations[source.start]
        if stop != source.stop or not is_gatherable(source):
            return False
        run.tensors[number] = _own_tensor(source)
        return True

    def refresh_views(self) -> bool:
        """Updates the views of tensors that moved; False if a tensor no longer fits."""
        return all(run.refresh_views() for run in self._runs)


class GatheredSources:
    """A save's sources, divided into small tensors and the others."""

    def __init__(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> None:
        self._source_ids = set(map(id, (*eager, *lazy)))
        self.small = SmallTensors(source for source in (*eager, *lazy) if is_gatherable(source))
        self._divide(eager, lazy)

    def prepare_for(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> bool:
        """Updates the division for a save's sources; False if it must be built again."""
        if eager is not self._eager or lazy is not self._lazy:
            present = set(map(id, (*eager, *lazy)))
            new_sources = [source for source in (*eager, *lazy) if id(source) not in self._source_ids]
            if len(present) != len(self._source_ids) or not all(map(self._can_take, new_sources)):
                return False
            self._source_ids = present
            self._divide(eager, lazy)
        return self.small.refresh_views()

    def _can_take(self, source: CopySource) -> bool:
        return self.small.replace(source) if source.start in self.small.locations else not is_gatherable(source)

    def _divide(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> None:
        self._eager, self._lazy = eager, lazy
        places = self.small.locations
        self.eager = [source for source in eager if source.start not in places]
        self.lazy = [source for source in lazy if source.start not in places]


def is_gatherable(source: CopySource) -> bool:
    """Whether a piece is all of a small contiguous host tensor."""
    tensor = source.plain_tensor
    if tensor is None or not 0 < source.size_bytes <= SMALL_BYTES or not _is_plain(tensor):
        return False
    return tensor.nbytes == source.size_bytes and has_stream_order(tuple(tensor.shape), source.tile)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are in this process' memory, contiguous and unmodified by lazy bits."""
    if type(tensor) not in PLAIN_CLASSES or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    is_freed = tensor.data_ptr() == 0 and tensor.numel() > 0
    return tensor.is_contiguous() and not (is_freed or tensor.is_conj() or tensor.is_neg())


def _own_tensor(source: CopySource) -> torch.Tensor:
    assert source.plain_tensor is not None, "the caller checked `gatherable`"
    return source.plain_tensor


def _flat_view(tensor: torch.Tensor) -> torch.Tensor:
    return as_integer_elements(tensor).reshape(-1)


def _target_of(run: _Run, room: CopyTarget) -> torch.Tensor:
    part = room.memory[run.start - room.stream_offset : run.stop - room.stream_offset]
    return torch.from_numpy(part).view(run.views[0].dtype)


def _facts(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Returns the class and the `_VIEW_PROPERTIES` properties of all tensors; only the classes if one is not plain, because a
    subclass may answer anything."""
    classes = list(map(type, tensors))
    if not set(classes).issubset(PLAIN_CLASSES):
        return [classes]
    return [classes, *(list(map(getter, tensors)) for getter in _VIEW_PROPERTIES)]


def _changed_indexes(new_facts: Sequence[Sequence[Any]], old_facts: Sequence[Sequence[Any]]) -> Iterator[int]:
    """Yields the indexes of the tensors of which a property has changed."""
    for new_values, old_values in zip(new_facts, old_facts, strict=False):
        yield from compress(range(len(new_values)), map(ne, new_values, old_values))
