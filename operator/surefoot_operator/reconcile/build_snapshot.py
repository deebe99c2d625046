"""Builds the snapshots that jobs are planned from, and limits how often jobs reconcile and write progress.

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
from surefoot_operator.coordinator.sessions import list_observed_sessions as sessions_seen
from surefoot_operator.coordinator.uploads import recent_upload_seconds, slowest_upload_seconds
from surefoot_operator.job_snapshot import JobSnapshot, ObservedWorker, PendingCreate
from surefoot_operator.memory import JobMemoryServers
from surefoot_operator.platforms.interface import Platform, PlatformSnapshot, WorkerEnvironment
from surefoot_operator.policy.core.actions import CreateWorker
from surefoot_operator.policy.failure.clock_skew import clamp_future_times
from surefoot_operator.policy.membership.lifecycle import status_without_rejection
from surefoot_operator.reconcile.worker_calls import PendingCalls
from surefoot_operator.settings import OperatorSettings

# ---- limit on concurrent reconciles ----------------------------------------------------------------------------------
# Lets jobs reconcile a few at a time, and leaves room for everything else in between. Created by the composition root
# and shared by the reconcilers of all jobs. Otherwise a thousand reconciles that wait for nothing would follow each
# other in one pass of the event loop, and for seconds no lease is renewed, no agent is read and no health endpoint
# answers.

SLICE_SECONDS = 0.02
"""Within one pass of the event loop, reconciles start for this long; the last one to start may run longer."""


class ReconcileLimiter:
    """Limits how many reconciles run at once, and how many start in one pass of the event loop.

    Args:
        at_once: Maximum number of reconciles that run concurrently.
        slice_seconds: Time within one pass of the event loop in which reconciles may start.
    """

    def __init__(self, at_once: int = 1, slice_seconds: float = SLICE_SECONDS) -> None:
        self._slots, self._slice_seconds = asyncio.Semaphore(at_once), slice_seconds
        self._pass_start_seconds: float | None = None
        """When the first reconcile of the current pass started; None between passes."""

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        try:
            # The next pass of the event loop comes at once, so there is no event to wait for.
            while not self._may_start():  # noqa: ASYNC110
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._slots.release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.release()

    def _may_start(self) -> bool:
        loop = asyncio.get_running_loop()
        if self._pass_start_seconds is None:
            self._pass_start_seconds = loop.time()
            loop.call_soon(self._end_pass)  # runs after all callbacks that are ready in this pass
            return True
        return loop.time() - self._pass_start_seconds < self._slice_seconds

    def _end_pass(self) -> None:
        self._pass_start_seconds = None


# ---- limit on progress writes ----------------------------------------------------------------------------------------
# Limits how often statuses that only report progress are written. Created by the composition root and shared by the
# reconcilers of all jobs. Although each job spaces its own progress writes, a thousand jobs whose pods start together
# wrote hundreds of statuses a second, which kept the API server from creating the pods.

PROGRESS_WRITE_RETRY_SECONDS = 1.0
"""Wait before a rejected progress write is tried again, then with the newest progress."""


class StatusWriteLimiter:
    """Limits the status writes of all jobs together: a rate, plus a burst after a pause (token bucket)."""

    def __init__(self, per_second: float = 30.0, burst: int = 60) -> None:
        self._per_second, self._burst = per_second, float(burst)
        self._tokens, self._refilled_seconds = float(burst), float("-inf")

    def wait_seconds(self, now: float) -> float:
        """Returns 0 if a status may be written now, and counts that write; else the seconds to wait.

        Args:
            now: Seconds of a monotonic clock.
        """
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._refilled_seconds) * self._per_second)
        self._refilled_seconds = now
        if self._tokens < 1.0:
            return PROGRESS_WRITE_RETRY_SECONDS
        self._tokens -= 1.0
        return 0.0


# ---- build snapshot --------------------------------------------------------------------------------------------------

Environment = Callable[[TrainingJob, CreateWorker], WorkerEnvironment]
"""Builds the environment variables and secrets of a new worker."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The services and settings that one job's reconciler uses."""

    platform: Platform
    """Shows and changes the job, its workers and their nodes."""
    channel: AgentChannel
    """Connections to the job's agents."""
    memory: JobMemoryServers
    """The job's view of its memory servers."""
    environment: Environment
    """Builds the environment of new workers."""
    settings: OperatorSettings
    """Settings of the operator that are the same for all jobs."""
    clock: Callable[[], float]
    """Unix seconds that never decrease: steps of the wall clock do not move them."""
    generation_token: Callable[[int], str]
    """Returns the secret of a generation: the same on every leader, and never stored in the status."""
    reconcile_limiter: ReconcileLimiter = field(default_factory=ReconcileLimiter)
    """Limits concurrent reconciles; shared by all jobs of one event loop."""
    status_write_limiter: StatusWriteLimiter = field(default_factory=StatusWriteLimiter)
    """Limits writes that only report progress; shared by the same jobs."""


