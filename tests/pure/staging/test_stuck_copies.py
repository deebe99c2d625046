"""What a system refuses (priorities, threads), and what hangs or dies behind the training, costs saves and never time without limit."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from surefoot import metrics
from surefoot.staging import CopyOutcome, CopySource, Stager
from surefoot.staging import stager as ordering
from surefoot.staging.host_copies import Copy, Scratch
from surefoot.staging.stager import Crew, Work

SIZE = 1_000_000


def source(tensor: torch.Tensor) -> CopySource:
    return CopySource("weight", lambda: tensor, lambda: tensor, (len(tensor),), 0, tensor.nbytes)


def ones() -> torch.Tensor:
    return torch.ones(SIZE, dtype=torch.uint8)


@pytest.fixture
def slot() -> np.ndarray[Any, Any]:
    return np.zeros(SIZE, dtype=np.uint8)


@pytest.fixture
def stagers() -> Iterator[Callable[[], Stager]]:
    made: list[Stager] = []

    def make() -> Stager:
        made.append(Stager())
        return made[-1]

    yield make
    for stager in made:
        stager.close()


class DeviceWork:
    """What a device still has to do, until the test ends it."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def let_training_wait(self) -> None:
        """A device's stream waits; the host does not."""

    def ended(self) -> bool:
        return self.done.is_set()

    def changed(self) -> tuple[str, ...]:
        self.done.wait()
        return ()


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[DeviceWork]:
    """What the next saves queue on a device."""
    works: list[DeviceWork] = []
    monkeypatch.setattr(Stager, "_queue", lambda *_: [works[-1]] if works else [])
    return works


@pytest.mark.parametrize("nice", [0, 5, 10, 19])
@pytest.mark.parametrize("may_lower", [True, False])
def test_a_process_that_is_nice_and_not_privileged_keeps_its_copying_thread(
    nice: int, may_lower: bool, monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray
) -> None:
    """As Linux answers without CAP_SYS_NICE, and as a sandbox does that refuses the call altogether."""
    now: dict[int, int] = {}

    def set_nice(which: int, thread: int, wanted: int) -> None:
        if wanted < now.get(thread, nice) or not may_lower:
            raise PermissionError(13, "Permission denied")
        now[thread] = wanted

    monkeypatch.setattr(os, "getpriority", lambda which, thread: now.get(thread, nice))
    monkeypatch.setattr(os, "setpriority", set_nice)
    stager, ended = stagers(), queue.Queue[CopyOutcome]()
    for _ in range(2):
        stager.start(slot, [], [source(ones())], ended.put)
        assert ended.get(timeout=10) == CopyOutcome(), "the thread copies without a join"
    assert stager._thread.is_alive()


def test_a_copying_thread_that_dies_is_reported_once_and_its_work_is_done_in_the_call(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stagers: Callable[[], Stager],
    slot: np.ndarray,
    queued: list[DeviceWork],
) -> None:
    def dies(self: Stager) -> None:
        raise OSError("unforeseen")

    monkeypatch.setattr(Stager, "_serve", dies)
    before = metrics.fallbacks.labels("staging_thread_ended")._value.get()
    stager = stagers()
    stager._thread.join(10)
    queued.append(DeviceWork())
    queued[-1].done.set()
    for _ in range(2):
        outcomes: list[CopyOutcome] = []
        stager.start(slot, [], [source(ones())], outcomes.append)
        assert outcomes == [CopyOutcome()], "inside the call"
    assert caplog.text.count("copied inside step()") == 1
    assert metrics.fallbacks.labels("staging_thread_ended")._value.get() == before + 1


def test_a_copying_thread_that_dies_with_a_save_in_hand_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray, queued: list[DeviceWork]
) -> None:
    """The save was begun, a device still copies, and the thread that would have ended it is gone."""
    taken = threading.Event()
    monkeypatch.setattr(Stager, "_end", lambda *_: (taken.set(), 1 / 0))
    stager, outcomes = stagers(), list[CopyOutcome]()
    queued.append(DeviceWork())
    stager.start(slot, [], [source(ones())], outcomes.append)
    assert taken.wait(10)
    stager._thread.join(10)
    monkeypatch.undo()
    queued[-1].done.set()
    stager.wait()
    assert outcomes == [CopyOutcome()]


