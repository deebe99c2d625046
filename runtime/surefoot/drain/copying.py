"""Copies one rank save from tier to tier, verifying every byte on the way. Promotion and repair are made of this.

Each part is taken from the first source whose copy of it is good, so one damaged chunk costs one other read, not the
save. The target's index entry comes last; repeating a copy that is already there is success.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from surefoot import metrics
from surefoot.drain import verified
from surefoot.drain.pace import Pace
from surefoot.errors import ChunkMissing, Corrupt, SurefootError, TierUnavailable, Unreadable
from surefoot.protocol.identities import RankSave
from surefoot.protocol.records import RankManifest
from surefoot.tiers import Tier

T = TypeVar("T")


class Abandoned(SurefootError):
    """The copy was called off."""


def copy_save(save: RankSave, sources: Sequence[Tier], target: Tier, writer_epoch: int, pace: Pace) -> int:
    """Copies `save` to `target` and commits it there with `writer_epoch`; the number of bytes written.

    Raises Unreadable when some part is bad or absent everywhere, TierUnavailable when a silent source might have it,
    and whatever the target raises.
    """
    manifest, having = _manifest_of(save, sources)
    stream = _first_good("layout", save, having, lambda tier: verified.stream_from(tier, manifest))
    table = _first_good("digest table", save, having, lambda tier: verified.table_from(tier, manifest))
    values = _first_good("values", save, having, lambda tier: verified.values_from(tier, manifest))
    target.put_layout(manifest.layout, stream.text)
    lengths = stream.layout.chunk_lengths()
    for index, length in enumerate(lengths):
        if not pace.take(length):
            raise Abandoned(f"copying {save} to {target.name} was called off")
        read = partial(verified.chunk_from, manifest=manifest, stream=stream, table=table, index=index)
        data = _first_good(f"chunk {index}", save, having, read)
        target.put_chunk(save, index, data)
    target.put_digests(save, table)
    target.put_values(save, values)
    target.commit(manifest, writer_epoch, lengths)
    return sum(lengths) + len(table) + len(values)


def _manifest_of(save: RankSave, sources: Sequence[Tier]) -> tuple[RankManifest, list[Tier]]:
    """The manifest, and the sources that have an index entry with the same bytes."""
    found: list[tuple[RankManifest, Tier]] = []
    silent: list[TierUnavailable] = []
    for tier in sources:
        try:
            found += [(manifest, tier) for manifest in tier.manifests() if manifest.save == save]
        except TierUnavailable as error:
            silent.append(error)
    if found:
        manifest = found[0][0]
        return manifest, [tier for other, tier in found if other.same_bytes_as(manifest)]
    if silent:
        raise silent[0]
    raise Unreadable(f"{save} is in the index of none of {', '.join(t.name for t in sources)}", absent=True)


def _first_good(what: str, save: RankSave, sources: Sequence[Tier], read: Callable[[Tier], T]) -> T:
    problems: list[SurefootError] = []
    for tier in sources:
        try:
            return read(tier)
        except (Corrupt, ChunkMissing, TierUnavailable) as problem:
            metrics.restore_fallbacks.labels(
                "silent" if isinstance(problem, TierUnavailable) else metrics.reason_of(problem)
            ).inc()
            problems.append(problem)
    silent = next((p for p in problems if isinstance(p, TierUnavailable)), None)
    if silent is not None:
        raise silent
    absent = all(isinstance(p, ChunkMissing) for p in problems)
    raise Unreadable(f"{what} of {save}: no copy is good ({'; '.join(map(str, problems))})", absent=absent)
