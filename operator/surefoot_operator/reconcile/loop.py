"""The reconciler: observe, plan, write, tell, act; again when something changed or a plan asked for it.

One instance a job, owned by `controller`. Level-triggered: nothing is remembered from one round to the next but the
pin of a promotion, when things were last written, and what was told lately. The loop never ends by itself: an error is
counted, logged and tried again with growing waits.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import replace

from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.plain import shorten
from surefoot_operator import metrics, names
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator.speech import rule
from surefoot_operator.errors import FabricError, InvariantBroken, JobRefused, WorldMoved
from surefoot_operator.fabric.fabric import FabricSeen
from surefoot_operator.observed import Observed
from surefoot_operator.policy.actions import DropSaves, Event, Plan, SetFinalizer
from surefoot_operator.policy.check import check
from surefoot_operator.policy.lifecycle.idle import is_idle
from surefoot_operator.policy.lifecycle.invalid_spec import accepted, refused
from surefoot_operator.policy.maintenance.maintain import Maintenance, maintain
from surefoot_operator.policy.maintenance.rollout import JobSafety, refused_safety, safety
from surefoot_operator.policy.plan import plan
from surefoot_operator.reconcile.ages import Ages
from surefoot_operator.reconcile.apply import carry_out, repairing, run_errands
from surefoot_operator.reconcile.background import Background
from surefoot_operator.reconcile.complaints import Complaints
from surefoot_operator.reconcile.measure import Figures
from surefoot_operator.reconcile.parts import Parts, observed, worker_ids
from surefoot_operator.reconcile.voice import Voice
from surefoot_operator.reconcile.worker_calls import WorkerCalls

log = logging.getLogger(__name__)

GATHERING_SECONDS = 0.005
"""Several messages of one happening come within so long: they are answered by one plan."""
_NOTICE_CHARACTERS = 900
"""Of what an agent wants people to hear; an event has 1024."""


class Reconciler:
    """Carries one job from spec to end."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._term_seconds = parts.clock()
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._background = Background()
        self.calls = WorkerCalls(parts.clock, self.wake)
        self._complaints = Complaints()
        self._ages = Ages()
        self.voice = Voice(parts.fabric.record, time.monotonic)
        self._figures = Figures()
        self._pinned: Checkpoint | None = None
        self._marked: tuple[int, Checkpoint] | None = None
        self._watermark: Checkpoint | None = None
        self._written = self._swept = float("-inf")
        self._said = self._errands = self._refusal = ""
        self._without: tuple[int, int] | None = None
        self._began: float | None = None
        self.safety: JobSafety | None = None
        """Whether the job could spare a holder, as of the last round."""
        self._longest = parts.settings.longest_sleep_seconds

    @property
    def round_seconds(self) -> float:
        """How long the round under way takes already; 0 between two."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def wake(self, urgent: bool = True) -> None:
        """Something changed. What is not urgent waits a little, for whatever else comes till then."""
        if urgent:
            self._wake.set()
        elif self._later is None:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(self._parts.settings.notice_seconds, self._wake.set)

    async def run(self) -> None:
        """Goes on until cancelled."""
        watching = asyncio.create_task(self._watch(), name="fabric changes")
        failures = 0
        try:
            while True:
                self._wake.clear()
                if self._later is not None:
                    self._later.cancel()
                    self._later = None
                try:
                    pause = await self._in_turn()
                    failures = 0
                except WorldMoved as moved:
                    log.info("%s", moved)
                    pause = self._backoff(failures := failures + 1)
                except Exception as error:  # noqa: BLE001  whatever it was, the job must go on being looked after
                    failures += 1
                    self._report(error, failures)
                    pause = self._backoff(failures)
                    await asyncio.sleep(pause)
                    continue
                await self._sleep(pause)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            if self._later is not None:
                self._later.cancel()
            await self.voice.close()
            await self.calls.close()
            await self._background.close()
            self._figures.forget()

    async def _in_turn(self) -> float:
        """One round, measured; not while too many other jobs have theirs."""
        async with self._parts.turns:
            began = self._began = time.perf_counter()
            try:
                return await self.once()
            finally:
                self._began = None
                metrics.reconcile_seconds.observe(time.perf_counter() - began)

    async def once(self) -> float:
        """One round; returns after how many seconds the next is due even if nothing changes."""
        parts = self._parts
        try:
            shown = await parts.fabric.observe()
        except JobRefused as refusal:
            return await self._refuse(refusal)
        shown = replace(shown, workers=self._ages.told(shown.workers, parts.clock()))
        self.calls.shown(shown.workers)
        parts.conversation.know(worker_ids(shown) | self.calls.under_way())
        self._stand(shown, shown.status)
        seen = await observed(parts, shown, self._term_seconds, self.calls.seen())
        decided = plan(seen)
        check(decided, seen)
        moved = decided.status.world != seen.status.world
        kept = None if moved else maintain(replace(seen, status=decided.status), self._pinned)
        status = decided.status if kept is None else kept.status
        events = (*decided.events, *(kept.events if kept is not None else ()))
        later = await self._write(seen, status, bool(events), seen.status != accepted(shown.status))
        if not later:
            self._stand(shown, status)
        self.safety = safety(seen, status, kept)
        self._figures.show(seen, status, kept)
        self._say(decided, kept, seen)
        if SetFinalizer(False) in decided.actions:  # once it is let go the job may be gone, and this loop with it
            self.voice.say(events)
            await self.voice.flush()
            events = ()
        failed = await carry_out(parts, self.calls, decided.actions, replace(seen, status=status))
        if kept is not None:
            self._upkeep(kept, replace(seen, status=status))
        self.voice.say(events)
        self.voice.say(self._notices(), of_agents=True)
        if failed:
            raise failed[0]
        wakes = [decided.wake_after_seconds, kept.wake_after_seconds if kept is not None else None, later or None]
        return min([w for w in wakes if w is not None], default=self._longest)

    async def _refuse(self, refusal: JobRefused) -> float:
        """What cannot be carried is left as it is; people are told once, and an edit wakes us."""
        parts, old = self._parts, refusal.status
        self.safety = refused_safety(old, parts.clock())
        if refusal.leaving:
            # what it would have deleted cannot be known: nobody is stuck with it
            await parts.fabric.hold_job(False)
        if old is not None:
            status = refused(old, refusal.reason, refusal.generation, parts.clock())
            if status != old:
                await parts.fabric.patch_status(status, old)
        if refusal.reason != self._refusal:
            self._refusal = refusal.reason
            self.voice.say((Event(names.JOB_REFUSED, refusal.reason, warning=True),))
        return parts.settings.rest_seconds

    async def _write(self, seen: Observed, status: JobStatus, must: bool, ahead: bool) -> float:
        """Writes the status if it changed; returns seconds until it may be written if it can wait, else 0.

        `ahead`: what is stored has moments that a clock ahead of ours wrote; they must not be met again later.
        """
        old = seen.status
        if status == old and not must and not ahead:
            return 0.0
        if not must and not ahead and _calm(old, status) == old:
            left = self._written + self._parts.settings.progress_seconds - time.monotonic()
            if left > 0:
                return left
        if status != old or ahead:
            await self._parts.fabric.patch_status(status, old)
            self._written = time.monotonic()
            self._figures.written(old, status, seen.job)
        return 0.0

    def _stand(self, shown: FabricSeen, status: JobStatus) -> None:
        """What stands in the API now: the tier follows it, and agents hear what follows from it."""
        parts, resting = self._parts, is_idle(shown.job, status, shown.workers)
        self._longest = parts.settings.rest_seconds if resting else parts.settings.longest_sleep_seconds
        if status.tidied:
            parts.memory.rest(status)
        else:
            parts.memory.follow(shown.holders, status, resting)
        epoch = status.world.epoch if status.world is not None else 0
        replicas = shown.job.spec.checkpoint.memory.replicas
        parts.conversation.rule(rule(status, parts.memory.ready(epoch), replicas, parts.epoch_token(epoch)))

    def _upkeep(self, kept: Maintenance, seen: Observed) -> None:
        parts, world = self._parts, seen.status.world
        self._pinned, self._watermark = kept.pinned, kept.watermark
        if world is None or world.state != "Committed":
            return
        run_errands(parts, kept.actions, seen, self._background)
        mark = (world.epoch, kept.watermark) if kept.watermark is not None else None
        if mark is not None and mark != self._marked:
            epoch, checkpoint = mark
            if self._background.start("watermark", lambda: parts.memory.mark(checkpoint, epoch)):
                self._marked = mark
        if time.monotonic() - self._swept >= parts.settings.memory.janitor_seconds:
            self._swept = time.monotonic()
            busy = repairing(parts.conversation.sessions)
            self._background.start("janitor", lambda: parts.memory.sweep(self._watermark, busy, kept.settled))

    def _notices(self) -> tuple[Event, ...]:
        """What agents want people to hear, and what they could not do."""
        sessions, now = self._parts.conversation.taken()
        notices = tuple(
            Event(shorten(n.reason), f"{worker}: {shorten(n.text, _NOTICE_CHARACTERS)}", warning=True)
            for worker, n in sessions.notices
        )
        return (*notices, *self._complaints.events(sessions.orders.failures, now))

    def _say(self, decided: Plan, kept: Maintenance | None, seen: Observed) -> None:
        """One line for each plan, and for each upkeep, that is news."""
        what = "; ".join(map(str, decided.actions))
        line = f"{decided.reason}{': ' if what else ''}{what}"
        if line != self._said:
            self._said = line
            log.info("[%s] %s", _world(seen.status), line)
        errands = "; ".join(map(str, kept.actions if kept is not None else ()))
        if errands != self._errands:
            self._errands = errands
            # drops come with every few saves; who looks for one asks for them
            routine = kept is None or all(isinstance(e, DropSaves) for e in kept.actions)
            log.log(logging.DEBUG if routine else logging.INFO, "[%s] upkeep: %s", _world(seen.status), errands)

        for one in kept.unrecoverable if kept is not None else ():
            if (one.checkpoint.epoch, one.worker) != self._without:  # once, and not with each save that it misses
                self._without = (one.checkpoint.epoch, one.worker)
                log.info("[%s] %s: what others saved of such checkpoints is dropped", _world(seen.status), one.reason)

    async def _watch(self) -> None:
        """The fabric's changes; a watch that breaks is begun anew."""
        failures = 0
        while True:
            try:
                async for _ in self._parts.fabric.changes():
                    failures = 0
                    self.wake()
                return
            except Exception as error:  # noqa: BLE001  without a watch there still are the timers
                failures += 1
                self._report(error, failures)
                await asyncio.sleep(self._backoff(failures))

    async def _sleep(self, pause: float) -> None:
        try:
            async with asyncio.timeout(min(pause, self._longest)):
                await self._wake.wait()
            await asyncio.sleep(GATHERING_SECONDS)
        except TimeoutError:
            pass  # the plan asked to look again now

    def _backoff(self, failures: int) -> float:
        first, longest = self._parts.settings.backoff_seconds
        return float(min(longest, first * 2 ** min(failures - 1, 16)) * random.uniform(0.5, 1.0))

    @staticmethod
    def _report(error: Exception, failures: int) -> None:
        metrics.reconcile_failures.labels(type(error).__name__).inc()
        if isinstance(error, FabricError):
            log.warning("reconciling failed (%d in a row): %s", failures, error)
        elif isinstance(error, InvariantBroken):
            log.error("a plan is not carried out (%d in a row): %s", failures, error)
        else:
            log.exception("reconciling failed (%d in a row)", failures)


def _calm(old: JobStatus, new: JobStatus) -> JobStatus:
    """`new` without what only reports progress: that may be written a little later."""
    return replace(
        new,
        step=old.step,
        progress_seconds=old.progress_seconds,
        last_complete=old.last_complete,
        message=old.message,
        conditions=old.conditions,
    )


def _world(status: JobStatus) -> str:
    world = status.world
    return "no world" if world is None else f"epoch {world.epoch} {world.state.lower()}"
