"""Collects the Python stacks of hung trainers, which faulthandler writes in each of them.

Once a hung rank is killed, its stack is lost, and it is the only trace of where the rank was. `install` runs in the
trainer. faulthandler's signal handler is C code that needs neither the GIL nor a running interpreter loop, so a rank
that is stuck in a collective or a C extension answers, too. `capture_stack` runs in the agent, within a time limit.

Only the main thread writes its own stack. faulthandler would walk the frames of other threads while they run, and read
memory that they have just freed: the request itself could crash a rank that is merely suspected.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from surefoot.linux_process import signal_main_thread, state_of

STACK_SIGNAL = signal.SIGRTMIN + 11
"""A real-time signal; SIGUSR1 and SIGUSR2 are left to programs and libraries."""

CAPTURE_TIMEOUT_SECONDS = 1.5
"""Time limit for one stack."""
MAX_STACK_BYTES = 256 << 10
"""Longest stack that is read."""
_POLL_SECONDS = 0.01
"""Interval at which the stack file is read."""
_OUTERMOST_ENDINGS = (" in <module>", " in _run_module_as_main", "  ...")
"""Ends of a complete stack's last line; `  ...` marks one that faulthandler cut off."""


@dataclass(frozen=True, slots=True)
class CapturedStack:
    """The stack of one rank's main thread."""

    rank: int
    """Global rank of the trainer."""
    text: str
    """The stack as faulthandler writes it; empty: there is none."""
    reason: str = ""
    """Why there is no stack; empty if there is one."""


def install_stack_handler(path: str | None) -> None:
    """Makes SIGNAL append the main thread's stack to the file `path`.

    Does nothing without a path, or if the program already handles the signal: its handler is never replaced. If the
    file cannot be opened, the process has no stack to give, and `capture_stack` reports that.
    """
    if not path or _is_caught(os.getpid()):
        return
    try:
        # never closed: faulthandler keeps using the descriptor until the process ends
        _stack_descriptors.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError:
        return
    faulthandler.register(STACK_SIGNAL, file=_stack_descriptors[-1], all_threads=False, chain=False)


_stack_descriptors: list[int] = []
"""Descriptors of the stack files."""


async def capture_stack(rank: int, pid: int, path: Path) -> CapturedStack:
    """Captures the stack of one trainer's main thread, or states why it has none."""
    state = state_of(pid)
    if state in ("T", "t"):
        return CapturedStack(rank, "", "its process is stopped (SIGSTOP or a debugger)")
    if state in ("", "Z", "X"):
        return CapturedStack(rank, "", "its process has ended")
    if not _is_caught(pid):  # without a handler the signal would kill the process
        return CapturedStack(
            rank,
            "",
            "its process writes no stacks: it is no Python program that surefoot started or that made a Checkpointer",
        )
    # the file keeps earlier stacks: only text after its present end is the reply
    old_size = _file_size(path)
    try:
        signal_main_thread(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return CapturedStack(rank, "", "its process has ended")
    deadline = time.monotonic() + CAPTURE_TIMEOUT_SECONDS
    text = ""
    while not _is_complete(text) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        text = _read_from(path, old_size)
    if text:
        return CapturedStack(rank, text)
    cause = "waits inside the kernel and cannot be interrupted" if state_of(pid) == "D" else "blocks all signals"
    return CapturedStack(rank, "", f"it wrote no stack within {CAPTURE_TIMEOUT_SECONDS:g} s: it {cause}")


def _is_complete(text: str) -> bool:
    """Returns whether a stack has its outermost frame, which is written last."""
    last_line = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and last_line.endswith(_OUTERMOST_ENDINGS)


def _is_caught(pid: int) -> bool:
    """Returns whether a process has a handler for SIGNAL."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


def _file_size(path: Path) -> int:
    """Returns the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, start: int) -> str:
    """Reads a file from an offset on; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ""