async def build_snapshot(
    dependencies: Dependencies, observed: PlatformSnapshot, term_seconds: float, calls: PendingCalls
) -> JobSnapshot:
    """Builds the snapshot that one plan is made from.

    Args:
        dependencies: The job's connections and memory servers.
        shown: What the platform observed just before.
        term_seconds: When this leader took the job over, in Unix seconds.
        calls: Calls whose effect the platform may not show yet.
    """
    requests = dependencies.channel.sessions.requests
    listed_checkpoints = (*(requests.persistent_listing.entries or ()), *(requests.source_listing.entries or ()))
    layouts = {**requests.source_layouts, **requests.persistent_layouts}
    servers = dependencies.memory.observed_servers()
    covers = await dependencies.memory.check_coverage(listed_checkpoints, layouts, servers)
    sessions = dependencies.channel.sessions
    now = dependencies.clock()
    return JobSnapshot(
        now_seconds=now,
        term_seconds=term_seconds,
        job=observed.job,
        status=clamp_future_times(
            status_without_rejection(observed.status), now, observed.job.spec.failure_policy.eval_period_seconds
        ),
        workers=observed.workers,
        nodes=observed.nodes,
        sessions=sessions_seen(sessions),
        retry_later_seconds=sessions.last_retry_later_seconds,
        servers=servers,
        persistent=sessions.requests.persistent_listing,
        source_listing=requests.source_listing,  # the version that `covers` was computed from, not a newer one
        barrier=sessions.requests.barrier,
        covers=covers,
        uploaded=sessions.requests.uploaded_saves,
        failed_uploads=sessions.requests.failed_uploads,
        unreadable=sessions.requests.unreadable_saves,
        upload_seconds=slowest_upload_seconds(requests, observed.status.last_uploaded),
        recent_upload_seconds=recent_upload_seconds(sessions.requests),
        rejected_records=(*dependencies.memory.out_of_bounds_records, *requests.rejected_records),
        memory_cleared=dependencies.memory.is_deleted,
        purges=observed.purges,
        purge_call=calls.purge,
        spec_rejection=observed.spec_rejection,
        free_nodes=observed.free_nodes,
        creates=calls.creates,
        deletion_uids=calls.deletions,
        pod_groups=observed.pod_groups,
        rejected_calls=observed.rejected_calls,
        group_calls=calls.groups,
    )


def count_ranks(observed: PlatformSnapshot, status: JobStatus) -> int:
    """Returns how many ranks the job runs or ran at most, which bounds its records whatever its spec requests."""
    placed_count = len({worker.index for worker in observed.workers if worker.node is not None})
    return max(placed_count * observed.job.spec.nproc_per_node, *(entry.world_size for entry in status.lineage), 0)


def expected_worker_ids(workers: Iterable[ObservedWorker], creates: Iterable[PendingCreate]) -> frozenset[WorkerId]:
    """Returns the ids of the workers that exist, or may exist by now because a create is in progress."""
    existing_ids = frozenset(WorkerId(worker.index, worker.attempt) for worker in workers)
    return existing_ids | {WorkerId(create.index, create.attempt) for create in creates if create.in_progress}
