"""Copies checkpoints through bounded memory, in bands of tensors.

Used by export and import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from surefoot import metrics
from surefoot.checkpointer.restoring import fill
from surefoot.errors import SurefootError, Unreadable
from surefoot.format.digests import DIGEST_BYTES, block_digests
from surefoot.format.dtypes import itemsize
from surefoot.format.layouts import PlacedPiece, Stream, TensorParts, build_layout
from surefoot.format.manifests import describe
from surefoot.geometry import Box
from surefoot.protocol.identities import RankSave
from surefoot.restore.catalogue import Catalogue, SaveSource, SourceReading, read_catalogue
from surefoot.restore.reader import CheckpointReader, ReadOptions
from surefoot.staging import elements
from surefoot.state import Entry, Saved, dtype_named
from surefoot.state.entries import Place
from surefoot.tiers.persistent import ObjectStoreTier
from surefoot.tools.byte_progress import ByteProgress

BAND_BYTES = 64 * 1024 * 1024
"""Most that is held of a checkpoint at once (a band being read, one being written)."""

ALIGNED = 32
"""Bands of several rows are a multiple of this many, as tiles are: a tile is then seldom read for two bands."""


@dataclass(frozen=True, slots=True)
class Band:
    """Part of one tensor, contiguous in it."""

    name: str
    box: Box
    size_bytes: int


def open_checkpoint(source: SaveSource, step: int | None) -> CheckpointReader:
    """The newest complete checkpoint, or that of `step`."""
    catalogue = _newest_alone(source) if step is None else read_catalogue([source])
    found = [checkpoint for checkpoint in catalogue.complete() if step in (None, checkpoint.step)]
    if not found:
        which = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        raise Unreadable(f"there is {which} of this job in the persistent tier", absent=True)
    return CheckpointReader(found[-1], catalogue, ReadOptions(patience_seconds=60.0))


def _newest_alone(source: SaveSource) -> Catalogue:
    """What the tier itself calls its newest, found without a listing; all that is there if that is not complete."""
    tier = source.open()
    try:
        if isinstance(tier, ObjectStoreTier):
            alone = Catalogue((source,), (SourceReading(tier.newest()),))
            if alone.complete():
                return alone
            metrics.fallbacks.labels("newest_not_complete").inc()
    finally:
        tier.close()
    return read_catalogue([source])


def saved_tensors(reader: CheckpointReader) -> dict[str, Saved]:
    """Describes every tensor that belongs to all ranks."""
    found = reader.layouts.tensors(reader.world, every=True)
    return {n: Saved(t.dtype, t.shape) for n, t in sorted(found.items()) if not n.startswith("local/")}


def _boxes(shape: tuple[int, ...], item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """Boxes of at most `limit_bytes` (or one element), in row-major order; one empty box for an empty tensor."""
    if prod(shape) * item_bytes <= limit_bytes or not shape:
        yield Box.whole(shape)
        return
    row = prod(shape[1:]) * item_bytes
    if row > limit_bytes:
        for index in range(shape[0]):
            for inner in _boxes(shape[1:], item_bytes, limit_bytes):
                yield Box((index, *inner.offsets), (1, *inner.lengths))
        return
    rows = limit_bytes // row
    rows = rows // ALIGNED * ALIGNED or rows
    rest = (0,) * (len(shape) - 1)
    for start in range(0, shape[0], rows):
        yield Box((start, *rest), (min(rows, shape[0] - start), *shape[1:]))


def bands_of(tensors: Mapping[str, Saved]) -> Iterator[Band]:
    """Yields the bands of all tensors in their order."""
    for name, what in tensors.items():
        for box in _boxes(what.shape, itemsize(what.dtype), BAND_BYTES):
            yield Band(name, box, box.volume * itemsize(what.dtype))


class BandReader:
    """Reads bands in order, verified, several small ones at a time.

    It holds about one limit of bytes at most.
    """

    def __init__(self, reader: CheckpointReader, tensors: Mapping[str, Saved], order: Sequence[Band]) -> None:
        self._reader, self._tensors = reader, tensors
        self._batches = list(_batches(order))
        self._progress = ByteProgress(sum(band.size_bytes for band in order))
        self._batch_of = {(b.name, b.box): n for n, batch in enumerate(self._batches) for b in batch}
        self._now = -1
        self._held: dict[tuple[str, Box], torch.Tensor] = {}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Reads one band; cheap in the order given."""
        number = self._batch_of[(name, box)]
        if number != self._now:
            self._held = {}
            held = {(b.name, b.box): self._empty(b) for b in self._batches[number]}
            fill(self._reader, [self._entry(*key, tensor) for key, tensor in held.items()])
            self._held, self._now = held, number
            self._progress.add(sum(band.size_bytes for band in self._batches[number]))
        return self._held[(name, box)]

    def _empty(self, band: Band) -> torch.Tensor:
        return torch.empty(band.box.lengths, dtype=dtype_named(self._tensors[band.name].dtype), device="cpu")

    def _entry(self, name: str, box: Box, tensor: torch.Tensor) -> Entry:
        what = self._tensors[name]
        return Entry(name, tensor, what.dtype, Place(what.shape, box, None), "split")


def _batches(order: Sequence[Band]) -> Iterator[list[Band]]:
    batch: list[Band] = []
    size = 0
    for band in order:
        if batch and size + band.size_bytes > BAND_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(band)
        size += band.size_bytes
    if batch:
        yield batch


ReadBox = Callable[[str, Box], torch.Tensor]


def write_save(
    tier: ObjectStoreTier, save: RankSave, parts: Sequence[TensorParts], values: bytes, read: ReadBox
) -> int:
    """Writes a checkpoint of one rank; returns the bytes written.

    `read` gives each box once, in the order of the stream.
    """
    stream = Stream(build_layout(parts))
    progress = ByteProgress(stream.layout.stream_bytes)
    table = bytearray()
    ends = iter([*stream.layout.chunk_starts[1:], stream.layout.stream_bytes])
    end, position, chunk, number = next(ends), 0, bytearray(), 0
    for piece in stream.pieces:
        for block in _blocks(piece, read):
            table += block_digests(memoryview(block), (0, len(block)), range(1))
            chunk += block
            position += len(block)
            progress.add(len(block))
            if position == end:
                tier.put_chunk(save, number, memoryview(chunk))
                end, chunk, number = next(ends, -1), bytearray(), number + 1
    if position != stream.layout.stream_bytes or len(table) != stream.blocks * DIGEST_BYTES:
        raise SurefootError(f"{position} of {stream.layout.stream_bytes} bytes were given: the import is not complete")
    tier.put_layout(stream.digest, stream.text)
    tier.put_values(save, values)
    tier.put_digests(save, bytes(table))
    manifest = describe(save, 1, "imported", stream, (bytes(table), values), 0.0)
    tier.commit(manifest, save.epoch, stream.layout.chunk_lengths())
    return position


def _blocks(piece: PlacedPiece, read: ReadBox) -> Iterator[bytes]:
    if not prod(piece.piece.lengths):
        return
    tensor = elements(read(piece.tensor.name, Box(piece.piece.offsets, piece.piece.lengths)))
    for number in range(piece.tiling.blocks):
        box = piece.tiling.block_box(number)
        part = tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
        yield part.contiguous().numpy().tobytes()
