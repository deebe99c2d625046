"""Real ranks in loops that look like a straggler's: a node is named only for what all ranks do and it does slowly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from support import gloo_world
from surefoot.protocol.progress import RankActivity, subtract_activity
from surefoot_operator.policy.failure.stragglers import find_slow_ranks

SIZE = 4
JUDGED = 4
"""Newest windows, as the operator keeps them."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank said of its looks, by case."""
    group = tmp_path_factory.mktemp("unkind") / "group"
    found = gloo_world.told(gloo_world.started("unkind_loops.py", (), SIZE, group))
    assert len(found) == SIZE
    return found


@pytest.mark.parametrize("case", ["equal", "all are slow", "more data", "a pipeline"])
def test_nobody_is_named_where_all_do_the_same(told: list[dict[str, Any]], case: str) -> None:
    assert judged(told, case) == [], [one[case] for one in told]


@pytest.mark.parametrize("case", ["slow", "slow to load", "slow in a pipeline", "slow in a framework"])
def test_who_is_slow_is_named(told: list[dict[str, Any]], case: str) -> None:
    assert judged(told, case) == [(2, True)], [one[case] for one in told]


@pytest.mark.parametrize(
    ("case", "rank"),
    [
        ("rank 0 logs", 0),
        ("rank 0 logs in a call of all", 0),
        ("rank 0 logs in the call that makes a step", 0),
        ("rank 0 evaluates", 0),
        ("the last stage computes a loss", 3),
        ("a framework's hook logs", 0),
    ],
)
def test_who_does_more_is_named_for_its_program(told: list[dict[str, Any]], case: str, rank: int) -> None:
    assert judged(told, case) == [(rank, False)], [one[case] for one in told]


def judged(told: list[dict[str, Any]], case: str) -> list[tuple[int, bool]]:
    """Who is named, and whether for doing slowly what all do."""
    windows = zip(*(_windows(one[case]) for one in told), strict=True)
    return [(one.rank, one.divergent_line is None) for one in find_slow_ranks(list(windows))]


def _windows(told: list[Any]) -> list[RankActivity]:
    """What passed between its moments."""
    totals = [RankActivity(*one[:5], tuple(map(tuple, one[5]))) for one in told]
    found = [subtract_activity(*pair) for pair in pairwise(totals)]
    assert None not in found
    return [one for one in found if one is not None][-JUDGED:]
