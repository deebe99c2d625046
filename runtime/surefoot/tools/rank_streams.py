"""Reads a whole persistent checkpoint rank by rank, every byte verified.

Called by `compare` and `verify`. It reads through the Tier protocol, with one rank's stream in memory at a time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from surefoot import metrics
from surefoot.checkpointer.restoring import fill
from surefoot.errors import ConfigurationError, SurefootError, Unreadable
from surefoot.format.layouts import (
    DIGEST_BYTES,
    PlacedPiece,
    Stream,
    TensorParts,
    block_digests,
    build_layout,
    first_bad_block,
    itemsize,
    read_layout,
)
from surefoot.format.manifests import build_manifest, check_digests, check_values
from surefoot.geometry import Box
from surefoot.protocol.bounds import has_every_rank
from surefoot.protocol.checkpoints.completeness import describe_uncovered_tensor
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.restore.catalogue import Catalogue, SaveSource, SourceReading, read_catalogue
from surefoot.restore.reader import CheckpointReader, ReadOptions
from surefoot.settings import job_settings
from surefoot.staging import as_integer_elements
from surefoot.state import Entry, SavedTensor, dtype_from_name
from surefoot.state.entries import TensorLocation
from surefoot.tiers.persistent import ObjectStoreTier, open_persistent

# ---- byte progress ---------------------------------------------------------------------------------------------------
# Reports a tool's progress as JSON lines on standard error: {"done", "total"} in bytes. Nothing is written unless
# `SUREFOOT_TOOL_PROGRESS` is set: a user who runs a tool by hand only needs its last line.

VARIABLE = "SUREFOOT_TOOL_PROGRESS"
_REPORT_INTERVAL_SECONDS = 0.1


class ByteProgress:
    """Counts bytes towards a total, on one thread."""

    def __init__(self, total: int) -> None:
        self._is_enabled = bool(os.environ.get(VARIABLE))
        self._total, self._done, self._next_report_seconds = total, 0, 0.0

    def add(self, size: int) -> None:
        self._done += size
        now = time.monotonic()
        if self._is_enabled and (now >= self._next_report_seconds or self._done >= self._total):
            self._next_report_seconds = now + _REPORT_INTERVAL_SECONDS
            sys.stderr.write(json.dumps({"done": self._done, "total": self._total}) + "\n")
            sys.stderr.flush()


# ---- rank streams ----------------------------------------------------------------------------------------------------

Ranks = Mapping[int, RankManifest]


@dataclass(frozen=True, slots=True)
class RankStream:
    """Contains one rank's verified bytes."""

    manifest: RankManifest
    stream: Stream
    data: memoryview
    values: bytes

    def blocks(self) -> Iterator[tuple[PlacedPiece, int, memoryview]]:
        """Yields each block with its piece and its number in that piece."""
        for part in self.stream.pieces:
            for index in range(part.tiling.blocks):
                number = part.first_block + index
                yield part, index, self.data[self.stream.edges[number] : self.stream.edges[number + 1]]


def open_tier(job: str, *, begin: bool = False) -> ObjectStoreTier:
    """Opens the persistent tier that the environment names, or raises ConfigurationError.

    `begin`: create its folder if it is missing.
    """
    settings = job_settings({**os.environ, "SUREFOOT_JOB_UID": job}).persistent
    if settings is None:
        raise ConfigurationError("SUREFOOT_PERSISTENT_URI is not set: it names the tier to read, file:///… or s3://…")
    return open_persistent(settings, job, create_root=begin)


def by_checkpoint(tier: ObjectStoreTier) -> dict[Checkpoint, dict[int, RankManifest]]:
    """Groups readable manifests by checkpoint, oldest first."""
    ranks_by_checkpoint: dict[Checkpoint, dict[int, RankManifest]] = {}
    for manifest in tier.manifests():
        ranks_by_checkpoint.setdefault(manifest.save.checkpoint, {})[manifest.save.rank] = manifest
    return dict(sorted(ranks_by_checkpoint.items(), key=lambda item: (item[0].step, item[0].generation)))


def is_complete(ranks: Ranks) -> bool:
    """Returns whether every rank of the checkpoint's world size has a manifest."""
    world_size = next(iter(ranks.values())).world_size
    return has_every_rank(ranks, world_size) and all(m.world_size == world_size for m in ranks.values())


