"""Owns the processes of a local run and injects faults into them.

Used by `surefoot local` and by tests. `close` ends everything it started; if this process is killed, the kernel ends
the rest (PDEATHSIG), and the next run in the folder ends what is left. Start processes from the main thread only: they
die with the thread that forked them.
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
    identity_of,
    is_alive,
    members,
    reap_orphans,
    send,
    send_group,
    with_environment,
)
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.local.node_process import free_port
from surefoot_operator.platforms.local.run_folder import (
    Deletion,
    NodeRecord,
    RunFolder,
    from_json,
    read_json,
    to_json,
    write_json,
)

# ---- processes killed for memory -------------------------------------------------------------------------------------
# Has the kernel's OOM killer end single processes. Touches cgroups (Linux, both versions). Each process is moved into a
# memory group of its own, which may use none: the first page that it needs from then on is refused, and the kernel ends
# it as it ends any that is beyond its limit. The machine's memory is never used up. Where no group can be made, or the
# process needs nothing, SIGKILL stands in, and whoever tells of the end says so.

_NEEDS_SECONDS = 5.0
"""A trainer that makes steps needs a page at once; one that waits for so long may never."""

_TOLD_SECONDS = 10.0
"""So long its agent may take to see its end, and to read the group's counters."""


@dataclass(slots=True)
class _Confined:
    process: ProcessIdentity
    group: Path
    word: Path
    until: float
    ended: bool = False


