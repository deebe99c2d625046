"""Who is named where stacks and collectives agree, disagree, or one of them says nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.hangs import Collective, RankPlace
from surefoot_operator.job_snapshot import StandingSeen
from surefoot_operator.policy.failure.failure_detection import odd_one

IN_ONE_LINE = tuple(RankPlace((rank,), "a", "in all_reduce", waiting=True) for rank in range(3))
WAITS = Collective((0,), "default_pg", 8, "all_reduce", "Float[4]", "scheduled")


def seen(places: tuple[RankPlace, ...], calls: dict[int, Collective]) -> list[StandingSeen]:
    """Of each rank by its own agent."""
    return [
        StandingSeen(42, (place,), collectives=tuple(replace(calls[r], ranks=(r,)) for r in place.ranks if r in calls))
        for place in places
    ]


def apart(rank: int) -> tuple[RankPlace, ...]:
    return tuple(replace(p, stack="b", text="in load", waiting=False) if p.ranks == (rank,) else p for p in IN_ONE_LINE)


def without(rank: int) -> dict[int, Collective]:
    return {r: replace(WAITS, number=7, state="finished") if r == rank else WAITS for r in range(3)}


ALL_WAIT = dict.fromkeys(range(3), WAITS)
LACKING = {0: WAITS, 2: WAITS}
UNLIKE = {**ALL_WAIT, 2: replace(WAITS, call="all_gather")}


@pytest.mark.parametrize(
    ("places", "calls", "named", "program"),
    [
        (IN_ONE_LINE, without(1), 1, False),
        (IN_ONE_LINE, UNLIKE, 2, True),
        (apart(1), {}, 1, False),
        (apart(1), LACKING, 1, False),
        (apart(1), ALL_WAIT, 1, False),
        (apart(1), without(1), 1, False),
        (apart(2), UNLIKE, 2, True),
    ],
    ids=["recorder alone", "unlike calls", "stacks alone", "a recorder is silent", "all wait alike", "both", "both, of the program"],
)  # fmt: skip
def test_who_is_named(places: tuple[RankPlace, ...], calls: dict[int, Collective], named: int, program: bool) -> None:
    found = odd_one(seen(places, calls))
    assert found is not None
    assert (found.rank, found.program) == (named, program)


@pytest.mark.parametrize("calls", [{}, LACKING, ALL_WAIT], ids=["none", "not all", "all alike"])
def test_nobody_is_odd(calls: dict[int, Collective]) -> None:
    assert odd_one(seen(IN_ONE_LINE, calls)) is None


def test_where_stacks_and_collectives_name_two_nobody_is() -> None:
    found = odd_one(seen(apart(1), without(2)))
    assert found is not None
    assert found.rank is None
    assert found.text == (
        "nobody is named: by its stack rank 1 differs (in load), by its collectives rank 2, which has not entered"
        " all_reduce #8 of default_pg (Float[4]), in which others wait; its last was all_reduce #7 of default_pg (Float[4])"
    )


@given(st.integers(0, 2), st.integers(0, 2))
def test_it_names_one_only_if_no_evidence_is_against_it(by_stack: int, by_call: int) -> None:
    found = odd_one(seen(apart(by_stack), without(by_call)))
    assert found is not None
    assert found.rank == (by_stack if by_stack == by_call else None)
