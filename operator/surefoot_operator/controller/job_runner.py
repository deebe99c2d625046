"""Runs one TrainingJob: its platform, agent channel, memory servers and reconciler.

Created by `shard_leadership` while this operator leads. Keeps nothing that another leader would lack.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from surefoot_operator.api.spec import HealthPolicy
from surefoot_operator.controller.process_setup import TermClock, logged_job
from surefoot_operator.controller.worker_environment import WorkerEnvironmentFactory
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.agent_server import AgentServer
from surefoot_operator.errors import PlatformError
from surefoot_operator.memory import JobMemoryServers, MemoryServerPool, MemoryTierCredentials
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.platforms.kubernetes.pods import PodSettings
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.policy.maintenance.memory_tier_rollout import JobSafety
from surefoot_operator.reconcile import Reconciler
from surefoot_operator.reconcile.build_snapshot import Dependencies, ReconcileLimiter, StatusWriteLimiter
from surefoot_operator.settings import OperatorSettings

log = logging.getLogger(__name__)

MEMORY_DELETION_TIMEOUT_SECONDS = 10.0
"""How long to delete a deleted job's memory here; the leader's orphan sweep deletes the rest."""
MAX_CONCURRENT_RECONCILES = 64
"""Number of jobs that reconcile at once, so that a thousand of them do not call the API server together."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """Identifies one incarnation of a job; a job recreated with the same name has another uid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class SharedResources:
    """Objects that all jobs of one operator share."""

    cache: ClusterCache
    """Cached objects of the cluster."""
    server: AgentServer
    """Accepts the agents' connections."""
    environment_factory: WorkerEnvironmentFactory
    """Builds the environment of new workers."""
    pod_settings: PodSettings
    """Settings of the workers' pods."""
    memory_credentials: MemoryTierCredentials
    """The operator's credentials for memory servers."""
    settings: OperatorSettings
    """Settings of the operator that are the same for all jobs."""
    memory_pool: MemoryServerPool
    """Connections to memory servers: each is visited once for all jobs."""
    reconcile_limiter: ReconcileLimiter = field(default_factory=lambda: ReconcileLimiter(MAX_CONCURRENT_RECONCILES))
    """Limits concurrent reconciles."""
    status_write_limiter: StatusWriteLimiter = field(default_factory=StatusWriteLimiter)
    """Limits writes of statuses that only report progress."""
    clock: Callable[[], float] = field(default_factory=TermClock)
    """Returns Unix seconds of the current term; no comparison of times follows the wall clock."""


class JobRunner:
    """Reconciles one job between `start` and `stop`."""

    def __init__(self, key: JobKey, shared: SharedResources) -> None:
        self.key = key
        self._shared = shared
        self._platform = KubernetesPlatform(
            shared.cache, key.namespace, key.name, key.uid, shared.memory_credentials, shared.pod_settings
        )
        account = shared.environment_factory.secrets.memory_account(key.uid)
        self._memory = JobMemoryServers(key.uid, account, shared.memory_pool, shared.clock, self.wake)
        channel = AgentChannel(key.uid, self._heartbeat_seconds(), shared.clock, self.wake)
        token = partial(shared.environment_factory.secrets.generation_token, key.uid)
        dependencies = Dependencies(
            self._platform, channel, self._memory, shared.environment_factory, shared.settings, shared.clock, token,
            shared.reconcile_limiter, shared.status_write_limiter,
        )  # fmt: skip
        self._channel = channel
        self._reconciler = Reconciler(dependencies)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Accepts the job's agents and starts its reconciler."""
        self._shared.server.add_channel(self.key.uid, self._channel)
        self._task = asyncio.create_task(self._run(), name=f"reconcile {self.key}")
        log.info("started the runner of job %s (%s)", self.key, self.key.uid)

    @property
    def current_reconcile_seconds(self) -> float:
        """How long the current reconcile has been running; 0 between two."""
        return self._reconciler.current_reconcile_seconds

    @property
    def rollout_safety(self) -> JobSafety:
        """Whether the job can lose a memory server, as of its last reconcile."""
        job_safety = self._reconciler.safety
        if job_safety is None:
            return JobSafety(str(self.key), False, "this operator has not reconciled it yet", self._shared.clock())
        return replace(job_safety, job=str(self.key))

    def data_lost_with_node(self, node: str) -> str:
        """Describes the data that the job would lose with a node; empty: none."""
        return self._reconciler.data_lost_with_node(node)

    def wake(self, urgent: bool = True) -> None:
        """Makes the reconciler plan again: at once if urgent, otherwise after a short delay."""
        self._reconciler.wake(urgent)

    async def stop(self, is_removed: bool) -> None:
        """Stops the reconciler, and deletes the memory of a job that was deleted.

        Args:
            gone: Whether the cache no longer shows the job. The API server is asked again before data is deleted.
        """
        self._shared.server.remove_channel(self.key.uid, self._channel)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        is_removed = is_removed and await self._is_deleted()
        if is_removed:
            try:
                async with asyncio.timeout(MEMORY_DELETION_TIMEOUT_SECONDS):
                    await self._memory.delete_job()
            except TimeoutError:
                log.warning(
                    "cannot delete the memory of job %s within %g s; the orphan sweep deletes the rest",
                    self.key,
                    MEMORY_DELETION_TIMEOUT_SECONDS,
                )
        await self._memory.close()
        await self._platform.close()
        log.info(
            "stopped the runner of job %s (%s): the job is %s",
            self.key,
            self.key.uid,
            "deleted" if is_removed else "unchanged",
        )

    async def _is_deleted(self) -> bool:
        """Asks the API server itself, because checkpoints must not be deleted for a watch that was wrong."""
        path = api_objects.jobs_path(self.key.namespace, self.key.name)
        try:
            stored_job = await self._shared.cache.api.get(path)
        except ApiError as error:
            return error.code == 404
        except PlatformError as error:
            log.warning(
                "cannot verify whether job %s was deleted, its keys stay in memory until the orphan sweep: %s",
                self.key,
                error,
            )
            return False
        return bool(stored_job["metadata"]["uid"] != self.key.uid)

    async def _run(self) -> None:
        logged_job.set(str(self.key))
        await self._reconciler.run()

    def _heartbeat_seconds(self) -> float:
        job = self._platform.last_valid_job()
        # If the spec cannot be read, use the default; the reconciler reports the error.
        return (HealthPolicy() if job is None else job.spec.health_policy).heartbeat_seconds
