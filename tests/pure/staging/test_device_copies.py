"""What a device still does while the host goes on, played by a thread: the order of events is the same.

The copies and fingerprints are those of a device, of tensors that lie on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.staging import CopyOutcome, CopySource, Stager, device_copies, prepare_copies
from surefoot.staging.device_copies import SMALL_BYTES, DeviceCopies, compute_fingerprint, copy_from_device

SIZE = SMALL_BYTES + 1_000_000


class OnDevice:
    """A holder that says it is on a device."""

    is_cuda = True
    device = torch.device("cpu")


class PlayedStream:
    """Does what was queued, in order, when somebody waits for an event behind it: the training's stream at once, the
    host when the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self._queued: list[Callable[[], None]] = []
        self._turn = threading.Lock()

    def enqueue(self, work: Callable[[], None], used: Any) -> PlayedEvent:
        self._queued.append(work)
        return PlayedEvent(self, len(self._queued))

    def run_to(self, count: int) -> None:
        with self._turn:
            for index, work in enumerate(self._queued[:count]):
                self._queued[index] = lambda: None
                work()


class PlayedEvent:
    def __init__(self, stream: PlayedStream, count: int) -> None:
        self._stream, self._count = stream, count

    def training_waits(self) -> None:
        self._stream.run_to(self._count)

    def synchronize(self) -> None:
        assert self._stream.gate.wait(10)
        self._stream.run_to(self._count)


class CurrentStream:
    def wait_event(self, event: PlayedEvent) -> None:
        event.training_waits()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies end when it is set."""
    stream = PlayedStream()
    monkeypatch.setattr(DeviceCopies, "_enqueue", stream.enqueue)
    monkeypatch.setattr(device_copies, "_current_stream", lambda device: CurrentStream())
    return stream.gate


@pytest.fixture
def stager() -> Iterator[Stager]:
    owner = Stager()
    yield owner
    owner.close()


def source(name: str, tensor: torch.Tensor, tile: int | None = None) -> CopySource:
    holder: Any = OnDevice()
    return CopySource(name, lambda: tensor, lambda: holder, (tile or len(tensor),), 0, tensor.numel())


@pytest.mark.parametrize(("before", "changed"), [(False, ()), (True, ("weight",))])
def test_only_what_changes_before_the_join_costs_the_save(
    gate: threading.Event, stager: Stager, before: bool, changed: tuple[str, ...]
) -> None:
    tensor, slot = torch.full((SIZE,), 7, dtype=torch.uint8), np.zeros(SIZE, dtype=np.uint8)
    outcomes: list[CopyOutcome] = []
    stager.start_save(slot, [], [source("weight", tensor)], outcomes.append)
    if before:
        tensor.data[5] = 8
    stager.join_copies()
    tensor.fill_(9)  # the optimizer's step, queued behind the copy
    stager.join_copies()  # a second optimizer's
    gate.set()
    stager.wait_for_save()
    assert outcomes == [CopyOutcome(changed)]
    assert before or set(slot) == {7}


def test_weights_that_are_swapped_while_they_are_copied_and_swapped_back_are_found(
    gate: threading.Event, stager: Stager
) -> None:
    tensor, slot = torch.full((SIZE,), 7, dtype=torch.uint8), np.zeros(SIZE, dtype=np.uint8)
    ended, outcomes = threading.Event(), list[CopyOutcome]()

    def done(outcome: CopyOutcome) -> None:
        outcomes.append(outcome)
        ended.set()

    stager.start_save(slot, [], [source("weight", tensor)], done)
    tensor.data.fill_(8)
    gate.set()
    assert ended.wait(10)
    tensor.data.fill_(7)
    stager.join_copies()
    assert outcomes == [CopyOutcome(("weight",))]


@pytest.mark.parametrize("lazy", [True, False])
def test_what_is_small_or_may_change_at_once_is_copied_before_what_is_queued_next(
    gate: threading.Event, stager: Stager, lazy: bool
) -> None:
    size = 1_000_000 if lazy else SIZE
    tensor, slot = torch.full((size,), 7, dtype=torch.uint8), np.zeros(size, dtype=np.uint8)
    outcomes: list[CopyOutcome] = []
    sources = [source("statistics", tensor)]
    stager.start_save(slot, [] if lazy else sources, sources if lazy else [], outcomes.append)
    tensor.fill_(8)  # the next forward's, queued behind the copy
    assert not outcomes
    gate.set()
    stager.wait_for_save()
    assert outcomes == [CopyOutcome()]
    assert set(slot) == {7}


@pytest.mark.parametrize("shape", [(), (1,), (7,), (300, 70), (5, 33, 17)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_a_device_lays_blocks_as_the_host_does_and_fingerprints_what_it_copied(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "BAND_BYTES", 4096)
    tensor = torch.randn((*shape, 2)).to(dtype)[..., 0]
    tile = tuple(3 for _ in shape)
    size = tensor.numel() * tensor.element_size()
    found, wanted = np.zeros(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)

    for copy in prepare_copies(tensor, tile, wanted):
        copy.run()
    keys = torch.randint(-(2**62), 2**62, (1024,))
    first = copy_from_device(tensor, tile, found, keys)
    assert found.tobytes() == wanted.tobytes()
    assert [f.item() for f in first] == [f.item() for f in copy_from_device(tensor.clone(), tile, found, keys)]


@pytest.mark.parametrize("length", [24, 1000, 1001, 5000])
def test_a_fingerprint_knows_places_signs_and_single_bits(length: int) -> None:
    """Also of more words than there are keys."""
    keys = torch.randint(-(2**63), 2**63 - 1, (512,))
    plain = torch.zeros(length, dtype=torch.uint8)
    plain[::3] = 1
    seen = {compute_fingerprint(plain, keys).item()}
    variants = [plain.roll(1), plain.flip(0), plain.roll(4), 1 - plain]
    for at in range(0, length, 7):
        for bit in (1, 128):
            variants.append(plain.clone())
            variants[-1][at] ^= bit
    distinct = {variant.numpy().tobytes() for variant in variants} - {plain.numpy().tobytes()}
    seen |= {compute_fingerprint(torch.frombuffer(bytearray(v), dtype=torch.uint8), keys).item() for v in distinct}
    assert len(seen) == 1 + len(distinct)
    signs = torch.ones(512)
    assert compute_fingerprint(signs, keys).item() != compute_fingerprint(-signs, keys).item()
