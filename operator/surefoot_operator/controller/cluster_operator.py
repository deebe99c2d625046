"""Assembles, starts and stops the operator of a cluster.

`__main__` has kopf run it. A standby replica does everything but plan jobs: it watches the cluster, listens to agents and
refers them to the leader. A replica stores nothing on disk: a job's status lies in the API server, and agents and holders
report the rest again to each new leader.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from surefoot.memory_server.connection import TLS_NAME
from surefoot.protocol.timeouts import Backoff
from surefoot.task_set import TaskSet, repeat
from surefoot_operator import metrics, reasons
from surefoot_operator.controller import process_metrics
from surefoot_operator.controller.admission_webhooks import Webhooks
from surefoot_operator.controller.cluster_settings import ClusterSettings
from surefoot_operator.controller.credentials.certificates import CoordinatorTls, server_names
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.controller.credentials.secrets import SecretAt, admin_password, root_key
from surefoot_operator.controller.credentials.token_review import TokenReviews
from surefoot_operator.controller.health_endpoints import (
    LivenessLimits,
    LivenessSigns,
    LoopLag,
    Probes,
    liveness_failures,
)
from surefoot_operator.controller.job_runner import Shared
from surefoot_operator.controller.leader.cluster_claim import ClusterClaim
from surefoot_operator.controller.leader.election_rules import shard_of, shard_url
from surefoot_operator.controller.leader.leader_election import LeaseAt
from surefoot_operator.controller.leader.leader_election import clock as lease_clock
from surefoot_operator.controller.leader.shard_election import ShardElection
from surefoot_operator.controller.memory_tier_maintenance import objection
from surefoot_operator.controller.shard_leadership import ShardTerms, within
from surefoot_operator.controller.worker_environment import WORKER_METRICS_PORT, WorkerEnvironmentFactory
from surefoot_operator.coordinator.agent_server import AgentServer, Referrals
from surefoot_operator.errors import FabricError
from surefoot_operator.memory import HolderPool, TierAccess
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiRefused
from surefoot_operator.platforms.kubernetes.api_writes import record_of_pod
from surefoot_operator.platforms.kubernetes.pods import PodSettings
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.rejected_calls import counted
from surefoot_operator.settings import CoordinatorSettings, OperatorSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

PROGRESS_SECONDS = 3.0
"""Between writes of a job's status that only report progress: hundreds of jobs must not flood the API server."""
SETTLE_SECONDS = 10.0
"""A new leader seals and reads again, and hears agents again: it must not tell each of hundreds of jobs so, and then take it back."""

BEGIN_SECONDS = 120.0
"""How long an API server that is away is waited for at first; then the process exits, as its pod's status shows."""
ACCESS_SECONDS = 20.0
"""How often the memory tier's password is read: after a change holders refuse the operator for so long at most."""
SHOW_SECONDS = 2.0
"""Between two looks at what the API server refuses."""
_BACKOFF = Backoff(0.2, 5.0)


