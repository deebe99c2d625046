"""Runs the agent's event loop and carries out the state machine's commands.

It makes events of what happens and decides nothing itself. Built by `__main__`. Everything it starts it owns:
trainers, the warm process, the store, drains, threads and sockets end before `run` returns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import AgentState, TerminationGrace
from surefoot.agent.coordinator_client import AgentRejected, CoordinatorClient, first_address, read_token, tls_context
from surefoot.agent.coordinator_requests import (
    CoordinatorRequests,
    LeaderlessCollector,
    SaveLocations,
    UnexpectedErrors,
)
from surefoot.agent.health.node_monitor import NodeMonitor, node_checks
from surefoot.agent.health.pre_join_checks import JoinCheck, NodeTestProcess
from surefoot.agent.metrics_server import Exporter
from surefoot.agent.staging_memory import SaveTracker, StagingMemory, StagingWatcher
from surefoot.agent.state_machine import next_state
from surefoot.agent.trainer_handler import StepLedger, TrainerSessionHandler
from surefoot.agent.trainers.hang_diagnosis import CollectiveQuery
from surefoot.agent.trainers.log_forwarder import LogForwarder
from surefoot.agent.trainers.supervisor import OrphanReaper, TrainerSupervisor
from surefoot.errors import SurefootError
from surefoot.flush.bandwidth import bandwidth_of
from surefoot.flush.engine import FlushOptions
from surefoot.ipc.metric_deltas import MetricSums
from surefoot.ipc.trainer_server import TrainerServer
from surefoot.launcher.job_program import with_own_interpreter
from surefoot.launcher.starter import HostedStore, Starter
from surefoot.linux_process import become_subreaper
from surefoot.protocol import messages
from surefoot.protocol.progress import RankActivity
from surefoot.settings import AgentSettings
from surefoot.task_set import TaskSet

_log = logging.getLogger(__name__)


# ---- report of activity ----------------------------------------------------------------------------------------------
# Says how often ranks were found at work, now and then. Totals say in seconds what they would say in every heartbeat:
# of a node of eight ranks they would be most of it.

PACE_SECONDS = 2.0
"""From word to word."""


class ActivityReporter:
    """Lets totals through that are new, once in a while."""

    def __init__(self) -> None:
        self._sent: tuple[RankActivity, ...] = ()
        self._at: float | None = None

    def due(self, paces: tuple[RankActivity, ...], now: float) -> tuple[RankActivity, ...]:
        """What the heartbeat of this moment tells of `paces`; empty: nothing."""
        if paces == self._sent or (self._at is not None and now - self._at < PACE_SECONDS):
            return ()
        self._sent, self._at = paces, now
        return paces


# ---- agent process ---------------------------------------------------------------------------------------------------

_TICK_SECONDS = 0.5
_REJECTED = 1
_TERMINATION_SECONDS = 5.0
_RETRY_SECONDS = 1.0
"""How long trainers of a worker that is asked to end go on without a halt being named."""
_NODE_TEST_TIMEOUT_SECONDS = 1.0
"""Longer a worker that is warm does not wait for its node's trial: a recovery may wait for it."""
_PART_SHARE = 1 / 2
"""Of the grace period, for leaving the world in order; the rest is for writing what is staged."""


