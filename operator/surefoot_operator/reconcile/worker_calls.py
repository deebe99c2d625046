"""Runs calls for workers and pod groups concurrently, with backoff.

Owned by `reconcile`. No round waits for them: a pod that a quota refuses, or a webhook that takes its ten seconds,
would otherwise keep the survivors of a failure from being sealed, read and assigned. What is refused is asked for
again after a backoff of its own, and the plan sees both: what is under way, and what was refused with which words.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.timeouts import Backoff
from surefoot_operator import metrics
from surefoot_operator.api.spec import GANG_SCHEDULERS
from surefoot_operator.errors import PlatformError
from surefoot_operator.job_snapshot import ObservedWorker, PendingCreate, PendingGroupCall, PurgeCallSeen
from surefoot_operator.platforms.interface import PlatformSnapshot
from surefoot_operator.policy.core.actions import (
    ApplyPodGroup,
    CreateWorker,
    DeletePodGroup,
    DeleteWorker,
    PurgePersistent,
)

log = logging.getLogger(__name__)


# ---- purge calls -----------------------------------------------------------------------------------------------------
# Runs the calls that have a deleted job's persistent data deleted, one at a time. Counts what the fabric refused: an
# attempt that never gets a pod must not be the first one for ever.


class PurgeCalls:
    """The calls of one job; `wake` has the loop plan again."""

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._task: asyncio.Task[None] | None = None
        self.seen = PurgeCallSeen()
        """How it stands now."""

    def begin(self, action: PurgePersistent, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begins the call unless one is under way."""
        if self._task is None:
            self.seen = replace(self.seen, under_way=True)
            self._task = asyncio.create_task(self._make(action, call), name=str(action))

    async def settled(self) -> None:
        """Returns when no call is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Cancels a call under way and waits for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _make(self, action: PurgePersistent, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await call()
            made = max(action.attempt, self.seen.attempt)
            self.seen = PurgeCallSeen(made, self._clock(), refusals=self.seen.refusals)
        except Exception as error:  # whatever it was, the plan hears of it and decides
            metrics.reconcile_failures.labels(type(error).__name__).inc()
            log.warning(
                "%s; %s was not carried out",
                error,
                action,
                exc_info=None if isinstance(error, PlatformError) else error,
            )
            self.seen = self._refused(action.attempt, error)
        finally:
            self.seen = replace(self.seen, under_way=False)
            self._task = None
            self._wake()

    def _refused(self, attempt: int, error: Exception) -> PurgeCallSeen:
        before, now = self.seen, self._clock()
        decided = isinstance(error, PlatformError) and error.decided and not error.busy
        return replace(
            before,
            refusal=str(error) or type(error).__name__,
            refused_attempt=attempt,
            refusals=before.refusals + decided,
            since_seconds=before.since_seconds if before.refusal else now,
            last_seconds=now,
            closing=isinstance(error, PlatformError) and error.closing,
        )


# ---- worker calls ----------------------------------------------------------------------------------------------------

AT_ONCE = 32
"""Calls to the fabric under way together: an API server must not be flooded by one job's recovery."""

REJECTED = Backoff(1.0, 30.0)
"""Wait before a call that was refused is made again."""

Call = Callable[[], Coroutine[Any, Any, None]]
_Deleted = tuple[str, bool]
"""A worker's uid, and whether it is deleted by force: force is another call, which need not wait for the gentle one."""
_Key = WorkerId | _Deleted | str
"""Text: the gang scheduler whose pod group is kept or removed, by one call at a time."""


@dataclass(slots=True)
class _PendingCall:
    """One call: under way while `task` is set, else refused."""

    task: asyncio.Task[None] | None = None
    failures: int = 0
    rejection: str = ""
    permanent: bool = False
    undecided: bool = False
    """Some try of it may be carried out late."""
    until_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PendingCalls:
    """Calls that a look at the fabric may not show yet."""

    creates: tuple[PendingCreate, ...]
    deletions: frozenset[str]
    groups: tuple[PendingGroupCall, ...]
    purge: PurgeCallSeen = field(default_factory=PurgeCallSeen)


