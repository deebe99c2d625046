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
        """Samples what this turn's copies (or every one) will copy."""
        chosen = [copies[i] for i in self.whose_turn([copy.size_bytes for _, copy in copies], every)]
        self._room(sum(_aligned(copy.size_bytes) for _, copy in chosen))
        begin = 0
        for name, copy in chosen:
            flat = self._memory[begin : begin + copy.size_bytes].view(copy.source.dtype)
            begin += _aligned(copy.size_bytes)
            reference = flat.reshape(copy.source.shape)
            np.copyto(reference, copy.source)
            yield name, copy.target, reference

    def whose_turn(self, sizes: Sequence[int], every: bool) -> Iterator[int]:
        """Those that begin in this turn's part of all bytes."""
        total = sum(sizes)
        begin = (self.turn % SAMPLED_PART) * total // SAMPLED_PART
        end = begin + total // SAMPLED_PART
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
