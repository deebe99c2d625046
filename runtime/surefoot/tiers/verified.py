"""Reads parts of a rank save from one copy and verifies them.

What does not match raises Corrupt that names part and place. The parts and their guards: the layout by its own name,
digest table and values by the manifest, every block by the table. Used by promotion and repair (`uploader`) and by
restore.
"""

from __future__ import annotations

from surefoot.errors import Corrupt, ProtocolError, TierError
from surefoot.format.digests import DIGEST_BYTES, first_bad_block
from surefoot.format.layouts import Stream, read_layout
from surefoot.format.manifests import check_digests, check_values
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import RankSave
from surefoot.tiers.tier import ByCheckpoint, LayoutCopies, Tier


def stream_from(tier: Tier, manifest: RankManifest) -> Stream:
    """The layout of a rank save."""
    try:
        text = tier.read_layout_of(manifest) if isinstance(tier, LayoutCopies) else tier.read_layout(manifest.layout)
        stream = read_layout(manifest.layout, text)
    except (Corrupt, ProtocolError) as error:
        raise Corrupt(f"layout {manifest.layout} at {tier.name} is damaged: {error}") from error
    described = (manifest.stream_bytes, manifest.chunks, manifest.digests_bytes)
    found = (stream.layout.stream_bytes, len(stream.layout.chunk_starts), stream.blocks * DIGEST_BYTES)
    if described != found:
        raise Corrupt(f"the manifest of {manifest.save} and its layout {manifest.layout} describe different bytes")
    return stream


def table_from(tier: Tier, manifest: RankManifest) -> bytes:
    """The digest table."""
    table = bytes(tier.read_digests(manifest.save, 0, manifest.digests_bytes))
    check_digests(manifest, table, tier.name)
    return table


def values_from(tier: Tier, manifest: RankManifest) -> bytes:
    """The blob of plain values."""
    values = tier.read_values(manifest.save)
    check_values(manifest, values, tier.name)
    return values


def is_listed(tier: Tier, save: RankSave) -> bool:
    """Whether a tier's index names a rank save.

    Tells a hole from an absent save: a part that is missing under its index entry never comes back, whereas an index
    without the entry is that of a save dropped, or of a holder restarted, since it was read.
    """
    try:
        named = tier.manifests_of(save.checkpoint) if isinstance(tier, ByCheckpoint) else tier.manifests()
    except TierError:
        return False
    return any(manifest.save == save for manifest in named)


def chunk_from(tier: Tier, manifest: RankManifest, stream: Stream, table: bytes, index: int) -> memoryview:
    """A whole chunk, every block of it verified."""
    data = memoryview(tier.read_chunk(manifest.save, index, 0, stream.layout.chunk_lengths()[index]))
    check_blocks(data, manifest, stream, table, (tier.name, index, stream.blocks_of_chunk(index)))
    return data


def check_blocks(
    data: memoryview, manifest: RankManifest, stream: Stream, table: bytes, what: tuple[str, int, range]
) -> None:
    """Raises Corrupt unless `data` is exactly these blocks; `what` is (place, chunk, blocks)."""
    place, chunk, blocks = what
    wanted = table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES]
    bad = first_bad_block(data, stream.edges, blocks, wanted)
    if bad is not None:
        raise Corrupt(f"chunk {chunk} of {manifest.save} at {place} does not match its digest (block {bad})")
