"""Which checkpoints lie on the history that was kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.checkpoints.completeness import LineageEntry, describe, epoch_at, on_lineage, pruned
from surefoot.protocol.identities import Checkpoint

# 1 ran to 40; 2 branched at 30 and ran to 50; 3 branched from 2 at 40; 5 from 1 at 20 (2 and 3 were overtaken).
HISTORY = (
    LineageEntry(1, None, 3),
    LineageEntry(2, Checkpoint(1, 30), 2),
    LineageEntry(3, Checkpoint(2, 40), 3),
    LineageEntry(5, Checkpoint(1, 20), 2),
)


@pytest.mark.parametrize(
    ("epoch", "step", "seen_from", "lies"),
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
def test_a_branch_cuts_off_what_came_after_it(epoch: int, step: int, seen_from: int, lies: bool) -> None:
    assert on_lineage(HISTORY, Checkpoint(epoch, step), seen_from) is lies


def test_a_parent_lies_on_the_lineage_even_where_its_own_epoch_was_pruned() -> None:
    assert on_lineage(HISTORY[2:3], Checkpoint(2, 40), 3)
    assert not on_lineage(HISTORY[2:3], Checkpoint(2, 30), 3)


def test_a_damaged_record_leads_round_in_no_circle() -> None:
    circle = (LineageEntry(1, Checkpoint(2, 5), 1), LineageEntry(2, Checkpoint(1, 5), 1))
    assert not on_lineage(circle, Checkpoint(9, 1), 2)
    assert epoch_at(circle, 2, 1) is None


def test_each_step_counts_in_exactly_one_epoch() -> None:
    assert [epoch_at(HISTORY, 3, s) for s in (1, 30, 31, 40, 41)] == [1, 1, 2, 2, 3]
    assert [epoch_at(HISTORY, 5, s) for s in (20, 21)] == [1, 5]


def test_it_reads_as_a_chain() -> None:
    assert describe(HISTORY[:2]) == "1@0x3 > 2@30x2"


@st.composite
def histories(draw: st.DrawFn) -> tuple[LineageEntry, ...]:
    entries = [LineageEntry(1, None, 1)]
    for epoch in range(2, draw(st.integers(2, 7))):
        base = draw(st.sampled_from(entries))
        begin = base.parent.step if base.parent else 0
        entries.append(LineageEntry(epoch, Checkpoint(base.epoch, begin + draw(st.integers(1, 4))), 1))
    return tuple(entries)


@given(histories(), st.integers(1, 30))
def test_on_lineage_and_epoch_at_tell_one_story(history: tuple[LineageEntry, ...], step: int) -> None:
    last = history[-1].epoch
    lying = [e.epoch for e in history if on_lineage(history, Checkpoint(e.epoch, step), last)]
    assert lying == [epoch_at(history, last, step)]


@given(histories(), st.integers(1, 30))
def test_pruning_forgets_nothing_that_is_still_needed(history: tuple[LineageEntry, ...], step: int) -> None:
    last = history[-1].epoch
    epoch = epoch_at(history, last, step)
    assert epoch is not None
    oldest = Checkpoint(epoch, step)
    short = pruned(history, oldest, last)
    for later in range(step, step + 10):
        for entry in history:
            checkpoint = Checkpoint(entry.epoch, later)
            if entry.epoch >= oldest.epoch:
                assert on_lineage(short, checkpoint, last) == on_lineage(history, checkpoint, last)
