"""Holds the reconciler's dependencies and builds its snapshots.

Called by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from surefoot.protocol.identities import WorkerId
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.holder_sightings import proxied, refused_of
from surefoot_operator.coordinator.request_replies import promotion_seconds
from surefoot_operator.coordinator.sessions import seen as sessions_seen
from surefoot_operator.job_snapshot import CreateSeen, Observed, WorkerSeen
from surefoot_operator.memory import JobHolders
from surefoot_operator.platforms.interface import Fabric, FabricSeen, WorkerEnvironment
from surefoot_operator.policy.core.actions import CreateWorker
from surefoot_operator.policy.failure.clock_skew import not_ahead
from surefoot_operator.policy.membership.invalid_spec import accepted
from surefoot_operator.reconcile.progress_pace import ProgressPace
from surefoot_operator.reconcile.turns import Turns
from surefoot_operator.reconcile.worker_calls import CallsSeen
from surefoot_operator.settings import OperatorSettings

Environment = Callable[[TrainingJob, CreateWorker], WorkerEnvironment]
"""What a new worker must be told."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    fabric: Fabric
    channel: AgentChannel
    memory: JobHolders
    environment: Environment
    settings: OperatorSettings
    clock: Callable[[], float]
    """Unix seconds, which only grow: no step of the wall clock moves them."""
    epoch_token: Callable[[int], str]
    """The secret of an epoch: the same from every leader, and in no status."""
    turns: Turns = field(default_factory=Turns)
    """How many jobs reconcile at one moment; all that share an event loop share it."""
    pace: ProgressPace = field(default_factory=ProgressPace)
    """How often progress alone is written, of all jobs that share it."""


async def observed(dependencies: Dependencies, shown: FabricSeen, term_seconds: float, calls: CallsSeen) -> Observed:
    """Builds the snapshot that the round's plan is made from.

    Everything known now, as one value. `shown` was looked up just before; the calls are what it may not show yet.
    """
    orders = dependencies.channel.sessions.orders
    listed = (*(orders.persistent.entries or ()), *(orders.older.entries or ()))
    layouts = {**orders.older_layouts, **orders.layouts, **orders.sighted_layouts}
    holders = proxied(dependencies.memory.seen(), orders.sights, shown.status.world)
    covers = await dependencies.memory.covers(listed, layouts, holders)
    sessions = dependencies.channel.sessions
    hold = sessions.orders.hold
    now = dependencies.clock()
    return Observed(
        now=now,
        term_seconds=term_seconds,
        job=shown.job,
        status=not_ahead(accepted(shown.status), now, shown.job.spec.failure_policy.eval_period_seconds),
        workers=shown.workers,
        nodes=shown.nodes,
        sessions=sessions_seen(sessions),
        turned_away_seconds=sessions.turned_away_seconds,
        holders=holders,
        persistent=sessions.orders.persistent,
        older=orders.older,  # as `covers` knows it: what came meanwhile comes with the next snapshot
        hold=hold.seen if hold is not None else None,
        covers=covers,
        promoted=sessions.orders.promoted,
        stumbled=sessions.orders.stumbled,
        unreadable=sessions.orders.unreadable,
        sights=orders.sights,  # as `holders` has them
        pairs=tuple(sessions.orders.pairs.values()),
        promotion_seconds=promotion_seconds(orders, shown.status.floor),
        refused_records=(
            *dependencies.memory.refused,
            *orders.refused,
            *refused_of(orders.sights, shown.status.world),
        ),
        memory_cleaned=dependencies.memory.cleaned,
        purges=shown.purges,
        purge_call=calls.purge,
        refusal=shown.refusal,
        free_nodes=shown.free_nodes,
        creates=calls.creates,
        deletions=calls.deletions,
        pod_groups=shown.pod_groups,
        refused_calls=shown.refused_calls,
        group_calls=calls.groups,
    )


def ranks_of(shown: FabricSeen, status: JobStatus) -> int:
    """Counts the ranks that the job runs or ran: they bound its records, whatever its spec asks for."""
    placed = len({worker.index for worker in shown.workers if worker.node is not None})
    return max(placed * shown.job.spec.nproc_per_node, *(entry.size for entry in status.lineage), 0)


def worker_ids(workers: Iterable[WorkerSeen], creates: Iterable[CreateSeen]) -> frozenset[WorkerId]:
    """Identifies workers that are there, or may be by now."""
    there = frozenset(WorkerId(worker.index, worker.attempt) for worker in workers)
    return there | {WorkerId(create.index, create.attempt) for create in creates if create.under_way}
