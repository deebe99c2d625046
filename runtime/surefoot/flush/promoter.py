"""Uploads a pinned checkpoint's rank saves from holders to the persistent tier.

In the background. The agent has one Promoter. Its source is the memory tier, not the arena, so a promotion survives
restarts of trainers and agents: whoever is told again copies again, and equal bytes that are already there are
success.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from surefoot import metrics
from surefoot.errors import SaveExists, SurefootError, TierError, Unreadable
from surefoot.flush.target_writer import Probe
from surefoot.flush.token_bucket import TokenBucket
from surefoot.flush.unchanged_chunks import WrittenSave
from surefoot.flush.uploader import Abandoned, CopiedSave, copy_save
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.timeouts import Backoff
from surefoot.tiers import Tier
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Promoted:
    """Tells how one promotion of a rank save ended.

    `error` is None if all of it is in the persistent tier.
    """

    save: RankSave
    error: str | None
    bytes: int
    seconds: float
    unreadable: bool = False
    """Every copy answered and is damaged; trying again finds the same."""


@dataclass(frozen=True, slots=True)
class PromotionOptions:
    pace: TokenBucket | None = None
    """The promoter's own, stopped when it is closed; None: without a limit."""
    attempts: int = 4
    retry_seconds: float = 0.5
    """Wait before the second try; doubles each time, less up to half."""
    queued: int = 256
    """Rank saves that may wait; more are answered with an error, and the leader names them again."""
    probe: Probe | None = None


class Promoter:
    """Copies rank saves to the persistent tier in one thread.

    `promote` returns at once, `on_done` is called from the thread.
    """

    def __init__(
        self,
        open_sources: Callable[[RankSave], Sequence[Tier]],
        open_target: Callable[[], Tier],
        on_done: Callable[[Promoted], None],
        options: PromotionOptions | None = None,
    ) -> None:
        self._open_sources = open_sources
        self._open_target = open_target
        self._on_done = on_done
        self._options = options or PromotionOptions()
        self._pace = self._options.pace or TokenBucket()
        self._orders: queue.Queue[tuple[RankSave, int] | None] = queue.Queue(maxsize=self._options.queued)
        self._waiting: set[RankSave] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._written: dict[int, WrittenSave] = {}
        """Of each rank the last save that was uploaded here; one that fails has none: the next try sends all of it."""
        self._thread = threading.Thread(target=self._run, name="surefoot-promoter", daemon=True)
        self._thread.start()

    def promote(self, epoch: int, saves: Iterable[RankSave]) -> None:
        """Queues saves; one that already waits or runs is not queued twice."""
        for save in saves:
            with self._lock:
                if save in self._waiting:
                    continue
                self._waiting.add(save)
            try:
                self._orders.put_nowait((save, epoch))
            except queue.Full:
                self._finished(Promoted(save, "too many promotions wait on this worker", 0, 0.0))

    def close(self, wait_seconds: float = 5.0) -> bool:
        """Calls off what is under way (it can be done again elsewhere) and joins the thread."""
        self._closing.set()
        self._pace.stop()
        try:
            self._orders.put_nowait(None)
        except queue.Full:
            pass  # the thread looks at the event between orders
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.is_set():
            order = self._orders.get()
            if order is None:
                return
            try:
                promoted = self._promoted(*order)
            except Exception as unexpected:  # a promoter that dies silently would never answer the leader again
                log.exception("promoting %s failed in an unexpected way", order[0])
                promoted = Promoted(order[0], repr(unexpected), 0, 0.0)
            self._finished(promoted)

    def _promoted(self, save: RankSave, epoch: int) -> Promoted:
        began = time.monotonic()
        error: str | None = None
        unreadable = False
        for attempt in range(self._options.attempts):
            try:
                copied = self._copied(save, epoch)
            except Abandoned as called_off:
                return Promoted(save, str(called_off), 0, time.monotonic() - began)
            except SurefootError as problem:
                error, unreadable = str(problem), isinstance(problem, Unreadable) and not problem.absent
                metrics.checkpoint_failures.labels("persistent", metrics.reason_of(problem)).inc()
                log.warning("promoting %s failed: %s", save, problem)
                if not isinstance(problem, TierError) or isinstance(problem, SaveExists):
                    # the source is bad, or the name is taken: trying again finds the same, and who asks again shall not ask at once
                    self._closing.wait(self._options.retry_seconds * 2)
                    break
                wait = Backoff(self._options.retry_seconds).seconds(attempt + 1, random.random())
                if attempt + 1 == self._options.attempts or self._closing.wait(wait):
                    break
            else:
                seconds = time.monotonic() - began
                if copied.written is not None:
                    self._written[save.rank] = copied.written
                metrics.checkpoint_bytes.labels("persistent").inc(copied.sent_bytes)
                metrics.unchanged_bytes.labels("persistent").inc(copied.unchanged_bytes)
                metrics.checkpoint_step.labels("persistent").set(save.step)
                metrics.checkpoint_seconds.labels("persistent", "promote").observe(seconds)
                return Promoted(save, None, copied.sent_bytes, seconds)
        return Promoted(save, error, 0, time.monotonic() - began, unreadable)

    def _copied(self, save: RankSave, epoch: int) -> CopiedSave:
        opened: list[Tier] = []
        try:
            sources = self._open_sources(save)
            opened += sources
            target = self._open_target()
            opened.append(target)
            return copy_save(save, sources, target, epoch, self._pace, self._written.pop(save.rank, None))
        finally:
            for tier in opened:
                tier.close()

    def _finished(self, promoted: Promoted) -> None:
        with self._lock:
            self._waiting.discard(promoted.save)
        if self._options.probe is not None and promoted.error is None:
            self._options.probe("promoted")
        try:
            self._on_done(promoted)
        except Exception:
            metrics.fallbacks.labels("promotion_callback_failed").inc()
            log.exception("a callback of the promoter failed; promoting goes on")


def drop_persistent(tier: ObjectStoreTier, checkpoints: Iterable[Checkpoint]) -> str | None:
    """Deletes checkpoints from the persistent tier, and closes it.

    Manifests first. None, or the first error.
    """
    try:
        for checkpoint in checkpoints:
            tier.drop_checkpoint(checkpoint)
    except SurefootError as error:
        log.warning("dropping from the persistent tier failed: %s", error)
        return str(error)
    finally:
        tier.close()
    return None
