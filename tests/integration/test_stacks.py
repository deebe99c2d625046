"""Stacks of real processes that stand still, whatever they stand in."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import busy_threads
from surefoot.agent.trainers.hang_diagnosis import parse_main_thread, summarize_stacks
from surefoot.ipc import stacks
from surefoot.ipc.stacks import CapturedStack
from surefoot.linux_process import state_of

PRELUDE = """
import ctypes, os, signal, sys, threading, time
from surefoot.ipc.stacks import install_stack_handler
install_stack_handler(sys.argv[1])
def ready(): print("ready", flush=True)
"""
C_WITH_THE_GIL = "libc = ctypes.PyDLL(None)\nready()\nwhile True: libc.sleep(1000)\n"
MANY_THREADS = """
def wait(): threading.Event().wait()
for _ in range(40): threading.Thread(target=wait, daemon=True).start()
ready()
wait()
"""
OWN_HANDLERS = """
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM): signal.signal(number, lambda *_: None)
ready()
while True: pass
"""


@contextmanager
def program(body: str, path: Path, prelude: str = PRELUDE) -> Iterator[int]:
    command = [sys.executable, "-c", prelude + body, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def taken(pid: int, path: Path) -> CapturedStack:
    return asyncio.run(stacks.capture_stack(3, pid, path))


BUSY_THREADS = busy_threads.SOURCE + "ready()\nwhile True: deep(50)\n"
LOOKS = 100
"""Every fifteenth ended it, in the median, where threads that run were read."""


@pytest.mark.parametrize(
    "body",
    [C_WITH_THE_GIL, MANY_THREADS, OWN_HANDLERS],
    ids=["in C with the GIL held", "with many threads", "with handlers of its own"],
)
def test_a_rank_says_where_it_stands(body: str, tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with program(body, path) as pid:
        first, second = taken(pid, path), taken(pid, path)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "asking does not end it"
    for one in (first, second):
        assert one.reason == ""
        assert parse_main_thread(one.text)[-1].function == "<module>"
        assert len(one.text) <= stacks.MAX_STACK_BYTES


def test_asking_a_rank_whose_threads_run_does_not_end_it(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with program(BUSY_THREADS, path) as pid:
        for look in range(LOOKS):
            one = taken(pid, path)
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), f"look {look} ended it"
            assert parse_main_thread(one.text)[-1].function == "<module>", one


def test_a_stopped_process_is_told_as_such(tmp_path: Path) -> None:
    with program(MANY_THREADS, tmp_path / "stacks") as pid:
        os.kill(pid, signal.SIGSTOP)
        while state_of(pid) != "T":
            time.sleep(0.001)
        assert (
            summarize_stacks([taken(pid, tmp_path / "stacks")])
            == "rank 3: its process is stopped (SIGSTOP or a debugger)"
        )


def test_a_program_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    with program("print('ready', flush=True); time.sleep(1000)", tmp_path / "s", "import time\n") as pid:
        assert taken(pid, tmp_path / "s").reason.startswith("its process writes no stacks")
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the signal would have ended it"


def test_a_process_that_takes_no_signal_costs_no_more_than_the_limit(tmp_path: Path) -> None:
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nready()\ntime.sleep(1000)\n"
    with program(blocked, tmp_path / "stacks") as pid:
        assert "no stack within" in taken(pid, tmp_path / "stacks").reason
