"""Assembles, starts and stops the operator of a cluster.

Run by kopf, whose handlers are in `__main__`. A standby replica does everything but run jobs: it watches, listens, and
refers agents to the leader. The process keeps nothing that it could not lose: status is stored in the API server, and
agents and memory servers report the rest again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from surefoot.memory_server.connection import TLS_SERVER_NAME
from surefoot.protocol.timeouts import Backoff
from surefoot.task_set import TaskSet, repeat_until_cancelled
from surefoot_operator import metrics, reasons
from surefoot_operator.controller import process_metrics
from surefoot_operator.controller.admission_webhooks import Webhooks
from surefoot_operator.controller.cluster_settings import ClusterSettings
from surefoot_operator.controller.credentials.certificates import CoordinatorTls, server_names
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.controller.credentials.secrets import SecretRef, load_admin_password, load_root_key
from surefoot_operator.controller.credentials.token_review import TokenReviewer
from surefoot_operator.controller.health_endpoints import (
    HealthEndpoints,
    LivenessLimits,
    LivenessSigns,
    LoopLag,
    liveness_failures,
)
from surefoot_operator.controller.job_runner import SharedResources
from surefoot_operator.controller.leader.cluster_claim import ClusterClaim
from surefoot_operator.controller.leader.election_rules import shard_of, shard_url
from surefoot_operator.controller.leader.leader_election import LeaseRef
from surefoot_operator.controller.leader.leader_election import boot_clock as lease_clock
from surefoot_operator.controller.leader.shard_election import ShardElection
from surefoot_operator.controller.memory_tier_maintenance import rollout_blocker
from surefoot_operator.controller.shard_leadership import ShardTerms, stop_within
from surefoot_operator.controller.worker_environment import WORKER_METRICS_PORT, WorkerEnvironmentFactory
from surefoot_operator.coordinator.agent_server import AgentServer, ShardDirectory
from surefoot_operator.errors import PlatformError
from surefoot_operator.memory import MemoryServerPool, MemoryTierCredentials
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.api_writes import record_pod_event
from surefoot_operator.platforms.kubernetes.pods import PodSettings
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.rejected_calls import count_by_cause
from surefoot_operator.settings import CoordinatorSettings, OperatorSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

PROGRESS_INTERVAL_SECONDS = 3.0
"""Minimum time between writes of one job's progress, so that hundreds of jobs do not flood the API server."""
TAKEOVER_DELAY_SECONDS = 10.0
"""Delay before a new leader writes progress. It fences and reads servers and waits for agents first; otherwise it would
report for hundreds of jobs that they are unreachable, and revoke that seconds later."""

API_WAIT_TIMEOUT_SECONDS = 120.0
"""How long to wait for an unreachable API server at the start; then the process exits, and its pod shows the
failure."""
PASSWORD_POLL_SECONDS = 20.0
"""Interval for reading the memory tier's password: after a change, servers deny the operator access for at most
this."""
REJECTED_CALLS_INTERVAL_SECONDS = 2.0
"""Interval for publishing which calls the API server rejects."""
_BACKOFF = Backoff(0.2, 5.0)


