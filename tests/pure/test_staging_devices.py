"""What a device still copies while the host goes on, played by a thread: the order of events is the same."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.staging import Outcome, Source, Stager

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


class Copying:
    """An event behind a copy that ends when it is let go."""

    def __init__(self, source: torch.Tensor, target: Any, gate: threading.Event) -> None:
        self._kept, self._target, self._gate = source.clone(), target, gate

    def synchronize(self) -> None:
        assert self._gate.wait(10)
        self._target[: self._kept.numel()] = self._kept.numpy()


class CurrentStream:
    def wait_event(self, event: Copying) -> None:
        """The device waits, the host does not."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies end when it is set."""
    found = threading.Event()

    def enqueue(_: Stager, sources: Any, room: Any) -> Copying:
        return Copying(sources[0].read(), room.into, found)

    monkeypatch.setattr(Stager, "_enqueue", enqueue)
    monkeypatch.setattr(Stager, "_sampled_on_device", lambda *_: iter(()))
    monkeypatch.setattr(torch.cuda, "current_stream", CurrentStream)
    return found


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
