"""Defines what is copied, where to, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from surefoot.staging.arena import Bytes


@dataclass(frozen=True, slots=True)
class CopySource:
    """One piece to copy: `read()` gives the live part of the tensor, `holder` is whose version tells of changes."""

    name: str
    read: Callable[[], torch.Tensor]
    holder: Callable[[], torch.Tensor]
    tile: tuple[int, ...]
    start: int
    stop: int
    within: tuple[slice, ...] = ()
    """Which part of `holder` it is."""

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Where pieces are copied to: `into` begins at byte `origin` of the stream and lies at `address` of this process."""

    into: Bytes
    origin: int
    address: int

    @staticmethod
    def of(into: Bytes, origin: int = 0) -> CopyTarget:
        return CopyTarget(into, origin, into.ctypes.data)

    def part(self, source: CopySource) -> Bytes:
        return self.into[source.start - self.origin : source.stop - self.origin]


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """How a save's copies ended: names of tensors that changed under it, and the error if copying failed."""

    changed: tuple[str, ...] = ()
    error: Exception | None = None

    @property
    def sealed(self) -> bool:
        return not self.changed and self.error is None
