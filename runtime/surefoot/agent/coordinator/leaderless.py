"""Collects garbage in the memory tier while no coordinator reaches it.

The rules are those of `drain.leaderless_gc`. One agent of the epoch is enough, and every agent knows which: the one
with the lowest place. Called by `agent.process`.
"""

from __future__ import annotations

from surefoot.agent.state_machine import AgentState
from surefoot.drain.leaderless_gc import GcResult, GcScope, collect_garbage
from surefoot.holder.client import HolderClient
from surefoot.holder.connection import account_of
from surefoot.protocol.lineage import LineageEntry
from surefoot.protocol.messages import Assign
from surefoot.protocol.progress import Progress
from surefoot.protocol.retention import SoundSteps
from surefoot.settings import JobSettings

AWAY_SECONDS = 30.0
"""How long the coordinator must be away: a restarted one takes its work up again long before."""
ROUND_SECONDS = 10.0


def epoch_in_charge(state: AgentState, away_seconds: float) -> Assign | None:
    """The epoch that this agent must look after now, if it must.

    `away_seconds`: how long no coordinator was heard, or said that it reaches no holder.
    """
    assign = state.assign
    if assign is None or assign.group_rank != 0 or not knows_all(assign) or away_seconds < AWAY_SECONDS:
        return None
    runs = state.alive and not state.killing and state.started == state.claimed == assign.epoch
    return assign if runs else None


def knows_all(assign: Assign) -> bool:
    """Whether the assignment names every holder.

    Of some alone nobody can tell what is superseded.
    """
    return not assign.partial


def sound_steps(progress: Progress, later_steps: int) -> SoundSteps | None:
    """Says what the steps of this worker show of all ranks'.

    Another rank may still be in the step that the own ranks have finished, as its collective is behind them all; every rank has
    finished the one before.
    """
    return SoundSteps(max(0, progress.step - 1), progress.odd_step, later_steps) if later_steps else None


def collect(assign: Assign, job: JobSettings, progress: Progress) -> GcResult:
    """Collects garbage once on this epoch's holders (blocks: in a thread).

    `progress` of the own ranks: those of other workers nobody tells without a coordinator, and they step together.
    """
    account = account_of(job)
    clients = {
        endpoint.holder: HolderClient(endpoint, job.job, account, job.holder_call_seconds)
        for endpoint in assign.holders
    }
    charge = GcScope(
        lineage=tuple(LineageEntry(epoch, parent, size) for epoch, parent, size in assign.lineage),
        epoch=assign.epoch,
        replicas=job.replicas,
        keep=job.keep,
        domains={endpoint.holder: endpoint.domain for endpoint in assign.holders},
        sound=sound_steps(progress, job.good_after_steps),
    )
    try:
        return collect_garbage(clients, charge)
    finally:
        for client in clients.values():
            client.close()
