"""Copies of device tensors, queued on a side stream behind what the training has queued on them. Owned by `ordering`.

The host waits for none of them: it may be far ahead of the device, and waiting would empty the queue that keeps the
device busy. Whoever must not go on before a copy is done is the training's stream, and it is told so on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from surefoot.staging.arena import Bytes
from surefoot.staging.copies import copy_from_device
from surefoot.staging.pieces import Room, Source
from surefoot.staging.samples import Sample


class DeviceCopies:
    """The side stream; made at the first device tensor, so that a program without any never touches CUDA."""

    def __init__(self) -> None:
        self._stream: Any = None

    def queue(
        self, now: Sequence[Source], sampled: Sequence[Source], behind: Sequence[Source], room: Room
    ) -> tuple[Any, list[Sample]]:
        """Queues all of them; the event behind the last, and the samples, which are to be read after it.

        `now` may change at once: what the training queues after this call waits until they are copied. `sampled` are
        some of `behind`, copied before it, to be compared with what was copied later.
        """
        if now:
            let_training_wait(self._enqueue(now, room))
        samples = []
        for source in sampled:
            reference = _pinned(source.size_bytes)
            self._enqueue([source], Room.of(reference, source.start))
            samples.append((source.name, room.part(source), reference))
        return self._enqueue(behind, room), samples

    def _enqueue(self, sources: Sequence[Source], room: Room) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._stream.wait_stream(torch.cuda.current_stream())  # what the training queued before must be seen
        with torch.cuda.stream(self._stream):
            for source in sources:
                tensor = source.read()
                tensor.record_stream(self._stream)
                copy_from_device(tensor, source.tile, room.part(source))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            event.record(self._stream)
        return event


def let_training_wait(event: Any) -> None:
    """What the training queues from here on begins behind `event`; the host goes on."""
    torch.cuda.current_stream().wait_event(event)


def _pinned(size: int) -> Bytes:
    """Host memory that a copy reaches without the host's help; kept by torch for the next time."""
    memory: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory
