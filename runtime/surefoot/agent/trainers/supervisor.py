"""Starts, watches and kills a generation's trainers, and reports each exit.

Only `agent_process` uses it, on its loop. Each rank's exit is reported once, also for a rank that could not be started.
The last rank's exit is reported only when no process that the ranks started is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot import metrics
from surefoot.agent.agent_state import HangObservation, ProcessActivity, TrainerExited
from surefoot.agent.health.node_checks import KernelLog
from surefoot.agent.trainers import hang_diagnosis
from surefoot.agent.trainers.exit_cause import (
    ErrorReport,
    ExitCause,
    Limit,
    OomCounts,
    OomKill,
    RankExit,
    consume_injected_kill,
    exceeded_limit_of,
    find_oom_kill,
    first_cause,
    read_oom_counts,
    read_report,
)
from surefoot.agent.trainers.hang_diagnosis import CollectiveQuery, parse_main_thread, rank_stacks, summarize_stacks
from surefoot.agent.trainers.log_forwarder import LogForwarder
from surefoot.fault_files import fault_file
from surefoot.ipc import stacks
from surefoot.launcher.child_process import Child
from surefoot.launcher.starter import Starter
from surefoot.linux_process import children, cpu_seconds
from surefoot.protocol.messages import Assign

_log = logging.getLogger(__name__)


# ---- environment -----------------------------------------------------------------------------------------------------
# Builds one trainer's environment: torchrun's variables and Surefoot's own. Pure. A program that runs under torchrun
# finds the variables that it expects; `TORCHELASTIC_RESTART_COUNT` is the generation.

_AGENT_ONLY_VARIABLES = (
    "SUREFOOT_TOKEN",
    "SUREFOOT_TOKEN_FILE",
    "SUREFOOT_COORDINATOR_URL",
    "SUREFOOT_COORDINATOR_FALLBACK_URL",
    "SUREFOOT_COORDINATOR_CA",
    "SUREFOOT_METRICS_PORT",
)
"""Variables that trainers do not get: they must not reach the coordinator, and the agent itself uses the metrics port."""


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """Describes a trainer's rank, store, socket and files, for its environment."""

    assign: Assign
    local: int
    store: str
    """Address of the TCP store (host:port)."""
    socket: str
    error_file: str
    stacks_file: str = ""
    restarts_allowed: int = 0


