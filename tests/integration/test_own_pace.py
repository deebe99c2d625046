"""A rank's looks at itself: what counts as work, what is left out, and that no end of a process is disturbed by them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.checkpointer import activity_monitor
from surefoot.checkpointer.activity_monitor import ActivityMonitor

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "looked_at.py"
ENDS = {
    "falls off": 0, "closes": 0, "raises": 1, "exits": 3, "exits at once": 0, "leaves a thread": 0, "forks": 0,
    "is interrupted": -2,
}  # fmt: skip
LOOKS = 10


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_monitor, "POLL_SECONDS", 0.002)


@pytest.fixture
def pace() -> Iterator[ActivityMonitor]:
    made = ActivityMonitor([torch.nn.Linear(2, 3)], 1, 3)
    yield made
    made.close()


def looked(pace: ActivityMonitor) -> tuple[int, int]:
    (told,) = pace.end_step(4)
    assert (told.rank, told.work) == (1, 9)
    return told.observations, told.busy_observations


def until_looked(pace: ActivityMonitor) -> None:
    """Stands where its caller made it stand until there were some looks."""
    before = pace.end_step(0)[0].observations
    deadline = time.monotonic() + 30
    while pace.end_step(0)[0].observations < before + LOOKS:
        assert time.monotonic() < deadline, "nobody looks"
        time.sleep(0.001)


def within(file: str, function: str) -> Callable[[Callable[[], object]], Any]:
    """A function of this name in a file of this name, which calls what it is given."""
    named: dict[str, Any] = {}
    exec(compile(f"def {function}(call):\n    call()\n", file, "exec"), named)
    return named[function]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("file", "function", "share"),
    [
        ("/job/train.py", "forward", 1),
        ("/x/torch/distributed/distributed_c10d.py", "all_reduce", 0),
        ("/x/torch/utils/data/dataloader.py", "_next_data", 1),
    ],
)
def test_what_is_no_wait_for_other_ranks_is_work(pace: ActivityMonitor, file: str, function: str, share: int) -> None:
    assert pace.end_step(4) == (), "nobody has looked before the first step"
    within(file, function)(lambda: until_looked(pace))
    looks, own = looked(pace)
    # between two calls the test itself is seen
    assert looks >= LOOKS
    assert abs(own - share * looks) <= 2


def test_of_a_program_on_a_device_loading_alone_is_work(pace: ActivityMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    pace.end_step(4)
    until_looked(pace)
    assert looked(pace)[1] == 0
    within("/x/torch/utils/data/dataloader.py", "_next_data")(
        lambda: within("/job/data.py", "decode")(lambda: until_looked(pace))
    )
    assert looked(pace)[1] >= LOOKS - 2


def test_a_backward_pass_that_sleeps_waits(pace: ActivityMonitor) -> None:
    """It sleeps in one piece: a thread that wakes up every millisecond queues for a core of a loaded machine, and so runs."""
    pace.end_step(4)
    enough = threading.Event()

    def end_when_looked() -> None:
        until_looked(pace)
        enough.set()

    watcher = threading.Thread(target=end_when_looked)
    watcher.start()
    within("/x/torch/autograd/graph.py", "_engine_run_backward")(lambda: enough.wait(60))
    watcher.join()
    looks, own = looked(pace)
    assert looks >= LOOKS
    # before it falls asleep and after it wakes up, the test itself is seen
    assert own <= 2


def test_nobody_looks_aside_nor_in_a_world_of_two(pace: ActivityMonitor) -> None:
    pace.end_step(4)
    until_looked(pace)
    with pace.not_counted():
        with pace.not_counted():
            pass
        time.sleep(0.01)  # a look that had begun before may end
        before = looked(pace)
        time.sleep(0.05)
        assert looked(pace) == before
    until_looked(pace)
    two = ActivityMonitor([torch.nn.Linear(2, 2)], 0, 2)
    assert [two.end_step(4) for _ in range(3)] == [(), (), ()]


@pytest.mark.parametrize("way", ENDS)
def test_however_a_process_ends_its_looks_end_before(way: str) -> None:
    ended = subprocess.run([sys.executable, str(PROGRAM), way], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == ENDS[way], ended.stderr
