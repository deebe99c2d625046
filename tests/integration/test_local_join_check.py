"""`surefoot local` with a node that calculates wrong: who comes there gets no rank, and the job trains on the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_whole, run


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("elastic", [None, pytest.param((2, 3), marks=pytest.mark.nightly)], ids=["fixed", "elastic"])
def test_a_worker_on_a_node_that_fails_gets_no_rank(elastic: tuple[int, int] | None, tmp_path: Path) -> None:
    check = {"healthPolicy": {"preJoinCheck": "Enforce"}}
    job = Job(steps=500, workers=3, elastic=elastic, trainer=("--pace", "0.08"), spec=check)
    done = run(tmp_path, job, "--nodes", "4", "--fault", "sick:1@step=10", "--fault", "agent:1@step=20")
    assert_whole(done.report, 500)
    assert len(done.told("CpuComputeError")) == 1, done.said
    (found,) = done.told("CpuComputeError")
    worker, _, text = found.partition(" (attempt 2): ")
    assert text == "the processor adds integers to a wrong sum"
    assert done.told("NodeUnhealthy")[0].startswith("node node-1 is unhealthy (CpuComputeError: ")
    kinds = [one["kind"] for one in done.report["incidents"]]
    behind = kinds[kinds.index("agent-lost") + 1 :]
    assert behind == ["planned"] * (elastic is not None), "it halts for nobody who gets no rank"
    assert done.told("WorkerCreated")[-1] == f"{worker} (attempt 3)"
    ranks = {path.parts[-3] for path in tmp_path.rglob("rank-*.log")}
    name = worker.replace(" ", "-")
    assert f"{name}-3" in ranks
    assert f"{name}-2" not in ranks
