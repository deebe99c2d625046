"""A part of the lazy bytes as they were before a save, to be compared with what was copied behind the training.

Writes that no version counter tells of (through `.data`) are found so, within as many saves as there are parts. Used
by `ordering`, which owns one `Sampler`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from surefoot.staging.arena import Bytes
from surefoot.staging.copies import BAND_BYTES, Copy

SAMPLED_PART = 64
"""One in so many lazy bytes is compared at each save; after so many saves every byte was."""

_ALIGNMENT = 16

Sample = tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""A tensor's name, where some of it was copied to, and what it was before."""


class Sampler:
    """Takes samples in turn, into memory that is the same from save to save."""

    def __init__(self) -> None:
        self.turn = 0
        self._memory: Bytes = np.empty(0, dtype=np.uint8)

    def prepare(self, lazy_bytes: int) -> None:
        """Memory for any turn's sample, its pages touched."""
        self._room(BAND_BYTES + lazy_bytes // SAMPLED_PART)

    def of(self, copies: Sequence[tuple[str, Copy]], every: bool) -> Iterator[Sample]:
        """Samples what will be copied by this turn's parts of copies, or by every copy."""
        chosen = [(n, c.source, c.target) for n, c in copies] if every else list(self._parts(copies))
        self._room(sum(_aligned(source.nbytes) for _, source, _ in chosen))
        begin = 0
        for name, source, target in chosen:
            flat = self._memory[begin : begin + source.nbytes].view(source.dtype)
            begin += _aligned(source.nbytes)
            reference = flat.reshape(source.shape)
            np.copyto(reference, source)
            yield name, target, reference

    def _parts(self, copies: Sequence[tuple[str, Copy]]) -> Iterator[Sample]:
        """(name, source, target) of what begins in this turn's part of all bytes, cut by rows of tiles: as whole copies
        are as large as a turn's part, some saves would take twice as long as others."""
        begin, end = self._turns_bytes(sum(copy.size_bytes for _, copy in copies))
        position = 0
        for name, copy in copies:
            size = copy.size_bytes
            if begin < position + size and position < end:
                rows = copy.source.shape[0] if copy.source.ndim else 1
                first, last = (min(rows, max(0, -(-(at - position) * rows // size))) for at in (begin, end))
                cut = slice(first, last) if copy.source.ndim else ...
                if first < last:
                    yield name, copy.source[cut], copy.target[cut]
            position += size

    def _turns_bytes(self, total: int) -> tuple[int, int]:
        begin = (self.turn % SAMPLED_PART) * total // SAMPLED_PART
        return begin, (self.turn % SAMPLED_PART + 1) * total // SAMPLED_PART

    def whose_turn(self, sizes: Sequence[int], every: bool) -> Iterator[int]:
        """Those that begin in this turn's part of all bytes."""
        begin, end = self._turns_bytes(sum(sizes))
        position = 0
        for index, size in enumerate(sizes):
            if every or begin <= position < end:
                yield index
            position += size

    def _room(self, size: int) -> None:
        if self._memory.size < size:
            self._memory = np.ones(size, dtype=np.uint8)  # ones: written, so that the pages are there


def differing(samples: Sequence[Sample]) -> Iterator[str]:
    """Names of the tensors whose copy is not what was sampled. Bytes, not numbers: a NaN equals itself here."""
    for name, copied, reference in samples:
        if not np.array_equal(copied.view(np.uint8), reference.view(np.uint8)):
            yield name


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
