"""Collects garbage in the memory tier while no coordinator reaches it.

The rules are those of `flush.garbage_collection`. One agent of the epoch is enough, and every agent knows which: the one
with the lowest place. Called by `agent.agent_process`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from surefoot.agent.agent_state import AgentState
from surefoot.agent.unexpected_errors import UnexpectedErrors
from surefoot.flush.garbage_collection import GcResult, GcScope, collect_garbage
from surefoot.memory_server.client import HolderClient
from surefoot.memory_server.connection import account_of
from surefoot.protocol.checkpoints.lineage import LineageEntry
from surefoot.protocol.checkpoints.retention import SoundSteps
from surefoot.protocol.messages import Assign
from surefoot.protocol.progress import Progress
from surefoot.settings import JobSettings

AWAY_SECONDS = 30.0
"""How long the coordinator must be away: a restarted one takes its work up again long before."""
ROUND_SECONDS = 10.0
_log = logging.getLogger(__name__)


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


class LeaderlessCollector:
    """Collects garbage in rounds while this agent is in charge.

    `away_seconds`: how long no coordinator was heard. One that is heard and reaches no holder itself counts as away, too.
    """

    def __init__(
        self,
        job: JobSettings,
        state: Callable[[], AgentState],
        away_seconds: Callable[[], float],
        unexpected: UnexpectedErrors,
    ) -> None:
        self._job, self._state, self._away_seconds, self._unexpected = job, state, away_seconds, unexpected
        self._unseen_since: float | None = None

    async def run(self) -> None:
        """Looks every ten seconds, until cancelled."""
        while True:
            await asyncio.sleep(ROUND_SECONDS)
            assign = epoch_in_charge(self._state(), self._alone_seconds(time.monotonic()))
            if assign is not None:
                await self._collect(assign)

    def _alone_seconds(self, now: float) -> float:
        assign = self._state().assign
        unseen = assign is not None and assign.unseen
        self._unseen_since = (self._unseen_since or now) if unseen else None
        return max(self._away_seconds(), now - self._unseen_since if self._unseen_since is not None else 0.0)

    async def _collect(self, assign: Assign) -> None:
        try:
            kept = await asyncio.to_thread(collect, assign, self._job, self._state().progress)
        except Exception as error:  # noqa: BLE001  the next round may do better
            self._unexpected.record("looking after the memory tier", error)
            return
        _log.info(
            "no coordinator reaches the holders: this agent moved the watermark to %s and dropped %d old saves from the holders",
            kept.watermark,
            kept.dropped,
            extra={"epoch": assign.epoch},
        )
        for problem in kept.problems:
            _log.warning("no coordinator reaches the holders, and one failed during garbage collection: %s", problem)