class ClusterOperator:
    """Runs one replica of the operator."""

    def __init__(self, api: Api, settings: ClusterSettings) -> None:
        self._api, self._settings = api, settings
        self._cache = ClusterCache(api, server_namespace=settings.namespace, gangs=settings.gang_schedulers)
        self._loop_lag = LoopLag()
        self._health_endpoints = HealthEndpoints(
            settings.probe_port,
            settings.metrics_port,
            self._liveness_failures,
            self._readiness_failures,
            self._readiness_remarks,
        )
        self._agent_server: AgentServer | None = None
        self._tls: CoordinatorTls | None = None
        self._webhooks: Webhooks | None = None
        self._shard_terms: ShardTerms | None = None
        self._claim: ClusterClaim | None = None
        self._election: ShardElection | None = None
        self._lease_api: Api | None = None
        self._background_tasks = TaskSet(self._background_task_failed)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._not_ready_reason = "the operator is starting"
        """Why the replica is not ready; empty: it is."""

    async def run(self, ended: asyncio.Event) -> None:
        """Stands by, leads, and stops once `ended` is set.

        Raises:
            LeaseLost: This replica led, and another one does now.
            PlatformError: The API server rejects a call that the operator cannot run without.
            OSError: A port is taken.
        """
        operator_task = asyncio.create_task(self._start_and_lead(), name="live")
        stop_task = asyncio.create_task(ended.wait(), name="ended")
        try:
            await asyncio.wait((operator_task, stop_task, self._failed), return_when=asyncio.FIRST_COMPLETED)
            for source in (self._failed, operator_task):
                if source.done():
                    source.result()
        finally:
            stop_task.cancel()
            operator_task.cancel()
            await asyncio.gather(operator_task, stop_task, return_exceptions=True)
            await self._shut_down()

    # ---- start ------------------------------------------------------------------------------------------------------

    async def _start_and_lead(self) -> None:
        # Serve health first, so that probes show why the replica is not ready.
        await self._health_endpoints.start()
        log.info(
            "/healthz and /readyz on port %d, /metrics on port %d",
            self._health_endpoints.port,
            self._health_endpoints.metrics_port,
        )
        self._background_tasks.start(self._loop_lag.run())
        self._background_tasks.start(self._publish_rejected_calls())
        self._not_ready_reason = "waiting for the operator's secrets"
        # Read the secrets, open the port for agents, and list the cluster's objects.
        shared = await self._retry_while_unreachable(self._start_shared_resources)
        self._not_ready_reason = "waiting for the first list of the cluster's objects"
        await self._retry_while_unreachable(self._cache.start)
        # Leases use their own connections: a renewal that waits for hundreds of other writes would come too late.
        self._lease_api = await asyncio.to_thread(self._api.with_own_connections)
        lease = LeaseRef(self._settings.namespace, self._settings.lease_name)
        claim = self._claim = ClusterClaim(
            self._lease_api,
            f"{lease.namespace}/{lease.name}",
            self._settings.watch_namespace,
            self._settings.identity,
            self._report_standby,
        )
        await claim.acquire()
        self._background_tasks.start(claim.renew_until_lost())
        terms = self._shard_terms = ShardTerms(
            self._api, self._settings, shared, self._background_task_failed, self._rollout_blocker, claim.require_claim
        )
        self._election = ShardElection(self._lease_api, lease, self._settings.identity, self._settings.shards, terms)
        # Prepare the election; serve webhooks before the replica may lead.
        if self._settings.admission_webhooks:
            await self._start_webhooks(shared, terms, self._election)
        process_metrics.jobs.set_function(lambda: terms.job_count)
        for shard in range(self._settings.shards):
            metrics.leader.labels(str(shard)).set(0)
        self._not_ready_reason = ""
        self._background_tasks.start(self._election.run())
        await asyncio.Event().wait()

    async def _start_webhooks(self, shared: SharedResources, terms: ShardTerms, election: ShardElection) -> None:
        """Serves the admission webhooks; evictions are reviewed for the jobs of the shards that this replica leads."""
        api = self._api.with_write_check(lambda: election.require_leadership(0))
        self._webhooks = Webhooks(api, shared, terms.data_lost_with_node, self._tls, self._settings)
        await self._webhooks.start()
        terms.run_with_shard_0(self._webhooks.keep_ca_bundle_current)

    def _rollout_blocker(self, ready: str) -> str:
        """Returns why no memory server may be restarted, as other shards' leaders noted on their leases."""
        assert self._election is not None, "rollouts are planned while shard 0 is led"
        election = self._election
        blockers = (
            rollout_blocker(shard, *election.leader_and_annotations(shard), ready)
            for shard in range(1, election.shard_count)
        )
        return next((blocker for blocker in blockers if blocker), "")

    def _shard_of(self, job: str) -> int:
        return shard_of(job, self._election.shard_count if self._election is not None else self._settings.shards)

    def _shard_directory(self) -> ShardDirectory:
        def url_of(shard: int) -> str:
            several = self._election is not None and self._election.shard_count > 1
            return shard_url(self._settings.coordinator_url, shard) if several else ""

        return ShardDirectory(self._shard_of, url_of)

    async def _start_shared_resources(self) -> SharedResources:
        """Reads the secrets and starts the agent server, which refers agents to the leader from now on."""
        cluster_settings = self._settings
        tls: CoordinatorTls | None = None
        if cluster_settings.coordinator_url.startswith("wss:"):
            tls = CoordinatorTls(
                self._api,
                self._secret_ref(cluster_settings.tls_secret),
                server_names(cluster_settings.coordinator_url, cluster_settings.namespace, cluster_settings.shards),
            )
            await tls.start()
            self._tls = tls
        secrets = Secrets(await load_root_key(self._api, self._secret_ref(cluster_settings.keys_secret)))
        credentials = await self._read_memory_credentials()
        operator_settings = OperatorSettings(
            coordinator=CoordinatorSettings(host="", port=cluster_settings.coordinator_port, retry_unknown_jobs=True),
            progress_interval_seconds=PROGRESS_INTERVAL_SECONDS,
            progress_write_delay_seconds=TAKEOVER_DELAY_SECONDS,
        )
        token_reviewer = TokenReviewer(self._api, self._cache.workers.items, self._cache.jobs.items, time.time)
        context = tls.context if tls is not None else None
        server = AgentServer(
            operator_settings.coordinator, token_reviewer.authenticate, context, self._shard_directory()
        )
        await server.start()
        self._agent_server = server
        if tls is not None:
            self._background_tasks.start(tls.keep_current())
        environment_factory = WorkerEnvironmentFactory(
            cluster_settings.coordinator_url,
            operator_settings.memory.call_timeout_seconds,
            secrets,
            has_derived_token=False,
            coordinator_ca=lambda: tls.authority if tls is not None else "",
            memory_tls_ca=lambda: credentials.authority,
            metrics_port=WORKER_METRICS_PORT,
            log_format=cluster_settings.log_format,
        )
        pods = PodSettings(
            agent=cluster_settings.agent_command,
            purge_image=cluster_settings.runtime_image,
            socket_folder=cluster_settings.memory_socket_folder,
        )
        return SharedResources(
            self._cache,
            server,
            environment_factory,
            pods,
            credentials,
            operator_settings,
            MemoryServerPool(operator_settings.memory),
        )

    async def _read_memory_credentials(self) -> MemoryTierCredentials:
        """Reads the operator's credentials for memory servers; with TLS it also keeps their certificate current."""
        settings = self._settings
        credentials = MemoryTierCredentials(
            password=await load_admin_password(self._api, self._secret_ref(settings.memory_admin_secret))
        )
        tls: CoordinatorTls | None = None
        if settings.memory_tls:
            tls = CoordinatorTls(self._api, self._secret_ref(settings.memory_tls_secret), (TLS_SERVER_NAME,))
            await tls.start()
            credentials.authority = tls.authority
            self._background_tasks.start(tls.keep_current())
        self._background_tasks.start(self._keep_credentials_current(credentials, tls))
        return credentials

    async def _keep_credentials_current(self, credentials: MemoryTierCredentials, tls: CoordinatorTls | None) -> None:
        """Rereads the credentials for memory servers until cancelled. A failure is logged and retried."""

        async def reread() -> float:
            try:
                credentials.password = await load_admin_password(
                    self._api, self._secret_ref(self._settings.memory_admin_secret)
                )
            except PlatformError as error:
                log.warning("cannot read the memory tier's password, keeping the former one: %s", error)
            if tls is not None:
                credentials.authority = tls.authority
            return PASSWORD_POLL_SECONDS

        await repeat_until_cancelled(reread, PASSWORD_POLL_SECONDS)

    def _secret_ref(self, name: str) -> SecretRef:
        return SecretRef(self._settings.namespace, name)

    async def _retry_while_unreachable(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats the call while the API server is unreachable; a rejection is final."""
        deadline = time.monotonic() + API_WAIT_TIMEOUT_SECONDS
        failures = 0
        while True:
            try:
                return await call()
            except PlatformError as error:
                is_final = isinstance(error, ApiError) and error.code < 500 and error.code != 429
                if is_final or time.monotonic() > deadline:
                    raise
                log.warning("cannot start yet, retrying: %s", error)
            failures += 1
            await asyncio.sleep(_BACKOFF.wait_seconds(failures, random.random()))

    # ---- background -------------------------------------------------------------------------------------------------

    def _background_task_failed(self, name: str, error: BaseException) -> None:
        """Makes `run` raise the error, and so ends the process: none of these tasks may end by itself."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _report_standby(self, reason: str) -> None:
        """Reports in /readyz, in metrics and by an event why this installation is on standby; empty: it is not."""
        self._not_ready_reason = reason
        metrics.standing_by.set(1 if reason else 0)
        if reason:
            self._background_tasks.start(
                self._record_pod_event(Event(reasons.OPERATOR_STANDING_BY, reason, warning=True))
            )

    async def _record_pod_event(self, event: Event) -> None:
        settings = self._settings
        try:
            await record_pod_event(self._api, settings.namespace, settings.pod_name, event, time.time())
        except PlatformError as error:
            log.info("cannot record the event %s of the operator's pod: %s", event.reason, error)

    def _readiness_failures(self) -> list[str]:
        # Until everything is listed nothing can be planned, so a list that is rejected counts from its second
        # rejection.
        rejected_calls = self._api.rejected_calls.disabling(time.monotonic(), at_once=not self._cache.is_complete)
        return [*([self._not_ready_reason] if self._not_ready_reason else []), *map(str, rejected_calls)]

    def _readiness_remarks(self) -> list[str]:
        return [f"rejected: {call}" for call in self._api.rejected_calls.long_rejected(time.monotonic())]

    async def _publish_rejected_calls(self) -> None:
        """Publishes which calls the API server keeps rejecting, and logs each once, until cancelled."""
        logged_sentences: set[str] = set()
        while True:
            rejected_calls = self._api.rejected_calls.long_rejected(time.monotonic())
            metrics.api_refused_calls.clear()
            for labels, count in count_by_cause(rejected_calls).items():
                metrics.api_refused_calls.labels(*labels).set(count)
            sentences = {str(call) for call in rejected_calls}
            for sentence in sorted(sentences - logged_sentences):
                log.warning("%s; the API server keeps rejecting this call", sentence)
            logged_sentences = sentences
            await asyncio.sleep(REJECTED_CALLS_INTERVAL_SECONDS)

    def _liveness_failures(self) -> tuple[str, ...]:
        lease_users = (self._claim, self._election)
        signs = LivenessSigns(
            watch_seconds_by_kind=self._cache.seconds_since_answer() if not self._not_ready_reason else {},
            reconcile_seconds_by_job=self._shard_terms.reconcile_seconds_by_job()
            if self._shard_terms is not None
            else {},
            lag_seconds=self._loop_lag.max_lag_seconds,
            api_seconds=lease_clock()
            - max((part.last_answer_seconds for part in lease_users if part is not None), default=-math.inf),
        )
        return liveness_failures(signs, LivenessLimits())

    # ---- stop -------------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """Stops the jobs, then releases the leases, then closes the rest, each within a time limit."""
        await stop_within("jobs", self._release_leases())
        await stop_within("connections", self._close_connections())
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # mark it as retrieved: `run` has raised this error or another one

    async def _release_leases(self) -> None:
        await self._background_tasks.close()
        if self._election is not None:
            await self._election.close()

    async def _close_connections(self) -> None:
        if self._webhooks is not None:
            await self._webhooks.close()
        if self._agent_server is not None:
            await self._agent_server.close()
        await self._cache.close()
        if self._lease_api is not None:
            await self._lease_api.close()
        await self._health_endpoints.close()
