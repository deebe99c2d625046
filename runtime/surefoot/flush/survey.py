"""Lists a persistent tier and names each record that cannot be read.

Read by an agent that lists for the operator, and in library mode by whoever chooses a restore point or removes old
checkpoints. Reading everything or nothing made one damaged record hide every checkpoint beside it; reading what can be
read without a word made it look as if nothing had been there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from surefoot import metrics
from surefoot.errors import ChunkMissing, Corrupt, ProtocolError, TierError, TierUnavailable
from surefoot.format.layouts import read_layout
from surefoot.protocol.checkpoints.completeness import Covers, LeftOut, TierReading, layouts_to_check
from surefoot.protocol.checkpoints.coverage import uncovered
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.timeouts import Backoff
from surefoot.tiers.parallel_reads import read_together
from surefoot.tiers.persistent import ObjectStoreTier

T = TypeVar("T")

_TRIES = 3
"""Of one read that the tier refuses: a single request that fails says nothing about what is there."""
_WAITS = Backoff(0.1)
_MOST_SILENT = 16
"""Reads that may stay unanswered before the tier counts as away, and not these records as unreadable."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Lists what a tier has; `seen`: every checkpoint with any object."""

    seen: tuple[Checkpoint, ...]
    manifests: tuple[RankManifest, ...]
    left_out: tuple[LeftOut, ...] = ()


def survey(
    tier: ObjectStoreTier,
    remembered: Mapping[RankSave, RankManifest] | None = None,
    named: Checkpoint | None = None,
) -> Survey:
    """Reads every manifest, and names those that it cannot.

    Raises TierUnavailable where the tier itself is away.

    `remembered`: manifests of an earlier look. One whose file is still there, as long as it was, is not read again.
    `named`: a checkpoint that is looked for by its name, as a stale listing may lack it.
    """
    seen = patiently(tier.seen)
    if named is not None and named not in seen and patiently(lambda: tier.committed(named)):
        seen = tuple(sorted((*seen, named)))
    looks = read_together(lambda checkpoint: patiently(lambda: tier.standing(checkpoint, remembered)), seen)
    read = read_together(lambda save: _manifest(tier, save), [save for _, unread in looks for save in unread])
    left_out = tuple(one for one in read if isinstance(one, LeftOut))
    _unless_away(left_out)
    found = [manifest for known, _ in looks for manifest in known]
    found += [one for one in read if isinstance(one, RankManifest)]
    return Survey(seen, tuple(sorted(found, key=lambda m: m.save)), left_out)


def layout_texts(tier: ObjectStoreTier, digests: Collection[str]) -> tuple[dict[str, str], tuple[LeftOut, ...]]:
    """Reads layout records by digest, and tells which are damaged."""
    wanted = sorted(digests)
    found = dict(zip(wanted, read_together(lambda digest: _layout(tier, digest), wanted), strict=True))
    left_out = tuple(one for one in found.values() if isinstance(one, LeftOut))
    _unless_away(left_out)
    return {digest: one for digest, one in found.items() if isinstance(one, str)}, left_out


def coverage(
    tier: ObjectStoreTier, manifests: Iterable[RankManifest], known: Covers | None = None
) -> tuple[Covers, tuple[LeftOut, ...]]:
    """Decides which sets of layouts cover every tensor.

    Of those that some world saved. Sets that cannot be judged are left out of the answer, and the record that is to
    blame is named. `known`: earlier answers, which hold for good.
    """
    wanted = layouts_to_check(TierReading({}, tuple(manifests)))
    covers = {digests: answer for digests, answer in (known or {}).items() if digests in wanted}
    texts, left_out = layout_texts(tier, {digest for digests in wanted - covers.keys() for digest in digests})
    for digests in wanted - covers.keys():
        if digests <= texts.keys():
            covers[digests] = uncovered(read_layout(digest, texts[digest]).layout for digest in digests) is None
    return covers, left_out


def unjudged(found: Survey, covers: Covers, left_out: Iterable[LeftOut]) -> dict[Checkpoint, str]:
    """Names checkpoints whose completeness cannot be judged.

    Each with the record that cannot be read and why.
    """
    layouts = {one.digest: one for one in left_out if one.digest is not None}
    told: dict[Checkpoint, str] = {one.checkpoint: str(one) for one in found.left_out if one.checkpoint is not None}
    for checkpoint, ranks in TierReading({}, found.manifests).manifests().items():
        digests = frozenset(m.layout for copies in ranks.values() for m in copies)
        lost = sorted(digests & layouts.keys())
        if lost and digests not in covers:
            told.setdefault(checkpoint, str(layouts[lost[0]]))
    return told


def reasons(found: Survey, covers: Covers, troubles: Mapping[Checkpoint, str]) -> dict[Checkpoint, str]:
    """Tells why checkpoints that are there cannot be restored.

    Those that can are not in it.
    """
    by_checkpoint = TierReading({}, found.manifests).manifests()
    told = {}
    for checkpoint in found.seen:
        ranks = by_checkpoint.get(checkpoint, {})
        if checkpoint in troubles:
            told[checkpoint] = troubles[checkpoint]
        elif not ranks:
            told[checkpoint] = "no rank's manifest is there: its save was interrupted, or the files were removed"
        elif len(ranks) < (world := next(iter(ranks.values()))[0].world):
            missing = next(rank for rank in range(world) if rank not in ranks)
            told[checkpoint] = (
                f"{len(ranks)} of {world} ranks' manifests are there, rank {missing}'s is not: its save was interrupted,"
                " or the file was removed"
            )
        elif not covers.get(frozenset(m.layout for copies in ranks.values() for m in copies), False):
            told[checkpoint] = "its ranks' layouts do not make up every tensor once"
    return told


def patiently(read: Callable[[], T]) -> T:
    """Asks a tier again, a few times, where it is silent.

    Raises its last word.
    """
    for attempt in range(_TRIES):
        try:
            return read()
        except TierUnavailable:
            if attempt == _TRIES - 1:
                raise
            metrics.fallbacks.labels("tier_asked_again").inc()
            time.sleep(_WAITS.seconds(attempt + 1, random.random()))
    raise AssertionError("unreachable: the last try returned or raised")


def _manifest(tier: ObjectStoreTier, save: RankSave) -> RankManifest | LeftOut | None:
    """Reads a manifest; None if it was removed since it was listed."""
    try:
        return patiently(lambda: tier.read_manifest(save))
    except ChunkMissing:
        return None
    except (TierError, Corrupt) as problem:
        return LeftOut(str(problem), isinstance(problem, TierError), checkpoint=save.checkpoint)


def _layout(tier: ObjectStoreTier, digest: str) -> str | LeftOut:
    try:
        text = patiently(lambda: tier.read_layout(digest))
        read_layout(digest, text)
    except (TierError, Corrupt, ProtocolError) as problem:
        silent = isinstance(problem, TierError) and not isinstance(problem, ChunkMissing)
        return LeftOut(str(problem), silent, digest=digest)
    return text


def _unless_away(left_out: Collection[LeftOut]) -> None:
    silent = [one for one in left_out if one.silent]
    if len(silent) > _MOST_SILENT:
        raise TierUnavailable(f"{len(silent)} reads were not answered, the last: {silent[-1].why}")
