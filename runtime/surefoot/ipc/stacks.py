"""Collects Python stacks of hung trainers, written by faulthandler in each.

A rank that hangs leaves no other trace: once it is killed, nobody can say where it stood. `install` runs in the
trainer. The signal's handler is C code that needs neither the GIL nor a running interpreter loop, so a rank that is
stuck in a collective or in a C extension answers too. `take` runs in the agent, within a time limit.

Only the main thread writes its own stack: faulthandler walks the frames of other threads while they run, and reads
memory that they have just given back. A rank that is only suspected would end by SIGSEGV because it was asked.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from surefoot.linux_process import send_main_thread, state_of

SIGNAL = signal.SIGRTMIN + 11
"""A real-time signal: programs and libraries take SIGUSR1 and SIGUSR2 for themselves, and theirs stay theirs."""

TAKE_SECONDS = 1.5
MAX_STACK_BYTES = 256 << 10
_POLL_SECONDS = 0.01
_OUTERMOST = (" in <module>", " in _run_module_as_main", "  ...")


@dataclass(frozen=True, slots=True)
class CapturedStack:
    """One rank's stack as faulthandler wrote it, or `why` there is none."""

    rank: int
    text: str
    why: str = ""


def install(path: str | None) -> None:
    """Makes SIGNAL write its thread's stack into `path`.

    Does nothing without a path, or where the signal is taken: a program's own handler is never replaced. A file that
    cannot be opened leaves the process without a stack, which `take` then reports.
    """
    if not path or _is_caught(os.getpid()):
        return
    try:
        # open for the process' life: faulthandler keeps the descriptor, and the file must not be collected
        _open.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError:
        return
    faulthandler.register(SIGNAL, file=_open[-1], all_threads=False, chain=False)


_open: list[int] = []


async def capture_stack(rank: int, pid: int, path: Path) -> CapturedStack:
    """Takes one trainer's main stack, or names what prevents it."""
    state = state_of(pid)
    if state in ("T", "t"):
        return CapturedStack(rank, "", "its process is stopped (SIGSTOP or a debugger)")
    if state in ("", "Z", "X"):
        return CapturedStack(rank, "", "its process has ended")
    if not _is_caught(pid):  # the signal would end it
        return CapturedStack(
            rank, "", "it cannot say: no Python program that surefoot started or that made a Checkpointer"
        )
    before = _size(path)
    try:
        send_main_thread(pid, SIGNAL)
    except ProcessLookupError:
        return CapturedStack(rank, "", "its process has ended")
    deadline = time.monotonic() + TAKE_SECONDS
    text = ""
    while not _is_whole(text) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        text = _read(path, before)
    if text:
        return CapturedStack(rank, text)
    waits = "waits inside the kernel and cannot be interrupted" if state_of(pid) == "D" else "blocks all signals"
    return CapturedStack(rank, "", f"it gave no stack within {TAKE_SECONDS:g} s: it {waits}")


def _is_whole(text: str) -> bool:
    """The outermost frame comes last, and is a module's."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and last.endswith(_OUTERMOST)


def _is_caught(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ""
