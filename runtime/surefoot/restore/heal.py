"""Rewrites damaged copies from good ones after a restore.

A part is written again only with its own bytes, verified once more, so doing it twice, or on several ranks at once,
is harmless. What cannot be healed here is told, and left to repair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from surefoot import metrics
from surefoot.errors import ChunkMissing, SurefootError
from surefoot.format.layouts import Stream
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.restore.copy_choice import Copies, Damage
from surefoot.tiers import LayoutCopies, Tier, verified

log = logging.getLogger(__name__)


def heal(copies: Copies, stream_of: Callable[[int], Stream], writer_epoch: int) -> list[str]:
    """A sentence for each damage: what, where, and whether it is healed."""
    told = []
    # a tier cuts its parts by the layout and takes chunks by the digest table: without these it takes none
    found = sorted(copies.damages(), key=lambda damage: (damage.part != "layout", damage.part != "digest table"))
    for damage in [*found, *copies.damaged_entries()]:
        source = copies.sources[damage.source]
        what = f"{damage.part} of {damage.save} at {source.name} was damaged or missing"
        if not source.heals:
            told.append(f"{what}; it was read from another copy and is left as it is")
            continue
        try:
            _rewrite(copies, stream_of(damage.save.rank), damage, writer_epoch)
        except SurefootError as problem:
            metrics.fallbacks.labels("heal_failed").inc()
            told.append(f"{what}; it was read from another copy, and rewriting it failed: {problem}")
        else:
            metrics.fallbacks.labels("healed").inc()
            told.append(f"{what}; it was read from another copy and is healed")
    for sentence in told:
        log.warning("%s", sentence)
    return told


def _rewrite(copies: Copies, stream: Stream, damage: Damage, writer_epoch: int) -> None:
    save, rank = damage.save, damage.save.rank
    target = copies.connections.to(damage.source)
    manifest = copies.manifest(rank)
    if damage.part != "index entry" and all(m.save != save for m in target.manifests()):
        raise ChunkMissing(f"{target.name} has dropped {save} meanwhile")
    match damage.part.split():
        case ["layout"]:
            target.put_layout(manifest.layout, stream.text)
            if isinstance(target, LayoutCopies):
                target.commit(manifest, writer_epoch, stream.layout.chunk_lengths())  # which writes the save's own
        case ["values"]:
            values, _ = copies.first_good(rank, damage.part, verified.values_from)
            target.put_values(save, values)
        case ["digest", "table"]:
            table, _ = copies.first_good(rank, damage.part, verified.table_from)
            target.put_digests(save, table)
        case ["chunk", number]:
            target.put_chunk(save, int(number), _good_chunk(copies, stream, rank, int(number)))
        case _:
            target.commit(manifest, writer_epoch, stream.layout.chunk_lengths())


def _good_chunk(copies: Copies, stream: Stream, rank: int, number: int) -> memoryview:
    table, _ = copies.first_good(rank, "digest table", verified.table_from)
    read = partial(_chunk, stream=stream, table=table, number=number)
    data, _ = copies.first_good(rank, f"chunk {number}", read)
    return data


def _chunk(tier: Tier, manifest: RankManifest, stream: Stream, table: bytes, number: int) -> memoryview:
    return verified.chunk_from(tier, manifest, stream, table, number)
