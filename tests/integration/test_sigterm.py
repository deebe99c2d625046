"""SIGTERM without an agent: the step that was reached is saved on every rank, and the script ends as it would have."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from surefoot.checkpointer.library_mode import end_signal
from surefoot.checkpointer.library_mode.end_signal import EndSignal
from surefoot.checkpointer.process_group import ProcessGroupInfo

PROGRAM = """
import os, signal, sys, time
import torch, surefoot

handler, folder, interval, stands = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["stands"]
stop = []
if handler == "before":
    signal.signal(signal.SIGTERM, lambda *_: (print("handled", flush=True), stop.append(1)))
if "LOCAL_RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)  # ranks begin with equal weights, as under DistributedDataParallel
model = torch.nn.Linear(4, 1)
checkpointer = surefoot.Checkpointer(model=model, folder=folder, interval_steps=interval)
start = checkpointer.restore()
if handler == "after":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
if handler == "around":
    inner = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *about: (print("handled", flush=True), inner(*about), sys.exit(6)))
if rank == 0:
    print("from", start, flush=True)
for step in range(start + 1, 10**6):
    if "LOCAL_RANK" in os.environ:
        torch.distributed.all_reduce(torch.ones(1))
    time.sleep(0.01)
    checkpointer.step(1.0)
    if step == start + 5:
        if rank == 0:
            print("trains", os.getpid(), flush=True)
        until = time.monotonic() + 100
        while stands and not stop and time.monotonic() < until:
            time.sleep(0.05)  # an evaluation
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


class Life:
    """One run of the program, asked to end at the fifth step."""

    def __init__(
        self,
        command: list[str],
        *,
        to_rank: bool = False,
        to_group: bool = False,
        gaps: tuple[float, ...] = (),
        **variables: str,
    ):
        self.start, self.code, self.asked_at, lines = -1, 0, 0.0, []
        environment = {**os.environ, **variables}
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=to_group,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                words = line.split()
                if words[:1] == ["from"]:
                    self.start = int(words[1])
                if words[:1] == ["trains"]:
                    target, self.asked_at = int(words[1]) if to_rank else process.pid, time.monotonic()
                    send = os.killpg if to_group else os.kill
                    send(target, signal.SIGTERM)
                    for gap in gaps:
                        time.sleep(gap)
                        os.kill(target, signal.SIGTERM)
            self.code = process.wait(60)
        self.seconds = time.monotonic() - self.asked_at
        """From the signal to the end."""
        self.text = "".join(lines)


def alone(handler: str, folder: Path, interval: int = 10**6, *more: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", PROGRAM, handler, str(folder), str(interval), *more]


def by_torchrun(handler: str, folder: Path, file: Path) -> list[str]:
    file.write_text(PROGRAM, encoding="utf-8")
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*torchrun, str(file), handler, str(folder), str(10**6)]


def saved_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"SIGTERM: step (\d+) is saved", text)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("handler", "code"), [("none", -signal.SIGTERM), ("before", 3), ("after", 5), ("around", 6)])
def test_the_step_is_saved_and_the_script_s_own_handler_still_runs(handler: str, code: int, tmp_path: Path) -> None:
    first = Life(alone(handler, tmp_path))
    assert (first.start, first.code) == (0, code), first.text
    [saved] = saved_steps(first.text)
    assert saved >= 5
    assert first.text.count("handled") == (1 if handler in ("before", "around") else 0)
    second = Life(alone(handler, tmp_path))
    assert second.start == saved, second.text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("to_rank", [False, True], ids=["to all by torchrun", "to one rank"])
def test_all_ranks_save_one_step(to_rank: bool, tmp_path: Path) -> None:
    command = by_torchrun("none", tmp_path / "saved", tmp_path / "train.py")
    first = Life(command, to_rank=to_rank)
    assert first.start == 0, first.text
    assert first.code != 0
    steps = saved_steps(first.text)
    assert len(steps) == 2, first.text
    assert steps[0] == steps[1] >= 5, first.text
    second = Life(command)
    assert second.start == steps[0], second.text


@pytest.mark.timeout(120)
def test_a_notice_that_comes_twice_is_one(tmp_path: Path) -> None:
    """Slurm signals torchrun and its ranks, and torchrun passes its own signal on."""
    first = Life(alone("none", tmp_path), gaps=(0.0, 0.02))
    assert first.code == -signal.SIGTERM
    [saved] = saved_steps(first.text)
    assert Life(alone("none", tmp_path)).start == saved


@pytest.mark.timeout(120)
def test_a_later_second_one_ends_at_once(tmp_path: Path) -> None:
    first = Life(alone("none", tmp_path, 10**6, "stands"), gaps=(4.0,))
    assert first.code == -signal.SIGTERM, first.text
    assert first.seconds < 10, "the period of grace is 25 s"
    assert not saved_steps(first.text)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("handler", "code"), [("none", -signal.SIGTERM), ("before", 3)])
def test_it_is_passed_on_where_no_step_ends(handler: str, code: int, tmp_path: Path) -> None:
    first = Life(alone(handler, tmp_path, 10**6, "stands"), SUREFOOT_SIGTERM_SECONDS="4")
    assert first.code == code, first.text
    assert first.seconds >= 4, first.text
    assert "4 s have passed; the newest step saved here is 0" in first.text
    assert first.text.count("handled") == (1 if handler == "before" else 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("handler", "code"), [("none", -signal.SIGTERM), ("before", 3)])
def test_between_steps_it_is_passed_on_once_the_last_one_is_saved(handler: str, code: int, tmp_path: Path) -> None:
    first = Life(alone(handler, tmp_path, 5, "stands"), SUREFOOT_SIGTERM_SECONDS="20")
    assert first.code == code, first.text
    assert first.seconds < 20, first.text
    assert "the last step is saved" in first.text
    assert first.text.count("handled") == (1 if handler == "before" else 0)
    assert Life(alone("none", tmp_path, 5)).start == 5


@pytest.mark.timeout(120)
def test_nought_seconds_leave_it_alone(tmp_path: Path) -> None:
    first = Life(alone("none", tmp_path), SUREFOOT_SIGTERM_SECONDS="0")
    assert first.code == -signal.SIGTERM
    assert not saved_steps(first.text)
    assert Life(alone("none", tmp_path)).start == 0


@pytest.mark.timeout(240)
def test_the_workers_of_a_loader_fetch_on_until_the_step_is_saved(tmp_path: Path) -> None:
    """As torchrun does: it signals a rank with all that the rank has started."""
    command = [sys.executable, "-W", "ignore", "-c", WITH_LOADER, str(tmp_path)]
    first = Life(command, to_group=True)
    assert (first.start, first.code) == (0, -signal.SIGTERM), first.text
    assert Life(command, to_group=True).start >= 5


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
def test_a_handler_that_calls_the_one_before_runs_once(
    signals: int, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = EndSignal(ProcessGroupInfo(0, 1), 1, 20.0, lambda: 0)
    set_handler_that_calls_the_one_before(heard)
    assert not ending.is_due(1), "which finds that handler"
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [], "it runs behind the save"
    if signals == 2:
        monkeypatch.setattr(end_signal, "SAME_NOTICE_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        reach_end(ending)
        ending.pass_on()
    assert heard == ["own", "first"]
    ending.close()


@pytest.mark.parametrize("chained", [False, True], ids=["closed by another thread", "called by a later handler"])
def test_sigterm_after_the_end_does_what_it_did_before(chained: bool, heard: list[str]) -> None:
    ending = EndSignal(ProcessGroupInfo(0, 1), 1, 20.0, lambda: 0)
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
