"""Copies device tensors on a side stream, after the kernels that the training has queued.

Used by `stager`. The host never waits for a copy: it may be far ahead of the device, and waiting would empty the queue
that keeps the device busy. Instead, the training's stream waits on the device. Before the next kernels of the training
start, small tensors are copied, and large ones are fingerprinted in place, which takes a few passes over device memory.
The large tensors are copied later and the copies are fingerprinted again, so that a change in between is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from surefoot.staging.host_copies import (
    Bytes,
    CopySource,
    CopyTarget,
    as_integer_elements,
    split_into_band_slices,
    split_into_regions,
)

BAND_BYTES = 16 * 1024 * 1024
"""Largest band, which limits scratch memory on a device: a copy of the band, and its blocks in stream order before one
contiguous copy to the host. The fingerprint briefly needs twice as much."""

SMALL_BYTES = 4 * 1024 * 1024
"""Device tensors up to this size are copied before the training's next kernels, because queueing one copy takes the host
less time than queueing a copy and two fingerprints."""

_WORD_BYTES = 4


@dataclass
class QueuedCopies:
    """The copies queued on one device, which are complete once `event` has occurred."""

    device: torch.device
    event: Any = None
    names: list[str] = field(default_factory=list)
    """Tensor to which the band of each fingerprint belongs."""
    fingerprints: list[torch.Tensor] = field(default_factory=list)
    """In host memory: the fingerprints at the step, then those of the copies."""

    def make_training_wait(self) -> None:
        """Makes the training's stream, but not the host, wait for the last copy."""
        _current_stream(self.device).wait_event(self.event)

    def has_ended(self) -> bool:
        """Whether the last copy has ended; does not wait."""
        return bool(self.event.query())

    def changed_names(self) -> Iterator[str]:
        """Waits for the last copy and yields the names of tensors that changed before they were copied."""
        self.event.synchronize()
        if self.names:
            at_step, of_copies = (fingerprints.tolist() for fingerprints in self.fingerprints)
            yield from (
                name
                for name, expected, copied in zip(self.names, at_step, of_copies, strict=True)
                if expected != copied
            )


