"""What it takes to ask a job's holders for one checkpoint."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

from surefoot.errors import TierUnavailable
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.records import RankManifest
from surefoot.restore import SaveSource, read_catalogue
from surefoot.restore.catalogue import AT_ONCE, reread

CHECKPOINT = Checkpoint(3, 40)
HOLDERS = 256


def manifest(rank: int) -> RankManifest:
    return RankManifest(RankSave(3, 40, rank), HOLDERS, "abc", "0" * 16, 4, 1, "0" * 16, 8, "1" * 16, 5, 1.5)


@dataclass
class Holders:
    """Holders that answer only once as many as may be are asked."""

    asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(AT_ONCE, timeout=60))
    silent: set[int] = field(default_factory=set)

    def sources(self) -> list[SaveSource]:
        return [SaveSource(f"memory:{n}", "memory", lambda n=n: cast("Any", OneOf(self, n))) for n in range(HOLDERS)]  # type: ignore[misc]  # n is bound on purpose


@dataclass
class OneOf:
    holders: Holders
    number: int

    def __post_init__(self) -> None:
        self.holders.asked["opened", self.number] += 1

    def manifests(self) -> tuple[RankManifest, ...]:
        raise AssertionError("all of an index is read for one checkpoint")

    def manifests_of(self, checkpoint: Checkpoint) -> tuple[RankManifest, ...]:
        self.holders.asked["asked", self.number] += 1
        self.holders.meeting.wait()
        if self.number in self.holders.silent:
            raise TierUnavailable("it does not answer")
        return (manifest(self.number),)

    def damaged(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        self.holders.asked["closed", self.number] += 1


def test_all_holders_are_asked_at_once_and_each_once() -> None:
    holders = Holders()
    found = read_catalogue(holders.sources(), CHECKPOINT)
    assert found.copies(CHECKPOINT) == {n: [(n, manifest(n))] for n in range(HOLDERS)}
    assert holders.asked == Counter({(what, n): 1 for what in ("opened", "asked", "closed") for n in range(HOLDERS)})


def test_only_silent_ones_are_asked_again_and_answers_stay_in_their_places() -> None:
    holders = Holders(silent=set(range(0, HOLDERS, 8)))
    first = read_catalogue(holders.sources(), CHECKPOINT)
    assert set(first.silent) == {f"memory:{n}" for n in holders.silent}
    again, holders.silent = set(holders.silent), {8}
    second = reread(first)
    assert second.silent == ("memory:8",)
    assert second.copies(CHECKPOINT) == {n: [(n, manifest(n))] for n in range(HOLDERS) if n != 8}
    assert {n for (what, n), times in holders.asked.items() if what == "asked" and times == 2} == again
