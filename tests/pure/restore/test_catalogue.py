"""What it takes to ask a job's holders for one checkpoint."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from surefoot.errors import TierUnavailable, Unreadable
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.restore import SaveSource, read_catalogue
from surefoot.restore.catalogue import MAX_CONCURRENT_SOURCES, reread_missing_indexes
from surefoot.restore.copy_choice import CopySelector

CHECKPOINT = Checkpoint(3, 40)
HOLDERS = 256


def manifest(rank: int) -> RankManifest:
    return RankManifest(RankSave(3, 40, rank), HOLDERS, "abc", "0" * 16, 4, 1, "0" * 16, 8, "1" * 16, 5, 1.5)


@dataclass
class Holders:
    """Holders that answer only once as many as may be are asked."""

    asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(MAX_CONCURRENT_SOURCES, timeout=60))
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
    assert found.copies_by_rank(CHECKPOINT) == {n: [(n, manifest(n))] for n in range(HOLDERS)}
    assert holders.asked == Counter({(what, n): 1 for what in ("opened", "asked", "closed") for n in range(HOLDERS)})


def test_only_silent_ones_are_asked_again_and_answers_stay_in_their_places() -> None:
    holders = Holders(silent=set(range(0, HOLDERS, 8)))
    first = read_catalogue(holders.sources(), CHECKPOINT)
    assert set(first.unanswered_sources) == {f"memory:{n}" for n in holders.silent}
    again, holders.silent = set(holders.silent), {8}
    second = reread_missing_indexes(first)
    assert second.unanswered_sources == ("memory:8",)
    assert second.copies_by_rank(CHECKPOINT) == {n: [(n, manifest(n))] for n in range(HOLDERS) if n != 8}
    assert {n for (what, n), times in holders.asked.items() if what == "asked" and times == 2} == again


# ---- some of the holders ----------------------------------------------------------------------------------------------


@dataclass
class Having:
    """A tier with the index entries of some ranks, and nothing behind them."""

    ranks: tuple[int, ...]

    def manifests_of(self, checkpoint: Checkpoint) -> tuple[RankManifest, ...]:
        return tuple(manifest(rank) for rank in self.ranks)

    def manifests(self) -> tuple[RankManifest, ...]:
        return self.manifests_of(CHECKPOINT)

    def damaged(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None: ...


def having(name: str, *ranks: int) -> SaveSource:
    return SaveSource(name, "memory", lambda: cast("Any", Having(ranks)))


@dataclass
class Others:
    """Whoever is asked for the other holders: nobody answers for so many times."""

    away: int = 0
    asked: int = 0

    def __call__(self) -> list[SaveSource] | None:
        self.asked += 1
        return None if self.asked <= self.away else [having("memory:b", 1), having("memory:c")]


def test_nobody_asks_for_other_holders_where_these_have_what_is_wanted() -> None:
    others = Others()
    catalogue = read_catalogue([having("memory:a", 0)], CHECKPOINT, others)
    assert CopySelector(CHECKPOINT, catalogue, 0, None).manifest_of(0) == manifest(0)
    assert others.asked == 0


def test_what_these_holders_lack_is_looked_for_on_all_others() -> None:
    others = Others(away=2)
    copies = CopySelector(CHECKPOINT, read_catalogue([having("memory:a", 0)], CHECKPOINT, others), 0, None)
    assert copies.manifest_of(1) == manifest(1)
    assert others.asked == 3, "as long as nobody answers nothing is absent"
    assert [source.name for source in copies.sources] == ["memory:a", "memory:b", "memory:c"]
    assert copies.connections.connection_to(1).manifests_of(CHECKPOINT) == (manifest(1),)  # type: ignore[attr-defined]


def test_a_save_is_absent_once_all_holders_were_told_of_and_have_it_not() -> None:
    others = Others()
    copies = CopySelector(CHECKPOINT, read_catalogue([having("memory:a", 0)], CHECKPOINT, others), 0, None)
    with pytest.raises(Unreadable) as told:
        copies.manifest_of(7)
    assert told.value.absent
    assert others.asked == 1


def test_patience_ends_also_where_nobody_says_which_others_there_are() -> None:
    copies = CopySelector(CHECKPOINT, read_catalogue([having("memory:a", 0)], CHECKPOINT, Others(away=9)), 0, 0.1)
    with pytest.raises(TierUnavailable, match="not known yet"):
        copies.manifest_of(1)


def test_who_lists_checkpoints_asks_all_holders_at_once() -> None:
    others = Others()
    found = read_catalogue([], None, others)
    assert others.asked == 1
    assert len(found.sources) == 2
    assert not found.further_sources
