"""Which jobs that holders still know are gone: only what every list of ten minutes did not name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.memory.orphaned_jobs import (
    MAX_GAP_SECONDS,
    MISSING_SECONDS_UNTIL_REMOVAL,
    MissingJobs,
    orphaned_jobs,
    update_missing_jobs,
)


def seen(*looks: tuple[float, str, str]) -> MissingJobs:
    """(time, live jobs, jobs that holders know): a letter each."""
    known = MissingJobs()
    for now, live, found in looks:
        known = update_missing_jobs(known, live, found, now)
    return known


def every_minute(until: float, live: str, found: str) -> list[tuple[float, str, str]]:
    return [(60.0 * i, live, found) for i in range(int(until // 60) + 1)]


def test_a_job_that_no_list_named_for_ten_minutes_is_gone() -> None:
    assert orphaned_jobs(seen(*every_minute(MISSING_SECONDS_UNTIL_REMOVAL - 60, "a", "ab"))) == ()
    assert orphaned_jobs(seen(*every_minute(MISSING_SECONDS_UNTIL_REMOVAL, "a", "ab"))) == ("b",)


def test_one_list_that_names_it_begins_the_wait_anew() -> None:
    looks = every_minute(MISSING_SECONDS_UNTIL_REMOVAL, "", "b")
    looks[5] = (300.0, "b", "b")
    assert orphaned_jobs(seen(*looks)) == ()


def test_lists_too_far_apart_prove_nothing() -> None:
    assert orphaned_jobs(seen((0.0, "", "b"), (MISSING_SECONDS_UNTIL_REMOVAL, "", "b"))) == ()
    assert orphaned_jobs(seen((0.0, "", "b"), (MAX_GAP_SECONDS + 1, "", "b"))) == ()


def test_a_clock_that_was_set_back_begins_anew() -> None:
    known = seen(*every_minute(MISSING_SECONDS_UNTIL_REMOVAL - 60, "", "b"), (0.0, "", "b"))
    assert known.missing_since_seconds == {"b": 0.0}


def test_what_no_holder_knows_is_not_remembered() -> None:
    assert seen((0.0, "", "abc"), (1.0, "", "a")).missing_since_seconds == {"a": 0.0}


LOOKS = st.lists(
    st.tuples(st.floats(0, 200), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc"))), max_size=40
)


@given(LOOKS)
def test_no_job_goes_that_some_list_of_the_last_ten_minutes_named(
    looks: list[tuple[float, set[str], set[str]]],
) -> None:
    known, now = MissingJobs(), 0.0
    named: dict[str, float] = {}
    for pause, live, found in looks:
        now += pause
        known = update_missing_jobs(known, live, found, now)
        named |= dict.fromkeys(live, now)
        for job in orphaned_jobs(known):
            assert job in found
            assert now - named.get(job, float("-inf")) >= MISSING_SECONDS_UNTIL_REMOVAL
