"""Drops persistent checkpoints older than the newest n, in library mode.

Rank 0 alone does it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from surefoot import metrics
from surefoot.drain.survey import Survey, coverage, survey, unjudged
from surefoot.errors import SurefootError
from surefoot.protocol.checkpoints.completeness import Covers, complete_persistent
from surefoot.protocol.checkpoints.lineage import Lineage, entry_of, newest
from surefoot.protocol.checkpoints.retention import Standing, last_good, persistent_drops
from surefoot.protocol.identities import Checkpoint
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)


class RetentionThread:
    """Removes superfluous checkpoints in one background thread.

    It looks after each save; several saves at once are one look.
    """

    def __init__(self, open_tier: Callable[[], ObjectStoreTier], lineage: Lineage, epoch: int, keep: int) -> None:
        self._open = open_tier
        self._lineage = lineage
        self._epoch = epoch
        self._keep = keep
        self._spared: frozenset[Checkpoint] = frozenset()
        self._covers: Covers = {}
        self._told: set[Checkpoint] = set()
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
        while self._looks.get():
            try:
                self.keep_now()
            except SurefootError as problem:
                metrics.fallbacks.labels("retention_failed").inc()
                log.warning("old checkpoints could not be removed: %s", problem)
            except Exception:
                metrics.fallbacks.labels("retention_failed").inc()
                log.exception("removing old checkpoints failed in an unexpected way")

    def keep_now(self) -> list[Checkpoint]:
        """Drops what the rules let go; what was dropped."""
        tier = self._open()
        try:
            drops = self._drops(tier, survey(tier))
            for checkpoint in drops:
                tier.drop_checkpoint(checkpoint)
            return drops
        finally:
            tier.close()

    def _drops(self, tier: ObjectStoreTier, found: Survey) -> list[Checkpoint]:
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
        unsure = self._spared | frozenset(troubles)
        return persistent_drops(whole, found.seen, standing, self._keep, unjudged=unsure)
