"""Starts and ends the nodes and the operator of a local run, and injects faults into them.

Used by `surefoot local` and by tests. `close` ends every process that was started here. If this process is killed, the
kernel ends its children (PDEATHSIG), and the next run in the folder ends the others. Start processes only from the main
thread, because they die with the thread that forked them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot.linux_process import (
    ProcessIdentity,
    become_subreaper,
    find_by_environment,
    identity_of,
    is_alive,
    list_group_members,
    reap_orphans,
    send_signal,
    signal_group,
)
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.local.node_process import find_free_port
from surefoot_operator.platforms.local.run_folder import (
    DeletionRequest,
    NodeRecord,
    RunFolder,
    parse_record,
    read_json,
    record_to_json,
    write_json,
)

# ---- processes killed by the OOM killer ------------------------------------------------------------------------------
# Makes the kernel's OOM killer end single processes, by cgroups (Linux, both versions). A process is moved into its own
# memory cgroup with a limit of 0: at the next page that it allocates, the kernel kills it as it kills any process over
# its limit. The machine's memory is never used up. If no cgroup can be created, or the process allocates nothing, it
# gets SIGKILL instead, and the fault file has the reason for the agent's report.

_MAX_ALLOCATION_WAIT_SECONDS = 5.0
"""Time within which a confined trainer must allocate a page; one that trains does so at once."""

_MAX_REPORT_SECONDS = 10.0
"""Time limit for the agent to notice the trainer's end and to read the cgroup's counters."""


@dataclass(slots=True)
class _MemoryCgroup:
    """A process that was moved into its own memory cgroup."""

    process: ProcessIdentity
    cgroup_folder: Path
    """Folder of the cgroup."""
    fault_file: Path
    """File that the agent reads to report how the process ended, and then removes."""
    deadline_seconds: float
    """Monotonic time limit: for the process' end, then for the agent's report."""
    has_ended: bool = False
    """Whether the process has ended."""


class OomInjector:
    """Makes the OOM killer kill processes; call `poll` often, and `close` at the end.

    Args:
        cgroup_root: Root of the cgroup file system.
        own_cgroups_file: File with the cgroups of this process.
    """

    def __init__(
        self, cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroups_file: Path = Path("/proc/self/cgroup")
    ) -> None:
        self._cgroup_root, self._own_cgroups_file = cgroup_root, own_cgroups_file
        self._confined_processes: list[_MemoryCgroup] = []

    def start_kill(self, process: ProcessIdentity, fault_file: Path) -> None:
        """Moves a process into a cgroup without memory; writes to `fault_file` for its agent how it will end."""
        name = f"surefoot-oom-{process.pid}-{process.ticks}"
        try:
            group = _create_cgroup(self._cgroup_root, self._own_cgroups_file, name)
        except OSError as error:
            _kill_instead(process, fault_file, f"no memory cgroup could be created: {error.strerror or error}")
            return
        write_json(fault_file, {"group": str(group), "stands_in": ""}, durable=False)
        self._confined_processes.append(
            _MemoryCgroup(process, group, fault_file, time.monotonic() + _MAX_ALLOCATION_WAIT_SECONDS)
        )
        try:
            (group / "cgroup.procs").write_text(str(process.pid))
        except OSError as error:
            _kill_instead(process, fault_file, f"it could not be moved into a memory cgroup: {error.strerror or error}")

    def poll(self) -> None:
        """Kills confined processes that the OOM killer did not; removes cgroups whose end the agent has reported."""
        now = time.monotonic()
        for confined in tuple(self._confined_processes):
            if is_alive(confined.process):
                if now > confined.deadline_seconds:
                    _kill_instead(confined.process, confined.fault_file, "it allocated no memory in its cgroup")
                continue
            if not confined.has_ended:
                confined.has_ended, confined.deadline_seconds = True, now + _MAX_REPORT_SECONDS
            if not confined.fault_file.exists() or now > confined.deadline_seconds:
                confined.fault_file.unlink(missing_ok=True)  # otherwise the next end on this node would be taken for it
                with contextlib.suppress(OSError):  # its last thread has not ended yet: the next poll tries again
                    confined.cgroup_folder.rmdir()
                    self._confined_processes.remove(confined)

    def close(self) -> None:
        """Removes the cgroups, whose processes have ended by now."""
        for confined in self._confined_processes:
            with contextlib.suppress(OSError):
                confined.cgroup_folder.rmdir()
        self._confined_processes.clear()


def _create_cgroup(cgroup_root: Path, own_cgroups_file: Path, name: str) -> Path:
    """Creates a cgroup that may use no memory; raises OSError if that is not possible."""
    for parent, limit_file in _cgroup_candidates(cgroup_root, own_cgroups_file):
        if not (parent / "cgroup.procs").exists():
            continue
        group = parent / name
        group.mkdir()
        try:
            (group / limit_file).write_text("0")
        except OSError:
            group.rmdir()
            raise
        return group
    raise FileNotFoundError(None, "this machine has no cgroup memory controller that this user may use")


def _cgroup_candidates(cgroup_root: Path, own_cgroups_file: Path) -> Iterator[tuple[Path, str]]:
    """Yields folders in which a cgroup may be created, the nearest first, each with the name of its limit file.

    Version 1 allows it below this process' own cgroup; version 2 only where children have a memory controller.
    """
    lines = [line.split(":", 2) for line in own_cgroups_file.read_text().splitlines()]
    path_by_controllers = {names: path.strip("/") for _, names, path in lines}
    version_1 = next((path for names, path in path_by_controllers.items() if "memory" in names.split(",")), None)
    if version_1 is not None:
        yield cgroup_root / "memory" / version_1, "memory.limit_in_bytes"
        yield cgroup_root / "memory", "memory.limit_in_bytes"
        return
    own_cgroup = cgroup_root / path_by_controllers.get("", "")
    for parent in (own_cgroup, *own_cgroup.parents):
        if not parent.is_relative_to(cgroup_root):
            return
        with contextlib.suppress(OSError):
            if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                yield parent, "memory.max"


def _kill_instead(process: ProcessIdentity, fault_file: Path, reason: str) -> None:
    write_json(fault_file, {"group": "", "stands_in": reason}, durable=False)
    send_signal(process, signal.SIGKILL)


# ---- local nodes -----------------------------------------------------------------------------------------------------

_FOLDER_VARIABLE = "SUREFOOT_RUN_FOLDER"
_MAX_END_SECONDS = 3.0
"""Time limit for processes to end after SIGTERM, or for those of a former run after SIGKILL."""
_MAX_KILL_SECONDS = 60.0
"""Time limit for a node's processes to end after SIGKILL; freeing a gigabyte took 15 s on a busy machine."""
_PAUSE_SECONDS = 0.02


