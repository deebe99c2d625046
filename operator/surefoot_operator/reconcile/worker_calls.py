"""Runs calls for workers and pod groups in the background, each with its own backoff.

Owned by `reconcile`. No reconcile waits for these calls. Otherwise a pod that a quota rejects, or a webhook that takes
its full ten seconds, would delay fencing, reading and reassigning the workers that survived a failure. A rejected call
may be repeated after its backoff. The plan gets both: the calls in progress, and the rejections with their messages.
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
from surefoot_operator.job_snapshot import ObservedPurgeCall, ObservedWorker, PendingCreate, PendingGroupCall
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
# Runs the calls that create the pods which delete a deleted job's persistent data, one at a time. Rejections are
# counted, so that the plan does not repeat an attempt forever that never gets a pod.


class PurgeCalls:
    """Runs one job's purge calls; after each, `wake` makes the reconciler plan again."""

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._task: asyncio.Task[None] | None = None
        self.state = ObservedPurgeCall()
        """The current call and the outcome of earlier ones; the plan reads it."""

    def start(self, action: PurgePersistent, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts the call, unless one is in progress."""
        if self._task is None:
            self.state = replace(self.state, in_progress=True)
            self._task = asyncio.create_task(self._run_call(action, call), name=str(action))

    async def wait_until_done(self) -> None:
        """Waits until no call is in progress."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Cancels the call in progress and waits for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run_call(self, action: PurgePersistent, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await call()
            attempt = max(action.attempt, self.state.attempt)
            self.state = ObservedPurgeCall(attempt, self._clock(), rejections=self.state.rejections)
        except Exception as error:  # of any kind: the plan sees it in `seen` and decides
            metrics.reconcile_failures.labels(type(error).__name__).inc()
            log.warning(
                "%s; this call failed: `%s`; the next plan decides about a retry",
                error,
                action,
                exc_info=None if isinstance(error, PlatformError) else error,
            )
            self.state = self._state_with_failure(action.attempt, error)
        finally:
            self.state = replace(self.state, in_progress=False)
            self._task = None
            self._wake()

    def _state_with_failure(self, attempt: int, error: Exception) -> ObservedPurgeCall:
        previous, now = self.state, self._clock()
        decided = isinstance(error, PlatformError) and error.is_final and not error.is_busy
        return replace(
            previous,
            rejection=str(error) or type(error).__name__,
            rejected_attempt=attempt,
            rejections=previous.rejections + decided,
            since_seconds=previous.since_seconds if previous.rejection else now,
            last_seconds=now,
            closing=isinstance(error, PlatformError) and error.is_namespace_deleted,
        )


# ---- worker calls ----------------------------------------------------------------------------------------------------

MAX_CONCURRENT_CALLS = 32
"""Calls to the platform in progress at once, so that one job's recovery does not flood the API server."""

REJECTED_CALL_BACKOFF = Backoff(1.0, 30.0)
"""Wait before a rejected call is repeated."""

Call = Callable[[], Coroutine[Any, Any, None]]
_DeletionKey = tuple[str, bool]
"""Uid of a worker, and whether to force its deletion: a forced call does not wait for a graceful one in progress."""
_CallKey = WorkerId | _DeletionKey | str
"""Identifies the object of a call; a string is the gang scheduler of a pod group. One call a key runs at a time."""


@dataclass(slots=True)
class _PendingCall:
    """A call that is in progress while `task` is set, and otherwise was rejected."""

    task: asyncio.Task[None] | None = None
    """Runs the call; None: no call is in progress."""
    failures: int = 0
    """Failures in a row; they determine the backoff."""
    rejection: str = ""
    """Message of the last failure; empty: none yet."""
    permanent: bool = False
    """The last rejection would be repeated unless the request changes."""
    undecided: bool = False
    """Some attempt got no answer, so the platform may still carry it out late."""
    retry_seconds: float = 0.0
    """No retry before this time. Unix seconds; 0: may start now."""


@dataclass(frozen=True, slots=True)
class PendingCalls:
    """Calls whose effect an observation of the platform may not show yet."""

    creates: tuple[PendingCreate, ...]
    """Workers whose creation is in progress or was rejected."""
    deletions: frozenset[str]
    """Uids of workers that may be deleted at any time."""
    groups: tuple[PendingGroupCall, ...]
    """Pod group calls in progress or rejected."""
    purge: ObservedPurgeCall = field(default_factory=ObservedPurgeCall)
    """Outcome of this leader's purge calls."""


class WorkerCalls:
    """Runs the calls for one job's workers and pod groups.

    Args:
        clock: Returns Unix seconds.
        wake: Makes the reconciler plan again; called after each call and when a backoff ends.
    """

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._calls: dict[_CallKey, _PendingCall] = {}
        self._purges = PurgeCalls(clock, wake)
        self._limit = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    def start_create(self, action: CreateWorker, call: Call) -> None:
        """Starts the call, unless it is in progress or its backoff lasts."""
        self._start_call(WorkerId(action.index, action.attempt), str(action), call)

    def start_delete(self, action: DeleteWorker, call: Call) -> None:
        """Starts the call, unless it is in progress or its backoff lasts."""
        self._start_call((action.uid, action.force), str(action), call)

    def start_pod_group_call(self, action: ApplyPodGroup | DeletePodGroup, call: Call) -> None:
        """Starts the call, unless one for the same gang scheduler is in progress or its backoff lasts."""
        gang = action.group.gang if isinstance(action, ApplyPodGroup) else action.gang
        self._start_call(gang, str(action), call)

    def start_purge(self, action: PurgePersistent, call: Call) -> None:
        """Starts the call, unless one is in progress; there is no backoff, because the plan spaces these calls."""
        self._purges.start(action, call)

    @property
    def purge_state(self) -> ObservedPurgeCall:
        """Outcome of this leader's purge calls."""
        return self._purges.state

    def pending_group_calls(self) -> tuple[PendingGroupCall, ...]:
        """Returns the pod group calls that are in progress or rejected."""
        calls_by_gang = ((gang, self._calls.get(gang)) for gang in GANG_SCHEDULERS)
        return tuple(
            PendingGroupCall(gang, call.task is not None, call.rejection, call.retry_seconds)
            for gang, call in calls_by_gang
            if call is not None
        )

    async def observe_with_calls(
        self, observation: Awaitable[PlatformSnapshot]
    ) -> tuple[PlatformSnapshot, PendingCalls]:
        """Awaits an observation of the platform and returns it with the calls that overlapped it.

        A create that ends while the platform is read may be missing from the observation. Without it in the result, the
        plan would create a second worker for the same index.
        """
        creates_before, deletions_before = self.pending_creates(), self.pending_deletions()
        observed = await observation
        self.forget_rejections(observed.workers)
        creates = self.pending_creates()
        create_ids = {(c.index, c.attempt) for c in creates}
        ended_creates = (c for c in creates_before if c.in_progress and (c.index, c.attempt) not in create_ids)
        return observed, PendingCalls(
            (*creates, *ended_creates),
            deletions_before | self.pending_deletions(),
            self.pending_group_calls(),
            self.purge_state,
        )

    def pending_creates(self) -> tuple[PendingCreate, ...]:
        """Returns the creates that are in progress or rejected, by index and attempt."""
        creates = [(key, call) for key, call in self._calls.items() if isinstance(key, WorkerId)]
        return tuple(
            PendingCreate(
                key.index, key.attempt, call.task is not None, call.rejection, call.permanent, call.retry_seconds
            )
            for key, call in sorted(creates, key=lambda item: item[0])
        )

    def pending_deletions(self) -> frozenset[str]:
        """Returns the uids of workers whose deletion may happen at any time.

        Their deletion is in progress or got no answer. A deletion that the platform rejected does not count.
        """
        return frozenset(
            key[0]
            for key, call in self._calls.items()
            if isinstance(key, tuple) and (call.task is not None or call.undecided)
        )

    def forget_rejections(self, workers: Iterable[ObservedWorker]) -> None:
        """Forgets rejections that no longer matter: the worker exists after all, or a later attempt does.

        Others are forgotten 60 s after their backoff ended, because the plan stopped requesting that call.
        """
        newest_attempts: dict[int, int] = {}
        uids = set()
        for worker in workers:
            newest_attempts[worker.index] = max(worker.attempt, newest_attempts.get(worker.index, 0))
            uids.add(worker.uid)
        for key, call in list(self._calls.items()):
            obsolete = _is_obsolete(key, newest_attempts, uids)
            if call.task is None and (
                obsolete or self._clock() > call.retry_seconds + 2 * REJECTED_CALL_BACKOFF.max_seconds
            ):
                del self._calls[key]

    async def wait_until_done(self) -> None:
        """Waits until no call is in progress."""
        while tasks := [call.task for call in self._calls.values() if call.task is not None]:
            await asyncio.wait(tasks)
        await self._purges.wait_until_done()

    async def close(self) -> None:
        """Cancels the calls in progress and waits for their end."""
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._calls.clear()
        await self._purges.close()

    def _start_call(self, key: _CallKey, action_text: str, call: Call) -> None:
        pending_call = self._calls.setdefault(key, _PendingCall())
        if pending_call.task is None and self._clock() >= pending_call.retry_seconds:
            pending_call.task = asyncio.create_task(
                self._run_call(key, pending_call, action_text, call), name=action_text
            )

    async def _run_call(self, key: _CallKey, pending_call: _PendingCall, action_text: str, call: Call) -> None:
        try:
            async with self._limit:
                await call()
            del self._calls[key]
        except Exception as error:  # noqa: BLE001  of any kind: the call is retried, and no other call waits for it
            self._record_failure(pending_call, action_text, error)
        finally:
            pending_call.task = None
            self._wake()

    def _record_failure(self, pending_call: _PendingCall, action_text: str, error: Exception) -> None:
        metrics.reconcile_failures.labels(type(error).__name__).inc()
        already_logged = pending_call.rejection == str(error)
        pending_call.failures += 1
        pending_call.rejection, pending_call.permanent = (
            str(error),
            isinstance(error, PlatformError) and error.is_permanent,
        )
        pending_call.undecided |= not (isinstance(error, PlatformError) and error.is_final)
        backoff_seconds = REJECTED_CALL_BACKOFF.wait_seconds(pending_call.failures, random.random())
        pending_call.retry_seconds = self._clock() + backoff_seconds
        if not isinstance(error, PlatformError):
            log.error("call failed: `%s`: %s; it is retried after a backoff", action_text, error, exc_info=error)
        elif not already_logged:
            log.warning("call failed: `%s`; retrying in %.0f s: %s", action_text, backoff_seconds, error)
        asyncio.get_running_loop().call_later(backoff_seconds, self._wake)


def _is_obsolete(key: _CallKey, newest_attempts: Mapping[int, int], uids: Collection[str]) -> bool:
    if isinstance(key, WorkerId):
        return newest_attempts.get(key.index, 0) >= key.attempt
    return isinstance(key, tuple) and key[0] not in uids
