"""`surefoot local` with a spare: it answers a killed agent and a killed node, and is replaced behind both."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, LocalRun, assert_little_lost, assert_whole, running
from surefoot_operator import reasons


def spare_is_warm(run: LocalRun) -> bool:
    told = [c for c in run.status.conditions if c.type == reasons.SPARES_READY]
    return [c.status for c in told] == ["True"]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_spare_takes_a_killed_workers_rank_and_its_replacement_the_next_ones(tmp_path: Path) -> None:
    """Of fixed size on as many nodes as workers and spares: without the spare nothing would train after a node is gone."""
    job = Job(steps=90, workers=3, gates=(30, 60, 85), spec={"spares": 1})
    with running(tmp_path, job) as run:
        run.wait_for_step(30)
        run.wait("the spare is warm", lambda: spare_is_warm(run))
        first = run.members()
        run.kill_agent(first[1])
        run.open_gate(30)
        run.wait_for_step(60)
        second = run.members()
        assert [second[0], second[2]] == [first[0], first[2]], "the others keep their ranks"
        assert second[1].node not in {m.node for m in first}
        run.wait("the killed worker's successor is warm", lambda: spare_is_warm(run))
        run.kill_node(second[2])
        run.open_gate(60)
        run.wait("a word on a node that no fault of the run ended", lambda: "ended unasked with code -9" in run.said)
        run.wait("the second loss is answered", lambda: run.members() != second)
        third = run.members()
        assert third[:2] == second[:2]
        assert (third[2].index, third[2].node) == (first[1].index, first[1].node), "it was made again, and waited there"
        done = run.finish()
    report = done.report
    assert_whole(report, 90)
    assert {i["kind"] for i in report["incidents"]} <= {"agent-lost", "node-lost", "worker-silent"}
    assert [generation["world_size"] for generation in report["generations"]] == [3] * len(report["generations"])
    assert_little_lost(report["incidents"])
