"""Runs the agent's event loop and carries out the state machine's commands.

It turns everything that happens into events and decides nothing itself. `__main__` creates it. It owns everything that
it starts: trainers, the fork server, the store, flushes, threads and sockets all end before `run` returns.
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
from surefoot.agent.trainers.supervisor import OrphanReaper, TrainerSupervisor, common_environment
from surefoot.errors import SurefootError
from surefoot.flush.bandwidth import build_bandwidth
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
# Adds the ranks' activity to some heartbeats only. Activity counters are totals, so nothing is lost between reports; in
# every heartbeat those of a node with eight ranks would be most of its bytes.

ACTIVITY_INTERVAL_SECONDS = 2.0
"""Shortest time between two heartbeats that carry activity."""


class ActivityReporter:
    """Selects the heartbeats that carry the ranks' activity."""

    def __init__(self) -> None:
        self._sent: tuple[RankActivity, ...] = ()
        self._sent_seconds: float | None = None

    def select_unsent(self, activities: tuple[RankActivity, ...], now: float) -> tuple[RankActivity, ...]:
        """Returns the activities to send with a heartbeat at `now`; empty if unchanged or sent too recently."""
        if activities == self._sent or (
            self._sent_seconds is not None and now - self._sent_seconds < ACTIVITY_INTERVAL_SECONDS
        ):
            return ()
        self._sent, self._sent_seconds = activities, now
        return activities


# ---- agent process ---------------------------------------------------------------------------------------------------

_TICK_SECONDS = 0.5
_REJECTED_EXIT_CODE = 1
_TERMINATION_SECONDS = 5.0
"""How long trainers continue after SIGTERM while the coordinator announces no barrier."""
_LEDGER_RETRY_SECONDS = 1.0
"""Time until lines that could not be written to the step ledger are tried again."""
_NODE_TEST_TIMEOUT_SECONDS = 1.0
"""How long a warm worker waits for its node test before it reports itself: a recovery may be waiting for it."""
_BARRIER_SHARE = 1 / 2
"""Share of the termination grace period for reaching a barrier; the rest is for flushing staged saves."""


