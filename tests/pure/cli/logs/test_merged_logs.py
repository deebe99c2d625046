"""Lines by rank and attempt: the blamed rank first, agents last."""

from __future__ import annotations

import pytest

from surefoot_operator.api.status import Incident
from surefoot_operator.cli.follow_logs import (
    LogLine,
    LogPart,
    blamed_incident,
    by_time,
    heading,
    in_order,
    part_lines,
    parts_of_pod,
)

TEXT = """\
2026-11-23T09:00:02.5Z [rank 1] step 1
2026-11-23T09:00:01.5Z worker 1 INFO epoch 1: starting
not stamped
2026-11-23T09:00:03.5Z [rank 1] Traceback [rank 7] within
"""


def failed(rank: int | None, worker: int | None, kind: str = "trainer-failed", epoch: int = 2) -> Incident:
    return Incident(kind, f"{kind} of {rank}", worker, None, epoch, 0.0, rank=rank)


def part(rank: int | None, worker: int, attempt: int = 1, epoch: int | None = None, *lines: str) -> LogPart:
    return LogPart(worker, attempt, rank, tuple(map(LogLine, lines or ("x",))), epoch)


def test_a_pods_stream_is_parted_by_rank() -> None:
    found = {one.rank: one for one in parts_of_pod(1, 3, TEXT)}
    assert [line.text for line in found[1].lines] == ["step 1", "Traceback [rank 7] within"]
    assert [line.text for line in found[None].lines] == ["worker 1 INFO epoch 1: starting", "not stamped"]
    assert {(one.worker, one.attempt) for one in found.values()} == {(1, 3)}
    assert parts_of_pod(1, 3, "") == []


@pytest.mark.parametrize(
    ("incidents", "rank"),
    [((), None), ((failed(1, 1), failed(2, 2)), 2), ((failed(1, 1), failed(None, None), failed(3, 3, "planned")), 1)],
)
def test_the_newest_failure_that_names_somebody_is_meant(incidents: tuple[Incident, ...], rank: int | None) -> None:
    found = blamed_incident(incidents)
    assert (None if found is None else found.rank) == rank


def test_the_blamed_rank_is_first_and_agents_are_last() -> None:
    parts = [part(None, 0), part(0, 0, 1, 2), part(1, 1, 1, 1), part(1, 1, 1, 2), part(None, 1)]
    found = in_order(parts, failed(1, 1))
    assert [(one.rank, one.worker, one.epoch, bool(one.blamed)) for one in found] == [
        (1, 1, 2, True), (0, 0, 2, False), (1, 1, 1, False), (None, 0, None, False), (None, 1, None, False),
    ]  # fmt: skip


def test_a_lost_worker_has_its_agent_blamed() -> None:
    found = in_order([part(0, 0), part(None, 1), part(0, 1)], failed(None, 1, "agent-lost"))
    assert (found[0].rank, found[0].worker, bool(found[0].blamed)) == (None, 1, True)


def test_the_replacement_of_a_lost_worker_is_not_blamed() -> None:
    began = "worker 1 INFO epoch %d: starting 1 of 3 ranks on this worker"
    lost, later = part(None, 1, 1, None, began % 2), part(None, 1, 2, None, "epoch 2 is restored", began % 3)
    ranks = part(1, 1, 1, None, "x"), part(1, 1, 2, None, "x")
    assert [one.attempt for one in in_order([later, lost], failed(None, 1)) if one.blamed] == [1]
    assert [one.attempt for one in in_order([later, lost, *ranks], failed(1, 1)) if one.blamed] == [1]
    assert len([one for one in in_order([part(None, 1, 1), part(None, 1, 2)], failed(None, 1)) if one.blamed]) == 2


def test_each_part_has_its_heading_and_its_newest_lines() -> None:
    found = in_order([part(1, 1, 2, None, "a", "b", "c"), part(0, 0, 1, None, "d")], failed(1, 1))
    assert part_lines(found, 2) == [
        "== rank 1, worker 1 (attempt 2), blamed: trainer-failed of 1",
        "(1 lines before)",
        "b",
        "c",
        "",
        "== rank 0, worker 0 (attempt 1)",
        "d",
    ]
    assert part_lines([], 2) == []
    assert heading(part(None, 3, 1, 4)) == "== agent, worker 3 (attempt 1), epoch 4"


def test_by_time_all_are_one_stream() -> None:
    assert by_time(parts_of_pod(1, 1, TEXT), 3) == [
        "2026-11-23T09:00:01.5Z  worker 1.1 agent  worker 1 INFO epoch 1: starting",
        "2026-11-23T09:00:02.5Z  worker 1.1 rank 1  step 1",
        "2026-11-23T09:00:03.5Z  worker 1.1 rank 1  Traceback [rank 7] within",
    ]
