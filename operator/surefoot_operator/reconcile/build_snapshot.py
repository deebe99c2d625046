"""Holds the reconciler's dependencies and builds its snapshots.

Called by `reconcile`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType

from surefoot.protocol.identities import WorkerId
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.sessions import observed_sessions as sessions_seen
from surefoot_operator.coordinator.uploads import promotion_seconds
from surefoot_operator.job_snapshot import JobSnapshot, ObservedWorker, PendingCreate
from surefoot_operator.memory import JobMemoryServers
from surefoot_operator.platforms.interface import Platform, PlatformSnapshot, WorkerEnvironment
from surefoot_operator.policy.core.actions import CreateWorker
from surefoot_operator.policy.failure.clock_skew import clamp_future_times
from surefoot_operator.policy.membership.lifecycle import status_without_rejection
from surefoot_operator.reconcile.worker_calls import PendingCalls
from surefoot_operator.settings import OperatorSettings

# ---- turns of jobs ---------------------------------------------------------------------------------------------------
# Lets jobs reconcile in turns, with room for everything else in between. Made by the composition root, shared by all
# jobs' reconcilers. A thousand rounds that wait for nothing would otherwise follow each other within one pass of the
# event loop: for seconds no lease is renewed, no agent heard, no probe answered.

SLICE_SECONDS = 0.02
"""Rounds begin for so long in one pass of the event loop; the round that is begun last may take longer."""


class ReconcileLimiter:
    """Limits rounds under way to `at_once`.

    In one pass of the event loop only a slice of them begins.
    """

    def __init__(self, at_once: int = 1, slice_seconds: float = SLICE_SECONDS) -> None:
        self._places, self._slice_seconds = asyncio.Semaphore(at_once), slice_seconds
        self._began: float | None = None
        """When the first round of the present pass began."""

    async def __aenter__(self) -> None:
        await self._places.acquire()
        try:
            while not self._may_begin():  # noqa: ASYNC110  the next pass is what is waited for, and it comes at once
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._places.release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._places.release()

    def _may_begin(self) -> bool:
        loop = asyncio.get_running_loop()
        if self._began is None:
            self._began = loop.time()
            loop.call_soon(self._pass_over)  # behind all that is ready in this pass
            return True
        return loop.time() - self._began < self._slice_seconds

    def _pass_over(self) -> None:
        self._began = None


# ---- how often progress is written -----------------------------------------------------------------------------------
# Bounds how often statuses that only report progress are written. Made by the composition root, shared by all jobs'
# reconcilers. Each job by itself writes progress seconds apart; a thousand jobs whose pods come at once still wrote
# hundreds of statuses a second, which kept the API server from making the pods.

RETRY_SECONDS = 1.0
"""Whoever may not write now asks again after so long, with what has become of it meanwhile."""


class StatusWriteLimiter:
    """Allows so many writes a second, and a burst after a pause.

    Of all jobs together.
    """

    def __init__(self, per_second: float = 30.0, burst: int = 60) -> None:
        self._per_second, self._burst = per_second, float(burst)
        self._left, self._counted_at = float(burst), float("-inf")

    def wait_seconds(self, now: float) -> float:
        """Returns 0 if one may write now, else the wait.

        Args:
            now: Seconds of a clock that only grows.
        """
        self._left = min(self._burst, self._left + max(0.0, now - self._counted_at) * self._per_second)
        self._counted_at = now
        if self._left < 1.0:
            return RETRY_SECONDS
        self._left -= 1.0
        return 0.0


# ---- build snapshot --------------------------------------------------------------------------------------------------

Environment = Callable[[TrainingJob, CreateWorker], WorkerEnvironment]
"""What a new worker must be told."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    platform: Platform
    channel: AgentChannel
    memory: JobMemoryServers
    environment: Environment
    settings: OperatorSettings
    clock: Callable[[], float]
    """Unix seconds, which only grow: no step of the wall clock moves them."""
    generation_token: Callable[[int], str]
    """The secret of an epoch: the same from every leader, and in no status."""
    turns: ReconcileLimiter = field(default_factory=ReconcileLimiter)
    """How many jobs reconcile at one moment; all that share an event loop share it."""
    pace: StatusWriteLimiter = field(default_factory=StatusWriteLimiter)
    """How often progress alone is written, of all jobs that share it."""


async def build_snapshot(
    dependencies: Dependencies, shown: PlatformSnapshot, term_seconds: float, calls: PendingCalls
) -> JobSnapshot:
    """Builds the snapshot that the round's plan is made from.

    Everything known now, as one value. `shown` was looked up just before; the calls are what it may not show yet.
    """
    orders = dependencies.channel.sessions.orders
    listed = (*(orders.persistent.entries or ()), *(orders.source_listing.entries or ()))
    layouts = {**orders.source_layouts, **orders.layouts}
    holders = dependencies.memory.observed_servers()
    covers = await dependencies.memory.covers(listed, layouts, holders)
    sessions = dependencies.channel.sessions
    now = dependencies.clock()
    return JobSnapshot(
        now_seconds=now,
        term_seconds=term_seconds,
        job=shown.job,
        status=clamp_future_times(
            status_without_rejection(shown.status), now, shown.job.spec.failure_policy.eval_period_seconds
        ),
        workers=shown.workers,
        nodes=shown.nodes,
        sessions=sessions_seen(sessions),
        retry_later_seconds=sessions.turned_away_seconds,
        servers=holders,
        persistent=sessions.orders.persistent,
        source_listing=orders.source_listing,  # as `covers` knows it: what came meanwhile comes with the next snapshot
        barrier=sessions.orders.barrier,
        covers=covers,
        uploaded=sessions.orders.uploaded,
        failed_uploads=sessions.orders.failed_uploads,
        unreadable=sessions.orders.unreadable,
        upload_seconds=promotion_seconds(orders, shown.status.last_uploaded),
        refused_records=(*dependencies.memory.refused, *orders.refused),
        memory_cleared=dependencies.memory.cleaned,
        purges=shown.purges,
        purge_call=calls.purge,
        spec_rejection=shown.rejection,
        free_nodes=shown.free_nodes,
        creates=calls.creates,
        deletions=calls.deletions,
        pod_groups=shown.pod_groups,
        refused_calls=shown.refused_calls,
        group_calls=calls.groups,
    )


def ranks_of(shown: PlatformSnapshot, status: JobStatus) -> int:
    """Counts the ranks that the job runs or ran: they bound its records, whatever its spec asks for."""
    placed = len({worker.index for worker in shown.workers if worker.node is not None})
    return max(placed * shown.job.spec.nproc_per_node, *(entry.world_size for entry in status.lineage), 0)


def worker_ids(workers: Iterable[ObservedWorker], creates: Iterable[PendingCreate]) -> frozenset[WorkerId]:
    """Identifies workers that are there, or may be by now."""
    there = frozenset(WorkerId(worker.index, worker.attempt) for worker in workers)
    return there | {WorkerId(create.index, create.attempt) for create in creates if create.in_progress}
