"""Handles messages of attached trainers: turns them into events, grants staging memory, writes the step ledger.

`state_machine` makes the decisions. Runs on the agent's loop.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
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
# Writes one JSON line for each step of each local rank, from which `surefoot local --compare` counts samples and losses.
# A line that cannot be written waits in memory until it can: a disk that was full for ten seconds must not look like lost
# samples. Lines beyond `MAX_WAITING` are dropped, counted, and logged once; the training continues. The comparison
# treats a step without a line as unknown.

MAX_WAITING = 20_000
"""Most lines that wait in memory: a few megabytes, or hours of a full disk with steps of one second."""


class StepLedger:
    """Appends to `{scratch_folder}/ledger/worker-INDEX-ATTEMPT.jsonl`, a line at a time.

    Args:
        path: The ledger's file.
        later: Calls its argument some seconds later. Lines that wait must not depend on another step for being written.
        write: As `os.write`.
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
        self._retry_scheduled = self._closed = False
        self._unwritten_lines: deque[bytes] = deque()
        self._failing = self._dropped = False
        path.parent.mkdir(parents=True, exist_ok=True)
        # unbuffered: a buffer that could not be written completely leaves an unknown part of a line
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, generation: int, rank: int, report: StepReport, start: Mapping[str, float]) -> None:
        """Adds a finished step. `start`: of a rank's first step, when its trainer attached and restored."""
        progress = report.progress
        entry = {
            "generation": generation,
            "step": progress.step,
            "rank": rank,
            "loss": progress.loss,
            "samples": list(report.samples) if report.samples is not None else None,
            "span": report.span,
            "at": time.time(),
            "seconds": progress.step_seconds,
            "stall_seconds": progress.stall_seconds,
            **start,
        }
        if len(self._unwritten_lines) < MAX_WAITING:
            self._unwritten_lines.append((json.dumps(entry) + "\n").encode())
        else:
            metrics.fallbacks.labels(kind="ledger_lost").inc()
            if not self._dropped:
                self._dropped = True
                _log.error(
                    "the ledger %s has %d unwritten lines: further steps are not recorded until it can be written",
                    self._path,
                    MAX_WAITING,
                )
        self._write_lines()

    def _write_lines(self) -> None:
        try:
            while self._unwritten_lines:
                written = self._write(self._descriptor, self._unwritten_lines[0])
                if written == len(self._unwritten_lines[0]):
                    self._unwritten_lines.popleft()
                else:
                    self._unwritten_lines[0] = self._unwritten_lines[0][written:]  # continue with the rest of this line
        except OSError as error:
            if not (self._retry_scheduled or self._closed):
                self._retry_scheduled = True
                self._later(self._retry)
            if not self._failing:
                self._failing = True
                _log.error("the ledger %s cannot be written (%s); its lines stay in memory for now", self._path, error)
            return
        if self._failing:
            self._failing = self._dropped = False
            _log.info("the ledger %s can be written again", self._path)

    def _retry(self) -> None:
        self._retry_scheduled = False
        if not self._closed:
            self._write_lines()

    def close(self) -> None:
        self._closed = True
        self._write_lines()
        if self._unwritten_lines:
            metrics.fallbacks.labels(kind="ledger_lost").inc(len(self._unwritten_lines))
            _log.error(
                "the last %d lines of the ledger %s could not be written", len(self._unwritten_lines), self._path
            )
        try:
            os.close(self._descriptor)
        except OSError as error:
            _log.error("the end of the ledger %s was lost: %s", self._path, error)


# ---- trainer handler -------------------------------------------------------------------------------------------------


