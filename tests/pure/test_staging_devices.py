"""What a device still copies while the host goes on, played by a thread: the order of events is the same."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.staging import Outcome, Source, Stager, device
from surefoot.staging.device import DeviceCopies

SIZE = 1_000_000


class OnDevice:
    """A holder that says it is on a device; its version is the host's word, which grows when work is queued."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def _version(self) -> int:
        return self._tensor._version

    def data_ptr(self) -> int:
        return self._tensor.data_ptr()


class PlayedStream:
    """Copies in the order they were queued; they are done when somebody waits for an event behind them."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self._queued: list[tuple[torch.Tensor, Any]] = []

    def enqueue(self, sources: Any, room: Any) -> PlayedStream:
        self._queued += [(source.read().clone(), room.part(source)) for source in sources]
        return self

    def synchronize(self) -> None:
        assert self.gate.wait(10)
        for kept, target in self._queued:
            target[:] = kept.numpy()


class CurrentStream:
    def wait_event(self, event: PlayedStream) -> None:
        """The device waits, the host does not."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies end when it is set."""
    stream = PlayedStream()
    monkeypatch.setattr(DeviceCopies, "_enqueue", stream.enqueue)
    monkeypatch.setattr(device, "_pinned", lambda size: np.empty(size, dtype=np.uint8))
    monkeypatch.setattr(torch.cuda, "current_stream", CurrentStream)
    return stream.gate


@pytest.mark.parametrize(("before", "changed"), [(False, ()), (True, ("weight",))])
def test_only_what_changes_before_the_join_costs_the_save(
    gate: threading.Event, before: bool, changed: tuple[str, ...]
) -> None:
    tensor, slot = torch.full((SIZE,), 7, dtype=torch.uint8), np.zeros(SIZE, dtype=np.uint8)
    holder: Any = OnDevice(tensor)
    outcomes: list[Outcome] = []
    stager = Stager()
    try:
        stager.start(slot, [], [Source("weight", lambda: tensor, lambda: holder, (SIZE,), 0, SIZE)], outcomes.append)
        if before:
            tensor.fill_(8)
        stager.join()
        tensor.fill_(9)  # the optimizer's step, queued behind the copy
        stager.join()  # a second optimizer's
        gate.set()
        stager.wait()
    finally:
        stager.close()
    assert outcomes == [Outcome(changed)]
    assert set(slot) == {7}


def test_what_may_change_at_once_is_copied_before_what_is_queued_next_and_nobody_waits(gate: threading.Event) -> None:
    tensor, slot = torch.full((SIZE,), 7, dtype=torch.uint8), np.zeros(SIZE, dtype=np.uint8)
    holder: Any = OnDevice(tensor)
    outcomes: list[Outcome] = []
    stager = Stager()
    try:
        stager.start(
            slot, [Source("statistics", lambda: tensor, lambda: holder, (SIZE,), 0, SIZE)], [], outcomes.append
        )
        tensor.fill_(8)  # the next forward's, queued behind the copy
        assert not outcomes
        gate.set()
        stager.wait()
    finally:
        stager.close()
    assert outcomes == [Outcome()]
    assert set(slot) == {7}