class LocalNodes:
    """Starts and ends the nodes and the operator of one local run."""

    def __init__(
        self, folder: RunFolder, memory_bytes: int | None = None, with_metrics: bool = False, servers: int = 1
    ) -> None:
        """Creates the object; `lock_run_folder` prepares the run folder.

        Args:
            folder: The run folder.
            memory_bytes: Memory of each node's memory servers together; None: the default.
            with_metrics: Whether the operator serves metrics.
            servers: Number of memory servers of each node.
        """
        self.folder = folder
        self._servers = servers
        self._with_metrics = with_metrics
        self.frozen_nodes: set[str] = set()
        """Nodes whose processes are stopped by SIGSTOP."""
        self.cordoned_nodes: set[str] = set()
        """Nodes that take no further workers."""
        self.drained_nodes: set[str] = set()
        """Cordoned nodes whose workers were deleted as well."""
        self._oom_injector = OomInjector()
        self._memory_bytes = memory_bytes
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._expected_exits: set[str] = set()
        self._operator: subprocess.Popen[bytes] | None = None
        self._port = 0
        """Port of the operator, which is the same after a restart so that agents find it; 0: not chosen yet."""
        self._lock_descriptor: int | None = None
        """Descriptor of the lock on the run folder; None: it is not locked."""

    def lock_run_folder(self, keeps_files: bool = False) -> None:
        """Locks the run folder, ends the processes of a former run in it, and removes its files.

        Args:
            keeps_files: Keep the status, checkpoints and logs of a former run, to continue it; remove only its sockets,
                injected faults and cordons.

        Raises:
            PlatformError: The folder has other files, or another run uses it.
        """
        folder = self.folder
        if folder.is_foreign():
            raise PlatformError(
                f"{folder.root} is not empty and not a run folder: choose an empty or new folder with --run-folder"
            )
        folder.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_descriptor = os.open(folder.root / ".run", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None
            raise PlatformError(
                f"another run uses {folder.root}: wait for its end, or choose another folder with --run-folder"
            ) from None
        _end_former_run(folder)
        for path in folder.list_passing_entries() if keeps_files else folder.list_own_entries():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.create_folders()
        become_subreaper()

    def close(self) -> None:
        """Ends all processes, the operator first so that it replaces no worker, and unlocks the run folder."""
        if self._operator is not None:
            self._operator.kill()
            self._operator.wait()
        for name, process in self._nodes.items():
            if name in self.frozen_nodes:
                signal_group(process.pid, signal.SIGKILL)
            elif process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _MAX_END_SECONDS
        for process in self._nodes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass  # killed with its group below
            self._end_group(process)
        self.poll()
        self._oom_injector.close()
        for path in self.folder.list_sockets():
            path.unlink()
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def poll(self) -> None:
        """Reaps ended processes; kills the other processes of a node whose leading process has ended."""
        for name, process in self._nodes.items():
            if process.poll() is not None and name not in self.frozen_nodes and list_group_members(process.pid):
                self._end_group(process)
        if self._operator is not None:
            self._operator.poll()
        child_pids = {p.pid for p in self._nodes.values()} | ({self._operator.pid} if self._operator else set())
        reap_orphans(child_pids)
        self._oom_injector.poll()

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def start_node(self, name: str) -> None:
        """Starts the node unless it runs; may be called again after its end."""
        old_process = self._nodes.get(name)
        if old_process is not None:
            if old_process.poll() is None:
                return
            self._end_group(old_process)
        command = [sys.executable, "-m", "surefoot_operator.platforms.local.node_process"]
        command += ["--run-folder", str(self.folder.root), "--name", name, "--parent", str(os.getpid())]
        command += ["--servers", str(self._servers)]
        if self._memory_bytes is not None:
            command += ["--memory-bytes", str(self._memory_bytes)]
        self._nodes[name] = self._spawn(command, f"{name}.log")
        self._expected_exits.discard(name)

    def node_exit_code(self, name: str) -> int | None:
        """Returns the exit code of the node's leading process; None while it runs."""
        return self._nodes[name].poll()

    def kill_node(self, name: str) -> None:
        """Kills the node's process group by SIGKILL and waits until it is empty."""
        self._expected_exits.add(name)
        self._end_group(self._nodes[name])
        self.frozen_nodes.discard(name)

    def collect_unexpected_exits(self) -> dict[str, int]:
        """Returns the exit codes of nodes that ended since the last call without `kill_node`."""
        codes = {name: code for name in self._nodes if (code := self.node_exit_code(name)) is not None}
        new_codes = {name: code for name, code in codes.items() if name not in self._expected_exits}
        self._expected_exits.update(new_codes)
        return new_codes

    def has_nodes(self) -> bool:
        """Whether the leading process of any node runs."""
        return any(process.poll() is None for process in self._nodes.values())

    def freeze_node(self, name: str) -> None:
        """Stops all processes of the node by SIGSTOP."""
        signal_group(self._nodes[name].pid, signal.SIGSTOP)
        self.frozen_nodes.add(name)

    def thaw_node(self, name: str) -> None:
        """Continues all processes of the node by SIGCONT."""
        signal_group(self._nodes[name].pid, signal.SIGCONT)
        self.frozen_nodes.discard(name)

    def cordon_node(self, name: str) -> None:
        """Makes the node take no further workers, as `kubectl cordon` does."""
        self.cordoned_nodes.add(name)
        write_json(self.folder.cordon_file(name), {}, durable=False)

    def drain_node(self, name: str) -> None:
        """Cordons the node and deletes its workers, as `kubectl drain` does."""
        self.cordon_node(name)
        self.drained_nodes.add(name)
        with self.folder.locked():
            for path in sorted(self.folder.workers_folder.glob("*.json")):
                worker_record, deletion = read_json(path), self.folder.worker_deletion_file(path.stem)
                if worker_record is None or worker_record["node"] != name or deletion.exists():
                    continue
                request = DeletionRequest(worker_record["uid"], False, time.time(), f"node {name} is drained")
                write_json(deletion, record_to_json(request), durable=False)

    def uncordon_node(self, name: str) -> None:
        """Makes the node take workers again, after `cordon_node` or `drain_node`."""
        self.folder.cordon_file(name).unlink(missing_ok=True)
        self.cordoned_nodes.discard(name)
        self.drained_nodes.discard(name)

    def count_running_workers(self) -> int:
        """Returns the number of running agents."""
        states = [read_json(path) or {} for path in self.folder.workers_folder.glob("*.state")]
        return sum(1 for state in states if state.get("life") and is_alive(ProcessIdentity.parse(state["life"])))

    # ---- parts of nodes -------------------------------------------------------------------------------------------

    def kill_trainer(self, name: str) -> bool:
        """Kills one trainer of the node by SIGKILL; returns False if none runs there."""
        trainers = self._trainer_pids(name)
        if not trainers:
            return False
        os.kill(min(trainers), signal.SIGKILL)
        return True

    def inject_oom_kill(self, name: str) -> bool:
        """Makes the OOM killer end one trainer of the node; returns False if none runs there."""
        trainers = self._trainer_pids(name)
        trainer = identity_of(min(trainers)) if trainers else None
        if trainer is None:
            return False
        self.folder.faults_folder.mkdir(mode=0o700, exist_ok=True)
        self._oom_injector.start_kill(trainer, self.folder.faults_folder / f"oom-{name}")
        return True

    def _trainer_pids(self, name: str) -> list[int]:
        return [pid for pid in list_group_members(self._nodes[name].pid) if is_trainer(pid)]

    def kill_agent(self, name: str) -> bool:
        """Kills the node's agent by SIGKILL; returns False if none runs there."""
        group = set(list_group_members(self._nodes[name].pid))
        killed = False
        for path in self.folder.workers_folder.glob("*.state"):
            state = read_json(path) or {}
            agent = ProcessIdentity.parse(state["life"]) if state.get("life") else None
            if agent is not None and agent.pid in group:
                killed = send_signal(agent, signal.SIGKILL) or killed
        return killed

    def kill_servers(self, name: str) -> bool:
        """Kills every memory server of the node by SIGKILL; returns False if none runs there."""
        record = self.read_node_record(name)
        killed = False
        for server in record.servers if record is not None else ():
            killed = send_signal(ProcessIdentity.parse(server.life), signal.SIGKILL) or killed
        return killed

    def cancel_fault(self, name: str, kind: str) -> None:
        """Removes a fault file, so that the fault is not injected again; an injected fault is not undone."""
        (self.folder.faults_folder / f"{kind}-{name}").unlink(missing_ok=True)

    def inject_trainer_fault(self, name: str, kind: str, text: str = "") -> bool:
        """Writes a fault file that the node's trainers check at each step; returns False if none runs there."""
        if not self._trainer_pids(name):
            return False
        self.write_fault_file(name, kind, text)
        return True

    def write_fault_file(self, name: str, kind: str, text: str = "") -> None:
        """Writes a fault file for the node's processes, atomically."""
        self.folder.faults_folder.mkdir(mode=0o700, exist_ok=True)
        fault_file = self.folder.faults_folder / f"{kind}-{name}"
        temporary_file = fault_file.with_name(f".{fault_file.name}")
        temporary_file.write_text(text, encoding="utf-8")
        temporary_file.rename(fault_file)

    def fail_node_tests(self, name: str) -> None:
        """Makes the node fail the node test of workers that start on it."""
        self.write_fault_file(name, "sick")
        (self.folder.root / "logs" / f"join-check-{name}.json").unlink(missing_ok=True)  # the result of a former test

    def restart_servers(self, name: str) -> None:
        """Makes the node restart its memory servers that have ended."""
        if self._nodes[name].poll() is None:
            self._nodes[name].send_signal(signal.SIGUSR1)

    def read_node_record(self, name: str) -> NodeRecord | None:
        """Returns the record of the node's running process; None: it does not run or has not written one yet."""
        content = read_json(self.folder.node_file(name))
        record = None if content is None else parse_record(NodeRecord, content)
        if record is None or ProcessIdentity.parse(record.life).pid != self._nodes[name].pid:
            return None
        return record if is_alive(ProcessIdentity.parse(record.life)) else None

    # ---- the operator ---------------------------------------------------------------------------------------------

    def start_operator(self) -> None:
        """Starts the operator, at the same port as before."""
        self._port = self._port or find_free_port()
        command = [sys.executable, "-m", "surefoot_operator.controller.local_operator"]
        command += ["--run-folder", str(self.folder.root), "--port", str(self._port), "--parent", str(os.getpid())]
        command += ["--metrics"] if self._with_metrics else []
        self._operator = self._spawn(command, "operator.log")

    def kill_operator(self) -> None:
        """Kills the operator until `start_operator`; this is no unexpected end."""
        if self._operator is not None:
            self._end_group(self._operator)
            self._operator = None

    def operator_exit_code(self) -> int | None:
        """Returns the exit code of an operator that ended by itself; None: it runs or `kill_operator` killed it."""
        return None if self._operator is None else self._operator.poll()

    # ---- processes ------------------------------------------------------------------------------------------------

    def _spawn(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with open(self.folder.logs_folder / log, "ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_build_environment(os.environ, self.folder.root),
                process_group=0,  # Ctrl-C must reach only `surefoot local`, and SIGKILL to the group the whole node
            )

    def _end_group(self, process: subprocess.Popen[bytes]) -> None:
        """Sends SIGKILL to a process group until it is empty; its number is not reused before.

        Raises:
            PlatformError: The processes did not end in time.
        """
        deadline = time.monotonic() + _MAX_KILL_SECONDS
        while process.poll() is None or list_group_members(process.pid):
            signal_group(process.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                living_pids = list_group_members(process.pid)
                raise PlatformError(
                    f"processes {living_pids} of group {process.pid} have not ended {_MAX_KILL_SECONDS:g} s after SIGKILL:"
                    " the kernel is still busy with them"
                )
            time.sleep(_PAUSE_SECONDS)  # these are not our children, so their end cannot be awaited
            reap_orphans({p.pid for p in self._nodes.values()} | ({self._operator.pid} if self._operator else set()))


def _build_environment(base: Mapping[str, str], root: Path) -> dict[str, str]:
    """Builds the environment of a node: `python` is this interpreter, and the run folder identifies its processes."""
    bin_folder = str(Path(sys.executable).parent)
    path = base.get("PATH", os.defpath)
    # without compiled bytecode, a trainer would not start within a second
    kept_variables = {name: value for name, value in base.items() if name != "PYTHONDONTWRITEBYTECODE"}
    faults_folder = str(RunFolder(root).faults_folder)
    return {
        **kept_variables,
        "PATH": f"{bin_folder}{os.pathsep}{path}",
        _FOLDER_VARIABLE: str(root),
        "SUREFOOT_INJECTED_FAULTS_FOLDER": faults_folder,
    }


def _end_former_run(folder: RunFolder) -> None:
    """Kills the processes of a crashed run, which have the run folder in their environment; raises PlatformError."""
    deadline = time.monotonic() + _MAX_END_SECONDS
    while pids := find_by_environment(_FOLDER_VARIABLE, str(folder.root)):
        pids = [pid for pid in pids if pid != os.getpid()]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has just ended
        if time.monotonic() > deadline:
            raise PlatformError(f"processes {pids} of a former run in {folder.root} do not end: kill them by hand")
        time.sleep(_PAUSE_SECONDS)  # these are not our children, so their end cannot be awaited


def is_trainer(pid: int) -> bool:
    """Whether a process is a trainer, by its log on stdout.

    Trainers are forked, so their command line is that of the fork server.
    """
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).name.startswith("rank-")
    except OSError:
        return False
