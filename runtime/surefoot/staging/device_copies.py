"""Copies device tensors on a side stream behind the training's kernels.

Owned by `stager`. The host waits for none of them: it may be far ahead of the device, and waiting would empty the
queue that keeps the device busy. Whoever must not go on before something is done is the training's stream, and it is
told so on the device: before what the training queues next, small tensors are copied and large ones fingerprinted
where they lie, which takes a few passes of the device's own memory. What is copied later is fingerprinted again, as it
was copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from surefoot.staging.host_copies import Bytes, CopySource, CopyTarget, bands, elements, regions

BAND_BYTES = 16 * 1024 * 1024
"""Largest scratch on a device: a band as it was read, and its blocks in order before one contiguous copy to the host. Its
fingerprint takes twice as much for a moment."""

SMALL_BYTES = 4 * 1024 * 1024
"""Device tensors up to this size are copied before the training goes on: the host queues one copy sooner than it queues
a copy and two fingerprints."""

_WORD_BYTES = 4


@dataclass
class QueuedCopies:
    """Holds what was queued on one device, valid behind its event."""

    device: torch.device
    event: Any = None
    names: list[str] = field(default_factory=list)
    """Whose band each fingerprint is of."""
    fingerprints: list[torch.Tensor] = field(default_factory=list)
    """On the host: those of the step, then those of the copies."""

    def let_training_wait(self) -> None:
        """Makes the training's stream wait for the last copy, not the host."""
        _current_stream(self.device).wait_event(self.event)

    def ended(self) -> bool:
        """Whether the last copy has ended, without waiting for it."""
        return bool(self.event.query())

    def changed(self) -> Iterator[str]:
        """Waits for the last copy; yields names whose copied bytes had changed."""
        self.event.synchronize()
        if self.names:
            before, after = (found.tolist() for found in self.fingerprints)
            yield from (name for name, was, copied in zip(self.names, before, after, strict=True) if was != copied)


class DeviceCopies:
    """Owns one device's side stream and its fingerprint keys."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._keys: torch.Tensor | None = None

    def queue(self, now: Sequence[CopySource], behind: Sequence[CopySource], room: CopyTarget) -> QueuedCopies:
        """Queues all copies on the side stream.

        Kernels that the training queues after this call begin once `now` is copied and `behind` fingerprinted.
        """
        queued = QueuedCopies(self._device)
        live = [(source, source.read()) for source in (*now, *behind)]
        before: list[torch.Tensor] = []
        after: list[torch.Tensor] = []

        def first() -> None:
            for source, tensor in live[: len(now)]:
                copy_from_device(tensor, source.tile, room.part(source))
            for source, tensor in live[len(now) :]:
                for band in _bands(elements(tensor), source.tile):
                    queued.names.append(source.name)
                    before.append(fingerprint(band, self.random_keys()))

        def then() -> None:
            for source, tensor in live[len(now) :]:
                after.extend(copy_from_device(tensor, source.tile, room.part(source), self.random_keys()))
            queued.fingerprints += [_to_host(torch.stack(found)) for found in (before, after)]

        queued.event = self._enqueue(first, [tensor for _, tensor in live])
        queued.let_training_wait()
        if behind:
            queued.event = self._enqueue(then, [])
        return queued

    def _enqueue(self, work: Callable[[], None], used: Sequence[torch.Tensor]) -> Any:
        """Queues what `work` launches behind what the training has queued; the event behind it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._stream.wait_stream(_current_stream(self._device))  # what the training queued before must be seen
        with torch.cuda.stream(self._stream):
            for tensor in used:
                tensor.record_stream(self._stream)
            work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            event.record(self._stream)
        return event

    def random_keys(self) -> torch.Tensor:
        """Drawn once, on the device when this returns."""
        if self._keys is None:
            drawn = np.random.default_rng().integers(-(2**63), 2**63, BAND_BYTES // _WORD_BYTES + 1, dtype=np.int64)
            self._keys = torch.from_numpy(drawn).to(self._device)
        return self._keys


def fingerprint(band: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sums a band's 32-bit words, each times a random key, modulo 2^64.

    Multilinear universal hashing: whatever is changed, moved or swapped, the sum stays the same with a chance of 2^-33
    at most, since the keys are drawn apart from the data. Two launches; `band` has whole words, or is padded to them.
    """
    flat = band.reshape(-1).view(torch.uint8)
    if flat.numel() % _WORD_BYTES or flat.data_ptr() % _WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _WORD_BYTES))
    words, most = flat.view(torch.int32), len(keys) - 1
    total = (keys[: len(words[:most])] * words[:most]).sum()
    for first in range(most, len(words), most):  # of a tile that is larger than a band should be
        row = words[first : first + most]
        total = total * (keys[most] | 1) + (keys[: len(row)] * row).sum()
    return total


def copy_from_device(
    source: torch.Tensor, tile: tuple[int, ...], target: Bytes, keys: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Enqueues a piece's copy on the current stream, blocks in stream order.

    Blocks are put in order on the device, then copied as one run. `target` should be pinned; the caller records an
    event behind this and waits for it before reading `target`. With `keys`, each band is copied to scratch first, where
    nobody changes it, and its fingerprint returned.
    """
    flat = elements(source)
    if flat.numel() == 0:
        return []
    if flat.dim() == 0:
        flat, tile = flat.reshape(1), (1,)
    found, start = [], 0
    for live in _bands(flat, tile):
        band = live if keys is None else live.clone(memory_format=torch.contiguous_format)
        if keys is not None:
            found.append(fingerprint(band, keys))
        size = band.numel() * band.element_size()
        part = torch.from_numpy(target[start : start + size])
        part.copy_(_in_order(band, tile).view(torch.uint8), non_blocking=True)
        start += size
    return found


def _bands(flat: torch.Tensor, tile: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for part in bands(tuple(flat.shape), tile, flat.element_size(), BAND_BYTES):
        yield flat[part]


def _in_order(band: torch.Tensor, tile: tuple[int, ...]) -> torch.Tensor:
    """The band's blocks one after the other: itself where it lies so, else scratch."""
    if band.is_contiguous() and all(t >= n for t, n in zip(tile[1:], band.shape[1:], strict=True)):
        return band.reshape(-1)
    scratch = torch.empty(band.numel(), dtype=band.dtype, device=band.device)
    for region in regions(tuple(band.shape), tile):
        offset = band.storage_offset() + sum(c * s for c, s in zip(region.offset, band.stride(), strict=True))
        steps = tuple(s * e for s, e in zip(band.stride(), region.extents, strict=True))
        shape = (*region.counts, *region.extents)
        laid = scratch.as_strided(shape, (*region.tile_strides, *region.element_strides), region.start)
        laid.copy_(band.as_strided(shape, (*steps, *band.stride()), offset))
    return scratch


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


def _to_host(found: torch.Tensor) -> torch.Tensor:
    """Into pinned memory, without the host's help; kept by torch for the next time."""
    target = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=found.is_cuda)
    return target.copy_(found, non_blocking=True)
