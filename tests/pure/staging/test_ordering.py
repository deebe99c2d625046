"""Lazy copies overlap the training and are joined; whatever changes under a copy is found and named."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from surefoot.staging import CopyOutcome, CopySource, Stager
from surefoot.staging.host_copies import Copy, Scratch
from surefoot.staging.stager import Crew


def source(name: str, tensor: torch.Tensor, start: int) -> CopySource:
    size = tensor.numel() * tensor.element_size()
    return CopySource(name, lambda: tensor, lambda: tensor, tuple(max(1, n) for n in tensor.shape), start, start + size)


def sources(*tensors: torch.Tensor) -> list[CopySource]:
    found, start = [], 0
    for index, tensor in enumerate(tensors):
        found.append(source(f"t{index}", tensor, start))
        start = found[-1].stop
    return found


@pytest.fixture
def stager():
    owner = Stager()
    yield owner
    owner.close()


@pytest.fixture
def slot() -> np.ndarray:
    return np.zeros(16 * 1024 * 1024, dtype=np.uint8)


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Copies of the staging thread wait for the second event, after setting the first; others' do not."""
    begun, go = threading.Event(), threading.Event()
    run = Copy.run_verified

    def held(self: Copy, digest: int, scratch: Scratch) -> bool:
        if threading.current_thread().name == "surefoot-staging":
            begun.set()
            assert go.wait(10)
        return run(self, digest, scratch)

    monkeypatch.setattr(Copy, "run_verified", held)
    return begun, go


def test_what_is_eager_or_small_is_copied_before_start_returns(stager: Stager, slot: np.ndarray) -> None:
    small, eager = torch.full((100,), 3, dtype=torch.uint8), torch.full((200_000,), 5, dtype=torch.uint8)
    first, second = sources(small, eager)
    stager.start(slot, [second], [first], lambda outcome: None)
    small.fill_(9)
    eager.fill_(9)
    assert set(slot[:100]) == {3}
    assert set(slot[100:200_100]) == {5}