class ClusterOperator:
    """One replica of the operator."""

    def __init__(self, api: Api, settings: ClusterSettings) -> None:
        self._api, self._settings = api, settings
        self._cache = ClusterCache(api, holders_in=settings.namespace, gangs=settings.gang_schedulers)
        self._lag = LoopLag()
        self._probes = Probes(settings.probe_port, settings.metrics_port, self._unwell, self._unready, self._remarks)
        self._server: AgentServer | None = None
        self._tls: CoordinatorTls | None = None
        self._webhooks: Webhooks | None = None
        self._terms: ShardTerms | None = None
        self._claim: ClusterClaim | None = None
        self._election: ShardElection | None = None
        self._lease_api: Api | None = None
        self._beside = TaskSet(self._beside_failed)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._begun = "the operator is starting"

    async def run(self, ended: asyncio.Event) -> None:
        """Stands by, leads, and shuts down once `ended` is set.

        Raises LeaseLost if it led and somebody else does now; FabricError, OSError.
        """
        living = asyncio.create_task(self._live(), name="live")
        ending = asyncio.create_task(ended.wait(), name="ended")
        try:
            await asyncio.wait((living, ending, self._failed), return_when=asyncio.FIRST_COMPLETED)
            for reason in (self._failed, living):
                if reason.done():
                    reason.result()
        finally:
            ending.cancel()
            living.cancel()
            await asyncio.gather(living, ending, return_exceptions=True)
            await self._leave()

    # ---- beginning --------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        await self._probes.start()
        log.info("/healthz and /readyz on port %d, /metrics on port %d", self._probes.port, self._probes.metrics_port)
        self._beside.start(self._lag.run())
        self._beside.start(self._show_refused())
        self._begun = "waiting for the operator's secrets"
        shared = await self._patiently(self._shared)
        self._begun = "waiting for the first list of the cluster's objects"
        await self._patiently(self._cache.start)
        # over connections of its own: a lease that waits behind hundreds of writes is lost
        self._lease_api = await asyncio.to_thread(self._api.apart)
        where = LeaseAt(self._settings.namespace, self._settings.lease_name)
        claim = self._claim = ClusterClaim(
            self._lease_api,
            f"{where.namespace}/{where.name}",
            self._settings.only_namespace,
            self._settings.identity,
            self._stands_by,
        )
        await claim.acquire()
        self._beside.start(claim.hold())
        terms = self._terms = ShardTerms(
            self._api, self._settings, shared, self._beside_failed, self._veto, claim.may_operate
        )
        self._election = ShardElection(self._lease_api, where, self._settings.identity, self._settings.shards, terms)
        if self._settings.admission_webhooks:
            await self._admit(shared, terms, self._election)
        process_metrics.jobs.set_function(lambda: terms.jobs)
        for shard in range(self._settings.shards):
            metrics.leader.labels(str(shard)).set(0)
        self._begun = ""
        self._beside.start(self._election.run())
        await asyncio.Event().wait()

    async def _admit(self, shared: Shared, terms: ShardTerms, election: ShardElection) -> None:
        """Answers the API server: about evictions for the jobs of the shards that are led here."""
        api = self._api.guarded(lambda: election.may_act(0))
        self._webhooks = Webhooks(api, shared, terms.departure, self._tls, self._settings)
        await self._webhooks.start()
        terms.run_once_in_a_cluster(self._webhooks.keep_trusted)

    def _veto(self, ready: str) -> str:
        """Why no holder may be restarted, by what leaders of other shards have noted on their leases."""
        assert self._election is not None, "shard 0 is led"
        election = self._election
        found = (objection(shard, *election.noted(shard), ready) for shard in range(1, election.shards))
        return next((why for why in found if why), "")

    def _shard_of(self, job: str) -> int:
        return shard_of(job, self._election.shards if self._election is not None else self._settings.shards)

    def _referrals(self) -> Referrals:
        def url_of(shard: int) -> str:
            several = self._election is not None and self._election.shards > 1
            return shard_url(self._settings.coordinator_url, shard) if several else ""

        return Referrals(self._shard_of, url_of)

    async def _shared(self) -> Shared:
        """Reads the secrets and starts the server; it refers agents to the leader already."""
        given = self._settings
        tls: CoordinatorTls | None = None
        if given.coordinator_url.startswith("wss:"):
            tls = CoordinatorTls(
                self._api,
                self._at(given.tls_secret),
                server_names(given.coordinator_url, given.namespace, given.shards),
            )
            await tls.begin()
            self._tls = tls
        secrets = Secrets(await root_key(self._api, self._at(given.keys_secret)))
        access = await self._tier_access()
        settings = OperatorSettings(
            coordinator=CoordinatorSettings(host="", port=given.coordinator_port, foreign_retry=True),
            progress_seconds=PROGRESS_SECONDS,
            settle_seconds=SETTLE_SECONDS,
        )
        reviews = TokenReviews(self._api, self._cache.workers.items, self._cache.jobs.items, time.time)
        context = tls.context if tls is not None else None
        server = AgentServer(settings.coordinator, reviews.authenticate, context, self._referrals())
        await server.start()
        self._server = server
        if tls is not None:
            self._beside.start(tls.follow())
        telling = WorkerEnvironmentFactory(
            given.coordinator_url,
            settings.memory.call_seconds,
            secrets,
            own_token=False,
            coordinator_ca=lambda: tls.authority if tls is not None else "",
            holder_tls_ca=lambda: access.authority,
            metrics_port=WORKER_METRICS_PORT,
            log_format=given.log_format,
        )
        pods = PodSettings(
            agent=given.agent_command, purge_image=given.runtime_image, socket_folder=given.memory_socket_folder
        )
        return Shared(self._cache, server, telling, pods, access, settings, HolderPool(settings.memory))

    async def _tier_access(self) -> TierAccess:
        """Reads the credentials for holders; with TLS it keeps their certificate too."""
        given = self._settings
        access = TierAccess(password=await admin_password(self._api, self._at(given.memory_admin_secret)))
        tls: CoordinatorTls | None = None
        if given.memory_tls:
            tls = CoordinatorTls(self._api, self._at(given.memory_tls_secret), (TLS_NAME,))
            await tls.begin()
            access.authority = tls.authority
            self._beside.start(tls.follow())
        self._beside.start(self._follow_access(access, tls))
        return access

    async def _follow_access(self, access: TierAccess, tls: CoordinatorTls | None) -> None:
        """Rereads the credentials for holders until cancelled. A failure is logged and retried."""

        async def reread() -> float:
            try:
                access.password = await admin_password(self._api, self._at(self._settings.memory_admin_secret))
            except FabricError as error:
                log.warning("cannot read the memory tier's password: %s", error)
            if tls is not None:
                access.authority = tls.authority
            return ACCESS_SECONDS

        await repeat(reread, ACCESS_SECONDS)

    def _at(self, name: str) -> SecretAt:
        return SecretAt(self._settings.namespace, name)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retries while the API server is away; a refusal is final."""
        deadline = time.monotonic() + BEGIN_SECONDS
        failures = 0
        while True:
            try:
                return await call()
            except FabricError as error:
                final = isinstance(error, ApiRefused) and error.code < 500 and error.code != 429
                if final or time.monotonic() > deadline:
                    raise
                log.warning("%s", error)
            failures += 1
            await asyncio.sleep(_BACKOFF.seconds(failures, random.random()))

    # ---- beside -----------------------------------------------------------------------------------------------------

    def _beside_failed(self, name: str, error: BaseException) -> None:
        """Ends the process: none of these tasks may end by itself."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _stands_by(self, sentence: str) -> None:
        """Says why this installation stands by: to probes, to metrics, and once as an event of its pod."""
        self._begun = sentence
        metrics.standing_by.set(1 if sentence else 0)
        if sentence:
            self._beside.start(self._record(Event(reasons.OPERATOR_STANDING_BY, sentence, warning=True)))

    async def _record(self, event: Event) -> None:
        at = self._settings
        try:
            await record_of_pod(self._api, at.namespace, at.pod_name, event, time.time())
        except FabricError as error:
            log.info("the event %s could not be recorded: %s", event.reason, error)

    def _unready(self) -> list[str]:
        # nothing can be planned before everything was listed: why it is not is said at its second refusal
        refused = self._api.refused.disabling(time.monotonic(), at_once=not self._cache.complete)
        return [*([self._begun] if self._begun else []), *map(str, refused)]

    def _remarks(self) -> list[str]:
        return [f"refused: {one}" for one in self._api.refused.lasting(time.monotonic())]

    async def _show_refused(self) -> None:
        """Publishes what is refused, and logs it once, until cancelled."""
        logged: set[str] = set()
        while True:
            refused = self._api.refused.lasting(time.monotonic())
            metrics.api_refused_calls.clear()
            for labels, count in counted(refused).items():
                metrics.api_refused_calls.labels(*labels).set(count)
            sentences = {str(one) for one in refused}
            for sentence in sorted(sentences - logged):
                log.warning("%s; the API server keeps refusing this call", sentence)
            logged = sentences
            await asyncio.sleep(SHOW_SECONDS)

    def _unwell(self) -> tuple[str, ...]:
        asking = (self._claim, self._election)
        vitals = LivenessSigns(
            watches=self._cache.silences() if not self._begun else {},
            rounds=self._terms.round_seconds() if self._terms is not None else {},
            lag_seconds=self._lag.worst_seconds,
            api_seconds=lease_clock() - max((part.heard_at for part in asking if part is not None), default=-math.inf),
        )
        return liveness_failures(vitals, LivenessLimits())

    # ---- ending -----------------------------------------------------------------------------------------------------

    async def _leave(self) -> None:
        """Stops the jobs, then releases the leases for other replicas, then closes the rest; each within a limit."""
        await within("jobs", self._let_go())
        await within("connections", self._close())
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # looked at: `run` has raised it, or something else

    async def _let_go(self) -> None:
        await self._beside.close()
        if self._election is not None:
            await self._election.close()

    async def _close(self) -> None:
        if self._webhooks is not None:
            await self._webhooks.close()
        if self._server is not None:
            await self._server.close()
        await self._cache.close()
        if self._lease_api is not None:
            await self._lease_api.close()
        await self._probes.close()