class WorkerCalls:
    """Owns the calls for one job's workers and pod groups.

    `clock` gives Unix seconds; `wake` has the loop plan again.
    """

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._calls: dict[_Key, _PendingCall] = {}
        self._purges = PurgeCalls(clock, wake)
        self._limit = asyncio.Semaphore(AT_ONCE)

    def create(self, action: CreateWorker, call: Call) -> None:
        """Begins the call unless one is under way or its backoff lasts."""
        self._begin(WorkerId(action.index, action.attempt), str(action), call)

    def delete(self, action: DeleteWorker, call: Call) -> None:
        """As `create`."""
        self._begin((action.uid, action.force), str(action), call)

    def group(self, action: ApplyPodGroup | DeletePodGroup, call: Call) -> None:
        """As `create`."""
        gang = action.group.gang if isinstance(action, ApplyPodGroup) else action.gang
        self._begin(gang, str(action), call)

    def purge(self, action: PurgePersistent, call: Call) -> None:
        """As `create`; the plan itself waits between two requests."""
        self._purges.begin(action, call)

    @property
    def purging(self) -> PurgeCallSeen:
        return self._purges.seen

    def groups(self) -> tuple[PendingGroupCall, ...]:
        """Returns calls for pod groups that are under way or refused."""
        found = ((gang, self._calls.get(gang)) for gang in GANG_SCHEDULERS)
        return tuple(
            PendingGroupCall(gang, asked.task is not None, asked.rejection, asked.until_seconds)
            for gang, asked in found
            if asked is not None
        )

    async def await_with_calls(self, look: Awaitable[PlatformSnapshot]) -> tuple[PlatformSnapshot, PendingCalls]:
        """Awaits a look at the fabric, with the calls around it.

        It may not show yet what ends while the fabric is read: a second worker was made for the same place.
        """
        begun, deletions = self.pending_creates(), self.deletions()
        shown = await look
        self.forget_rejections(shown.workers)
        creates = self.pending_creates()
        known = {(c.index, c.attempt) for c in creates}
        made = (c for c in begun if c.in_progress and (c.index, c.attempt) not in known)
        return shown, PendingCalls((*creates, *made), deletions | self.deletions(), self.groups(), self.purging)

    def pending_creates(self) -> tuple[PendingCreate, ...]:
        """Returns creates that the fabric does not show yet."""
        found = [(key, asked) for key, asked in self._calls.items() if isinstance(key, WorkerId)]
        return tuple(
            PendingCreate(
                key.index, key.attempt, asked.task is not None, asked.rejection, asked.permanent, asked.until_seconds
            )
            for key, asked in sorted(found, key=lambda one: one[0])
        )

    def deletions(self) -> frozenset[str]:
        """Returns uids of workers whose deletion may come any time.

        It is under way, or was never answered. One that the fabric refused will not.
        """
        return frozenset(
            key[0]
            for key, asked in self._calls.items()
            if isinstance(key, tuple) and (asked.task is not None or asked.undecided)
        )

    def forget_rejections(self, workers: Iterable[ObservedWorker]) -> None:
        """Forgets refusals that no plan can ask about any more.

        The worker is there after all, or a later attempt is.
        """
        newest: dict[int, int] = {}
        uids = set()
        for worker in workers:
            newest[worker.index] = max(worker.attempt, newest.get(worker.index, 0))
            uids.add(worker.uid)
        for key, asked in list(self._calls.items()):
            over = _is_over(key, newest, uids)
            if asked.task is None and (over or self._clock() > asked.until_seconds + 2 * REJECTED.longest_seconds):
                del self._calls[key]

    async def all_calls_done(self) -> None:
        """Returns when no call is under way."""
        while tasks := [asked.task for asked in self._calls.values() if asked.task is not None]:
            await asyncio.wait(tasks)
        await self._purges.settled()

    async def close(self) -> None:
        """Cancels what is under way and waits for its end."""
        tasks = [asked.task for asked in self._calls.values() if asked.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._calls.clear()
        await self._purges.close()

    def _begin(self, key: _Key, what: str, call: Call) -> None:
        asked = self._calls.setdefault(key, _PendingCall())
        if asked.task is None and self._clock() >= asked.until_seconds:
            asked.task = asyncio.create_task(self._made(key, asked, what, call), name=what)

    async def _made(self, key: _Key, asked: _PendingCall, what: str, call: Call) -> None:
        try:
            async with self._limit:
                await call()
            del self._calls[key]
        except Exception as error:  # noqa: BLE001  whatever it was, this call is made again and no other waits for it
            self._rejected(asked, what, error)
        finally:
            asked.task = None
            self._wake()

    def _rejected(self, asked: _PendingCall, what: str, error: Exception) -> None:
        metrics.reconcile_failures.labels(type(error).__name__).inc()
        known = asked.rejection == str(error)
        asked.failures += 1
        asked.rejection, asked.permanent = str(error), isinstance(error, PlatformError) and error.permanent
        asked.undecided |= not (isinstance(error, PlatformError) and error.decided)
        pause = REJECTED.seconds(asked.failures, random.random())
        asked.until_seconds = self._clock() + pause
        if not isinstance(error, PlatformError):
            log.error("%s failed: %s", what, error, exc_info=error)
        elif not known:
            log.warning("%s was refused, retrying in %.0f s: %s", what, pause, error)
        asyncio.get_running_loop().call_later(pause, self._wake)


def _is_over(key: _Key, newest: Mapping[int, int], uids: Collection[str]) -> bool:
    if isinstance(key, WorkerId):
        return newest.get(key.index, 0) >= key.attempt
    return isinstance(key, tuple) and key[0] not in uids
