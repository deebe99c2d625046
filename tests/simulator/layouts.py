"""Layout records that one operator, or one agent without a leader, has read somewhere: good for as long as it lives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from surefoot.protocol.checkpoints.completeness import Covers


class KnownLayouts:
    """Of one process."""

    def __init__(self) -> None:
        self.digests: frozenset[str] = frozenset()

    def learn(self, digests: Iterable[str]) -> None:
        self.digests = self.digests.union(digests)

    def covers(self, told: Mapping[str, str]) -> Covers:
        """Of the modelled worlds: all ranks have one layout, so whoever has read it can judge. `told`: by a listing."""
        return {frozenset({digest}): True for digest in self.digests.union(told)}
