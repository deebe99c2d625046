"""Tracks how much staging memory each local rank needs or was refused.

Pure. Kept by `staging_memory`. Of the running epoch alone: another world has other shares. The heartbeat says both, so that
the operator can tell whether checkpoints fit, before a holder is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class StagingNeeds:
    ranks: int = 0
    """Local ranks of the epoch; 0: none asked yet."""
    wanted: Mapping[int, int] = field(default_factory=dict)
    """Slot bytes that each local rank asked for: its save, and some room for it to grow."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of each local rank's newest save."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Why a local rank has no memory."""

    @property
    def save_bytes(self) -> int:
        """One save of all local ranks; 0 until all have asked."""
        if not self.ranks or len(self.wanted) < self.ranks:
            return 0
        return sum(self.sizes.get(local, wanted) for local, wanted in self.wanted.items())

    @property
    def unstaged(self) -> str:
        """Why a local rank has no staging memory; empty: each has."""
        return next((self.refused[local] for local in sorted(self.refused)), "")


def asked(needs: StagingNeeds, local: int, slot_bytes: int, ranks: int) -> StagingNeeds:
    return replace(needs, ranks=ranks, wanted={**needs.wanted, local: slot_bytes})


def staged(needs: StagingNeeds, local: int, save_bytes: int) -> StagingNeeds:
    return replace(needs, sizes={**needs.sizes, local: save_bytes})


def given(needs: StagingNeeds, local: int) -> StagingNeeds:
    return replace(needs, refused={n: why for n, why in needs.refused.items() if n != local})


def refused(needs: StagingNeeds, local: int, why: str) -> StagingNeeds:
    return replace(needs, refused={**needs.refused, local: why})


def missing(needs: StagingNeeds, has: Mapping[int, int]) -> dict[int, int]:
    """Bytes that local ranks need and do not have.

    One that did not ask yet will want what others do. `has`: slot bytes by local rank.
    """
    usual = max(needs.wanted.values(), default=0)
    wanted = {local: needs.wanted.get(local, usual) for local in range(needs.ranks)}
    return {local: needed for local, needed in wanted.items() if has.get(local, 0) < needed}
