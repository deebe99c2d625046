"""However a tensor's bytes change between a step and its copy, what is sealed is what the step left."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.staging import CopyOutcome, CopySource, Stager, host_copies, stager

TILE = (4, 8)


def by_data(tensor: torch.Tensor, seed: int) -> None:
    tensor.data.add_(seed)


def by_view(tensor: torch.Tensor, seed: int) -> None:
    tensor.detach()[seed % len(tensor)].add_(1)


def by_numpy(tensor: torch.Tensor, seed: int) -> None:
    tensor.detach().numpy()[seed % len(tensor)] += 1


def by_dlpack(tensor: torch.Tensor, seed: int) -> None:
    np.from_dlpack(tensor.detach())[..., seed % tensor.shape[-1]] *= -1


def by_storage(tensor: torch.Tensor, seed: int) -> None:
    storage: Any = tensor.untyped_storage()
    storage[seed % len(storage)] = (storage[seed % len(storage)] + 1) % 256


def by_address(tensor: torch.Tensor, seed: int) -> None:
    """As a kernel of somebody else's does."""
    ctypes.memset(tensor.data_ptr(), seed % 256, 4)


def by_swapping(tensor: torch.Tensor, seed: int) -> None:
    """Equal sums, equal multisets."""
    a, b = seed % len(tensor), (seed * 7 + 1) % len(tensor)
    tensor.data[[a, b]] = tensor.data[[b, a]]


def by_sign(tensor: torch.Tensor, seed: int) -> None:
    tensor.data.neg_()


CHANGES: list[Callable[[torch.Tensor, int], None]] = [
    by_data, by_view, by_numpy, by_dlpack, by_storage, by_address, by_swapping, by_sign,
]  # fmt: skip


class Played:
    """A stager whose thread copies nothing: each copy is one call of the test's."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.tensors = [
            torch.randn(40, 30, generator=draw),
            torch.randn(30, 40, generator=draw).t(),
            torch.randn(40, 30, generator=draw).to(torch.float64)[:, ::3],
            torch.randint(-9, 9, (40, 30), generator=draw, dtype=torch.int16),
            torch.eye(24, dtype=torch.float32),
        ]
        self.sources, start = [], 0
        for index, tensor in enumerate(self.tensors):
            stop = start + tensor.numel() * tensor.element_size()
            self.sources.append(self._source(f"t{index}", tensor, start, stop))
            start = stop
        self.slot = np.zeros(start, dtype=np.uint8)
        self.stager = Stager()
        self.outcomes: list[CopyOutcome] = []

    def begin(self) -> None:
        self.at_step = [tensor.clone() for tensor in self.tensors]
        self.stager.start_save(self.slot, [], self.sources, self.outcomes.append)

    def copy(self, count: int) -> None:
        staging = self.stager._current
        assert staging is not None
        for _ in range(count):
            staging.work.do_next()

    def wanted(self) -> bytes:
        found = np.zeros_like(self.slot)
        for source, tensor in zip(self.sources, self.at_step, strict=True):
            for copy in host_copies.prepare_copies(tensor, TILE, found[source.start : source.stop]):
                copy.run()
        return found.tobytes()

    @staticmethod
    def _source(name: str, tensor: torch.Tensor, start: int, stop: int) -> CopySource:
        return CopySource(name, lambda: tensor, lambda: tensor, TILE, start, stop)


@pytest.fixture(scope="module", autouse=True)
def copies_are_small_and_wait_for_the_test() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host_copies, "BAND_BYTES", 1024)
        patched.setattr(stager, "SMALL_BYTES", 16)
        patched.setattr(Stager, "_run_background", _waits_for_the_end)
        yield


def _waits_for_the_end(self: Stager) -> None:
    """Alive, as in a program: of a thread that has ended the call itself takes the work over."""
    with self._wake:
        self._wake.wait_for(lambda: self._closed)


events = st.one_of(
    st.tuples(st.just("copy"), st.integers(0, 20), st.just(0), st.just(0)),
    st.tuples(st.just("change"), st.integers(0, 4), st.integers(0, len(CHANGES) - 1), st.integers(0, 10**6)),
    st.tuples(st.just("undo"), st.integers(0, 4), st.just(0), st.just(0)),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**31), st.lists(events, max_size=12))
def test_a_sealed_slot_holds_the_bytes_of_the_step(seed: int, schedule: list[tuple[str, int, int, int]]) -> None:
    played = Played(seed)
    try:
        played.begin()
        for kind, which, how, number in schedule:
            if kind == "copy":
                played.copy(which)
            elif kind == "change":
                CHANGES[how](played.tensors[which], number)
            else:
                played.tensors[which].data.copy_(played.at_step[which])
        untouched = all(kind != "change" for kind, *_ in schedule)
        played.stager.join_copies()
        right = played.slot.tobytes() == played.wanted()
        assert played.outcomes[0].is_complete == right
        assert right or not untouched
    finally:
        played.stager.close()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("stays", [True, False], ids=["stays", "is undone"])
@pytest.mark.parametrize("after", [0, 7])
def test_each_way_to_change_a_tensor_is_found_and_named(
    change: Callable[[torch.Tensor, int], None], stays: bool, after: int
) -> None:
    """`after` so many copies; the first tensor takes five."""
    played = Played(1)
    try:
        played.begin()
        played.copy(after)
        change(played.tensors[3], 5)
        if not stays:
            played.copy(100)
            played.tensors[3].data.copy_(played.at_step[3])
        played.stager.join_copies()
    finally:
        played.stager.close()
    assert played.outcomes == [CopyOutcome(("t3",))]


def test_tensors_that_change_places_are_found() -> None:
    played = Played(2)
    one, other = played.tensors[0], torch.randn(40, 30)
    played.tensors[0] = one
    try:
        played.begin()
        kept = one.clone()
        one.data.copy_(other)
        other.copy_(kept)
        played.stager.join_copies()
    finally:
        played.stager.close()
    assert played.outcomes == [CopyOutcome(("t0",))]
