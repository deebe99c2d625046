"""`surefoot local` with a coordinator that dies together with what it should look after, or halfway through its work."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_equal, assert_little_lost, assert_whole, faults, running

ELASTIC = Job(steps=120, workers=3, elastic=(2, 3), gates=(110,), trainer=("--pace", "0.03"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_an_agent_and_its_coordinator_may_die_at_once_and_another_coordinator_in_the_middle_of_a_recovery(
    tmp_path: Path,
) -> None:
    struck = faults("agent:0@step=30", "coordinator@step=30,for=1", "node:1@step=70,for=3")
    with running(tmp_path, ELASTIC, *struck, "--compare") as run:
        run.wait("the node's loss in the status", lambda: any(i.kind == "node-lost" for i in run.status.incidents))
        run.kill_operator()
        run.wait("a world that goes on", lambda: run.progress.finished_step > 100)
        assert "the operator exited with code -9 and is restarted" in run.said
        done = run.finish()
    assert_whole(done.report, 120)
    assert_equal(done.report)
    assert_little_lost(done.report["incidents"])
    sources = {epoch["restored_from"] for epoch in done.report["generations"]}
    assert sources <= {None, "memory", "staging+memory"}  # a survivor has its own share in staging memory
