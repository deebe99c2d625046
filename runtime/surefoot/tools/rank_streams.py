"""Reads a whole persistent checkpoint rank by rank, every byte verified.

Called by `compare` and `verify`. Reads through the Tier protocol; holds one rank's stream at a time unless asked to
keep tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from surefoot.errors import ConfigurationError, SurefootError
from surefoot.format.digests import DIGEST_BYTES, first_bad_block
from surefoot.format.layouts import PlacedPiece, Stream, read_layout
from surefoot.format.manifests import check_digests, check_values
from surefoot.protocol.bounds import has_every_rank
from surefoot.protocol.checkpoints.coverage import uncovered
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint
from surefoot.settings import job_settings
from surefoot.tiers.open import open_persistent
from surefoot.tiers.persistent import ObjectStoreTier
from surefoot.tools.byte_progress import ByteProgress

Ranks = Mapping[int, RankManifest]


@dataclass(frozen=True, slots=True)
class RankStream:
    """Holds one rank's verified bytes."""

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

    `begin`: makes its folder where there is none.
    """
    settings = job_settings({**os.environ, "SUREFOOT_JOB_UID": job}).persistent
    if settings is None:
        raise ConfigurationError("SUREFOOT_PERSISTENT_URI is not set: it names the tier to read, file:///… or s3://…")
    return open_persistent(settings, job, begin=begin)


def by_checkpoint(tier: ObjectStoreTier) -> dict[Checkpoint, dict[int, RankManifest]]:
    """Groups readable manifests by checkpoint, oldest first."""
    found: dict[Checkpoint, dict[int, RankManifest]] = {}
    for manifest in tier.manifests():
        found.setdefault(manifest.save.checkpoint, {})[manifest.save.rank] = manifest
    return dict(sorted(found.items(), key=lambda item: (item[0].step, item[0].epoch)))


def is_whole(ranks: Ranks) -> bool:
    """Whether every rank of that world is there."""
    world = next(iter(ranks.values())).world
    return has_every_rank(ranks, world) and all(m.world == world for m in ranks.values())


def layout_problem(tier: ObjectStoreTier, ranks: Ranks) -> str | None:
    """Why these layouts do not cover each tensor exactly once, or None."""
    try:
        streams = [read_layout(m.layout, tier.read_layout(m.layout)) for m in ranks.values()]
    except SurefootError as error:
        return str(error)
    return uncovered(stream.layout for stream in streams)


def read_rank(tier: ObjectStoreTier, manifest: RankManifest, progress: ByteProgress | None = None) -> RankStream:
    """Reads and verifies one rank save; SurefootError names missing or damaged parts."""
    where = tier.name
    stream = read_layout(manifest.layout, tier.read_layout(manifest.layout))
    table = tier.read_digests(manifest.save, 0, manifest.digests_bytes)
    check_digests(manifest, table, where)
    values = tier.read_values(manifest.save)
    check_values(manifest, values, where)
    data = bytearray(stream.layout.stream_bytes)
    view = memoryview(data)
    for chunk, length in enumerate(stream.layout.chunk_lengths()):
        start = stream.layout.chunk_starts[chunk]
        view[start : start + length] = tier.read_chunk(manifest.save, chunk, 0, length)
        if progress is not None:
            progress.add(length)
        blocks = stream.blocks_of_chunk(chunk)
        part = table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES]
        bad = first_bad_block(view[start : start + length], stream.edges, blocks, part)
        if bad is not None:
            piece = next(p for p in reversed(stream.pieces) if p.first_block <= bad)
            raise DamagedBlock(
                f"block {bad} (chunk {chunk}, tensor {piece.tensor.name}) of {manifest.save} does not match its digest"
            )
    return RankStream(manifest, stream, view.toreadonly(), values)


class DamagedBlock(SurefootError):
    """A block's bytes are not the saved ones."""