class DeviceCopies:
    """Copies tensors of one device; owns its side stream and fingerprint keys."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._keys: torch.Tensor | None = None

    def queue_copies(self, now: Sequence[CopySource], later: Sequence[CopySource], room: CopyTarget) -> QueuedCopies:
        """Queues all copies on the side stream.

        Kernels that the training queues after this call start once `now` is copied and `later` is fingerprinted.
        """
        queued = QueuedCopies(self._device)
        live = [(source, source.read()) for source in (*now, *later)]
        step_fingerprints: list[torch.Tensor] = []
        copy_fingerprints: list[torch.Tensor] = []

        def copy_small_and_fingerprint() -> None:
            for source, tensor in live[: len(now)]:
                copy_from_device(tensor, source.tile, room.memory_of(source))
            for source, tensor in live[len(now) :]:
                for band in _bands(as_integer_elements(tensor), source.tile):
                    queued.names.append(source.name)
                    step_fingerprints.append(compute_fingerprint(band, self.random_keys()))

        def copy_large() -> None:
            for source, tensor in live[len(now) :]:
                copy_fingerprints.extend(
                    copy_from_device(tensor, source.tile, room.memory_of(source), self.random_keys())
                )
            queued.fingerprints += [_to_host(torch.stack(group)) for group in (step_fingerprints, copy_fingerprints)]

        # The training's stream waits for the first part only; the second part overlaps with its kernels.
        queued.event = self._enqueue(copy_small_and_fingerprint, [tensor for _, tensor in live])
        queued.make_training_wait()
        if later:
            queued.event = self._enqueue(copy_large, [])
        return queued

    def _enqueue(self, work: Callable[[], None], used: Sequence[torch.Tensor]) -> Any:
        """Queues the kernels of `work` after those that the training has queued; returns the event of their end."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._stream.wait_stream(_current_stream(self._device))  # the copies must see the results of queued kernels
        with torch.cuda.stream(self._stream):
            for tensor in used:
                tensor.record_stream(self._stream)
            work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            event.record(self._stream)
        return event

    def random_keys(self) -> torch.Tensor:
        """Returns the random keys of this device, which are drawn at the first call."""
        if self._keys is None:
            keys = np.random.default_rng().integers(-(2**63), 2**63, BAND_BYTES // _WORD_BYTES + 1, dtype=np.int64)
            self._keys = torch.from_numpy(keys).to(self._device)
        return self._keys


def compute_fingerprint(band: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sums a band's 32-bit words, each multiplied by a random key, modulo 2^64.

    This is multilinear universal hashing: whatever is changed, moved or swapped, the sum stays equal with a probability
    of at most 2^-33, since the keys are independent of the data. It takes two kernel launches. A band that has no whole
    number of words is padded.
    """
    flat = band.reshape(-1).view(torch.uint8)
    if flat.numel() % _WORD_BYTES or flat.data_ptr() % _WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _WORD_BYTES))
    words, row_words = flat.view(torch.int32), len(keys) - 1
    total = (keys[: len(words[:row_words])] * words[:row_words]).sum()
    for start in range(row_words, len(words), row_words):  # only if a single tile is larger than a band
        row = words[start : start + row_words]
        total = total * (keys[row_words] | 1) + (keys[: len(row)] * row).sum()
    return total


def copy_from_device(
    source: torch.Tensor, tile: tuple[int, ...], target: Bytes, keys: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Queues the copy of a piece on the current stream, with its blocks in stream order.

    Blocks are put in order on the device, then copied in one run. The caller records an event afterwards and waits for it
    before it reads `target`, which should be pinned.

    Args:
        source: The piece on the device.
        tile: Shape of its blocks.
        target: Memory for exactly the piece's bytes.
        keys: With keys, each band is first copied to scratch memory, where it cannot change, and fingerprinted.

    Returns:
        The fingerprints of the bands; empty without keys.
    """
    flat = as_integer_elements(source)
    if flat.numel() == 0:
        return []
    if flat.dim() == 0:
        flat, tile = flat.reshape(1), (1,)
    fingerprints, start = [], 0
    for live in _bands(flat, tile):
        band = live if keys is None else live.clone(memory_format=torch.contiguous_format)
        if keys is not None:
            fingerprints.append(compute_fingerprint(band, keys))
        size = band.numel() * band.element_size()
        part = torch.from_numpy(target[start : start + size])
        part.copy_(_in_stream_order(band, tile).view(torch.uint8), non_blocking=True)
        start += size
    return fingerprints


def _bands(flat: torch.Tensor, tile: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for part in split_into_band_slices(tuple(flat.shape), tile, flat.element_size(), BAND_BYTES):
        yield flat[part]


def _in_stream_order(band: torch.Tensor, tile: tuple[int, ...]) -> torch.Tensor:
    """Returns the band's blocks in stream order: the band itself if they are, else a copy."""
    if band.is_contiguous() and all(t >= n for t, n in zip(tile[1:], band.shape[1:], strict=True)):
        return band.reshape(-1)
    scratch = torch.empty(band.numel(), dtype=band.dtype, device=band.device)
    for region in split_into_regions(tuple(band.shape), tile):
        offset = band.storage_offset() + sum(c * s for c, s in zip(region.offset, band.stride(), strict=True))
        steps = tuple(s * e for s, e in zip(band.stride(), region.extents, strict=True))
        shape = (*region.counts, *region.extents)
        target = scratch.as_strided(shape, (*region.tile_strides, *region.element_strides), region.start)
        target.copy_(band.as_strided(shape, (*steps, *band.stride()), offset))
    return scratch


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queues a copy to pinned memory, which torch caches, without waiting."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return target.copy_(tensor, non_blocking=True)
