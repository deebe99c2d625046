"""SIGTERM without an agent: the step that was reached is saved on every rank, and the script ends as it would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from surefoot.checkpointer.library_mode.end_signal import EndSignal
from surefoot.checkpointer.world import ProcessWorld

PROGRAM = """
import os, signal, sys, time
import torch, surefoot

handler, folder = sys.argv[1:]
stop = []
if handler == "before":
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
if "LOCAL_RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))
model = torch.nn.Linear(4, 1)
checkpointer = surefoot.Checkpointer(model=model, folder=folder, interval_steps=10**6)
start = checkpointer.restore()
if handler == "after":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("from", start, flush=True)
for step in range(start + 1, 10**6):
    if "LOCAL_RANK" in os.environ:
        torch.distributed.all_reduce(torch.ones(1))
    time.sleep(0.01)
    checkpointer.step(1.0)
    if step == start + 5 and rank == 0:
        print("trains", os.getpid(), flush=True)
    if stop:
        print("stopped behind", step, flush=True)
        checkpointer.close()
        sys.exit(3)
"""

WITH_LOADER = """
import os, sys, time
import torch, surefoot

model = torch.nn.Linear(4, 1)
checkpointer = surefoot.Checkpointer(model=model, folder=sys.argv[1], interval_steps=10**6)
start = checkpointer.restore()
print("from", start, flush=True)
for number, batch in enumerate(torch.utils.data.DataLoader(range(10**6), num_workers=2, multiprocessing_context="fork")):
    time.sleep(0.02)
    checkpointer.step(1.0)
    if number == 5:
        print("trains", os.getpid(), flush=True)
"""


def life(command: list[str], *, to_rank: bool = False, to_group: bool = False) -> tuple[int, int, str]:
    """Starts it and asks it to end; from which step it went on, its exit code and its log."""
    start, lines = -1, []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=to_group
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            words = line.split()
            if words[:1] == ["from"]:
                start = int(words[1])
            if words[:1] == ["trains"]:
                if to_group:
                    os.killpg(process.pid, signal.SIGTERM)
                else:
                    os.kill(int(words[1]) if to_rank else process.pid, signal.SIGTERM)
        code = process.wait(60)
    return start, code, "".join(lines)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("handler", "code"), [("none", -signal.SIGTERM), ("before", 3), ("after", 5)])
def test_the_step_is_saved_and_the_script_s_own_handler_still_runs(handler: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, handler, str(tmp_path)]
    start, ended, said = life(command)
    assert (start, ended) == (0, code), said
    again, _, said = life(command)
    assert again >= 5, said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("to_rank", [False, True], ids=["to all by torchrun", "to one rank"])
def test_all_ranks_save_one_step(to_rank: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(file), "none", str(tmp_path / "saved")]
    start, ended, said = life(command, to_rank=to_rank)
    assert start == 0, said
    assert ended != 0
    assert said.count("is saved") == 2, said
    again, _, said = life(command)
    assert again >= 5, said


@pytest.mark.timeout(240)
def test_the_workers_of_a_loader_fetch_on_until_the_step_is_saved(tmp_path: Path) -> None:
    """As torchrun does: it signals a rank with all that the rank has started."""
    command = [sys.executable, "-W", "ignore", "-c", WITH_LOADER, str(tmp_path)]
    start, ended, said = life(command, to_group=True)
    assert (start, ended) == (0, -signal.SIGTERM), said
    again, _, said = life(command, to_group=True)
    assert again >= 5, said


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What SIGTERM called: the handler that was there before is called `first`."""
    called: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append("first"))
    yield called
    signal.signal(signal.SIGTERM, before)


def set_handler_that_calls_the_one_before(heard: list[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append("own")
        assert callable(before)
        before(number, frame)

    signal.signal(signal.SIGTERM, handle)


def reach_end(ending: EndSignal) -> None:
    """Trains until SIGTERM ends it."""
    limit, step = time.monotonic() + 20, 2
    while not ending.is_due(step) and time.monotonic() < limit:
        step += 1
        time.sleep(0.01)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_handler_that_calls_the_one_before_runs_once(signals: int, heard: list[str]) -> None:
    ending = EndSignal(ProcessWorld(0, 1), 1, 20.0)
    set_handler_that_calls_the_one_before(heard)
    assert not ending.is_due(1), "which finds that handler"
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [], "it runs behind the save"
    if signals == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        reach_end(ending)
        ending.pass_on()
    assert heard == ["own", "first"]
    ending.close()


@pytest.mark.parametrize("chained", [False, True], ids=["closed by another thread", "called by a later handler"])
def test_sigterm_after_the_end_does_what_it_did_before(chained: bool, heard: list[str]) -> None:
    ending = EndSignal(ProcessWorld(0, 1), 1, 20.0)
    if chained:
        set_handler_that_calls_the_one_before(heard)
        ending.close()
    else:
        closing = threading.Thread(target=ending.close)
        closing.start()
        closing.join()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard[-1:] == ["first"]
    assert heard.count("own") == chained
