"""Tests of `protocol.hangs`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.hangs import (
    MIN_LEARNED_STEPS,
    Collective,
    RankStack,
    find_collective_outlier,
    find_stack_outlier,
    hang_suspicion_seconds,
)

# ---- collectives -----------------------------------------------------------------------------------------------------
# Which rank is named in a hang, by the collective that each is in.


def waits(
    *ranks: int, number: int = 812, group: str = "default_pg", call: str = "all_reduce", gives: str = "Float[4]"
) -> Collective:
    return Collective(ranks, group, number, call, gives, "scheduled")


def done(*ranks: int, number: int = 811, group: str = "default_pg") -> Collective:
    return Collective(ranks, group, number, "all_reduce", "Float[4]", "finished")


def sends(*ranks: int) -> Collective:
    return replace(waits(*ranks, number=ranks[0] + 3, call="recv"), is_pairwise=True)


def begun(*ranks: int) -> Collective:
    return replace(waits(*ranks), state="started")


@pytest.mark.parametrize(
    ("told", "named", "program"),
    [
        ((waits(0, 2, 3), done(1)), 1, False),
        ((waits(0), done(1)), 1, False),
        ((waits(0, 2), waits(3, number=7, group="pair"), done(1), done(1, number=6, group="pair")), 1, False),
        ((waits(0, 2), waits(1, call="all_gather")), 1, True),
        ((waits(0, 2), waits(1, gives="Float[8]")), 1, True),
        ((waits(0, 2), waits(1, gives="Double[4]")), 1, True),
        ((waits(0, 2), waits(1, number=3, group="pair"), done(1)), 1, True),
        ((waits(0, 2), waits(1, number=811)), 1, False),
        ((waits(0, 2), sends(1)), 1, True),
        ((begun(0, 2), waits(1)), 1, False),
        ((waits(0, 2, call="broadcast"), waits(0, 2, number=5, group="pair"), done(1)), 1, False),
    ],
    ids=[
        "not entered", "of two", "across groups", "another call", "another size", "another type", "another group",
        "still in an earlier one", "in a receive", "not begun on its device", "others wait in two groups",
    ],
)  # fmt: skip
def test_the_one_that_is_not_in_it_is_named(told: tuple[Collective, ...], named: int, program: bool) -> None:
    found = find_collective_outlier(told)
    assert found is not None
    assert (found.rank, found.is_program_fault) == (named, program)


@pytest.mark.parametrize(
    "told",
    [
        (),
        (done(0),),
        (waits(0, 1, 2),),
        (begun(0, 1, 2),),
        (done(0, 1, 2),),
        (waits(0), done(1, 2)),
        (waits(0), waits(1, number=7, group="pair")),
        (waits(0, 1), waits(2, 3, number=7, group="pair")),
        (waits(0, 1), done(2, number=812)),
        (waits(0, 1), done(2, group="pair")),
        (waits(0, 1), waits(2, number=813)),
        (waits(0, 1, call="all_to_all"), waits(2, call="all_to_all", gives="Float[9]")),
        (waits(0), begun(1, 2), waits(3)),
        (waits(0, 1), waits(2, 3), done(2, 3, number=2, group="pair")),
        (sends(0), sends(1), sends(2)),
        (waits(1), done(2), waits(2, number=2, group="pair"), done(0, number=1, group="pair")),
    ],
)
def test_where_nothing_is_proven_nobody_is_named(told: tuple[Collective, ...]) -> None:
    assert find_collective_outlier(told) is None


@pytest.mark.parametrize("few", [(0,), (0, 1)])
def test_unlike_calls_without_a_majority_are_told_and_blame_nobody(few: tuple[int, ...]) -> None:
    more = tuple(range(len(few), 2 * len(few)))
    found = find_collective_outlier((waits(*few), waits(*more, call="all_gather")))
    assert found is not None
    assert (found.rank, found.is_program_fault) == (None, True)
    assert "ranks made different calls as number 812 of default_pg" in found.text


@pytest.mark.parametrize("others", [(1, 2), (2, 1)])
def test_numbers_of_a_receive_say_nothing_of_a_collective(others: tuple[int, ...]) -> None:
    awaited = {rank: replace(sends(rank), group="pair", number=rank) for rank in (0, 1, 2)}
    found = find_collective_outlier((waits(0, number=2, group="pair"), awaited[0], *(awaited[rank] for rank in others)))
    assert found is not None
    assert (found.rank, found.is_program_fault) == (0, True)


def test_what_is_said_names_the_call_and_the_last_one() -> None:
    found = find_collective_outlier((waits(0, 2), done(1)))
    assert found is not None
    assert found.text == (
        "has not entered all_reduce #812 of default_pg (Float[4]), in which others wait;"
        " its last was all_reduce #811 of default_pg (Float[4])"
    )
    found = find_collective_outlier((waits(0, 2), waits(1, call="all_gather")))
    assert found is not None
    assert found.text == "is at all_gather #812 of default_pg, where all others are at all_reduce (Float[4]) #812"


CALLS = st.builds(
    Collective,
    ranks=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(tuple),
    group=st.sampled_from(("default_pg", "pair")),
    number=st.integers(1, 3),
    call=st.sampled_from(("all_reduce", "all_to_all")),
    tensors=st.sampled_from(("", "Float[4]")),
    state=st.sampled_from(("finished", "scheduled", "started")),
    is_pairwise=st.booleans(),
)


@given(st.lists(CALLS, max_size=8), st.randoms(use_true_random=False))
def test_whoever_is_named_is_told_of_and_order_and_grouping_say_nothing(told: list[Collective], chance: object) -> None:
    seen: set[tuple[int, str, bool]] = set()
    single = []
    for one in told:  # one entry of each rank, group and kind, as recorders tell them
        for rank in one.ranks:
            if (rank, one.group, one.is_pairwise) not in seen:
                seen.add((rank, one.group, one.is_pairwise))
                single.append(replace(one, ranks=(rank,)))
    found = find_collective_outlier(single)
    back = find_collective_outlier(reversed(single))
    assert (found and found.rank, found and found.is_program_fault) == (
        back and back.rank,
        back and back.is_program_fault,
    )
    if found is not None and found.rank is not None:
        ranks = {rank for one in single for rank in one.ranks}
        assert found.rank in ranks
        assert any(one.is_waiting for one in single if one.ranks != (found.rank,)), "somebody else waits"


@given(st.integers(2, 9), st.integers(0, 8), st.integers(1, 900))
def test_of_any_world_the_one_that_did_not_come_is_named(size: int, absent: int, number: int) -> None:
    absent %= size
    others = tuple(rank for rank in range(size) if rank != absent)
    found = find_collective_outlier((waits(*others, number=number + 1), done(absent, number=number)))
    assert found is not None
    assert found.rank == absent


# ---- rank places -----------------------------------------------------------------------------------------------------
# Which rank is named in a hang, by where all of them stand.


def waits_rank_places(*ranks: int, stack: str = "a") -> RankStack:
    return RankStack(ranks, stack, f"in {stack}", is_waiting=True)


def works(*ranks: int, stack: str = "w") -> RankStack:
    return RankStack(ranks, stack, f"in {stack}", is_waiting=False)


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ((waits_rank_places(0), works(1)), 1),
        ((waits_rank_places(0, 1), waits_rank_places(2, 3, stack="b"), works(4)), 4),
        ((works(0, 1, 2), works(3, stack="load")), 3),
        ((waits_rank_places(0, 1), waits_rank_places(2, stack="another collective")), 2),
    ],
)
def test_the_one_that_is_not_where_the_others_are_is_named(places: tuple[RankStack, ...], named: int) -> None:
    found = find_stack_outlier(places)
    assert found is not None
    assert found[0] == named


@pytest.mark.parametrize(
    "places",
    [
        (),
        (works(0),),
        (waits_rank_places(0, 1, 2),),
        (waits_rank_places(0), waits_rank_places(1, stack="b")),
        (works(0), works(1, stack="b")),
        (waits_rank_places(0, 1), works(2), works(3, stack="b")),
        (waits_rank_places(0), waits_rank_places(1, stack="b"), waits_rank_places(2, stack="c")),
        (works(0, 1), works(2, 3, stack="b")),
    ],
)
def test_where_none_differs_or_more_than_one_nobody_is_named(places: tuple[RankStack, ...]) -> None:
    assert find_stack_outlier(places) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=9), st.randoms())
def test_it_does_not_depend_on_who_speaks_first_or_for_how_many(
    stands: list[tuple[str, bool]], shuffle: object
) -> None:
    waiting = dict(stands)  # one stack is one place: it waits or not
    each = [RankStack((rank,), stack, stack, waiting[stack]) for rank, (stack, _) in enumerate(stands)]
    grouped = [
        RankStack(tuple(r for r, (s, _) in enumerate(stands) if s == stack), stack, stack, waits_there)
        for stack, waits_there in waiting.items()
    ]
    assert find_stack_outlier(each) == find_stack_outlier(reversed(each)) == find_stack_outlier(grouped)


# ---- step limit ------------------------------------------------------------------------------------------------------
# After how long without a step a world is suspect.

SECONDS = st.floats(0.001, 1e4)


def test_steps_of_a_second_are_suspect_long_before_the_ceiling() -> None:
    assert hang_suspicion_seconds([1.0] * 30, 600.0) == 120.0
    assert hang_suspicion_seconds([10.0] * 30, 600.0) == 200.0


def test_one_long_step_among_short_ones_is_no_surprise_the_second_time() -> None:
    assert hang_suspicion_seconds([1.0] * 30 + [90.0], 600.0) == 270.0


def test_of_few_steps_nothing_is_learned() -> None:
    assert hang_suspicion_seconds([1.0] * (MIN_LEARNED_STEPS - 1), 600.0) == 600.0


@given(st.lists(SECONDS, max_size=40), SECONDS)
def test_it_is_never_above_the_ceiling_nor_below_what_was_seen(steps: list[float], ceiling: float) -> None:
    limit = hang_suspicion_seconds(steps, ceiling)
    assert 0.2 * ceiling <= limit <= ceiling
    assert limit == ceiling or limit >= 3 * max(steps)