def test_join_takes_over_what_the_thread_has_not_begun(
    stager: Stager, slot: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = hold_copies(monkeypatch)
    tensors = [torch.full((1_000_000,), n + 1, dtype=torch.uint8) for n in range(8)]
    outcomes: list[CopyOutcome] = []
    stager.start(slot, [], sources(*tensors), outcomes.append)
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    stager.join()
    assert [o.sealed for o in outcomes] == [True]
    assert all(set(slot[n * 1_000_000 : (n + 1) * 1_000_000]) == {n + 1} for n in range(8))


def test_a_save_ends_by_itself_without_a_join(stager: Stager, slot: np.ndarray) -> None:
    done = threading.Event()
    stager.start(slot, [], sources(torch.ones(500_000)), lambda outcome: done.set())
    assert done.wait(10)


def test_a_tensor_changed_in_place_under_the_copy_is_named(
    stager: Stager, slot: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = hold_copies(monkeypatch)
    a, b = torch.ones(500_000), torch.ones(500_000)
    outcomes: list[CopyOutcome] = []
    stager.start(slot, [], sources(a, b), outcomes.append)
    assert begun.wait(10)
    b.mul_(2)
    go.set()
    stager.join()
    assert outcomes == [CopyOutcome(("t1",))]


def test_a_change_that_is_gone_before_the_copy_costs_nothing(
    stager: Stager, slot: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are compared, not counters: what the copy finds is what the step left."""
    begun, go = hold_copies(monkeypatch)
    a, b = torch.ones(500_000), torch.ones(500_000)
    outcomes: list[CopyOutcome] = []
    stager.start(slot, [], sources(a, b), outcomes.append)
    assert begun.wait(10)
    b.mul_(2)
    b.mul_(0.5)
    go.set()
    stager.join()
    assert outcomes == [CopyOutcome()]
    assert np.all(slot[:4_000_000].view(np.float32) == 1)


def test_nobody_waits_for_a_helper_that_gets_no_turn_and_what_it_finds_later_does_not_count(
    slot: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, begun, go = Copy.digest, threading.Event(), threading.Event()

    def stopped(self: Copy, scratch: Scratch) -> int:
        if threading.current_thread().name.startswith("surefoot-helper"):
            begun.set()
            assert go.wait(10)
        else:
            assert begun.wait(10), "a helper takes part"
        return digest(self, scratch)

    monkeypatch.setattr(Crew, "size", staticmethod(lambda: 1))
    monkeypatch.setattr(Copy, "digest", stopped)
    tensors, outcomes = [torch.full((1_000_000,), 7, dtype=torch.uint8) for _ in range(4)], list[CopyOutcome]()
    _, on = hold_copies(monkeypatch)
    stager = Stager()
    try:
        stager.start(slot, [], sources(*tensors), outcomes.append)
        for tensor in tensors:
            tensor.data.fill_(9)
        go.set()  # the helper digests what is there now
        on.set()
        stager.join()
    finally:
        stager.close()
    assert sorted(outcomes[0].changed) == ["t0", "t1", "t2", "t3"]


def test_large_tensors_that_are_copied_at_once_are_copied_before_start_returns(
    stager: Stager, slot: np.ndarray
) -> None:
    tensors = [torch.full((3_000_000,), n + 1, dtype=torch.uint8) for n in range(4)]
    stager.start(slot, sources(*tensors), [], lambda outcome: None)
    for tensor in tensors:
        tensor.fill_(9)
    assert all(set(slot[n * 3_000_000 : (n + 1) * 3_000_000]) == {n + 1} for n in range(4))


def test_a_conjugated_tensor_is_saved_as_what_it_means_at_each_step(stager: Stager, slot: np.ndarray) -> None:
    memory = torch.ones(50_000, dtype=torch.complex64)
    tensor = memory.conj()
    for value in (1 + 2j, 3 - 4j):
        memory.fill_(value)
        outcomes: list[CopyOutcome] = []
        stager.start(
            slot, [], [CopySource("w", lambda: tensor, lambda: tensor, (50_000,), 0, 400_000)], outcomes.append
        )
        stager.join()
        assert outcomes == [CopyOutcome()]
        assert np.all(slot[:400_000].view(np.complex64) == np.conj(value))


def test_a_tensor_that_moved_is_copied_from_where_it_is_now(stager: Stager, slot: np.ndarray) -> None:
    place = [torch.full((300_000,), 1.0)]
    source = CopySource("w", lambda: place[0], lambda: place[0], (16_000,), 0, 1_200_000)
    for value in (1.0, 2.0, 2.0, 3.0):
        if value != place[0][0]:
            place[0] = torch.full((300_000,), value)
        outcomes: list[CopyOutcome] = []
        stager.start(slot, [], [source], outcomes.append)
        stager.join()
        assert outcomes[0].sealed
        assert np.all(slot[:1_200_000].view(np.float32) == value)


def test_a_failed_copy_is_an_outcome_not_a_crash(
    stager: Stager, slot: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Copy, digest: int, scratch: Scratch) -> bool:
        raise MemoryError("no")

    outcomes: list[CopyOutcome] = []
    with monkeypatch.context() as patched:
        patched.setattr(Copy, "run_verified", fails)
        stager.start(slot, [], sources(torch.ones(500_000)), outcomes.append)
        stager.join()
    assert isinstance(outcomes[0].error, MemoryError)
    assert not outcomes[0].sealed


def test_a_failed_copy_inside_the_call_is_the_callers(
    stager: Stager, slot: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Copy) -> None:
        raise MemoryError("no")

    with monkeypatch.context() as patched:
        patched.setattr(Copy, "run", fails)
        with pytest.raises(MemoryError):
            stager.start(slot, sources(torch.ones(500_000)), [], lambda outcome: None)
    assert not stager.busy


def test_close_ends_the_threads() -> None:
    owner = Stager()
    owner.close()
    assert not [t for t in (owner._thread, *owner._crew._threads) if t.is_alive()]