class Agent(Protocol):
    """The part of the agent process that the handler uses."""

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
    """Handles the trainers' sessions: the server calls `admit` and `handle_message`, staging calls `slot_freed`."""

    def __init__(self, agent: Agent, job: JobSettings, ledger: StepLedger) -> None:
        self._agent = agent
        self._job = job
        self._ledger = ledger
        self._attached: dict[tuple[int, int], int] = {}
        """Process id by (generation, rank) of the trainers attached in the current generation."""
        self._starts: dict[int, dict[str, float]] = {}
        """By rank, when its trainer attached and how long it restored; until its first step is recorded."""

    def admit(self, attach: line.Attach) -> line.Attached | str:
        """Admits a trainer of the current generation; returns the reason as text if it rejects the process."""
        state, assign = self._agent.state, self._agent.state.assign
        rank_text = f"rank {attach.rank} of generation {attach.generation} (pid {attach.pid})"
        if (
            assign is None
            or attach.generation != state.started_generation
            or assign.generation != state.started_generation
            or state.killing
        ):
            return f"{rank_text} does not belong to generation {state.claimed_generation}"
        rank = next((r for r in state.ranks if r.rank == attach.rank and r.alive), None)
        if rank is None:
            return f"{rank_text} is not a rank of this worker"
        attached_pid = self._attached.get((attach.generation, attach.rank), attach.pid)
        if attached_pid != attach.pid and os.path.exists(f"/proc/{attached_pid}"):
            return (
                f"{rank_text} is rejected: process {attached_pid} is attached as this rank. A process that a rank starts "
                "must not create a Checkpointer; unset SUREFOOT_AGENT_SOCKET in its environment"
            )
        self._attached = {key: pid for key, pid in self._attached.items() if key[0] == attach.generation}
        self._attached[attach.generation, attach.rank] = attach.pid
        self._starts[attach.rank] = {"attached_at": time.time()}
        self._agent.dispatch(on.TrainerMessage(state.started_generation, rank.local, attach, time.monotonic()))
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
        """Handles a trainer's message; ignores those of older generations."""
        state, generation = self._agent.state, trainer.generation
        local = next((r.local for r in state.ranks if r.rank == trainer.rank), None)
        if local is None or generation != state.started_generation:
            return
        if isinstance(message, BarrierReply | BarrierReached) and message.generation != generation:
            return  # a rank replies for its own generation only
        if isinstance(message, line.StepReport):
            self._ledger.write(generation, trainer.rank, message, self._starts.pop(trainer.rank, {}))
            metrics.samples.inc(message.progress.step_samples or 0)
            if local == 0:  # ranks of one worker step together
                metrics.step_seconds.observe(message.progress.step_seconds or 0.0)
        if isinstance(message, line.RestoreDone) and trainer.rank in self._starts:
            self._starts[trainer.rank] |= {"restored_at": time.time(), "restore_seconds": message.seconds}
        match message:
            case line.Staged():
                save = RankSave(generation, message.step, trainer.rank)
                self._agent.staging.stage(
                    local, save, state.assign.world_size if state.assign is not None else 0, message
                )
            case line.RequestArena(slot_bytes=slot_bytes):
                self._agent.spawn(self._grant_arena(trainer, local, slot_bytes))
            case line.FindStagedSaves(checkpoint=checkpoint):
                for saves, fd in self._agent.staging.reusable_saves(local, checkpoint):
                    trainer.send(saves, fd)
            case line.TrainerNotice(reason=reason, text=text):
                self._agent.notice(reason, f"rank {trainer.rank}: {text}")
            case line.MetricsReport(deltas=deltas):
                self._agent.sums.add_increases(deltas)
            case line.CollectivesReport():
                self._agent.inquiry.add_reply(trainer.rank, message)
            case line.Attach():
                _log.warning("rank %d sent a second Attach on its connection; it is ignored", trainer.rank)
            case _:
                self._agent.dispatch(on.TrainerMessage(generation, local, message, time.monotonic()))

    def slot_freed(self, local: int, slot: int, step: int, was_saved: bool) -> None:
        """Notifies the trainer that now uses this arena of a free slot."""
        state = self._agent.state
        rank = next((r.rank for r in state.ranks if r.local == local), None)
        if rank is not None:
            self._agent.trainer_server.send(state.started_generation, rank, line.SlotFreed(slot, step, was_saved))

    def close(self) -> None:
        self._ledger.close()

    async def _grant_arena(self, trainer: TrainerConnection, local: int, slot_bytes: int) -> None:
        try:
            grant = await self._agent.staging.grant_arena(local, slot_bytes, len(self._agent.state.ranks))
        except OSError as error:
            trainer.send(line.ArenaDenied(error.strerror or str(error)))
            return
        message = line.ArenaGranted(SLOTS, grant.file.slot_bytes, grant.seconds, grant.busy)
        trainer.send(message, grant.file.fd)
