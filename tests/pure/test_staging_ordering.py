"""Lazy copies overlap the training and are joined; whatever changes under a copy is found and named."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from surefoot.staging import Outcome, Source, Stager
from surefoot.staging.copies import Copy, copies_of
from surefoot.staging.samples import SAMPLED_PART, Sampler


def source(name: str, tensor: torch.Tensor, start: int) -> Source:
    size = tensor.numel() * tensor.element_size()
    return Source(name, lambda: tensor, lambda: tensor, tuple(max(1, n) for n in tensor.shape), start, start + size)


def sources(*tensors: torch.Tensor) -> list[Source]:
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
    """Copies of the staging thread wait for the second event, after setting the first; the caller's do not."""
    begun, go = threading.Event(), threading.Event()
    run = Copy.run

    def held(self: Copy) -> None:
        if threading.current_thread().name == "surefoot-staging":
            begun.set()
            assert go.wait(10)
        run(self)

    monkeypatch.setattr(Copy, "run", held)
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
    outcomes: list[Outcome] = []
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
    outcomes: list[Outcome] = []
    stager.start(slot, [], sources(a, b), outcomes.append)
    assert begun.wait(10)
    b.mul_(2)
    go.set()
    stager.join()
    assert outcomes == [Outcome(("t1",))]


def test_a_write_through_data_evades_versions_and_is_found_by_comparing_all(
    stager: Stager, slot: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = hold_copies(monkeypatch)
    tensor = torch.ones(500_000)
    outcomes: list[Outcome] = []
    stager.start(slot, [], sources(tensor), outcomes.append, compare_all=True)
    assert begun.wait(10)
    tensor.data.mul_(2)
    go.set()
    stager.join()
    assert outcomes == [Outcome(("t0",))]


@pytest.mark.parametrize(("length", "tile", "count"), [(100_000, 1000, 73), (1_000_000, 100_000, 3), (70, 70, 200)])
def test_every_lazy_byte_is_compared_once_in_so_many_saves(length: int, tile: int, count: int) -> None:
    sampler, memory = Sampler(), np.zeros(count * length, dtype=np.uint8)
    plain = torch.ones(length, dtype=torch.uint8)
    parts = [memory[i * length : (i + 1) * length] for i in range(count)]
    copies = [(f"t{i}", copies_of(plain, (tile,), part)[0]) for i, part in enumerate(parts)]
    for sampler.turn in range(SAMPLED_PART):
        compared = 0
        for _, copied, reference in sampler.of(copies, every=False):
            assert copied.shape == reference.shape
            assert reference.all()
            np.add(copied, 1, out=copied)
            compared += copied.nbytes
        assert compared <= count * length // SAMPLED_PART + tile + 1
    assert (memory == 1).all()


def test_a_number_is_compared_once_in_so_many_saves() -> None:
    sampler, memory = Sampler(), np.zeros(4, dtype=np.uint8)
    copies = [("n", copies_of(torch.tensor(1.0), (), memory)[0])]
    turns = [turn for sampler.turn in range(SAMPLED_PART) for turn in sampler.of(copies, every=False)]
    assert [(name, copied.shape) for name, copied, _ in turns] == [("n", ())]


def test_a_tensor_that_moved_is_copied_from_where_it_is_now(stager: Stager, slot: np.ndarray) -> None:
    place = [torch.full((300_000,), 1.0)]
    source = Source("w", lambda: place[0], lambda: place[0], (16_000,), 0, 1_200_000)
    for value in (1.0, 2.0, 2.0, 3.0):
        if value != place[0][0]:
            place[0] = torch.full((300_000,), value)
        outcomes: list[Outcome] = []
        stager.start(slot, [], [source], outcomes.append)
        stager.join()
        assert outcomes[0].sealed
        assert np.all(slot[:1_200_000].view(np.float32) == value)


def test_a_failed_copy_is_an_outcome_not_a_crash(
    stager: Stager, slot: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Copy) -> None:
        raise MemoryError("no")

    outcomes: list[Outcome] = []
    lazy = sources(torch.ones(500_000))
    monkeypatch.setattr(Copy, "run", fails)
    stager.start(slot, [], [], lambda outcome: None)
    stager.join()
    monkeypatch.undo()
    with monkeypatch.context() as patched:
        patched.setattr(Copy, "run", fails)
        stager.start(slot, [], lazy, outcomes.append)
        stager.join()
    assert isinstance(outcomes[0].error, MemoryError)
    assert not outcomes[0].sealed


def test_close_ends_the_thread() -> None:
    owner = Stager()
    owner.close()
    assert not owner._thread.is_alive()
