"""Lines that come are whole, bounded and somebody's; workers that change are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.cli.follow_logs import (
    MOST_LINE_BYTES,
    FollowChoice,
    WorkerNow,
    followed_line,
    stamp_order,
    whole_lines,
    worker_changes,
    workers_now,
)
from surefoot_operator.job_snapshot import WorkerSeen


@given(
    st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n"), max_size=20)),
    st.integers(1, 9),
)
def test_lines_are_the_same_however_they_are_cut(lines: list[str], size: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    found: list[str] = []
    rest = b""
    for place in range(0, len(data), size):
        more, rest = whole_lines(rest, data[place : place + size])
        found += more
    assert (found, rest) == (lines, b"")


def test_a_line_without_end_is_shown_in_pieces_and_held_in_none() -> None:
    found, rest = whole_lines(b"", b"x" * (3 * MOST_LINE_BYTES + 5))
    assert [len(one) for one in found] == [MOST_LINE_BYTES] * 3
    assert rest == b"xxxxx"


def test_a_line_says_whose_it_is() -> None:
    assert followed_line(1, 2, 13, "words") == "1.2 rank 13  | words"
    assert followed_line(1, 2, None, "words") == "1.2 agent    | words"
    assert FollowChoice().takes(None)
    assert not FollowChoice(rank=1).takes(None)


FIRST, SECOND = WorkerNow(1, "n1"), WorkerNow(2, "n2")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {1: FIRST}, ["== worker 1 (attempt 1) on n1"]),
        ({}, {1: WorkerNow(1, "")}, ["== worker 1 (attempt 1) waits for a node"]),
        ({1: WorkerNow(1, "")}, {1: FIRST}, ["== worker 1 (attempt 1) on n1"]),
        ({1: FIRST}, {1: FIRST}, []),
        ({1: FIRST}, {1: SECOND}, ["== worker 1 is replaced: attempt 2 on n2 follows attempt 1, which was on n1"]),
        ({1: FIRST}, {1: WorkerNow(2, "n1")}, ["== worker 1 is replaced: attempt 2 on n1 follows attempt 1"]),
        (
            {1: FIRST},
            {1: WorkerNow(2, "")},
            ["== worker 1 is replaced: attempt 2, which waits for a node, follows attempt 1, which was on n1"],
        ),
        ({1: FIRST}, {}, ["== worker 1 (attempt 1) is gone"]),
        (
            {1: FIRST},
            {1: WorkerNow(1, "n1", "Failed with exit code 9")},
            ["== worker 1 (attempt 1) ended: Failed with exit code 9"],
        ),
        ({1: WorkerNow(1, "n1", "Succeeded")}, {}, []),
        ({1: WorkerNow(1, "n1", "Failed")}, {1: WorkerNow(1, "n1", "Failed")}, []),
    ],
)
def test_what_became_of_a_worker_is_said_once(
    before: dict[int, WorkerNow], now: dict[int, WorkerNow], said: list[str]
) -> None:
    assert worker_changes(before, now) == said


def test_of_each_worker_the_newest_attempt_counts() -> None:
    def seen(index: int, attempt: int, node: str, phase: str = "Running", code: int | None = None) -> WorkerSeen:
        return WorkerSeen(index, attempt, f"w-{index}-{attempt}", "u", node, phase, code)  # type: ignore[arg-type]

    workers = [seen(0, 2, "n0"), seen(0, 1, "n9"), seen(1, 1, "n1", "Failed", 137)]
    assert workers_now(workers, None) == {0: WorkerNow(2, "n0"), 1: WorkerNow(1, "n1", "Failed with exit code 137")}
    assert set(workers_now(workers, 1)) == {1}


def test_stamps_without_last_zeros_are_in_order() -> None:
    stamps = ["2026-11-23T09:00:02Z", "2026-11-23T09:00:02.5Z", "2026-11-23T09:00:02.51Z", "2026-11-23T09:00:03Z"]
    assert sorted(sorted(stamps), key=stamp_order) == stamps
    assert sorted(stamps) != stamps
