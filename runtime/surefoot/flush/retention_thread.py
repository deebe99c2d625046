"""Drops old checkpoints, and what failed saves left, in library mode.

Rank 0 drops all but the newest n after each save; every rank makes room where the tier is full.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Protocol

from surefoot import metrics
from surefoot.errors import SurefootError, TierError
from surefoot.flush.survey import Survey, coverage, survey, unjudged
from surefoot.protocol.checkpoints.completeness import Covers, complete_persistent
from surefoot.protocol.checkpoints.lineage import Lineage, entry_of, newest
from surefoot.protocol.checkpoints.retention import Standing, last_good, persistent_drops
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)

BEAT_SECONDS = 10.0
"""Between two signs of life of a program that writes to the tier."""
_MAX_DISCARDS = 8


class OvertakingWatch(Protocol):
    """Shows others that this program writes, and finds out whether one overtook it."""

    def beat(self, tier: ObjectStoreTier) -> None: ...
    def check(self, tier: ObjectStoreTier) -> bool: ...
    def end(self, tier: ObjectStoreTier) -> None: ...


class RetentionThread:
    """Removes superfluous checkpoints in one background thread.

    It looks after each save; several saves at once are one look. `watch`: of rank 0, which alone looks after saves.
    """

    def __init__(
        self,
        open_tier: Callable[[], ObjectStoreTier],
        lineage: Lineage,
        epoch: int,
        keep: int,
        watch: OvertakingWatch | None = None,
        leads: bool = True,
    ) -> None:
        self._open = open_tier
        self._lineage = lineage
        self._epoch = epoch
        self._keep = keep
        self._watch, self._leads = watch, leads
        self._spared: frozenset[Checkpoint] = frozenset()
        self._overtaken_at: frozenset[Checkpoint] | None = None
        """What was there when another program was first seen to have overtaken this one: it may stand on it."""
        self.outdone = False
        """At the end: another program has overtaken this one, and saved; later starts go on from what that one saved."""
        self._covers: Covers = {}
        self._told: set[Checkpoint] = set()
        self._full = False
        self._discards: deque[RankSave] = deque(maxlen=_MAX_DISCARDS)
        self._looks: queue.Queue[bool] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._run, name="surefoot-keeper", daemon=True)
        self._thread.start()

    def set_lineage(self, lineage: Lineage, spared: frozenset[Checkpoint]) -> None:
        """Sets the lineage that the epoch stands on, as finally decided.

        `spared` could not be judged then, and is never removed here.
        """
        self._lineage, self._spared = lineage, spared

    def saved(self, checkpoint: Checkpoint) -> None:
        """Looks again, since a rank save has come.

        Older ones may have become superfluous.
        """
        if self._leads:
            self._put(True)

    def make_room(self) -> None:
        """Drops the oldest complete checkpoint though it might stay: the tier is full, and a newer one waits."""
        self._full = True
        self._put(True)

    def discard(self, save: RankSave) -> None:
        """Removes what lies of a save that was given up and never committed."""
        self._discards.append(save)
        self._put(True)

    def close(self, wait_seconds: float = 5.0) -> None:
        """Finishes the look it is at, and ends."""
        try:
            self._looks.put(False, timeout=wait_seconds)
        except queue.Full:
            log.warning("the persistent tier hangs while old checkpoints are removed; the thread ends with the process")
        self._thread.join(wait_seconds)

    def _put(self, look: bool) -> None:
        try:
            self._looks.put_nowait(look)
        except queue.Full:
            pass  # a look that comes after this save is already queued

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            try:
                goes_on = self._looks.get(timeout=BEAT_SECONDS if self._watch is not None else None)
                self._guarded(self._tidy if goes_on else self._end)
            except queue.Empty:
                self._guarded(self._beat)

    def _guarded(self, work: Callable[[ObjectStoreTier], None]) -> None:
        try:
            with closing(self._open()) as tier:
                work(tier)
        except SurefootError as problem:
            metrics.fallbacks.labels("retention_failed").inc()
            log.warning("old checkpoints could not be removed: %s", problem)
        except Exception:
            metrics.fallbacks.labels("retention_failed").inc()
            log.exception("removing old checkpoints failed in an unexpected way")

    def _tidy(self, tier: ObjectStoreTier) -> None:
        while self._discards:
            tier.drop_unfinished(self._discards.popleft())
        if self._leads or self._full:
            self._keep_in(tier)
        self._beat(tier)

    def _beat(self, tier: ObjectStoreTier) -> None:
        if self._watch is not None:
            try:
                self._watch.beat(tier)
            except TierError as silent:
                metrics.fallbacks.labels("sign_of_life_unwritten").inc()
                log.info(
                    "%s did not take this program's sign of life, so others may not notice it: %s", tier.place, silent
                )

    def _end(self, tier: ObjectStoreTier) -> None:
        if self._watch is not None:
            self.outdone = self._watch.check(tier) and any(c.epoch > self._epoch for c in tier.seen())
            self._watch.end(tier)

    def keep_now(self) -> list[Checkpoint]:
        """Drops what the rules let go; what was dropped."""
        with closing(self._open()) as tier:
            return self._keep_in(tier)

    def _keep_in(self, tier: ObjectStoreTier) -> list[Checkpoint]:
        full, self._full = self._full, False
        found = survey(tier)
        if self._watch is not None and self._watch.check(tier) and self._overtaken_at is None:
            # the other one chose before it claimed, and may have seen what came since `found` was read
            self._overtaken_at = frozenset((*found.seen, *tier.seen()))
        if self._watch is None and tier.epochs.is_overtaken(self._epoch):
            return []  # a rank that only makes room does not know what the other program stands on
        drops = self._drops(tier, found, full)
        if self._overtaken_at is not None:
            drops = [c for c in drops if c.epoch == self._epoch and c not in self._overtaken_at]
        for checkpoint in drops:
            tier.drop_checkpoint(checkpoint)
        return drops

    def _drops(self, tier: ObjectStoreTier, found: Survey, full: bool) -> list[Checkpoint]:
        """Chooses what to drop. What cannot be read stays: it may be good, and only a person can say that it is not."""
        self._covers, left_out = coverage(tier, found.manifests, self._covers)
        troubles = unjudged(found, self._covers, left_out)
        for checkpoint in sorted(troubles.keys() - self._told):
            log.warning("%s is not removed, as it cannot be judged: %s", checkpoint, troubles[checkpoint])
        self._told |= troubles.keys()
        whole = complete_persistent(found.manifests, self._lineage, self._epoch, frozenset(), self._covers)
        entry = entry_of(self._lineage, self._epoch)
        standing = Standing(
            lineage=self._lineage,
            epoch=self._epoch,
            claimed=False,
            parent=entry.parent if entry is not None else None,
            watermark=None,
            persistent=newest(whole),
            pinned=None,
            bad=frozenset(),
            good=frozenset(c for c in (last_good(whole, found.manifests),) if c is not None),
        )
        keep = max(1, min(self._keep, len(whole)) - 1) if full else self._keep
        unsure = self._spared | frozenset(troubles)
        return persistent_drops(whole, found.seen, standing, keep, unjudged=unsure)
