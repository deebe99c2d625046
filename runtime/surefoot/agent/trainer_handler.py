"""Handles messages of attached trainers: makes events, gives memory, writes the ledger.

Decisions stay with `state_machine`. Built by the agent's `agent_process`; runs on its loop.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Protocol

from surefoot import metrics
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import AgentState
from surefoot.agent.staging_memory import StagingMemory
from surefoot.agent.trainers.hang_diagnosis import CollectiveQuery
from surefoot.ipc import trainer_messages as line
from surefoot.ipc.memfd import SLOTS
from surefoot.ipc.metric_deltas import MetricSums
from surefoot.ipc.trainer_messages import StepReport
from surefoot.ipc.trainer_server import TrainerConnection, TrainerServer
from surefoot.protocol.identities import RankSave
from surefoot.protocol.messages import BarrierReached, BarrierReply
from surefoot.settings import JobSettings

_log = logging.getLogger(__name__)


# ---- step ledger -----------------------------------------------------------------------------------------------------
# Writes one JSON line for each step of each local rank. `surefoot local --compare` counts samples and losses from it. A
# line that cannot be written waits in memory and follows when the disk takes it: a disk that was full for ten seconds
# must not look like samples that were lost. Beyond `MOST_WAITING` lines are given up, counted and said once; the
# training goes on. Whoever counts takes a step without a line for unknown.

MAX_WAITING = 20_000
"""Lines: some megabytes, and hours of a full disk where steps take a second."""


class StepLedger:
    """Appends to `{scratch_folder}/ledger/worker-INDEX-ATTEMPT.jsonl`, a line at a time.

    `later` calls what it is given some seconds later: lines that wait must not wait for the next step, which may wait
    for them. `write`: as `os.write`.
    """

    def __init__(
        self,
        path: Path,
        later: Callable[[Callable[[], None]], None],
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._path = path
        self._later = later
        self._write = write
        self._due = self._closed = False
        self._waiting: deque[bytes] = deque()
        self._failing = self._dropped = False
        path.parent.mkdir(parents=True, exist_ok=True)
        # unbuffered: a buffer that could not be flushed keeps a part of a line, and nobody knows which
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, epoch: int, rank: int, stepped: StepReport) -> None:
        progress = stepped.progress
        entry = {
            "generation": epoch,
            "step": progress.step,
            "rank": rank,
            "loss": progress.loss,
            "samples": list(stepped.samples) if stepped.samples is not None else None,
            "span": stepped.span,
            "at": time.time(),
            "seconds": progress.step_seconds,
            "stall_seconds": progress.stall_seconds,
        }
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((json.dumps(entry) + "\n").encode())
        else:
            metrics.fallbacks.labels(kind="ledger_lost").inc()
            if not self._dropped:
                self._dropped = True
                _log.error("the ledger %s has %d lines waiting: steps are not recorded", self._path, MAX_WAITING)
        self._catch_up()

    def _catch_up(self) -> None:
        try:
            while self._waiting:
                written = self._write(self._descriptor, self._waiting[0])
                if written == len(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][written:]  # the rest of this line is the next to be written
        except OSError as error:
            if not (self._due or self._closed):
                self._due = True
                self._later(self._try_again)
            if not self._failing:
                self._failing = True
                _log.error("the ledger %s cannot be written (%s); its lines wait in memory", self._path, error)
            return
        if self._failing:
            self._failing = self._dropped = False
            _log.info("the ledger %s can be written again", self._path)

    def _try_again(self) -> None:
        self._due = False
        if not self._closed:
            self._catch_up()

    def close(self) -> None:
        self._closed = True
        self._catch_up()
        if self._waiting:
            metrics.fallbacks.labels(kind="ledger_lost").inc(len(self._waiting))
            _log.error("the last %d lines of the ledger %s could not be written", len(self._waiting), self._path)
        try:
            os.close(self._descriptor)
        except OSError as error:
            _log.error("the end of the ledger %s was lost: %s", self._path, error)


# ---- trainer handler -------------------------------------------------------------------------------------------------


class Agent(Protocol):
    """The agent process, as far as it is needed here."""

    incarnation: str
    state: AgentState
    staging: StagingMemory
    trainer_server: TrainerServer
    sums: MetricSums
    inquiry: CollectiveQuery

    def dispatch(self, event: on.Event) -> None: ...

    def spawn(self, work: Coroutine[object, object, None]) -> None: ...

    def notice(self, reason: str, text: str) -> None: ...


class TrainerSessionHandler:
    """Handles trainers: the server calls `admit` and `hear`, staging calls `slot_freed`."""

    def __init__(self, agent: Agent, job: JobSettings, ledger: StepLedger) -> None:
        self._agent = agent
        self._job = job
        self._ledger = ledger
        self._attached: dict[tuple[int, int], int] = {}
        """(epoch, rank) → the process that attached as it; of the present epoch."""

    def admit(self, attach: line.Attach) -> line.Attached | str:
        """The epoch, for a trainer of it; why not, for any other."""
        state, assign = self._agent.state, self._agent.state.assign
        who = f"rank {attach.rank} of epoch {attach.generation} (pid {attach.pid})"
        if assign is None or attach.generation != state.started or assign.generation != state.started or state.killing:
            return f"{who} does not belong to epoch {state.claimed}"
        rank = next((r for r in state.ranks if r.rank == attach.rank and r.alive), None)
        if rank is None:
            return f"{who} is none of this worker's"
        speaker = self._attached.get((attach.generation, attach.rank), attach.pid)
        if speaker != attach.pid and os.path.exists(f"/proc/{speaker}"):
            return (
                f"{who} is not the rank: process {speaker} is. A process that a rank starts must not build a Checkpointer"
                " of its own; unset SUREFOOT_AGENT_SOCKET in its environment"
            )
        self._attached = {key: pid for key, pid in self._attached.items() if key[0] == attach.generation}
        self._attached[attach.generation, attach.rank] = attach.pid
        self._agent.dispatch(on.TrainerMessage(state.started, rank.local, attach, time.monotonic()))
        job = self._job
        return line.Attached(
            job=job.job,
            generation=assign.generation,
            world_size=assign.world_size,
            rank=attach.rank,
            incarnation=self._agent.incarnation,
            parent=assign.parent,
            lineage=assign.lineage,
            servers=assign.servers,
            replicas=assign.replicas,
            interval_steps=job.interval_steps,
            persistent_interval_steps=job.persistent.interval_steps if job.persistent else None,
            interval_exponent=state.interval_exponent,
            source_job=assign.source_job,
            skip_steps=assign.skip_steps,
            is_partial=assign.is_partial,
        )

    def handle_message(self, trainer: TrainerConnection, message: line.FromTrainer) -> None:
        """Handles a trainer's message; ignores those of older epochs."""
        state, epoch = self._agent.state, trainer.generation
        local = next((r.local for r in state.ranks if r.rank == trainer.rank), None)
        if local is None or epoch != state.started:
            return
        if isinstance(message, BarrierReply | BarrierReached) and message.generation != epoch:
            return  # a rank answers for its own generation alone
        if isinstance(message, line.StepReport):
            self._ledger.write(epoch, trainer.rank, message)
            metrics.samples.inc(message.progress.step_samples or 0)
            if local == 0:  # ranks of one worker step together
                metrics.step_seconds.observe(message.progress.step_seconds or 0.0)
        match message:
            case line.Staged():
                save = RankSave(epoch, message.step, trainer.rank)
                self._agent.staging.stage(
                    local, save, state.assign.world_size if state.assign is not None else 0, message
                )
            case line.RequestArena(slot_bytes=slot_bytes):
                self._agent.spawn(self._grant_arena(trainer, local, slot_bytes))
            case line.FindStagedSaves(checkpoint=checkpoint):
                for here, fd in self._agent.staging.reusable_saves(local, checkpoint):
                    trainer.send(here, fd)
            case line.TrainerNotice(reason=reason, text=text):
                self._agent.notice(reason, f"rank {trainer.rank}: {text}")
            case line.MetricsReport(deltas=grown):
                self._agent.sums.add(grown)
            case line.CollectivesReport():
                self._agent.inquiry.add_reply(trainer.rank, message)
            case line.Attach():
                _log.warning("rank %d attached twice: ignored", trainer.rank)
            case _:
                self._agent.dispatch(on.TrainerMessage(epoch, local, message, time.monotonic()))

    def slot_freed(self, local: int, slot: int, step: int, ok: bool) -> None:
        """Tells the trainer that now has this memory of a free slot."""
        state = self._agent.state
        rank = next((r.rank for r in state.ranks if r.local == local), None)
        if rank is not None:
            self._agent.trainer_server.send(state.started, rank, line.SlotFreed(slot, step, ok))

    def close(self) -> None:
        self._ledger.close()

    async def _grant_arena(self, trainer: TrainerConnection, local: int, slot_bytes: int) -> None:
        try:
            given = await self._agent.staging.grant_arena(local, slot_bytes, len(self._agent.state.ranks))
        except OSError as error:
            trainer.send(line.ArenaDenied(error.strerror or str(error)))
            return
        message = line.ArenaGranted(SLOTS, given.file.slot_bytes, given.seconds, given.busy)
        trainer.send(message, given.file.fd)
