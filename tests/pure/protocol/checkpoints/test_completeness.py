"""Tests of `protocol.checkpoints.completeness`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import COVERED, manifest
from surefoot.protocol.checkpoints.completeness import (
    LineageEntry,
    TierReading,
    complete_checkpoints,
    complete_in_persistent_tier,
    count_copies,
    effective_replicas,
    find_watermark,
    generation_of_step,
    is_on_lineage,
    layout_sets_to_check,
    prune_lineage,
)
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance

# ---- completeness ----------------------------------------------------------------------------------------------------
# What makes a checkpoint complete, and how many copies count.

A, B, C = (MemoryServerInstance(n, n) for n in "abc")
DOMAINS = {A: "a", B: "b", C: "b"}
LINEAGE = (LineageEntry(1, None, 2),)
ZERO, ONE = manifest(1, 10, 0, 2), manifest(1, 10, 1, 2)
NONE: frozenset[Checkpoint] = frozenset()


def found(*a: RankManifest, b: tuple[RankManifest, ...] = (), s3: tuple[RankManifest, ...] | None = None) -> list[int]:
    reading = TierReading({A: a, B: b}, s3)
    return [c.step for c in complete_checkpoints(reading, LINEAGE, 1, NONE, COVERED)]


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
    assert complete_checkpoints(reading, LINEAGE, 1, NONE, {}) == []
    assert layout_sets_to_check(reading) == {frozenset({"layout"})}
    assert layout_sets_to_check(TierReading({A: (ZERO,)}, None)) == set()


def test_what_was_put_aside_or_lies_elsewhere_does_not_count() -> None:
    reading = TierReading({A: (ZERO, ONE)}, None)
    assert complete_checkpoints(reading, LINEAGE, 1, frozenset({Checkpoint(1, 10)}), COVERED) == []
    assert complete_checkpoints(reading, (LineageEntry(2, None, 2),), 2, NONE, COVERED) == []


def test_copies_are_counted_by_failure_domain_and_the_least_rank_decides() -> None:
    assert count_copies(Checkpoint(1, 10), TierReading({A: (ZERO, ONE), B: (ZERO,)}, None), DOMAINS) == 1
    assert count_copies(Checkpoint(1, 10), TierReading({A: (ZERO, ONE), B: (ZERO, ONE)}, None), DOMAINS) == 2
    assert count_copies(Checkpoint(1, 10), TierReading({B: (ZERO, ONE), C: (ZERO, ONE)}, None), DOMAINS) == 1
    assert count_copies(Checkpoint(1, 20), TierReading({A: (ZERO,)}, None), DOMAINS) == 0


def test_the_watermark_is_the_newest_with_all_its_copies() -> None:
    newer = (manifest(1, 20, 0, 2), manifest(1, 20, 1, 2))
    reading = TierReading({A: (ZERO, ONE, *newer), B: (ZERO, ONE)}, None)
    assert find_watermark(reading, LINEAGE, 1, NONE, COVERED, DOMAINS, 2) == Checkpoint(1, 10)
    assert find_watermark(reading, LINEAGE, 1, NONE, COVERED, DOMAINS, 1) == Checkpoint(1, 20)
    assert find_watermark(TierReading({}, (ZERO, ONE)), LINEAGE, 1, NONE, COVERED, DOMAINS, 1) is None


def test_as_many_copies_as_there_are_domains_but_never_none() -> None:
    assert [effective_replicas(2, n) for n in (0, 1, 2, 5)] == [1, 1, 2, 2]


def test_the_persistent_tier_completes_alone() -> None:
    assert complete_in_persistent_tier((ZERO, ONE), LINEAGE, 1, NONE, COVERED) == [Checkpoint(1, 10)]
    assert complete_in_persistent_tier((ZERO,), LINEAGE, 1, NONE, COVERED) == []


# ---- lineage ---------------------------------------------------------------------------------------------------------
# Which checkpoints lie on the history that was kept.

# 1 ran to 40; 2 branched at 30 and ran to 50; 3 branched from 2 at 40; 5 from 1 at 20 (2 and 3 were overtaken).
HISTORY = (
    LineageEntry(1, None, 3),
    LineageEntry(2, Checkpoint(1, 30), 2),
    LineageEntry(3, Checkpoint(2, 40), 3),
    LineageEntry(5, Checkpoint(1, 20), 2),
)


@pytest.mark.parametrize(
    ("generation", "step", "seen_from", "lies"),
    [
        (1, 10, 1, True),
        (1, 30, 2, True),
        (1, 40, 2, False),
        (2, 40, 2, True),
        (2, 30, 2, False),
        (2, 40, 3, True),
        (2, 50, 3, False),
        (1, 30, 3, True),
        (1, 40, 3, False),
        (3, 50, 3, True),
        (1, 20, 5, True),
        (1, 30, 5, False),
        (2, 40, 5, False),
        (5, 30, 5, True),
        (4, 30, 5, False),
    ],
)
def test_a_branch_cuts_off_what_came_after_it(generation: int, step: int, seen_from: int, lies: bool) -> None:
    assert is_on_lineage(HISTORY, Checkpoint(generation, step), seen_from) is lies


def test_a_parent_lies_on_the_lineage_even_where_its_own_epoch_was_pruned() -> None:
    assert is_on_lineage(HISTORY[2:3], Checkpoint(2, 40), 3)
    assert not is_on_lineage(HISTORY[2:3], Checkpoint(2, 30), 3)


def test_a_damaged_record_leads_round_in_no_circle() -> None:
    circle = (LineageEntry(1, Checkpoint(2, 5), 1), LineageEntry(2, Checkpoint(1, 5), 1))
    assert not is_on_lineage(circle, Checkpoint(9, 1), 2)
    assert generation_of_step(circle, 2, 1) is None


def test_each_step_counts_in_exactly_one_epoch() -> None:
    assert [generation_of_step(HISTORY, 3, s) for s in (1, 30, 31, 40, 41)] == [1, 1, 2, 2, 3]
    assert [generation_of_step(HISTORY, 5, s) for s in (20, 21)] == [1, 5]


@st.composite
def histories(draw: st.DrawFn) -> tuple[LineageEntry, ...]:
    entries = [LineageEntry(1, None, 1)]
    for epoch in range(2, draw(st.integers(2, 7))):
        base = draw(st.sampled_from(entries))
        begin = base.parent.step if base.parent else 0
        entries.append(LineageEntry(epoch, Checkpoint(base.generation, begin + draw(st.integers(1, 4))), 1))
    return tuple(entries)


@given(histories(), st.integers(1, 30))
def test_on_lineage_and_epoch_at_tell_one_story(history: tuple[LineageEntry, ...], step: int) -> None:
    last = history[-1].generation
    lying = [e.generation for e in history if is_on_lineage(history, Checkpoint(e.generation, step), last)]
    assert lying == [generation_of_step(history, last, step)]


@given(histories(), st.integers(1, 30))
def test_pruning_forgets_nothing_that_is_still_needed(history: tuple[LineageEntry, ...], step: int) -> None:
    last = history[-1].generation
    epoch = generation_of_step(history, last, step)
    assert epoch is not None
    oldest = Checkpoint(epoch, step)
    short = prune_lineage(history, oldest, last)
    for later in range(step, step + 10):
        for entry in history:
            checkpoint = Checkpoint(entry.generation, later)
            if entry.generation >= oldest.generation:
                assert is_on_lineage(short, checkpoint, last) == is_on_lineage(history, checkpoint, last)
