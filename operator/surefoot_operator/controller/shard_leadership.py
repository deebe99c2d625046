"""Runs what a replica does for each shard that it leads.

Made by the composition root, begun and ended by `leader.shard_election`. What there is once in a cluster (the memory
tier's rollout, the sweep of orphans, conditions of nodes) is done by who leads shard 0.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surefoot.task_set import TaskSet
from surefoot_operator import metrics
from surefoot_operator.controller.cluster_settings import ClusterSettings
from surefoot_operator.controller.holder_assent import HolderAssent
from surefoot_operator.controller.job_runner import Shared
from surefoot_operator.controller.job_runners import JobRunners
from surefoot_operator.controller.leader.leader_label import LeaderLabel
from surefoot_operator.controller.leader.shards import leader_label, shard_of, shard_url
from surefoot_operator.controller.memory_tier_maintenance import MemoryMaintenance, RolloutVeto
from surefoot_operator.controller.node_reporter import NodeReporter
from surefoot_operator.controller.term_clock import TermClock
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes.api_client import Api

log = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
"""How long stopping the jobs of a shard may take."""


@dataclass(frozen=True, slots=True)
class _Term:
    runners: JobRunners
    tasks: TaskSet
    label: LeaderLabel
    assent: HolderAssent


class ShardTerms:
    """The terms of one replica, one for each shard that it leads.

    Args:
        failed: Told of a task that ended by an error, which none may.
        veto: Says why holders may not be restarted by what leaders of other shards note.
        may_operate: Raises NotLeading while another installation may look after the same jobs.
    """

    def __init__(
        self,
        api: Api,
        settings: ClusterSettings,
        shared: Shared,
        failed: Callable[[str, BaseException], None],
        veto: RolloutVeto,
        may_operate: Callable[[], None],
    ) -> None:
        self._api, self._settings, self._shared, self._failed, self._veto = api, settings, shared, failed, veto
        self._may_operate = may_operate
        self._terms: dict[int, _Term] = {}
        self._once: list[Callable[[], Coroutine[Any, Any, None]]] = []

    @property
    def jobs(self) -> int:
        """How many jobs are looked after here."""
        return sum(len(term.runners.running) for term in self._terms.values())

    def round_seconds(self) -> dict[str, float]:
        """Age of each job's reconcile under way; 0 between two."""
        return {key: age for term in self._terms.values() for key, age in term.runners.round_seconds().items()}

    def wake_soon(self) -> None:
        """Has missing runners started soon."""
        for term in self._terms.values():
            term.runners.wake_soon()

    def departure(self, node: str) -> str:
        """Says what some job loses with a node; empty: nothing."""
        said = (term.runners.departure(node) for term in self._terms.values())
        return next((why for why in said if why), "")

    def run_once_in_a_cluster(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Has `work` run, until cancelled, in each later term of shard 0."""
        self._once.append(work)

    def begin(self, shard: int, shards: int, may_act: Callable[[], None]) -> None:
        """Leads a shard from now on, until `end`."""

        def may_write() -> None:
            may_act()
            self._may_operate()

        given, url = self._settings, self._settings.coordinator_url
        api = self._api.guarded(may_write)
        telling = replace(self._shared.telling, coordinator_url=shard_url(url, shard), fallback_url=url)
        # whatever a job's reconciler writes goes through this one, and stops with the lease
        cache = self._shared.cache.guarded(may_write)
        shared = replace(self._shared, cache=cache, telling=telling, clock=TermClock())
        runners = JobRunners(shared, given.only_namespace, lambda uid: shard_of(uid, shards) == shard)
        label = LeaderLabel(api, given.namespace, given.pod_name, leader_label(shard))
        assent = HolderAssent(shared, given.namespace, given.memory_daemonset, runners.safeties)
        term = self._terms[shard] = _Term(runners, TaskSet(self._failed), label, assent)
        runners.start()
        shared.server.lead(True, shard)
        metrics.leader.labels(str(shard)).set(1)
        term.tasks.start(label.hold())
        term.tasks.start(runners.resync())
        if shard != 0:
            term.tasks.start(assent.run())
        else:
            tier = MemoryMaintenance(shared, given.namespace, given.memory_daemonset, runners.safeties, self._veto)
            term.tasks.start(tier.run())
            if given.node_reports:
                term.tasks.start(NodeReporter(api, cache, given.node_taint).run())
            for work in self._once:
                term.tasks.start(work())
        of = f" of shard {shard} (of {shards})" if shards > 1 else ""
        log.info("leading, with %d jobs%s; agents connect to %s", len(runners.running), of, telling.coordinator_url)

    async def end(self, shard: int, in_peace: bool) -> None:
        """Ends a term, whose agents go first.

        Whoever leads next is elsewhere. The next term here begins with nothing of this one.
        """
        self._shared.server.lead(False, shard)
        metrics.leader.labels(str(shard)).set(0)
        term = self._terms.pop(shard, None)
        if term is None:
            return
        await within("jobs", term.runners.close())
        if not self._terms:
            await within("holders", self._shared.pool.close())
        await within("the leader's tasks", term.tasks.close())
        if in_peace:
            try:
                await term.label.drop()
            except FabricError as error:
                log.warning("could not remove the leader label: %s", error)

    def notes(self, shard: int) -> Mapping[str, str]:
        """Annotations of the shard's lease: whether its jobs can spare a holder."""
        term = self._terms.get(shard)
        return term.assent.notes() if term is not None else {}


async def within(what: str, work: Coroutine[Any, Any, None]) -> None:
    """Waits for what stops, within a limit."""
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await work
    except TimeoutError:
        log.warning("%s did not stop within %g s: going on anyway", what, LEAVE_SECONDS)
