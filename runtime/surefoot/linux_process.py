"""Identifies, signals and reaps processes, and ties their lives to a parent's.

Reads /proc and calls the kernel (Linux). Standard library only, since the fork server must start fast. A pid alone does
not identify a process, since the kernel reuses it; ProcessIdentity does. Whether a process is *stopped* (SIGSTOP) is never
used for decisions: on a cluster it would not be visible either, only missing heartbeats are.
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
"""Number of the tgkill system call: glibc has a function for it only since 2.30, musl has none."""
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
    """Identifies the running process with a pid; None: there is none, or it has ended and waits to be reaped."""
    fields = _stat(pid)
    if fields is None or _has_ended(fields):
        return None
    return ProcessIdentity(pid, int(fields[19]))


def this_process() -> ProcessIdentity:
    identity = identity_of(os.getpid())
    assert identity is not None
    return identity


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still runs."""
    return identity_of(identity.pid) == identity


def state_of(pid: int) -> str:
    """Reads the kernel's letter for a process's state (R, S, T, Z …); empty: there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def group_of(pid: int) -> int | None:
    """Returns the process group of `pid`; None: the process has ended."""
    fields = _stat(pid)
    return None if fields is None or _has_ended(fields) else int(fields[2])


def parent_of(pid: int) -> int:
    """Reads the pid of a process's parent; 0: it has none, or there is no such process."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[1])


def cpu_seconds(pid: int, reaped: bool = False) -> float:
    """Reads the user and system time of all threads of a process; 0.0: there is no such process.

    `reaped`: include that of its reaped children.
    """
    fields = _stat(pid)
    return 0.0 if fields is None else sum(map(int, fields[11 : 15 if reaped else 13])) / _TICKS


def _stat(pid: int) -> list[str] | None:
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the command name is in parentheses and may contain any character, also parentheses
    return content.rpartition(")")[2].split()


def _has_ended(fields: list[str]) -> bool:
    # a process is a zombie when its first thread has ended; other threads may still use memory and ports
    return fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)


def list_group_members(group: int) -> list[int]:
    """Lists the pids of the running processes of a process group."""
    return [pid for pid in _all() if group_of(pid) == group]


def find_by_environment(name: str, value: str) -> list[int]:
    """Lists the pids of this user's running processes that were started with `name=value` in their environment.

    It finds them in all process groups, since a crashed run leaves several.
    """
    variable = f"{name}={value}".encode()
    pids = []
    for pid in _all():
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # it has just ended, or belongs to another user
        if variable in content.split(b"\0") and identity_of(pid) is not None:
            pids.append(pid)
    return pids


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Sends a signal to exactly this process; returns False if it has ended."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(
            identity
        ):  # checked after the pidfd was opened: from then on the pid cannot refer to another process
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def signal_group(group: int, number: signal.Signals) -> None:
    """Sends a signal to a whole process group; does nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def signal_main_thread(pid: int, number: int) -> None:
    """Sends a signal to the main thread of a process; a signal to the process may be handled by any thread.

    On processors other than x86-64 and arm64 it is sent to the process, where the kernel prefers the main thread.

    Raises:
        ProcessLookupError: The process has ended.
    """
    if _TGKILL is None:
        os.kill(pid, number)
    elif _libc.syscall(_TGKILL, pid, pid, int(number)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))  # as the subclass that Python has for the code


def die_with_parent(parent: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when its parent thread ends; exits at once if `parent` already has.

    The setting survives exec, but not fork.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: this process could outlive its parent")
    if os.getppid() != parent:  # the parent ended before prctl: no signal would ever come
        os._exit(1)


def initial_environment() -> dict[bytes, bytes]:
    """Returns the environment that this process was started with, before its interpreter changed it."""
    variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {name: value for name, _, value in (variable.partition(b"=") for variable in variables if variable)}


def become_subreaper() -> None:
    """Makes this process the parent of its descendants whose parents end; it must then reap them."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed: descendants could escape")


def children(pid: int) -> set[int]:
    """Returns the pids of a process's direct children, including zombies."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                pids |= {int(word) for word in (thread / "children").read_text().split()}
    return pids


def descendants(pid: int) -> list[int]:
    """Lists the pids of all descendants of a process."""
    return [below for child in sorted(children(pid)) for below in (child, *descendants(child))]


def reap_orphans(owned_pids: set[int]) -> None:
    """Reaps ended children that no other code waits for; stops at one of `owned_pids`, which its owner reaps."""
    while True:
        try:
            exit_info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if exit_info is None or exit_info.si_pid in owned_pids:
            return  # its owner reaps it, and then this is called again
        os.waitpid(exit_info.si_pid, os.WNOHANG)


# ---- sockets ---------------------------------------------------------------------------------------------------------
# Opens Unix sockets at paths longer than the 107 bytes that the kernel allows.

MAX_SOCKET_PATH_BYTES = 100
"""Longest path in bytes that is used directly."""


@contextlib.contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """Yields a path of the socket that is short enough to bind or connect."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
