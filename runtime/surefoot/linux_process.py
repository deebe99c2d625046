"""Identifies, signals, binds and collects processes.

Reads /proc and asks the kernel (Linux); standard library only, as a zygote and a node's leader must begin in a moment.
A pid alone names nobody: the kernel gives it out again. Whether a process is *stopped* is never asked here: on a
cluster nobody could see it either, silence alone has to tell.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TGKILL = {"x86_64": 234, "aarch64": 131}.get(os.uname().machine)
"""Its number as a system call: glibc has a function of this name only since 2.30, musl has none."""
_TICKS = os.sysconf("SC_CLK_TCK")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Process `pid` that started `ticks` clock ticks after boot."""

    pid: int
    ticks: int

    def __str__(self) -> str:
        return f"{self.pid}:{self.ticks}"

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity:
        pid, ticks = text.split(":")
        return cls(int(pid), int(ticks))


def identity_of(pid: int) -> ProcessIdentity | None:
    """Identifies the live process of a pid.

    None where there is none, or it has ended and only waits to be reaped.
    """
    fields = _stat(pid)
    if fields is None or _has_ended(fields):
        return None
    return ProcessIdentity(pid, int(fields[19]))


def this_process() -> ProcessIdentity:
    identity = identity_of(os.getpid())
    assert identity is not None
    return identity


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still is."""
    return identity_of(identity.pid) == identity


def state_of(pid: int) -> str:
    """Reads the kernel's letter for a process' state; empty: none."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def group_of(pid: int) -> int | None:
    """The process group of `pid`."""
    fields = _stat(pid)
    return None if fields is None or _has_ended(fields) else int(fields[2])


def parent_of(pid: int) -> int:
    """Reads a process' parent; 0: none, or there is no such process."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[1])


def cpu_seconds(pid: int, reaped: bool = False) -> float:
    """User and system time of a process, all threads; 0.0 if gone.

    `reaped`: with that of children it has collected.
    """
    fields = _stat(pid)
    return 0.0 if fields is None else sum(map(int, fields[11 : 15 if reaped else 13])) / _TICKS


def _stat(pid: int) -> list[str] | None:
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the command name stands in parentheses and may hold anything, also parentheses
    return content.rpartition(")")[2].split()


def _has_ended(fields: list[str]) -> bool:
    # the kernel calls a process a zombie when its first thread has ended; the others may hold memory and ports yet
    return fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)


def members(group: int) -> list[int]:
    """Lists the living processes of a process group."""
    return [pid for pid in _all() if group_of(pid) == group]


def with_environment(name: str, value: str) -> list[int]:
    """Lists live processes of ours that were started with `name=value`.

    Whatever group each is in: a crashed run leaves several.
    """
    variable = f"{name}={value}".encode()
    pids = []
    for pid in _all():
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
        if variable in content.split(b"\0") and identity_of(pid) is not None:
            pids.append(pid)
    return pids


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def send(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signals exactly this process; False if it is gone."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(identity):  # asked after the descriptor was opened: the number cannot be used again now
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def send_group(group: int, number: signal.Signals) -> None:
    """Signals a whole process group; one that is gone is success."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def send_main_thread(pid: int, number: int) -> None:
    """Signals the main thread of a process, and no other.

    A signal to the process goes to any thread that does not block it. On other processors than x86-64 and arm64 it is
    sent to the process, of which the kernel prefers the main thread.

    Raises:
        ProcessLookupError: it has ended.
    """
    if _TGKILL is None:
        os.kill(pid, number)
    elif _libc.syscall(_TGKILL, pid, pid, int(number)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))  # as the subclass that Python has for the code


def die_with_parent(parent: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel send this process `number` when its parent thread ends.

    Ends it at once if `parent` already has. Survives exec, not fork.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: this process could outlive its parent")
    if os.getppid() != parent:  # it ended before the kernel was asked: then no signal will ever come
        os._exit(1)


def become_subreaper() -> None:
    """Makes this process the parent of orphans among its descendants.

    It has to collect them.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed: descendants could escape")


def children(pid: int) -> set[int]:
    """Direct children, zombies included."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                pids |= {int(word) for word in (thread / "children").read_text().split()}
    return pids


def descendants(pid: int) -> list[int]:
    """Lists every process below this one."""
    return [below for child in sorted(children(pid)) for below in (child, *descendants(child))]


def reap_orphans(owned_pids: set[int]) -> None:
    """Collects ended children that nobody else waits for.

    Stops at one that has an owner (`known`), which collects it.
    """
    while True:
        try:
            exit_info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if exit_info is None or exit_info.si_pid in owned_pids:
            return  # its owner collects it, and then this is called again
        os.waitpid(exit_info.si_pid, os.WNOHANG)


# ---- sockets ---------------------------------------------------------------------------------------------------------
# Opens Unix sockets at paths longer than the kernel's 107 bytes.

LONGEST = 100


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Yields a name of the socket short enough to bind or connect."""
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