class MemoryKills:
    """Strikes processes; `look` often, and `close` at the end."""

    def __init__(self, groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> None:
        self._groups, self._own = groups, own
        self._confined: list[_Confined] = []

    def strike(self, process: ProcessIdentity, word: Path) -> None:
        """Confines a process; `word` tells its agent how it ends."""
        name = f"surefoot-oom-{process.pid}-{process.ticks}"
        try:
            group = _made(self._groups, self._own, name)
        except OSError as error:
            _stand_in(process, word, f"no memory group can be made: {error.strerror or error}")
            return
        write_json(word, {"group": str(group), "stands_in": ""}, durable=False)
        self._confined.append(_Confined(process, group, word, time.monotonic() + _NEEDS_SECONDS))
        try:
            (group / "cgroup.procs").write_text(str(process.pid))
        except OSError as error:
            _stand_in(process, word, f"it cannot be moved into a memory group: {error.strerror or error}")

    def look(self) -> None:
        """Removes groups whose end was told; ends what did not end there."""
        now = time.monotonic()
        for one in tuple(self._confined):
            if is_alive(one.process):
                if now > one.until:
                    _stand_in(one.process, one.word, "it needed no memory in the group that it was put into")
                continue
            if not one.ended:
                one.ended, one.until = True, now + _TOLD_SECONDS
            if not one.word.exists() or now > one.until:
                one.word.unlink(missing_ok=True)  # else the next death there would be taken for it
                with contextlib.suppress(OSError):  # its last thread is still going: asked again
                    one.group.rmdir()
                    self._confined.remove(one)

    def close(self) -> None:
        """Removes the groups; nothing is left running in them."""
        for one in self._confined:
            with contextlib.suppress(OSError):
                one.group.rmdir()
        self._confined.clear()


def _made(groups: Path, own: Path, name: str) -> Path:
    """Makes a group that may use no memory. Raises OSError."""
    for parent, limit in _places(groups, own):
        if not (parent / "cgroup.procs").exists():
            continue
        group = parent / name
        group.mkdir()
        try:
            (group / limit).write_text("0")
        except OSError:
            group.rmdir()
            raise
        return group
    raise FileNotFoundError(None, "this machine has no memory controller that may be used")


def _places(groups: Path, own: Path) -> Iterator[tuple[Path, str]]:
    """Where a group may be made, the nearest first, and the file of its limit.

    Version 1 below this process' own group. Version 2 allows it only below one whose children have a memory controller.
    """
    lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    of = {names: path.strip("/") for _, names, path in lines}
    version_1 = next((path for names, path in of.items() if "memory" in names.split(",")), None)
    if version_1 is not None:
        yield groups / "memory" / version_1, "memory.limit_in_bytes"
        yield groups / "memory", "memory.limit_in_bytes"
        return
    here = groups / of.get("", "")
    for parent in (here, *here.parents):
        if not parent.is_relative_to(groups):
            return
        with contextlib.suppress(OSError):
            if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                yield parent, "memory.max"


def _stand_in(process: ProcessIdentity, word: Path, why: str) -> None:
    write_json(word, {"group": "", "stands_in": why}, durable=False)
    send(process, signal.SIGKILL)


# ---- local nodes -----------------------------------------------------------------------------------------------------

_FOLDER_VARIABLE = "SUREFOOT_RUN_FOLDER"
_END_SECONDS = 3.0
_KILLED_SECONDS = 60.0
"""Of processes that were sent SIGKILL: the kernel first takes a gigabyte back; a slow, busy machine took 15 s for it."""
_PAUSE_SECONDS = 0.02


class Machine:
    """The nodes and the operator of one local run.

    `frozen` nodes are stopped by SIGSTOP, `cordoned` ones take no further workers, `drained` ones were emptied besides.
    """

    def __init__(
        self, folder: RunFolder, memory_bytes: int | None = None, with_metrics: bool = False, servers: int = 1
    ) -> None:
        """`memory_bytes`: of each node; `servers`: Redis servers that share it."""
        self.folder = folder
        self._servers = servers
        self._with_metrics = with_metrics
        self.frozen: set[str] = set()
        self.cordoned: set[str] = set()
        self.drained: set[str] = set()
        self._memory_kills = MemoryKills()
        self._memory_bytes = memory_bytes
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._known_ends: set[str] = set()
        self._operator: subprocess.Popen[bytes] | None = None
        self._port = 0
        """Of the operator: a restarted one is found where agents know it."""
        self._lock: int | None = None

    def open(self) -> None:
        """Locks the run folder and removes a former run from it."""
        folder = self.folder
        if folder.is_foreign():
            raise FabricError(f"{folder.root} is not empty and not a run folder: name an empty or a new --run-folder")
        folder.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder.root / ".run", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise FabricError(
                f"another run uses {folder.root} now: wait for it, or name another --run-folder"
            ) from None
        _end_former_run(folder)
        for path in folder.own_entries():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.make()
        become_subreaper()

    def close(self) -> None:
        """Ends every process: the operator first, so that it replaces no worker."""
        if self._operator is not None:
            self._operator.kill()
            self._operator.wait()
        for name, process in self._nodes.items():
            if name in self.frozen:
                send_group(process.pid, signal.SIGKILL)
            elif process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._nodes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass  # killed with its group below
            self._end_group(process)
        self.poll()
        self._memory_kills.close()
        for path in self.folder.sockets():
            path.unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def poll(self) -> None:
        """Reaps ended processes; kills the rest of a node whose leader ended."""
        for name, process in self._nodes.items():
            if process.poll() is not None and name not in self.frozen and members(process.pid):
                self._end_group(process)
        if self._operator is not None:
            self._operator.poll()
        known = {p.pid for p in self._nodes.values()} | ({self._operator.pid} if self._operator else set())
        reap_orphans(known)
        self._memory_kills.look()

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def start_node(self, name: str) -> None:
        """Starts the node, or restarts it after its death."""
        former = self._nodes.get(name)
        if former is not None:
            if former.poll() is None:
                return
            self._end_group(former)
        command = [sys.executable, "-m", "surefoot_operator.platforms.local.node_process"]
        command += ["--run-folder", str(self.folder.root), "--name", name, "--parent", str(os.getpid())]
        command += ["--servers", str(self._servers)]
        if self._memory_bytes is not None:
            command += ["--memory-bytes", str(self._memory_bytes)]
        self._nodes[name] = self._spawn(command, f"{name}.log")
        self._known_ends.discard(name)

    def node_exit_code(self, name: str) -> int | None:
        """The exit code of the node's leader; None while it runs."""
        return self._nodes[name].poll()

    def kill_node(self, name: str) -> None:
        """SIGKILLs the node's process group and waits until it is empty."""
        self._known_ends.add(name)
        self._end_group(self._nodes[name])
        self.frozen.discard(name)

    def unexpected_ends(self) -> dict[str, int]:
        """The exit codes of nodes that ended unasked since the last call."""
        codes = {name: code for name in self._nodes if (code := self.node_exit_code(name)) is not None}
        new = {name: code for name, code in codes.items() if name not in self._known_ends}
        self._known_ends.update(new)
        return new

    def has_nodes(self) -> bool:
        """Whether any node's leader runs."""
        return any(process.poll() is None for process in self._nodes.values())

    def freeze_node(self, name: str) -> None:
        send_group(self._nodes[name].pid, signal.SIGSTOP)
        self.frozen.add(name)

    def thaw_node(self, name: str) -> None:
        send_group(self._nodes[name].pid, signal.SIGCONT)
        self.frozen.discard(name)

    def cordon_node(self, name: str) -> None:
        """Has the node take no further workers, as `kubectl cordon` does."""
        self.cordoned.add(name)
        write_json(self.folder.cordon(name), {}, durable=False)

    def drain_node(self, name: str) -> None:
        """Cordons the node and deletes its workers, as `kubectl drain` does."""
        self.cordon_node(name)
        self.drained.add(name)
        with self.folder.locked():
            for path in sorted(self.folder.workers.glob("*.json")):
                body, deletion = read_json(path), self.folder.worker_deletion(path.stem)
                if body is None or body["node"] != name or deletion.exists():
                    continue
                ends = Deletion(body["uid"], False, time.time(), f"node {name} is drained")
                write_json(deletion, to_json(ends), durable=False)

    def uncordon_node(self, name: str) -> None:
        self.folder.cordon(name).unlink(missing_ok=True)
        self.cordoned.discard(name)
        self.drained.discard(name)

    def running_workers(self) -> int:
        """Counts running agents."""
        states = [read_json(path) or {} for path in self.folder.workers.glob("*.state")]
        return sum(1 for state in states if state.get("life") and is_alive(ProcessIdentity.parse(state["life"])))

    # ---- parts of nodes -------------------------------------------------------------------------------------------

    def kill_trainer(self, name: str) -> bool:
        """SIGKILLs one trainer; False if none runs there."""
        trainers = self._trainers(name)
        if not trainers:
            return False
        os.kill(min(trainers), signal.SIGKILL)
        return True

    def exhaust_memory(self, name: str) -> bool:
        """Has the OOM killer end one trainer; False if none runs there."""
        trainers = self._trainers(name)
        life = identity_of(min(trainers)) if trainers else None
        if life is None:
            return False
        self.folder.faults.mkdir(mode=0o700, exist_ok=True)
        self._memory_kills.strike(life, self.folder.faults / f"oom-{name}")
        return True

    def _trainers(self, name: str) -> list[int]:
        return [pid for pid in members(self._nodes[name].pid) if is_trainer(pid)]

    def kill_agent(self, name: str) -> bool:
        """SIGKILLs the node's agent; False if none runs there."""
        group = set(members(self._nodes[name].pid))
        killed = False
        for path in self.folder.workers.glob("*.state"):
            state = read_json(path) or {}
            life = ProcessIdentity.parse(state["life"]) if state.get("life") else None
            if life is not None and life.pid in group:
                killed = send(life, signal.SIGKILL) or killed
        return killed

    def kill_holder(self, name: str) -> bool:
        """SIGKILLs every Redis of the node; False if none runs there."""
        record = self.node_record(name)
        found = False
        for holder in record.holders if record is not None else ():
            found = send(ProcessIdentity.parse(holder.life), signal.SIGKILL) or found
        return found

    def take_back(self, name: str, kind: str) -> None:
        """Removes a word that no process has read yet; what a process did upon one that it has read stands."""
        (self.folder.faults / f"{kind}-{name}").unlink(missing_ok=True)

    def ask_trainers(self, name: str, kind: str, text: str = "") -> bool:
        """Leaves a word that the node's trainers look for at each step; False: none runs there."""
        if not self._trainers(name):
            return False
        self.leave_word(name, kind, text)
        return True

    def leave_word(self, name: str, kind: str, text: str = "") -> None:
        """Leaves a word for the node's processes, whole at once."""
        self.folder.faults.mkdir(mode=0o700, exist_ok=True)
        word = self.folder.faults / f"{kind}-{name}"
        scratch = word.with_name(f".{word.name}")
        scratch.write_text(text, encoding="utf-8")
        scratch.rename(word)

    def sicken_node(self, name: str) -> None:
        """Has the node fail the check of workers that come to it."""
        self.leave_word(name, "sick")
        (self.folder.root / "logs" / f"join-check-{name}.json").unlink(missing_ok=True)  # what was found before

    def return_holder(self, name: str) -> None:
        """Tells the node to start what is dead of its Redis again."""
        if self._nodes[name].poll() is None:
            self._nodes[name].send_signal(signal.SIGUSR1)

    def node_record(self, name: str) -> NodeRecord | None:
        """The record of the node's running process; None before it wrote one."""
        body = read_json(self.folder.node(name))
        record = None if body is None else from_json(NodeRecord, body)
        if record is None or ProcessIdentity.parse(record.life).pid != self._nodes[name].pid:
            return None
        return record if is_alive(ProcessIdentity.parse(record.life)) else None

    # ---- the operator ---------------------------------------------------------------------------------------------

    def start_operator(self) -> None:
        self._port = self._port or free_port()
        command = [sys.executable, "-m", "surefoot_operator.controller.local_operator"]
        command += ["--run-folder", str(self.folder.root), "--port", str(self._port), "--parent", str(os.getpid())]
        command += ["--metrics"] if self._with_metrics else []
        self._operator = self._spawn(command, "operator.log")

    def kill_operator(self) -> None:
        """Kills the operator. `operator_exit_code` then reports no unexpected end, until `start_operator` starts another."""
        if self._operator is not None:
            self._end_group(self._operator)
            self._operator = None

    def operator_exit_code(self) -> int | None:
        """Returns the exit code of an operator that ended by itself; None while it runs, and after `kill_operator`."""
        return None if self._operator is None else self._operator.poll()

    # ---- processes ------------------------------------------------------------------------------------------------

    def _spawn(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with open(self.folder.logs / log, "ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ, self.folder.root),
                process_group=0,  # of its own: Ctrl-C reaches the command alone, SIGKILL of a group ends all of a node
            )

    def _end_group(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILLs the group until it has no living member. Its number stays taken until its last member is gone."""
        deadline = time.monotonic() + _KILLED_SECONDS
        while process.poll() is None or members(process.pid):
            send_group(process.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                left = members(process.pid)
                raise FabricError(f"processes {left} of group {process.pid} do not end: the kernel holds them")
            time.sleep(_PAUSE_SECONDS)  # death of another's child cannot be waited for
            reap_orphans({p.pid for p in self._nodes.values()} | ({self._operator.pid} if self._operator else set()))


def _environment(base: Mapping[str, str], root: Path) -> dict[str, str]:
    """That of a node: `python` is this very interpreter, and what it starts can be known by its run folder."""
    own = str(Path(sys.executable).parent)
    path = base.get("PATH", os.defpath)
    # compiled bytecode is what makes a trainer start in a second
    kept = {name: value for name, value in base.items() if name != "PYTHONDONTWRITEBYTECODE"}
    faults = str(RunFolder(root).faults)
    return {**kept, "PATH": f"{own}{os.pathsep}{path}", _FOLDER_VARIABLE: str(root), "SUREFOOT_FAULTS_FOLDER": faults}


def _end_former_run(folder: RunFolder) -> None:
    """Kills what a crashed run left behind; it is known by the run folder in its environment."""
    deadline = time.monotonic() + _END_SECONDS
    while left := with_environment(_FOLDER_VARIABLE, str(folder.root)):
        left = [pid for pid in left if pid != os.getpid()]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended meanwhile
        if time.monotonic() > deadline:
            raise FabricError(f"processes {left} of a former run in {folder.root} do not end: kill them by hand")
        time.sleep(_PAUSE_SECONDS)  # they are not our children: there is nothing to wait on


def is_trainer(pid: int) -> bool:
    """Recognizes a trainer by its log on stdout.

    Trainers are forked: their command line is their zygote's.
    """
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).name.startswith("rank-")
    except OSError:
        return False