def _later(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(_RETRY_SECONDS, call)


class AgentProcess:
    """Runs one agent, from its start to its exit code."""

    def __init__(self, settings: AgentSettings, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._settings = settings
        self.incarnation = secrets.token_hex(6)
        self.state = AgentState(step_timeout_seconds=settings.step_timeout_seconds)
        self._paces = ActivityReporter()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks = TaskSet(self._task_failed)
        self._store: tuple[int, HostedStore] | None = None
        environment = with_own_interpreter(environment)
        folder, scratch = Path(settings.run_folder).absolute(), Path(settings.scratch_folder).absolute()
        worker = f"worker-{settings.index}-{settings.attempt}"
        logs = scratch / "logs" / worker
        logs.mkdir(parents=True, exist_ok=True)
        path = folder / f"{worker}.sock"
        self.sums = MetricSums()
        self._exporter = Exporter(settings, self.sums, self)
        self._forwarder = LogForwarder()
        self._coordinator = CoordinatorClient(
            first_address(settings.coordinator_url, settings.coordinator_fallback_url),
            self._hello,
            self._heartbeat,
            self._from_coordinator,
            tls_context(settings),
        )
        self._trainer_handler = TrainerSessionHandler(
            self, settings.job, StepLedger(scratch / "ledger" / f"{worker}.jsonl", _later)
        )
        watcher = StagingWatcher(self._trainer_handler.slot_freed, self._coordinator.send_heartbeat, self.notice)
        self._bandwidth = bandwidth_of(settings.job)
        options = FlushOptions(pace=self._bandwidth.memory, node=settings.node)
        self.staging = StagingMemory(self.incarnation, settings.job, watcher, options)
        self._starter = Starter(command, environment, logs / "zygote.log", self._warmed)
        self._warm = False
        probe = NodeTestProcess(settings.host, logs, environment)
        self._orphans = OrphanReaper(lambda: self._starter.own_pids() | probe.own())
        self.trainer_server = TrainerServer(path, self._trainer_handler.admit, self._trainer_handler.handle_message)
        self.inquiry = CollectiveQuery(self.trainer_server.send, self.trainer_server.attached)
        self._trainers = TrainerSupervisor(
            self._starter, self._forwarder, logs, environment, str(path), self._orphans, self.dispatch, self.inquiry
        )
        places = SaveLocations(self.staging.open_tier, self.staging.servers, self.staging.partial_generation)
        self._unexpected = UnexpectedErrors()
        self._collector = LeaderlessCollector(
            settings.job, lambda: self.state, self._coordinator.away_seconds, self._unexpected
        )
        checks = node_checks((logs,))
        if settings.pre_join_check != "Disabled":
            checks.append(JoinCheck(settings.node, logs.parent, settings.pre_join_check == "Enforce", probe))
        self._node = NodeMonitor(checks, self._coordinator.send, self.notice)
        self._requests = CoordinatorRequests(settings.job, places, self._coordinator.send, self._bandwidth)

    async def run(self) -> int:
        """Runs the agent until it leaves; returns its exit code."""
        loop = asyncio.get_running_loop()
        become_subreaper()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._exporter.start()
        self._forwarder.start()
        self.trainer_server.start()
        self._starter.start()
        self.spawn(self._talk())
        self.spawn(self._tick())
        self.spawn(self._collector.run())
        self.spawn(self._requests.run())
        self.spawn(self._node.run())
        try:
            return await self._ended
        finally:
            await self._close()

    @property
    def tracker(self) -> SaveTracker:
        return self.staging.tracker

    def dispatch(self, event: on.Event) -> None:
        """The one way in: an event, its decision, its commands."""
        self.state, commands = next_state(self.state, event)
        self._bandwidth.limit(self.state.trains)
        for command in commands:
            self._do(command)

    # ---- commands -----------------------------------------------------------------------------------------------

    def _do(self, command: on.Command) -> None:
        match command:
            case on.Send(message):
                self._coordinator.send(message)
            case on.SendHeartbeat():
                self._coordinator.send_heartbeat()
            case on.StartStore(epoch):
                self.spawn(self._host_store(epoch))
            case on.StopStore(epoch):
                self._stop_store(epoch)
            case on.StartTrainers(assign, store):
                _log.info(
                    "epoch %d: starting %d of %d ranks on this worker",
                    assign.generation,
                    assign.local_ranks,
                    assign.world_size,
                    extra={"generation": assign.generation},
                )
                self.staging.drop_older_generations(assign.generation)
                self.spawn(self._trainers.start(assign, store))
            case on.KillTrainers(epoch):
                self._trainers.kill(epoch)
            case on.CollectStacks(epoch):
                self.spawn(self._take_stacks(epoch))
            case on.SendToTrainers(message, rank):
                self.trainer_server.send(self.state.started, rank, message)
            case on.Retarget(holders):
                self.staging.retarget(holders)
            case on.Flush(epoch):
                self.spawn(self._flush(epoch))
            case on.Exit(code):
                if not self._ended.done():
                    self._ended.set_result(code)

    async def _host_store(self, epoch: int) -> None:
        try:
            hosted = await self._starter.start_store(self._settings.host)
        except (SurefootError, OSError) as error:
            self.dispatch(on.StoreExited(epoch, str(error)))
            return
        if self.state.claimed > epoch:
            hosted.child.kill()
            return
        self._store = (epoch, hosted)
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        self.dispatch(on.StoreStarted(epoch, f"{host}:{hosted.port}"))
        code = await hosted.child.exited
        if self._store == (epoch, hosted):
            self.dispatch(on.StoreExited(epoch, f"its process ended with code {code}"))

    async def _take_stacks(self, epoch: int) -> None:
        try:
            found, look = await self._trainers.capture_stacks()
        except Exception as error:  # noqa: BLE001  the trainers are to be ended all the same
            found, look = self._unexpected.record("taking stacks", error), None
        self.dispatch(on.StacksCollected(epoch, found, look))

    def _warmed(self, warm: bool) -> None:
        self._warm = warm
        if warm and self._settings.pre_join_check == "Enforce":
            self.spawn(self._report_warm_after_tests())
        else:
            self.dispatch(on.WarmChanged(warm))

    async def _report_warm_after_tests(self) -> None:
        """What was found on the node is told ahead of the word that this worker can have a rank."""
        try:
            async with asyncio.timeout(_NODE_TEST_TIMEOUT_SECONDS):
                await self._node.first_answer(JoinCheck.name)
        except TimeoutError:
            _log.info("ready before all of this node was tried: what is found later is told then")
        self.dispatch(on.WarmChanged(self._warm))

    def _stop_store(self, epoch: int) -> None:
        if self._store is not None and self._store[0] < epoch:
            hosted, self._store = self._store[1], None
            hosted.child.kill()

    async def _flush(self, epoch: int) -> None:
        if not await self.staging.flush(self._settings.termination_grace_seconds):
            text = "what was staged could not be written to its holders in time and was given up"
            self.notice("SaveAbandoned", text)
        self.dispatch(on.Flushed(epoch))

    # ---- the coordinator ----------------------------------------------------------------------------------------

    async def _talk(self) -> None:
        try:
            await self._coordinator.run()
        except AgentRejected as error:
            _log.error("%s", error)
            self.dispatch(on.ShutdownRequested(_REJECTED))

    def _hello(self) -> messages.Hello:
        settings, state = self._settings, self.state
        return messages.Hello(
            job=settings.job.job,
            index=settings.index,
            attempt=settings.attempt,
            incarnation=self.incarnation,
            node=settings.node,
            token=read_token(settings),
            generation=state.running,
            stopped=state.stopped,
            is_warm=state.warm,
            store=state.store,
        )

    def _heartbeat(self) -> messages.Heartbeat:
        state, tracker, needs = self.state, self.staging.tracker, self.staging.needs
        saved, copies = tracker.saved(state.started, len(state.ranks))
        told = state.progress
        progress = replace(
            told,
            save_bytes=needs.save_bytes,
            no_staging_reason=needs.unstaged,
            closed_steps=tracker.closed_steps(state.started, len(state.ranks), told.closed_steps.closed_up_to),
            activities=self._paces.due(told.activities, time.monotonic()),
        )
        return messages.Heartbeat(
            generation=state.started,
            stopped=state.stopped,
            is_warm=state.warm,
            progress=progress,
            pending=tracker.pending(),
            saved=saved,
            copies=copies,
            terminating=state.terminating is not None,
        )

    def _from_coordinator(self, message: messages.ToAgent) -> None:
        match message:
            case messages.Welcome():
                self.dispatch(message)
                self._coordinator.send(self._node.health())
            case messages.Assign() | messages.MemoryServers() | messages.Barrier() | messages.IntervalExponent():
                self.dispatch(message)
            case messages.StopTrainers(generation=epoch, reason=reason):
                if epoch > self.state.claimed:
                    _log.info(
                        "epoch %d is claimed, trainers of older ones stop: %s",
                        epoch,
                        reason,
                        extra={"generation": epoch},
                    )
                self.dispatch(message)
            case messages.Shutdown(reason=reason, exit_code=code):
                _log.info("the coordinator retires this worker, stopping its trainers: %s", reason)
                self.dispatch(on.ShutdownRequested(code))
            case messages.ListPersistent() | messages.RepairSave() | messages.DeletePersistent():
                self._requests.ask(message)
            case messages.UploadSave():
                self._requests.upload(message)
            case messages.HelloRejected() | messages.MemoryServerChanges():
                pass  # the line itself acts on it

    # ---- the rest -----------------------------------------------------------------------------------------------

    def notice(self, reason: str, text: str) -> None:
        _log.warning("%s: %s", reason, text)
        self._coordinator.send(messages.Notice(reason, text))

    def _on_signal(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        _log.info("received %s: stopping at the next agreed step and flushing staged saves", name)
        if self._coordinator.away_seconds() > 0.0:  # nobody is there who could name a halt
            self.dispatch(on.ShutdownRequested(128 + number))
            return
        share = self._settings.termination_grace_seconds * _PART_SHARE
        self.dispatch(
            on.TerminationRequested(128 + number, TerminationGrace(now + min(_TERMINATION_SECONDS, share), now + share))
        )

    async def _tick(self) -> None:
        pause = min(_TICK_SECONDS, self._settings.step_timeout_seconds / 4)
        while True:
            await asyncio.sleep(pause)
            self._orphans.reap()
            self.dispatch(on.Ticked(time.monotonic()))

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.start(work)

    def _task_failed(self, name: str, error: BaseException) -> None:
        # nothing here is allowed to fail unheard: an agent that only half works is worse than one that is gone
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _close(self) -> None:
        await self._trainers.close()
        if self._store is not None:
            self._store[1].child.kill()
            self._store = None
        await self._tasks.close()
        await self._starter.close()
        await self._exporter.close()
        await self.trainer_server.close()
        await self._requests.close()
        await self.staging.close()
        self._trainer_handler.close()
        await asyncio.to_thread(self._forwarder.close)