@pytest.mark.parametrize("refused", ["surefoot-staging", "surefoot-helper"])
def test_without_leave_for_another_thread_the_training_copies_itself(
    refused: str, monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray
) -> None:
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(Crew, "size", staticmethod(lambda: 2))
    monkeypatch.setattr(threading.Thread, "start", limited)
    stager, outcomes = stagers(), list[CopyOutcome]()
    stager.start(slot, [], [source(ones())], outcomes.append)
    stager.wait()
    assert outcomes == [CopyOutcome()]
    assert set(slot) == {1}


def test_a_device_that_does_not_end_costs_the_save_and_no_other_is_begun_until_it_does(
    monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray, queued: list[DeviceWork]
) -> None:
    """Its copies may still land in the slot: another save must not have it."""
    monkeypatch.setattr(ordering, "WAIT_SECONDS", 0.05)
    stager, outcomes = stagers(), list[CopyOutcome]()
    queued.append(DeviceWork())
    stager.start(slot, [], [source(ones())], outcomes.append)
    stager.wait()
    assert isinstance(outcomes[0].error, TimeoutError)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="still being copied"):
            stager.start(slot, [], [source(ones())], outcomes.append)
    stager.join()  # an optimizer's, before each step
    queued[-1].done.set()
    queued.clear()
    stager.start(slot, [], [source(ones())], outcomes.append)
    stager.wait()
    assert outcomes[1:] == [CopyOutcome()]


def test_a_thread_that_hangs_in_a_copy_costs_the_save(
    monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray
) -> None:
    monkeypatch.setattr(ordering, "WAIT_SECONDS", 0.05)
    begun, go, run = threading.Event(), threading.Event(), Copy.run_verified

    def hangs(self: Copy, digest: int, scratch: Scratch) -> bool:
        if threading.current_thread().name == "surefoot-staging":
            begun.set()
            go.wait()
        return run(self, digest, scratch)

    monkeypatch.setattr(Copy, "run_verified", hangs)
    stager, outcomes = stagers(), list[CopyOutcome]()
    stager.start(slot, [], [source(ones())], outcomes.append)
    assert begun.wait(10)
    stager.join()
    assert isinstance(outcomes[0].error, TimeoutError)
    stager.join()  # waits no second time
    with pytest.raises(TimeoutError):
        stager.start(slot, [], [source(ones())], outcomes.append)
    go.set()
    assert len(outcomes) == 1


def test_a_helper_that_hangs_in_a_copy_of_the_call_costs_the_save(
    monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray
) -> None:
    monkeypatch.setattr(ordering, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(Crew, "size", staticmethod(lambda: 1))
    begun, go, run = threading.Event(), threading.Event(), Copy.run

    def hangs(self: Copy) -> None:
        if threading.current_thread().name.startswith("surefoot-helper"):
            begun.set()
            go.wait()
        else:
            assert begun.wait(10), "the helper takes one of the two"
        run(self)

    monkeypatch.setattr(Copy, "run", hangs)
    stager, tensor = stagers(), torch.ones(SIZE, dtype=torch.uint8)
    halves = [
        CopySource(str(n), lambda n=n: tensor[n : n + SIZE // 2], lambda: tensor, (SIZE // 2,), n, n + SIZE // 2)
        for n in (0, SIZE // 2)
    ]
    for _ in range(2):
        with pytest.raises(TimeoutError):
            stager.start(slot, halves, [], lambda outcome: None)
    go.set()


def test_a_copy_that_was_interrupted_is_no_copy() -> None:
    def interrupted(thing: int) -> None:
        raise KeyboardInterrupt

    work = Work(interrupted, [1])
    with pytest.raises(KeyboardInterrupt):
        work.finish()
    assert work.error is not None