def _call_later(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(_LEDGER_RETRY_SECONDS, call)


class AgentProcess:
    """Runs one agent, from its start to its exit code."""

    def __init__(self, settings: AgentSettings, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._settings = settings
        self.incarnation = secrets.token_hex(6)
        self.state = AgentState(step_timeout_seconds=settings.step_timeout_seconds)
        self._activity_reporter = ActivityReporter()
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks = TaskSet(self._on_task_failed)
        self._store: tuple[int, HostedStore] | None = None
        environment = with_own_interpreter(environment)
        run_folder, scratch_folder = Path(settings.run_folder).absolute(), Path(settings.scratch_folder).absolute()
        worker = f"worker-{settings.index}-{settings.attempt}"
        log_folder = scratch_folder / "logs" / worker
        log_folder.mkdir(parents=True, exist_ok=True)
        socket_path = run_folder / f"{worker}.sock"
        self.sums = MetricSums()
        self._exporter = Exporter(settings, self.sums, self)
        self._forwarder = LogForwarder()
        self._coordinator = CoordinatorClient(
            first_address(settings.coordinator_url, settings.coordinator_fallback_url),
            self._build_hello,
            self._build_heartbeat,
            self._handle_coordinator_message,
            tls_context(settings),
        )
        self._trainer_handler = TrainerSessionHandler(
            self, settings.job, StepLedger(scratch_folder / "ledger" / f"{worker}.jsonl", _call_later)
        )
        watcher = StagingWatcher(self._trainer_handler.slot_freed, self._coordinator.send_heartbeat, self.notice)
        self._bandwidth = build_bandwidth(settings.job)
        flush_options = FlushOptions(rate_limit=self._bandwidth.memory, node=settings.node)
        self.staging = StagingMemory(self.incarnation, settings.job, watcher, flush_options)
        self._starter = Starter(
            command,
            common_environment(environment),
            log_folder / "fork_server.log",
            self._on_warm_changed,
            warm_imports=settings.warm_imports != "none",
        )
        self._warm = False
        test_process = NodeTestProcess(settings.host, log_folder, environment)
        self._orphans = OrphanReaper(lambda: self._starter.own_pids() | test_process.own())
        self.trainer_server = TrainerServer(
            socket_path, self._trainer_handler.admit, self._trainer_handler.handle_message
        )
        self.inquiry = CollectiveQuery(self.trainer_server.send, self.trainer_server.attached_ranks)
        self._trainers = TrainerSupervisor(
            self._starter,
            self._forwarder,
            log_folder,
            environment,
            str(socket_path),
            self._orphans,
            self.dispatch,
            self.inquiry,
        )
        save_locations = SaveLocations(self.staging.open_tier, self.staging.servers, self.staging.partial_generation)
        self._unexpected = UnexpectedErrors()
        self._collector = LeaderlessCollector(
            settings.job, lambda: self.state, self._coordinator.away_seconds, self._unexpected
        )
        checks = node_checks((log_folder,))
        if settings.pre_join_check != "Disabled":
            checks.append(
                JoinCheck(settings.node, log_folder.parent, settings.pre_join_check == "Enforce", test_process)
            )
        self._node = NodeMonitor(checks, self._coordinator.send, self.notice)
        self._requests = CoordinatorRequests(settings.job, save_locations, self._coordinator.send, self._bandwidth)

    async def run(self) -> int:
        """Runs the agent until it shuts down; returns its exit code."""
        loop = asyncio.get_running_loop()
        become_subreaper()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._on_signal, signal_number)
        await self._exporter.start()
        self._forwarder.start()
        self.trainer_server.start()
        self._starter.start()
        self.spawn(self._run_coordinator_client())
        self.spawn(self._tick())
        self.spawn(self._collector.run())
        self.spawn(self._requests.run())
        self.spawn(self._node.run())
        try:
            return await self._exit_code
        finally:
            await self._close()

    @property
    def tracker(self) -> SaveTracker:
        return self.staging.tracker

    def dispatch(self, event: on.Event) -> None:
        """Applies one event to the state and carries out the resulting commands; every change passes through here."""
        self.state, commands = next_state(self.state, event)
        self._bandwidth.set_limited(self.state.is_training)
        for command in commands:
            self._run_command(command)

    # ---- commands -----------------------------------------------------------------------------------------------

    def _run_command(self, command: on.Command) -> None:
        match command:
            case on.Send(message):
                self._coordinator.send(message)
            case on.SendHeartbeat():
                self._coordinator.send_heartbeat()
            case on.StartStore(generation):
                self.spawn(self._host_store(generation))
            case on.StopStore(generation):
                self._stop_store(generation)
            case on.StartTrainers(assign, store):
                _log.info(
                    "generation %d: starting %d of %d ranks on this worker",
                    assign.generation,
                    assign.local_ranks,
                    assign.world_size,
                    extra={"generation": assign.generation},
                )
                self.staging.drop_older_generations(assign.generation)
                self.spawn(self._trainers.start(assign, store))
            case on.KillTrainers(generation):
                self._trainers.kill(generation)
            case on.CollectStacks(generation):
                self.spawn(self._collect_stacks(generation))
            case on.SendToTrainers(message, rank):
                self.trainer_server.send(self.state.started_generation, rank, message)
            case on.Retarget(servers):
                self.staging.retarget(servers)
            case on.Flush(generation):
                self.spawn(self._flush(generation))
            case on.Exit(code):
                if not self._exit_code.done():
                    self._exit_code.set_result(code)

    async def _host_store(self, generation: int) -> None:
        try:
            store = await self._starter.start_store(self._settings.host)
        except (SurefootError, OSError) as error:
            self.dispatch(on.StoreExited(generation, str(error)))
            return
        if self.state.claimed_generation > generation:
            store.child.kill()
            return
        self._store = (generation, store)
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        self.dispatch(on.StoreStarted(generation, f"{host}:{store.port}"))
        code = await store.child.exited
        if self._store == (generation, store):
            self.dispatch(on.StoreExited(generation, f"its process ended with code {code}"))

    async def _collect_stacks(self, generation: int) -> None:
        try:
            stacks, observation = await self._trainers.capture_stacks()
        except Exception as error:  # noqa: BLE001  the trainers must be killed even without stacks
            stacks, observation = self._unexpected.record("collecting stacks", error), None
        self.dispatch(on.StacksCollected(generation, stacks, observation))

    def _on_warm_changed(self, warm: bool) -> None:
        self._warm = warm
        if warm and self._settings.pre_join_check == "Enforce":
            self.spawn(self._report_warm_after_tests())
        else:
            self.dispatch(on.WarmChanged(warm))

    async def _report_warm_after_tests(self) -> None:
        """Reports this worker as warm, after the findings of its node test if they come in time."""
        try:
            async with asyncio.timeout(_NODE_TEST_TIMEOUT_SECONDS):
                await self._node.first_answer(JoinCheck.name)
        except TimeoutError:
            _log.info("this worker is warm before its node test has ended; later findings are reported when they come")
        self.dispatch(on.WarmChanged(self._warm))

    def _stop_store(self, generation: int) -> None:
        if self._store is not None and self._store[0] < generation:
            store, self._store = self._store[1], None
            store.child.kill()

    async def _flush(self, generation: int) -> None:
        if not await self.staging.flush(self._settings.termination_grace_seconds):
            message = "some staged saves were abandoned: their memory servers did not accept them in time"
            self.notice("SaveAbandoned", message)
        self.dispatch(on.Flushed(generation))

    # ---- the coordinator ----------------------------------------------------------------------------------------

    async def _run_coordinator_client(self) -> None:
        try:
            await self._coordinator.run()
        except AgentRejected as error:
            _log.error("%s", error)
            self.dispatch(on.ShutdownRequested(_REJECTED_EXIT_CODE))

    def _build_hello(self) -> messages.Hello:
        settings, state = self._settings, self.state
        return messages.Hello(
            job=settings.job.job,
            index=settings.index,
            attempt=settings.attempt,
            incarnation=self.incarnation,
            node=settings.node,
            token=read_token(settings),
            generation=state.running_generation,
            stopped=state.stopped_below,
            is_warm=state.is_warm,
            store=state.store_address,
        )

    def _build_heartbeat(self) -> messages.Heartbeat:
        state, tracker, needs = self.state, self.staging.tracker, self.staging.needs
        saved, copies = tracker.saved(state.started_generation, len(state.ranks))
        progress_of_ranks = state.progress
        progress = replace(
            progress_of_ranks,
            save_bytes=needs.save_bytes,
            no_staging_reason=needs.rejection_reason,
            closed_steps=tracker.closed_steps(
                state.started_generation, len(state.ranks), progress_of_ranks.closed_steps.closed_up_to
            ),
            activities=self._activity_reporter.select_unsent(progress_of_ranks.activities, time.monotonic()),
        )
        return messages.Heartbeat(
            generation=state.started_generation,
            stopped=state.stopped_below,
            is_warm=state.is_warm,
            progress=progress,
            pending=tracker.pending(),
            saved=saved,
            copies=copies,
            terminating=state.termination_exit_code is not None,
        )

    def _handle_coordinator_message(self, message: messages.ToAgent) -> None:
        match message:
            case messages.Welcome():
                self.dispatch(message)
                self._coordinator.send(self._node.health())
            case messages.Assign() | messages.MemoryServers() | messages.Barrier() | messages.IntervalExponent():
                self.dispatch(message)
            case messages.StopTrainers(generation=generation, reason=reason):
                if generation > self.state.claimed_generation:
                    _log.info(
                        "generation %d is claimed, trainers of older generations stop: %s",
                        generation,
                        reason,
                        extra={"generation": generation},
                    )
                self.dispatch(message)
            case messages.Shutdown(reason=reason, exit_code=code):
                _log.info("the coordinator shuts this worker down, stopping its trainers: %s", reason)
                self.dispatch(on.ShutdownRequested(code))
            case messages.ListPersistent() | messages.RepairSave() | messages.DeletePersistent():
                self._requests.queue_request(message)
            case messages.UploadSave():
                self._requests.queue_uploads(message)
            case messages.HelloRejected() | messages.MemoryServerChanges():
                pass  # the coordinator client handles these itself

    # ---- notices, signals, tasks --------------------------------------------------------------------------------

    def notice(self, reason: str, text: str) -> None:
        """Logs a warning and has the coordinator record it as an event of the job."""
        _log.warning("%s: %s", reason, text)
        self._coordinator.send(messages.Notice(reason, text))

    def _on_signal(self, signal_number: int) -> None:
        name, now = signal.Signals(signal_number).name, time.monotonic()
        _log.info("received %s: stopping at the next agreed step and flushing staged saves", name)
        if self._coordinator.away_seconds() > 0.0:  # without a coordinator no barrier can be announced
            self.dispatch(on.ShutdownRequested(128 + signal_number))
            return
        barrier_seconds = self._settings.termination_grace_seconds * _BARRIER_SHARE
        self.dispatch(
            on.TerminationRequested(
                128 + signal_number,
                TerminationGrace(now + min(_TERMINATION_SECONDS, barrier_seconds), now + barrier_seconds),
            )
        )

    async def _tick(self) -> None:
        interval_seconds = min(_TICK_SECONDS, self._settings.step_timeout_seconds / 4)
        while True:
            await asyncio.sleep(interval_seconds)
            self._orphans.reap()
            self.dispatch(on.Ticked(time.monotonic()))

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.start(work)

    def _on_task_failed(self, name: str, error: BaseException) -> None:
        # no task may fail silently: an agent that half works is worse than one that ended and is replaced
        if not self._exit_code.done():
            self._exit_code.set_exception(error)

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
