"""Fills tensors on devices, and conjugated ones, part by part.

Used by `restoring`. A reading thread has one buffer of a chunk, pinned where there is CUDA, and waits for each copy out
of it while others read. Before, all of a rank's state stood in host memory a second time until the last byte had come.
"""

from __future__ import annotations

import threading

import torch

from surefoot.geometry import Box
from surefoot.protocol.checkpoints.records import CHUNK_BYTES


def needs_relay(live: torch.Tensor) -> bool:
    """Returns whether a tensor's memory cannot be filled where it lies."""
    overlaps = any(n > 1 and step == 0 for n, step in zip(live.shape, live.stride(), strict=True))
    return live.device.type != "cpu" or live.is_conj() or live.is_neg() or overlaps


class Relays:
    """Owns the buffers of a restore's threads."""

    def __init__(self) -> None:
        self._mine = threading.local()
        self._devices: set[torch.device] = set()

    def to(self, live: torch.Tensor) -> TensorRelay:
        """Makes the receiver of one tensor."""
        self._devices.add(live.device)
        return TensorRelay(live, self)

    def buffer(self, pinned: bool) -> torch.Tensor:
        """This thread's."""
        made: dict[bool, torch.Tensor] = self._mine.__dict__.setdefault("buffers", {})
        if pinned not in made:
            made[pinned] = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return made[pinned]

    def finish(self) -> None:
        """Waits for what devices still do with what they were given."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


class TensorRelay:
    """Receives parts of one tensor (`restore.placer.BoxReceiver`)."""

    def __init__(self, live: torch.Tensor, relays: Relays) -> None:
        self._live, self._relays = live, relays
        self._pinned = live.device.type == "cuda"

    def room(self, size_bytes: int) -> memoryview:
        """Gives the beginning of this thread's buffer."""
        memory: memoryview = self._relays.buffer(self._pinned).numpy().data
        return memory[:size_bytes]

    def take(self, part: Box) -> None:
        """Copies what was written there to its place.

        A copy to a device has read it when this returns.
        """
        size = part.volume * self._live.itemsize
        found = self._relays.buffer(self._pinned)[:size].view(self._live.dtype).view(part.lengths)
        place = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.lengths, strict=True))
        with torch.no_grad():  # each thread's own
            self._live[place].copy_(found)
