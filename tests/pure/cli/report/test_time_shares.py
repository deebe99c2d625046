"""Each moment of a job counts once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.cli.report.time_shares import CAUSES, Stretch, share_of, time_shares

STRETCHES = st.lists(st.builds(Stretch, st.floats(-10, 200), st.floats(-10, 200), st.sampled_from(CAUSES)), max_size=20)


@given(STRETCHES)
def test_shares_add_up_to_the_whole_time(stretches: list[Stretch]) -> None:
    found = time_shares(0.0, 100.0, stretches)
    assert sum(one.seconds for one in found) == pytest.approx(100.0)
    assert len({one.cause for one in found}) == len(found)


@given(STRETCHES, st.floats(0, 100))
def test_a_moment_counts_for_its_first_cause(stretches: list[Stretch], at: float) -> None:
    causes = {one.cause for one in stretches if one.begin <= at < one.end}
    wanted = next((cause for cause in CAUSES if cause in causes), "other")
    edges = sorted({0.0, 100.0, *(e for one in stretches for e in (one.begin, one.end) if 0 < e < 100)})
    cell = next(((a, b) for a, b in pairwise(edges) if a <= at < b), None)
    if cell is not None:
        only = time_shares(*cell, stretches)
        assert [one.cause for one in only] == [wanted]


def test_a_step_within_a_recovery_is_part_of_it() -> None:
    found = time_shares(
        0, 10, [Stretch(0, 4, "training"), Stretch(3, 6, "recovery"), Stretch(5, 9, "training"), Stretch(6, 7, "stall")]
    )
    assert {one.cause: one.seconds for one in found} == {"recovery": 3, "stall": 1, "training": 5, "other": 1}
    assert share_of(found, "training") == 0.5
    assert share_of((), "training") is None


def test_no_time_has_no_share() -> None:
    assert time_shares(5, 5, [Stretch(0, 9, "training")]) == ()
    assert time_shares(5, 4, []) == ()
