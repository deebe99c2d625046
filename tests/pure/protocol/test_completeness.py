"""What makes a checkpoint complete, and how many copies count."""

from __future__ import annotations

from dataclasses import replace

from support.builders import COVERED, manifest
from surefoot.protocol.checkpoints.completeness import (
    LineageEntry,
    TierReading,
    complete,
    complete_persistent,
    copies_of,
    effective_replicas,
    layouts_to_check,
    watermark,
)
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, HolderId

A, B, C = (HolderId(n, n) for n in "abc")
DOMAINS = {A: "a", B: "b", C: "b"}
LINEAGE = (LineageEntry(1, None, 2),)
ZERO, ONE = manifest(1, 10, 0, 2), manifest(1, 10, 1, 2)
NONE: frozenset[Checkpoint] = frozenset()


def found(*a: RankManifest, b: tuple[RankManifest, ...] = (), s3: tuple[RankManifest, ...] | None = None) -> list[int]:
    reading = TierReading({A: a, B: b}, s3)
    return [c.step for c in complete(reading, LINEAGE, 1, NONE, COVERED)]


def test_all_ranks_are_there_wherever_they_lie() -> None:
    assert found(ZERO, ONE) == [10]
    assert found(ZERO, b=(ONE,)) == [10]
    assert found(ZERO, s3=(ONE,)) == [10]
    assert found(ZERO) == []
    assert found() == []


def test_manifests_that_tell_of_different_bytes_make_it_incomplete() -> None:
    assert found(ZERO, ONE, b=(manifest(1, 10, 1, 2, tag="b"),)) == []
    assert found(ZERO, ONE, b=(replace(ONE, saved_at=5.0),)) == [10]


def test_a_world_other_than_the_epochs_own_makes_it_incomplete() -> None:
    assert found(manifest(1, 10, 0, 1)) == []
    assert found(ZERO, manifest(1, 10, 1, 3)) == []
    assert found(ZERO, ONE, manifest(1, 10, 2, 2)) == []


def test_layouts_that_were_not_found_to_cover_everything_make_it_incomplete() -> None:
    reading = TierReading({A: (ZERO, ONE)}, None)
    assert complete(reading, LINEAGE, 1, NONE, {}) == []
    assert layouts_to_check(reading) == {frozenset({"layout"})}
    assert layouts_to_check(TierReading({A: (ZERO,)}, None)) == set()


def test_what_was_put_aside_or_lies_elsewhere_does_not_count() -> None:
    reading = TierReading({A: (ZERO, ONE)}, None)
    assert complete(reading, LINEAGE, 1, frozenset({Checkpoint(1, 10)}), COVERED) == []
    assert complete(reading, (LineageEntry(2, None, 2),), 2, NONE, COVERED) == []


def test_copies_are_counted_by_failure_domain_and_the_least_rank_decides() -> None:
    assert copies_of(Checkpoint(1, 10), TierReading({A: (ZERO, ONE), B: (ZERO,)}, None), DOMAINS) == 1
    assert copies_of(Checkpoint(1, 10), TierReading({A: (ZERO, ONE), B: (ZERO, ONE)}, None), DOMAINS) == 2
    assert copies_of(Checkpoint(1, 10), TierReading({B: (ZERO, ONE), C: (ZERO, ONE)}, None), DOMAINS) == 1
    assert copies_of(Checkpoint(1, 20), TierReading({A: (ZERO,)}, None), DOMAINS) == 0


def test_the_watermark_is_the_newest_with_all_its_copies() -> None:
    newer = (manifest(1, 20, 0, 2), manifest(1, 20, 1, 2))
    reading = TierReading({A: (ZERO, ONE, *newer), B: (ZERO, ONE)}, None)
    assert watermark(reading, LINEAGE, 1, NONE, COVERED, DOMAINS, 2) == Checkpoint(1, 10)
    assert watermark(reading, LINEAGE, 1, NONE, COVERED, DOMAINS, 1) == Checkpoint(1, 20)
    assert watermark(TierReading({}, (ZERO, ONE)), LINEAGE, 1, NONE, COVERED, DOMAINS, 1) is None


def test_as_many_copies_as_there_are_domains_but_never_none() -> None:
    assert [effective_replicas(2, n) for n in (0, 1, 2, 5)] == [1, 1, 2, 2]


def test_the_persistent_tier_completes_alone() -> None:
    assert complete_persistent((ZERO, ONE), LINEAGE, 1, NONE, COVERED) == [Checkpoint(1, 10)]
    assert complete_persistent((ZERO,), LINEAGE, 1, NONE, COVERED) == []