def layout_problem(tier: ObjectStoreTier, ranks: Ranks) -> str | None:
    """Explains why these layouts do not cover each tensor exactly once; None if they do."""
    try:
        streams = [read_layout(m.layout, tier.read_layout(m.layout)) for m in ranks.values()]
    except SurefootError as error:
        return str(error)
    return describe_uncovered_tensor(stream.layout for stream in streams)


def read_rank(tier: ObjectStoreTier, manifest: RankManifest, progress: ByteProgress | None = None) -> RankStream:
    """Reads and verifies one rank save; SurefootError names missing or damaged parts."""
    tier_name = tier.name
    stream = read_layout(manifest.layout, tier.read_layout(manifest.layout))
    digest_table = tier.read_digests(manifest.save, 0, manifest.digests_bytes)
    check_digests(manifest, digest_table, tier_name)
    values = tier.read_values(manifest.save)
    check_values(manifest, values, tier_name)
    data = bytearray(stream.layout.stream_bytes)
    view = memoryview(data)
    for chunk, length in enumerate(stream.layout.chunk_lengths()):
        start = stream.layout.chunk_starts[chunk]
        view[start : start + length] = tier.read_chunk(manifest.save, chunk, 0, length)
        if progress is not None:
            progress.add(length)
        blocks = stream.blocks_of_chunk(chunk)
        chunk_digests = digest_table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES]
        bad_block = first_bad_block(view[start : start + length], stream.edges, blocks, chunk_digests)
        if bad_block is not None:
            piece = next(p for p in reversed(stream.pieces) if p.first_block <= bad_block)
            raise DamagedBlock(
                f"block {bad_block} (chunk {chunk}, tensor {piece.tensor.name}) of {manifest.save} does not match its"
                " digest"
            )
    return RankStream(manifest, stream, view.toreadonly(), values)


class DamagedBlock(SurefootError):
    """A block's bytes do not match their digest."""


# ---- stream copy -----------------------------------------------------------------------------------------------------
# Copies checkpoints through bounded memory, in bands of tensors. Used by export and import.

BAND_BYTES = 64 * 1024 * 1024
"""Largest part of a checkpoint in memory at once, in bytes (one band being read, one being written)."""

ALIGNED = 32
"""Bands of several rows have a multiple of this many, like tiles, so that few tiles are read for two bands."""


@dataclass(frozen=True, slots=True)
class Band:
    """Locates a contiguous part of one tensor."""

    name: str
    box: Box
    size_bytes: int


def open_checkpoint(source: SaveSource, step: int | None) -> CheckpointReader:
    """Opens the newest complete checkpoint, or that of `step`; raises Unreadable if there is none."""
    catalogue = _newest_catalogue(source) if step is None else read_catalogue([source])
    checkpoints = [checkpoint for checkpoint in catalogue.complete_checkpoints() if step in (None, checkpoint.step)]
    if not checkpoints:
        which = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        raise Unreadable(f"there is {which} of this job in the persistent tier", absent=True)
    return CheckpointReader(checkpoints[-1], catalogue, ReadOptions(patience_seconds=60.0))


def _newest_catalogue(source: SaveSource) -> Catalogue:
    """Reads only the tier's newest checkpoint, without a listing; reads all if it is not complete."""
    tier = source.open()
    try:
        if isinstance(tier, ObjectStoreTier):
            newest = Catalogue((source,), (SourceReading(tier.read_newest_manifests()),))
            if newest.complete_checkpoints():
                return newest
            metrics.fallbacks.labels("newest_not_complete").inc()
    finally:
        tier.close()
    return read_catalogue([source])


def saved_tensors(reader: CheckpointReader) -> dict[str, SavedTensor]:
    """Describes every tensor that belongs to all ranks."""
    layouts = reader.layouts.list_tensors(reader.world_size, read_all=True)
    return {n: SavedTensor(t.dtype, t.shape) for n, t in sorted(layouts.items()) if not n.startswith("local/")}


