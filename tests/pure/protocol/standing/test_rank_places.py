"""Which rank is named in a hang, by where all of them stand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.hangs import RankPlace, odd_rank


def waits(*ranks: int, stack: str = "a") -> RankPlace:
    return RankPlace(ranks, stack, f"in {stack}", waiting=True)


def works(*ranks: int, stack: str = "w") -> RankPlace:
    return RankPlace(ranks, stack, f"in {stack}", waiting=False)


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ((waits(0), works(1)), 1),
        ((waits(0, 1), waits(2, 3, stack="b"), works(4)), 4),
        ((works(0, 1, 2), works(3, stack="load")), 3),
        ((waits(0, 1), waits(2, stack="another collective")), 2),
    ],
)
def test_the_one_that_is_not_where_the_others_are_is_named(places: tuple[RankPlace, ...], named: int) -> None:
    found = odd_rank(places)
    assert found is not None
    assert found[0] == named


@pytest.mark.parametrize(
    "places",
    [
        (),
        (works(0),),
        (waits(0, 1, 2),),
        (waits(0), waits(1, stack="b")),
        (works(0), works(1, stack="b")),
        (waits(0, 1), works(2), works(3, stack="b")),
        (waits(0), waits(1, stack="b"), waits(2, stack="c")),
        (works(0, 1), works(2, 3, stack="b")),
    ],
)
def test_where_none_differs_or_more_than_one_nobody_is_named(places: tuple[RankPlace, ...]) -> None:
    assert odd_rank(places) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=9), st.randoms())
def test_it_does_not_depend_on_who_speaks_first_or_for_how_many(
    stands: list[tuple[str, bool]], shuffle: object
) -> None:
    waiting = dict(stands)  # one stack is one place: it waits or not
    each = [RankPlace((rank,), stack, stack, waiting[stack]) for rank, (stack, _) in enumerate(stands)]
    grouped = [
        RankPlace(tuple(r for r, (s, _) in enumerate(stands) if s == stack), stack, stack, waits_there)
        for stack, waits_there in waiting.items()
    ]
    assert odd_rank(each) == odd_rank(reversed(each)) == odd_rank(grouped)
