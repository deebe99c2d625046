"""Tests of `staging.stager`."""

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
from surefoot.staging.host_copies import Copy, CopyBuffers
from surefoot.staging.stager import MIN_BYTES, RETRY_INTERVAL_SAVES, CopyCosts, CopyThreads, SharedWork

# ---- stuck copies ----------------------------------------------------------------------------------------------------
# What a system refuses (priorities, threads), and what hangs or dies behind the training, costs saves and never time without limit.

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

    def make_training_wait(self) -> None:
        """A device's stream waits; the host does not."""

    def has_ended(self) -> bool:
        return self.done.is_set()

    def changed_names(self) -> tuple[str, ...]:
        self.done.wait()
        return ()


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[DeviceWork]:
    """What the next saves queue on a device."""
    works: list[DeviceWork] = []
    monkeypatch.setattr(Stager, "_queue_device_copies", lambda *_: [works[-1]] if works else [])
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
        stager.start_save(slot, [], [source(ones())], ended.put)
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

    monkeypatch.setattr(Stager, "_serve_saves", dies)
    before = metrics.fallbacks.labels("staging_thread_ended")._value.get()
    stager = stagers()
    stager._thread.join(10)
    queued.append(DeviceWork())
    queued[-1].done.set()
    for _ in range(2):
        outcomes: list[CopyOutcome] = []
        stager.start_save(slot, [], [source(ones())], outcomes.append)
        assert outcomes == [CopyOutcome()], "inside the call"
    assert caplog.text.count("copied inside step()") == 1
    assert metrics.fallbacks.labels("staging_thread_ended")._value.get() == before + 1


def test_a_copying_thread_that_dies_with_a_save_in_hand_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray, queued: list[DeviceWork]
) -> None:
    """The save was begun, a device still copies, and the thread that would have ended it is gone."""
    taken = threading.Event()
    monkeypatch.setattr(Stager, "_end_staging", lambda *_: (taken.set(), 1 / 0))
    stager, outcomes = stagers(), list[CopyOutcome]()
    queued.append(DeviceWork())
    stager.start_save(slot, [], [source(ones())], outcomes.append)
    assert taken.wait(10)
    stager._thread.join(10)
    monkeypatch.undo()
    queued[-1].done.set()
    stager.wait_for_save()
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

    monkeypatch.setattr(CopyThreads, "helper_count", staticmethod(lambda: 2))
    monkeypatch.setattr(threading.Thread, "start", limited)
    stager, outcomes = stagers(), list[CopyOutcome]()
    stager.start_save(slot, [], [source(ones())], outcomes.append)
    stager.wait_for_save()
    assert outcomes == [CopyOutcome()]
    assert set(slot) == {1}


def test_a_device_that_does_not_end_costs_the_save_and_no_other_is_begun_until_it_does(
    monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray, queued: list[DeviceWork]
) -> None:
    """Its copies may still land in the slot: another save must not have it."""
    monkeypatch.setattr(ordering, "COPY_TIMEOUT_SECONDS", 0.05)
    stager, outcomes = stagers(), list[CopyOutcome]()
    queued.append(DeviceWork())
    stager.start_save(slot, [], [source(ones())], outcomes.append)
    stager.wait_for_save()
    assert isinstance(outcomes[0].error, TimeoutError)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="still being copied"):
            stager.start_save(slot, [], [source(ones())], outcomes.append)
    stager.join_copies()  # an optimizer's, before each step
    queued[-1].done.set()
    queued.clear()
    stager.start_save(slot, [], [source(ones())], outcomes.append)
    stager.wait_for_save()
    assert outcomes[1:] == [CopyOutcome()]