def common_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Builds what all trainers share from the agent's environment, which has the job's and the pod template's variables."""
    environment = {name: value for name, value in base.items() if name not in _AGENT_ONLY_VARIABLES}
    # as torchrun does: several ranks with one thread per core each slow each other down; the template may set it
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def trainer_environment(base: Mapping[str, str], place: TrainerPlace) -> dict[str, str]:
    """Builds a trainer's environment: the common one and the variables of its rank (`RANK_VARIABLES`)."""
    assign = place.assign
    host, _, port = place.store.rpartition(":")
    environment = common_environment(base)
    return environment | {
        "RANK": str(assign.first_rank + place.local),
        "LOCAL_RANK": str(place.local),
        "WORLD_SIZE": str(assign.world_size),
        "LOCAL_WORLD_SIZE": str(assign.local_ranks),
        "GROUP_RANK": str(assign.group_rank),
        "GROUP_WORLD_SIZE": str(assign.group_size),
        "ROLE_RANK": str(assign.first_rank + place.local),
        "ROLE_WORLD_SIZE": str(assign.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(assign.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(place.restarts_allowed),
        "TORCHELASTIC_RUN_ID": environment.get("SUREFOOT_JOB_UID", "surefoot"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": place.error_file,
        "SUREFOOT_AGENT_SOCKET": place.socket,
        "SUREFOOT_GENERATION": str(assign.generation),
        "SUREFOOT_STACK_DUMP_FILE": place.stacks_file,
    }


# ---- activity --------------------------------------------------------------------------------------------------------
# Reads the I/O and CPU time of trainers and their children from /proc; a process that has ended counts nothing.

_MAX_CHILDREN = 256


def measure_activity(pids: Iterable[tuple[int, bool]]) -> ProcessActivity:
    """Sums I/O and CPU time of these processes and their children.

    The flag of each process: whether it waits for other ranks. CPU time spent spinning in a wait is no sign of progress.
    """
    io_bytes, seconds = 0, 0.0
    for pid, waits in pids:
        io_bytes += _io_bytes(pid)
        seconds += 0.0 if waits else cpu_seconds(pid)
        for child in sorted(children(pid))[:_MAX_CHILDREN]:
            io_bytes += _io_bytes(child)
            seconds += cpu_seconds(child)
    return ProcessActivity(io_bytes, seconds)


def _io_bytes(pid: int) -> int:
    try:
        content = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0
    lines = dict(line.split(": ", 1) for line in content.splitlines() if ": " in line)
    return int(lines.get("rchar", 0)) + int(lines.get("wchar", 0))


# ---- orphans ---------------------------------------------------------------------------------------------------------
# Reaps and kills the processes that trainers leave running when they end. The kernel makes them children of the agent,
# which is a subreaper. A data loader's process is harmless, but ranks that the trainer started itself (by torchrun) still
# train and write into staging memory: the worker counts as stopped only when they have ended too.

_SWEEP_SECONDS = 10.0
_POLL_SECONDS = 0.01


class OrphanReaper:
    """Reaps and kills child processes that the agent did not start; `own` returns the pids that it did."""

    def __init__(self, own_pids: Callable[[], set[int]]) -> None:
        self._own = own_pids

    def reap(self) -> set[int]:
        """Reaps ended orphans; returns the pids of those that still run."""
        living: set[int] = set()
        for pid in children(os.getpid()) - self._own():
            try:
                ended_pid, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
            if not ended_pid:
                living.add(pid)
        return living

    async def kill_all(self) -> None:
        """Kills all orphans, and those that become orphans by it, until none is left or _SWEEP_SECONDS have passed."""
        deadline = time.monotonic() + _SWEEP_SECONDS
        while living := self.reap():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                metrics.fallbacks.labels(kind="orphans_left").inc()
                _log.error(
                    "processes %s of ended trainers do not end after SIGKILL: they are blocked in the kernel",
                    sorted(living),
                )
                return
            await asyncio.sleep(_POLL_SECONDS)


# ---- supervisor ------------------------------------------------------------------------------------------------------

_NOT_STARTED = 127
_MAX_FRAMES = 30
_KILLED = -9


@dataclass(slots=True)
class _LocalTrainer:
    rank: int
    log: Path
    error_file: Path
    stacks_file: Path
    child: Child | None = None
    code: int | None = None
    logged_stack: str = ""
    """Stack that was logged last, so that the same one is not logged again."""


@dataclass(slots=True)
class TrainerSupervisor:
    """Supervises the local trainers; `on_exit` gets each exit, and `folder` is for their logs."""

    starter: Starter
    forwarder: LogForwarder
    folder: Path
    environment: Mapping[str, str]
    socket: str
    orphans: OrphanReaper
    on_exit: Callable[[TrainerExited], None]
    inquiry: CollectiveQuery
    _generation: int = 0
    _killed: int = 0
    _blamed: bool = False
    _oom: OomCounts = field(default_factory=OomCounts)
    """Counters of the kernel's OOM killer before the generation's trainers started."""
    _injected: OomKill | None = None
    """OOM kill that `surefoot local` injected in this generation; None: none."""
    _kernel: KernelLog | None = None
    """Kernel log, open since the generation's trainers were started."""
    _kernel_lines: list[str] = field(default_factory=list)
    _running: dict[int, _LocalTrainer] = field(default_factory=dict)
    _watchers: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, assign: Assign, store: str) -> None:
        """Starts every local rank; one that cannot be started is reported as exited, with the cause."""
        self._generation, self._blamed = assign.generation, False
        self._oom, self._injected = read_oom_counts(), None
        self._forget_kernel_log()
        self._kernel = KernelLog()
        folder = self.folder / f"epoch-{assign.generation}"
        folder.mkdir(parents=True, exist_ok=True)
        self._running = {
            local: _LocalTrainer(
                rank,
                folder / f"rank-{rank}.log",
                folder / f"rank-{rank}.error.json",
                folder / f"rank-{rank}.stacks.txt",
            )
            for local, rank in enumerate(range(assign.first_rank, assign.first_rank + assign.local_ranks))
        }
        running = self._running
        for local, entry in running.items():
            entry.error_file.unlink(missing_ok=True)
            if self._killed >= assign.generation:  # a newer generation was claimed while these trainers were started
                self._report_exit(assign.generation, local, running, _KILLED)
                continue
            place = TrainerPlace(assign, local, store, self.socket, str(entry.error_file), str(entry.stacks_file))
            try:
                entry.child = await self._start_trainer(place, entry.log)
            except OSError as error:
                reason = f"rank {entry.rank} could not be started: {error}"
                entry.code = _NOT_STARTED
                self.on_exit(TrainerExited(assign.generation, local, _NOT_STARTED, reason))
                continue
            if self._killed >= assign.generation:
                entry.child.kill()
            self.forwarder.start_forwarding(entry.log, entry.rank)
            self._watch_exit(assign.generation, local, running)

    def kill(self, generation: int) -> None:
        """Kills every trainer of this generation, also those that are being started."""
        self._killed = max(self._killed, generation)
        for entry in self._running.values():
            if entry.child is not None:
                entry.child.kill()

    async def capture_stacks(self) -> tuple[str, HangObservation | None]:
        """Captures the running trainers' stacks and collectives, and logs main threads that have changed.

        The complete stacks are written to files next to the trainers' logs.

        Returns:
            A summary in text, and the same for comparison; the latter is None if some rank gave no stack.
        """
        running = [e for e in self._running.values() if e.child is not None and e.code is None]
        (*captured,), answers = await asyncio.gather(
            asyncio.gather(*(stacks.capture_stack(e.rank, e.child.pid, e.stacks_file) for e in running if e.child)),
            self.inquiry.query_ranks(self._generation, [e.rank for e in running]),
        )
        collectives = hang_diagnosis.summarize_collectives(answers)
        self._log_stacks(captured, running, collectives)
        stack_groups = rank_stacks(captured)
        waiting = {rank for group in stack_groups if group.is_waiting for rank in group.ranks}
        pids = [(entry.child.pid, entry.rank in waiting) for entry in running if entry.child is not None]
        observation = HangObservation(
            time.monotonic(), stack_groups, measure_activity(pids), hang_diagnosis.collectives_of(answers)
        )
        return f"{summarize_stacks(captured)}\n{collectives}", observation if stack_groups else None

    def _log_stacks(
        self, captured: Sequence[stacks.CapturedStack], running: Sequence[_LocalTrainer], collectives: str
    ) -> None:
        logged = False
        for stack, entry in zip(captured, running, strict=True):
            stack_text = stack.reason or "\n  ".join(map(str, parse_main_thread(stack.text)[:_MAX_FRAMES]))
            if entry.logged_stack == stack_text:
                continue
            entry.logged_stack, logged = stack_text, True
            _log.warning(
                "rank %d makes no progress; its main thread: %s; all threads: %s",
                stack.rank,
                stack_text,
                entry.stacks_file,
                extra={"rank": stack.rank, "generation": self._generation},
            )
        if logged:
            _log.warning("collectives: %s", collectives.replace("\n", "; "), extra={"generation": self._generation})

    async def close(self) -> None:
        self.kill(self._generation)
        await asyncio.gather(*self._watchers)
        self._forget_kernel_log()

    async def _start_trainer(self, place: TrainerPlace, log: Path) -> Child:
        environment = trainer_environment(self.environment, place)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            return await self.starter.start_trainer(environment, os.getcwd(), output)
        finally:
            os.close(output)

    def _watch_exit(self, generation: int, local: int, running: dict[int, _LocalTrainer]) -> None:
        async def watch() -> None:
            child = running[local].child
            assert child is not None
            code = await child.exited
            running[local].code = code
            if all(entry.code is not None for entry in running.values()):
                # the last one: kill all processes that the ranks started before the worker is reported as stopped
                await self.orphans.kill_all()
            self._report_exit(generation, local, running, code)

        task = asyncio.create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    def _report_exit(self, generation: int, local: int, running: dict[int, _LocalTrainer], code: int) -> None:
        entry = running[local]
        entry.code = code
        self.forwarder.stop_forwarding(entry.log)
        if code == 0 or self._killed >= generation:
            self.on_exit(TrainerExited(generation, local, code, f"exit code {code}"))
            return
        cause, oom = self._find_cause(running)
        if not self._blamed:
            self._blamed = True
            self.forwarder.show_tail(running[cause.local].log, running[cause.local].rank)
        failed_rank = running[cause.local].rank
        _log.warning(
            "rank %d exited: %s", failed_rank, cause.text, extra={"rank": failed_rank, "generation": generation}
        )
        self.on_exit(TrainerExited(generation, local, code, cause.text, cause.secondary, cause.local, oom))

    def _find_cause(self, running: dict[int, _LocalTrainer]) -> tuple[ExitCause, Limit]:
        """Returns the worker's first cause of failure, and the exceeded memory limit if it was an OOM kill."""
        if self._kernel is not None:
            self._kernel_lines += self._kernel.lines()
        self._injected = self._injected or consume_injected_kill(fault_file("oom"))
        kill = self._injected or find_oom_kill(self._oom, read_oom_counts(), kernel=self._kernel_lines)
        oom_text = kill.text if kill is not None else ""
        exits = [
            RankExit(local, entry.code, _read_error_file(entry.error_file), oom_text)
            for local, entry in running.items()
        ]
        cause = first_cause(exits)
        return cause, exceeded_limit_of(next((e for e in exits if e.local == cause.local), None), kill)

    def _forget_kernel_log(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
        self._kernel, self._kernel_lines = None, []


def _read_error_file(path: Path) -> ErrorReport | None:
    try:
        return read_report(path.read_text(encoding="utf-8"))
    except OSError:
        return None  # it ended without writing a report
