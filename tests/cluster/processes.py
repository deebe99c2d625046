"""Processes known by id and start time, so that no stranger who got the same id is ever signalled.

Daemons outlive the command that starts them; `state.py` keeps what `spawn` returns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError
from surefoot.linux_process import identity_of

NICENESS = 0
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Recorded:
    """A process: its id and the clock ticks from boot to its start."""

    pid: int
    started: int


def start_time(pid: int) -> int | None:
    """Ticks from boot to the start of the process; None when it is gone or only waits to be reaped."""
    found = identity_of(pid)
    return None if found is None else found.ticks


def is_alive(process: Recorded) -> bool:
    """Whether that very process still runs."""
    return start_time(process.pid) == process.started


def spawn(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> Recorded:
    """Starts a daemon with its own session, output appended to `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["nice", "-n", str(NICENESS), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    started = start_time(process.pid)
    if started is None:
        raise ClusterError(f"{command[0]} ended as it started; its last words are in {log}")
    process.returncode = 0  # nobody here waits for a daemon, and Popen would warn about that
    return Recorded(process.pid, started)


def send(process: Recorded, number: signal.Signals) -> None:
    """Signals it if it still is that process."""
    if is_alive(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def end(several: Sequence[Recorded], grace_seconds: float = 0.0) -> None:
    """Asks them to end, waits, then kills what is left."""
    if grace_seconds:
        for process in several:
            send(process, signal.SIGTERM)
        wait(lambda: not any(_reap_and_see(process) for process in several), grace_seconds)
    for process in several:
        send(process, signal.SIGKILL)
    if not wait(lambda: not any(_reap_and_see(process) for process in several), 10.0):
        left = [process.pid for process in several if is_alive(process)]
        raise ClusterError(f"processes {left} did not end 10 s after SIGKILL; look at /proc/PID/stack")


def _reap_and_see(process: Recorded) -> bool:
    """True while it lives; collects it where it is a child of ours."""
    try:
        os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        pass  # started by a former command
    return is_alive(process)


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Until the condition holds; False when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def run(*command: str, seconds: float = 30.0, check: bool = True) -> str:
    """A short command; what it printed. Fails with its own words."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise ClusterError(f"{command[0]} is not installed; install it, or run `up` as root on Debian") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{' '.join(command)}` did not end within {seconds:.0f} s") from None
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-800:]
        raise ClusterError(f"`{' '.join(command)}` failed with {done.returncode}: {said}")
    return done.stdout
