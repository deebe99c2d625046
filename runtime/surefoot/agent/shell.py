"""The agent's shell: makes events of what happens, and carries out what `life` decides. One loop, no decisions.

Built by `__main__`. Everything it starts it owns: trainers, the warm process, the store, drains, threads and sockets
end before `run` returns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path

from surefoot.agent import events as on
from surefoot.agent import line
from surefoot.agent.arena import SLOTS
from surefoot.agent.chores import Chores, Places
from surefoot.agent.command import with_own_interpreter
from surefoot.agent.coordinator_line import CoordinatorLine, TurnedAway
from surefoot.agent.ledger import Ledger
from surefoot.agent.life import Life, advance
from surefoot.agent.logs import LogForwarder
from surefoot.agent.orphans import Orphans, adopt_orphans
from surefoot.agent.staging import Staging, StagingWatcher
from surefoot.agent.starter import Hosted, Starter
from surefoot.agent.trainer_line import Trainer, TrainerLine
from surefoot.agent.trainers import Trainers
from surefoot.errors import SurefootError
from surefoot.protocol import messages
from surefoot.protocol.identities import RankSave
from surefoot.settings import AgentSettings

_TICK_SECONDS = 0.5
_TURNED_AWAY = 1
_log = logging.getLogger(__name__)


class Shell:
    """One agent, from its start to its exit code."""

    def __init__(self, settings: AgentSettings, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._settings = settings
        self.incarnation = secrets.token_hex(8)
        self._life = Life(step_timeout_seconds=settings.step_timeout_seconds)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._store: tuple[int, Hosted] | None = None
        environment = with_own_interpreter(environment)
        folder = Path(settings.run_folder).absolute()
        worker = f"worker-{settings.index}-{settings.attempt}"
        logs = folder / "logs" / worker
        logs.mkdir(parents=True, exist_ok=True)
        path = folder / f"{worker}.sock"
        self._ledger = Ledger(folder / "ledger" / f"{worker}.jsonl")
        self._forwarder = LogForwarder()
        self._staging = Staging(
            self.incarnation,
            settings.job,
            StagingWatcher(self._slot_freed, self._beat, self._send_notice),
        )
        self._starter = Starter(
            command, environment, logs / "zygote.log", lambda warm: self.dispatch(on.WarmChanged(warm))
        )
        self._orphans = Orphans(self._starter.own)
        self._trainers = Trainers(
            self._starter, self._forwarder, logs, environment, str(path), self._orphans, self.dispatch
        )
        self._trainer_line = TrainerLine(path, self._admit, self._from_trainer)
        self._line = CoordinatorLine(settings.coordinator_url, self._hello, self._heartbeat, self._from_coordinator)
        places = Places(self._staging.open_tier, self._staging.holders)
        self._chores = Chores(settings.job, places, self._line.send)

    async def run(self) -> int:
        """The agent's life; returns its exit code."""
        loop = asyncio.get_running_loop()
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end, number)
        self._forwarder.start()
        self._trainer_line.start()
        self._starter.start()
        self._spawn(self._talk())
        self._spawn(self._tick())
        self._spawn(self._chores.run())
        try:
            return await self._ended
        finally:
            await self._close()

    def dispatch(self, event: on.Event) -> None:
        """The one way in: an event, its decision, its commands."""
        self._life, commands = advance(self._life, event)
        for command in commands:
            self._do(command)

    # ---- commands -----------------------------------------------------------------------------------------------

    def _do(self, command: on.Command) -> None:
        match command:
            case on.Send(message):
                self._line.send(message)
            case on.Beat():
                self._line.beat()
            case on.StartStore(epoch):
                self._spawn(self._host_store(epoch))
            case on.StopStore(epoch):
                self._stop_store(epoch)
            case on.StartTrainers(assign, store):
                _log.info("epoch %d: %d of %d ranks start here", assign.epoch, assign.local_ranks, assign.world)
                self._spawn(self._trainers.start(assign, store))
            case on.KillTrainers(epoch):
                self._trainers.kill(epoch)
            case on.TellHold(hold):
                self._trainer_line.tell(self._life.started, None, hold)
            case on.TellLevel(level):
                self._trainer_line.tell(self._life.started, None, line.LevelIs(level))
            case on.Retarget(holders):
                self._staging.retarget(holders)
            case on.Flush(epoch):
                self._staging.trainers_gone()
                self._spawn(self._flush(epoch))
            case on.Exit(code):
                if not self._ended.done():
                    self._ended.set_result(code)

    async def _host_store(self, epoch: int) -> None:
        try:
            hosted = await self._starter.store()
        except (SurefootError, OSError) as error:
            self.dispatch(on.StoreLost(epoch, str(error)))
            return
        if self._life.claimed > epoch:
            hosted.child.kill()
            return
        self._store = (epoch, hosted)
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        self.dispatch(on.StoreUp(epoch, f"{host}:{hosted.port}"))
        code = await hosted.child.exited
        if self._store == (epoch, hosted):
            self.dispatch(on.StoreLost(epoch, f"its process ended with code {code}"))

    def _stop_store(self, epoch: int) -> None:
        if self._store is not None and self._store[0] < epoch:
            hosted, self._store = self._store[1], None
            hosted.child.kill()

    async def _flush(self, epoch: int) -> None:
        if not await self._staging.flush(self._settings.termination_grace_seconds):
            text = "what was staged could not be written to its holders in time and was given up"
            self._send_notice("SaveGivenUp", text)
        self.dispatch(on.Flushed(epoch))

    # ---- the coordinator ----------------------------------------------------------------------------------------

    async def _talk(self) -> None:
        try:
            await self._line.run()
        except TurnedAway as error:
            _log.error("%s", error)
            self.dispatch(on.LeaveAsked(_TURNED_AWAY))

    def _hello(self) -> messages.Hello:
        settings, life = self._settings, self._life
        return messages.Hello(
            job=settings.job.job,
            index=settings.index,
            attempt=settings.attempt,
            incarnation=self.incarnation,
            node=settings.node,
            token=settings.token,
            epoch=life.running,
            stopped=life.stopped,
            warm=life.warm,
            store=life.store,
        )

    def _heartbeat(self) -> messages.Heartbeat:
        life, book = self._life, self._staging.book
        saved, copies = book.saved(life.started, len(life.ranks))
        return messages.Heartbeat(
            epoch=life.started,
            stopped=life.stopped,
            warm=life.warm,
            step=life.step,
            loss=life.loss,
            step_seconds=life.step_seconds,
            restored=life.restored,
            pending=book.pending(),
            saved=saved,
            copies=copies,
            level=life.reported_level,
            stall_seconds=life.stall_seconds,
            restored_from=life.restored_from,
        )

    def _from_coordinator(self, message: messages.ToAgent) -> None:
        match message:
            case messages.Welcome():
                self.dispatch(on.Welcomed())
            case messages.Assign():
                self.dispatch(on.Assigned(message))
            case messages.Stop(epoch=epoch, reason=reason):
                if epoch > self._life.claimed:
                    _log.info("epoch %d is claimed: %s", epoch, reason)
                self.dispatch(on.StopAsked(epoch))
            case messages.Holders():
                self.dispatch(on.HoldersChanged(message))
            case messages.Hold():
                self.dispatch(on.HoldAsked(message))
            case messages.SaveLevel(epoch=epoch, level=level):
                self.dispatch(on.LevelAsked(epoch, level))
            case messages.Retire(reason=reason, exit_code=code):
                _log.info("retiring: %s", reason)
                self.dispatch(on.LeaveAsked(code))
            case messages.ListPersistent() | messages.RepairSave() | messages.DropPersistent():
                self._chores.ask(message)
            case messages.PromoteSave():
                self._chores.promote(message)
            case messages.Refused():
                pass  # the line itself acts on it

    # ---- the trainers -------------------------------------------------------------------------------------------

    def _admit(self, attach: line.Attach) -> line.Attached | str:
        life, assign = self._life, self._life.assign
        who = f"rank {attach.rank} of epoch {attach.epoch} (pid {attach.pid})"
        if assign is None or attach.epoch != life.started or assign.epoch != life.started or life.killing:
            return f"{who} does not belong to epoch {life.claimed}"
        rank = next((r for r in life.ranks if r.rank == attach.rank and r.alive), None)
        if rank is None:
            return f"{who} is none of this worker's"
        self.dispatch(on.Attached(life.started, rank.local))
        job = self._settings.job
        return line.Attached(
            job=job.job,
            epoch=assign.epoch,
            world=assign.world,
            rank=attach.rank,
            incarnation=self.incarnation,
            parent=assign.parent,
            lineage=assign.lineage,
            holders=assign.holders,
            targets=assign.targets,
            replicas=assign.replicas,
            interval_steps=job.interval_steps,
            persistent_interval_steps=job.persistent.interval_steps if job.persistent else None,
            level=life.level,
        )

    def _from_trainer(self, trainer: Trainer, message: line.FromTrainer) -> None:
        life = self._life
        local = next((r.local for r in life.ranks if r.rank == trainer.rank), None)
        if local is None or trainer.epoch != life.started:
            return
        epoch = trainer.epoch
        match message:
            case line.Stepped():
                self._ledger.write(epoch, trainer.rank, message)
                done = (message.step, message.loss, message.seconds, message.stall_seconds, message.level)
                self.dispatch(on.StepDone(epoch, local, *done, at=time.monotonic()))
            case line.Staged():
                world = life.assign.world if life.assign is not None else 0
                self._staging.stage(local, RankSave(epoch, message.step, trainer.rank), world, message)
            case line.NeedArena(slot_bytes=slot_bytes):
                self._spawn(self._give_memory(trainer, local, slot_bytes))
            case line.HoldReply(step=step, accepted=accepted):
                self.dispatch(on.HoldAnswered(epoch, local, step, accepted))
            case line.Holding(step=step):
                self.dispatch(on.HoldReached(epoch, local, step))
            case line.RestoreDone(source=source):
                self.dispatch(on.Restored(epoch, local, source, time.monotonic()))
            case line.RestoreFailed(checkpoint=checkpoint, absent=absent, detail=detail):
                self.dispatch(on.RestoreImpossible(epoch, local, checkpoint, absent, detail))
            case line.Say(reason=reason, text=text):
                self._send_notice(reason, f"rank {trainer.rank}: {text}")
            case line.Closing():
                self.dispatch(on.Closed(epoch, local))
            case line.Attach():
                _log.warning("rank %d attached twice: ignored", trainer.rank)

    async def _give_memory(self, trainer: Trainer, local: int, slot_bytes: int) -> None:
        try:
            given = await self._staging.give(local, slot_bytes)
        except OSError as error:
            self._send_notice("NoStagingMemory", f"2 × {slot_bytes} bytes of staging memory cannot be had: {error}")
            trainer.cut()
            return
        message = line.ArenaGiven(SLOTS, given.file.slot_bytes, given.seconds, given.busy)
        trainer.tell(message, given.file.fd)

    def _slot_freed(self, local: int, slot: int, step: int, ok: bool) -> None:
        rank = next((r.rank for r in self._life.ranks if r.local == local), None)
        if rank is not None:
            self._trainer_line.tell(self._life.started, rank, line.SlotFreed(slot, step, ok))

    # ---- the rest -----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._line.beat()

    def _send_notice(self, reason: str, text: str) -> None:
        _log.warning("%s: %s", reason, text)
        self._line.send(messages.Notice(reason, text))

    def _asked_to_end(self, number: int) -> None:
        name = signal.Signals(number).name
        _log.info("%s: stopping trainers and writing what is staged", name)
        self.dispatch(on.LeaveAsked(128 + number))

    async def _tick(self) -> None:
        pause = min(_TICK_SECONDS, self._settings.step_timeout_seconds / 4)
        while True:
            await asyncio.sleep(pause)
            self._orphans.reap()
            self.dispatch(on.Ticked(time.monotonic()))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None or self._ended.done():
            return
        # nothing here is allowed to fail unheard: an agent that only half works is worse than one that is gone
        self._ended.set_exception(task.exception() or SurefootError("a task of the agent failed"))

    async def _close(self) -> None:
        await self._trainers.close()
        if self._store is not None:
            self._store[1].child.kill()
            self._store = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._starter.close()
        await self._trainer_line.close()
        await self._chores.close()
        await self._staging.close()
        self._ledger.close()
        await asyncio.to_thread(self._forwarder.close)
