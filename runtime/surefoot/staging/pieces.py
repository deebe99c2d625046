"""Defines what is copied, where to, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from surefoot.staging.arena import Bytes


@dataclass(frozen=True, slots=True)
class CopySource:
    """Describes one piece to copy.

    `read()` gives the live part of the tensor; `holder()` the tensor whose version counter shows changes.
    """

    name: str
    read: Callable[[], torch.Tensor]
    holder: Callable[[], torch.Tensor]
    tile: tuple[int, ...]
    start: int
    stop: int
    within: tuple[slice, ...] = ()
    """Which part of `holder` it is."""
    own: torch.Tensor | None = None
    """The program's tensor itself, where it is a plain one and the piece is all of it."""

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Describes where pieces go: `into` begins at byte `origin` of the stream.

    It is mapped at `address` of this process.
    """

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
    """Reports how a save's copies ended: changed tensors, and any error."""

    changed: tuple[str, ...] = ()
    error: Exception | None = None

    @property
    def sealed(self) -> bool:
        return not self.changed and self.error is None