def _split_shape(shape: tuple[int, ...], item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """Yields boxes of at most `limit_bytes` (or one element), in row-major order.

    An empty tensor has one empty box.
    """
    if prod(shape) * item_bytes <= limit_bytes or not shape:
        yield Box.whole(shape)
        return
    row_bytes = prod(shape[1:]) * item_bytes
    if row_bytes > limit_bytes:
        for index in range(shape[0]):
            for inner in _split_shape(shape[1:], item_bytes, limit_bytes):
                yield Box((index, *inner.offsets), (1, *inner.lengths))
        return
    row_count = limit_bytes // row_bytes
    row_count = row_count // ALIGNED * ALIGNED or row_count
    zeros = (0,) * (len(shape) - 1)
    for start in range(0, shape[0], row_count):
        yield Box((start, *zeros), (min(row_count, shape[0] - start), *shape[1:]))


def bands_of(tensors: Mapping[str, SavedTensor]) -> Iterator[Band]:
    """Yields the bands of all tensors in their order."""
    for name, saved in tensors.items():
        for box in _split_shape(saved.shape, itemsize(saved.dtype), BAND_BYTES):
            yield Band(name, box, box.volume * itemsize(saved.dtype))


class BandReader:
    """Reads bands in order, verified, several small ones at a time.

    About `BAND_BYTES` are in memory at most.
    """

    def __init__(self, reader: CheckpointReader, tensors: Mapping[str, SavedTensor], order: Sequence[Band]) -> None:
        self._reader, self._tensors = reader, tensors
        self._batches = list(_batches(order))
        self._progress = ByteProgress(sum(band.size_bytes for band in order))
        self._batch_of = {(b.name, b.box): n for n, batch in enumerate(self._batches) for b in batch}
        self._current_batch = -1
        self._tensors_by_band: dict[tuple[str, Box], torch.Tensor] = {}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Reads one band; cheap in the order given to the constructor."""
        batch_index = self._batch_of[(name, box)]
        if batch_index != self._current_batch:
            self._tensors_by_band = {}
            tensors_by_band = {(b.name, b.box): self._empty(b) for b in self._batches[batch_index]}
            fill(self._reader, [self._entry(*key, tensor) for key, tensor in tensors_by_band.items()])
            self._tensors_by_band, self._current_batch = tensors_by_band, batch_index
            self._progress.add(sum(band.size_bytes for band in self._batches[batch_index]))
        return self._tensors_by_band[(name, box)]

    def _empty(self, band: Band) -> torch.Tensor:
        return torch.empty(band.box.lengths, dtype=dtype_from_name(self._tensors[band.name].dtype), device="cpu")

    def _entry(self, name: str, box: Box, tensor: torch.Tensor) -> Entry:
        saved = self._tensors[name]
        return Entry(name, tensor, saved.dtype, TensorLocation(saved.shape, box, None), "split")


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

    `read` is called once for each box, in the order of the stream.
    """
    stream = Stream(build_layout(parts))
    # chunks are written as soon as they are complete, so that at most one chunk and one box are in memory
    progress = ByteProgress(stream.layout.stream_bytes)
    digest_table = bytearray()
    ends = iter([*stream.layout.chunk_starts[1:], stream.layout.stream_bytes])
    end, position, chunk, chunk_number = next(ends), 0, bytearray(), 0
    for piece in stream.pieces:
        for block in _read_blocks(piece, read):
            digest_table += block_digests(memoryview(block), (0, len(block)), range(1))
            chunk += block
            position += len(block)
            progress.add(len(block))
            if position == end:
                tier.put_chunk(save, chunk_number, memoryview(chunk))
                end, chunk, chunk_number = next(ends, -1), bytearray(), chunk_number + 1
    if position != stream.layout.stream_bytes or len(digest_table) != stream.blocks * DIGEST_BYTES:
        raise SurefootError(f"{position} of {stream.layout.stream_bytes} bytes were given: the import is not complete")
    # the manifest comes last: readers only find saves that have one
    tier.put_layout(stream.digest, stream.text)
    tier.put_values(save, values)
    tier.put_digests(save, bytes(digest_table))
    manifest = build_manifest(save, 1, "imported", stream, (bytes(digest_table), values), 0.0)
    tier.commit(manifest, save.generation, stream.layout.chunk_lengths())
    return position


def _read_blocks(piece: PlacedPiece, read: ReadBox) -> Iterator[bytes]:
    if not prod(piece.piece.lengths):
        return
    tensor = as_integer_elements(read(piece.tensor.name, Box(piece.piece.offsets, piece.piece.lengths)))
    for number in range(piece.tiling.blocks):
        box = piece.tiling.block_box(number)
        part = tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
        yield part.contiguous().numpy().tobytes()