def test_a_thread_that_hangs_in_a_copy_costs_the_save(
    monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray
) -> None:
    monkeypatch.setattr(ordering, "COPY_TIMEOUT_SECONDS", 0.05)
    begun, go, run = threading.Event(), threading.Event(), Copy.run_verified

    def hangs(self: Copy, digest: int, scratch: CopyBuffers) -> bool:
        if threading.current_thread().name == "surefoot-staging":
            begun.set()
            go.wait()
        return run(self, digest, scratch)

    monkeypatch.setattr(Copy, "run_verified", hangs)
    stager, outcomes = stagers(), list[CopyOutcome]()
    stager.start_save(slot, [], [source(ones())], outcomes.append)
    assert begun.wait(10)
    stager.join_copies()
    assert isinstance(outcomes[0].error, TimeoutError)
    stager.join_copies()  # waits no second time
    with pytest.raises(TimeoutError):
        stager.start_save(slot, [], [source(ones())], outcomes.append)
    go.set()
    assert len(outcomes) == 1


def test_a_helper_that_hangs_in_a_copy_of_the_call_costs_the_save(
    monkeypatch: pytest.MonkeyPatch, stagers: Callable[[], Stager], slot: np.ndarray
) -> None:
    monkeypatch.setattr(ordering, "COPY_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(CopyThreads, "helper_count", staticmethod(lambda: 1))
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
            stager.start_save(slot, halves, [], lambda outcome: None)
    go.set()


def test_a_copy_that_was_interrupted_is_no_copy() -> None:
    def interrupted(thing: int) -> None:
        raise KeyboardInterrupt

    work = SharedWork(interrupted, [1])
    with pytest.raises(KeyboardInterrupt):
        work.finish()
    assert work.error is not None


# ---- ordering --------------------------------------------------------------------------------------------------------
# Lazy copies overlap the training and are joined; whatever changes under a copy is found and named.


def source_ordering(name: str, tensor: torch.Tensor, start: int) -> CopySource:
    size = tensor.numel() * tensor.element_size()
    return CopySource(name, lambda: tensor, lambda: tensor, tuple(max(1, n) for n in tensor.shape), start, start + size)


def sources(*tensors: torch.Tensor) -> list[CopySource]:
    found, start = [], 0
    for index, tensor in enumerate(tensors):
        found.append(source_ordering(f"t{index}", tensor, start))
        start = found[-1].stop
    return found


@pytest.fixture
def stager():
    owner = Stager()
    yield owner
    owner.close()


@pytest.fixture
def slot_ordering() -> np.ndarray:
    return np.zeros(16 * 1024 * 1024, dtype=np.uint8)


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Copies of the staging thread wait for the second event, after setting the first; others' do not."""
    begun, go = threading.Event(), threading.Event()
    run = Copy.run_verified

    def held(self: Copy, digest: int, scratch: CopyBuffers) -> bool:
        if threading.current_thread().name == "surefoot-staging":
            begun.set()
            assert go.wait(10)
        return run(self, digest, scratch)

    monkeypatch.setattr(Copy, "run_verified", held)
    return begun, go


def test_what_is_eager_or_small_is_copied_before_start_returns(stager: Stager, slot_ordering: np.ndarray) -> None:
    small, eager = torch.full((100,), 3, dtype=torch.uint8), torch.full((200_000,), 5, dtype=torch.uint8)
    first, second = sources(small, eager)
    stager.start_save(slot_ordering, [second], [first], lambda outcome: None)
    small.fill_(9)
    eager.fill_(9)
    assert set(slot_ordering[:100]) == {3}
    assert set(slot_ordering[100:200_100]) == {5}


def test_join_takes_over_what_the_thread_has_not_begun(
    stager: Stager, slot_ordering: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = hold_copies(monkeypatch)
    tensors = [torch.full((1_000_000,), n + 1, dtype=torch.uint8) for n in range(8)]
    outcomes: list[CopyOutcome] = []
    stager.start_save(slot_ordering, [], sources(*tensors), outcomes.append)
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    stager.join_copies()
    assert [o.is_complete for o in outcomes] == [True]
    assert all(set(slot_ordering[n * 1_000_000 : (n + 1) * 1_000_000]) == {n + 1} for n in range(8))


def test_a_save_ends_by_itself_without_a_join(stager: Stager, slot_ordering: np.ndarray) -> None:
    done = threading.Event()
    stager.start_save(slot_ordering, [], sources(torch.ones(500_000)), lambda outcome: done.set())
    assert done.wait(10)


def test_a_tensor_changed_in_place_under_the_copy_is_named(
    stager: Stager, slot_ordering: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = hold_copies(monkeypatch)
    a, b = torch.ones(500_000), torch.ones(500_000)
    outcomes: list[CopyOutcome] = []
    stager.start_save(slot_ordering, [], sources(a, b), outcomes.append)
    assert begun.wait(10)
    b.mul_(2)
    go.set()
    stager.join_copies()
    assert outcomes == [CopyOutcome(("t1",))]


def test_a_change_that_is_gone_before_the_copy_costs_nothing(
    stager: Stager, slot_ordering: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are compared, not counters: what the copy finds is what the step left."""
    begun, go = hold_copies(monkeypatch)
    a, b = torch.ones(500_000), torch.ones(500_000)
    outcomes: list[CopyOutcome] = []
    stager.start_save(slot_ordering, [], sources(a, b), outcomes.append)
    assert begun.wait(10)
    b.mul_(2)
    b.mul_(0.5)
    go.set()
    stager.join_copies()
    assert outcomes == [CopyOutcome()]
    assert np.all(slot_ordering[:4_000_000].view(np.float32) == 1)


def test_nobody_waits_for_a_helper_that_gets_no_turn_and_what_it_finds_later_does_not_count(
    slot_ordering: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, begun, go = Copy.digest, threading.Event(), threading.Event()

    def stopped(self: Copy, scratch: CopyBuffers) -> int:
        if threading.current_thread().name.startswith("surefoot-helper"):
            begun.set()
            assert go.wait(10)
        else:
            assert begun.wait(10), "a helper takes part"
        return digest(self, scratch)

    monkeypatch.setattr(CopyThreads, "helper_count", staticmethod(lambda: 1))
    monkeypatch.setattr(Copy, "digest", stopped)
    tensors, outcomes = [torch.full((1_000_000,), 7, dtype=torch.uint8) for _ in range(4)], list[CopyOutcome]()
    _, on = hold_copies(monkeypatch)
    stager = Stager()
    try:
        stager.start_save(slot_ordering, [], sources(*tensors), outcomes.append)
        for tensor in tensors:
            tensor.data.fill_(9)
        go.set()  # the helper digests what is there now
        on.set()
        stager.join_copies()
    finally:
        stager.close()
    assert sorted(outcomes[0].changed) == ["t0", "t1", "t2", "t3"]


def test_large_tensors_that_are_copied_at_once_are_copied_before_start_returns(
    stager: Stager, slot_ordering: np.ndarray
) -> None:
    tensors = [torch.full((3_000_000,), n + 1, dtype=torch.uint8) for n in range(4)]
    stager.start_save(slot_ordering, sources(*tensors), [], lambda outcome: None)
    for tensor in tensors:
        tensor.fill_(9)
    assert all(set(slot_ordering[n * 3_000_000 : (n + 1) * 3_000_000]) == {n + 1} for n in range(4))


def test_a_conjugated_tensor_is_saved_as_what_it_means_at_each_step(stager: Stager, slot_ordering: np.ndarray) -> None:
    memory = torch.ones(50_000, dtype=torch.complex64)
    tensor = memory.conj()
    for value in (1 + 2j, 3 - 4j):
        memory.fill_(value)
        outcomes: list[CopyOutcome] = []
        stager.start_save(
            slot_ordering, [], [CopySource("w", lambda: tensor, lambda: tensor, (50_000,), 0, 400_000)], outcomes.append
        )
        stager.join_copies()
        assert outcomes == [CopyOutcome()]
        assert np.all(slot_ordering[:400_000].view(np.complex64) == np.conj(value))


def test_a_tensor_that_moved_is_copied_from_where_it_is_now(stager: Stager, slot_ordering: np.ndarray) -> None:
    place = [torch.full((300_000,), 1.0)]
    source = CopySource("w", lambda: place[0], lambda: place[0], (16_000,), 0, 1_200_000)
    for value in (1.0, 2.0, 2.0, 3.0):
        if value != place[0][0]:
            place[0] = torch.full((300_000,), value)
        outcomes: list[CopyOutcome] = []
        stager.start_save(slot_ordering, [], [source], outcomes.append)
        stager.join_copies()
        assert outcomes[0].is_complete
        assert np.all(slot_ordering[:1_200_000].view(np.float32) == value)


def test_a_failed_copy_is_an_outcome_not_a_crash(
    stager: Stager, slot_ordering: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Copy, digest: int, scratch: CopyBuffers) -> bool:
        raise MemoryError("no")

    outcomes: list[CopyOutcome] = []
    with monkeypatch.context() as patched:
        patched.setattr(Copy, "run_verified", fails)
        stager.start_save(slot_ordering, [], sources(torch.ones(500_000)), outcomes.append)
        stager.join_copies()
    assert isinstance(outcomes[0].error, MemoryError)
    assert not outcomes[0].is_complete


def test_a_failed_copy_inside_the_call_is_the_callers(
    stager: Stager, slot_ordering: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Copy) -> None:
        raise MemoryError("no")

    with monkeypatch.context() as patched:
        patched.setattr(Copy, "run", fails)
        with pytest.raises(MemoryError):
            stager.start_save(slot_ordering, sources(torch.ones(500_000)), [], lambda outcome: None)
    assert not stager.is_busy


def test_close_ends_the_threads() -> None:
    owner = Stager()
    owner.close()
    assert not [t for t in (owner._thread, *owner._threads._threads) if t.is_alive()]


# ---- timing ----------------------------------------------------------------------------------------------------------
# Copies run where they hold the training up for less, and the other way is tried now and then.

SIZE_TIMING = MIN_BYTES


def played(timing: CopyCosts, saves: int, behind: tuple[float, float], inside: float) -> list[bool]:
    found = []
    for _ in range(saves):
        found.append(timing.should_copy_lazily(SIZE_TIMING))
        timing.record_cost(found[-1], SIZE_TIMING, *(behind if found[-1] else (inside, 0.0)))
    return found


def test_with_a_core_to_spare_every_save_is_copied_behind() -> None:
    assert all(played(CopyCosts(), 100, (0.2, 0.01), 0.5))


def test_with_none_to_spare_saves_are_copied_inside_and_the_other_way_is_tried_now_and_then() -> None:
    found = played(CopyCosts(), 10 * RETRY_INTERVAL_SAVES, (0.2, 0.8), 0.5)
    assert found[:3] == [True, False, False]
    assert sum(found) <= 1 + 10


def test_a_core_that_becomes_free_is_found_again() -> None:
    timing = CopyCosts()
    played(timing, 3, (0.2, 0.8), 0.5)
    found = played(timing, 3 * RETRY_INTERVAL_SAVES, (0.2, 0.0), 0.5)
    assert sum(found[-RETRY_INTERVAL_SAVES:]) == RETRY_INTERVAL_SAVES - 1


def test_a_copy_that_was_waited_for_and_is_still_cheaper_stays_behind() -> None:
    found = played(CopyCosts(), 2 * RETRY_INTERVAL_SAVES, (0.1, 0.2), 0.5)
    assert found.count(False) <= 3


def test_what_is_small_is_always_copied_behind() -> None:
    timing = CopyCosts()
    played(timing, 4, (0.2, 0.8), 0.5)
    assert timing.should_copy_lazily(MIN_BYTES - 1)
