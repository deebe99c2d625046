"""`surefoot local` with a full disk, cordoned nodes, a hang and a kill by the OOM killer: what is blamed, and what nobody loses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_equal, assert_little_lost, assert_whole, faults, run, running

PACE = ("--pace", "0.05")
OOM_KILLED = (
    r"killed by the kernel's OOM killer(: the limit of the memory group|, for which SIGKILL stands in here \(.+\))"
)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_each_of_three_nodes_with_a_fault_of_its_own_is_told_of_as_what_it_is(tmp_path: Path) -> None:
    """One run, as each run imports PyTorch four times; none of its faults hides another.

    A full disk ends nothing. A worker ends in the moment in which its node is cordoned: there is no other, so the job waits
    until it is open again. The OOM killer ends a trainer on a node that is cordoned for good and keeps its worker.
    """
    struck = faults(
        "diskfull:2@step=10", "cordon:0@step=30", "cordon:1@step=60,for=4", "agent:1@step=60", "oom:0@step=110"
    )
    job = Job(steps=150, workers=3, trainer=PACE, gates=(50,))
    with running(tmp_path, job, *struck, "--compare") as under_way:
        under_way.wait("a word about the disk", lambda: bool(under_way.told("DiskFull")))
        (there,) = [one for one in under_way.members() if one.node == "node-2"]
        done = under_way.finish()
    assert_whole(done.report, 150)
    assert_equal(done.report)

    (told,) = done.told("DiskFull")
    assert told.startswith(f"worker {there.index} (attempt {there.attempt}): "), told
    assert told.endswith(f"logs/worker-{there.index}-{there.attempt} is full"), told
    full = [one for one in done.report["faults"] if "disk" in one["fault"]]
    assert full == [{"fault": "have the disk of node-2 be full from step 10", "step": 10}]
    assert len(done.report["faults"]) == len(struck) // 2, "each was struck once"

    lost, killed = done.report["incidents"]
    assert (lost["kind"], lost["node"], lost["fault"]) == ("agent-lost", "node-1", "kill agent of node-1 at step 60")
    assert lost["world_size_after"] == 3
    assert lost["first_step_seconds"] > 3, "its new worker came to a node that was cordoned"
    assert "node-1 takes workers again" in done.said
    (again,) = done.told("WorkerCreated")[3:]
    assert again.endswith("(attempt 2)")

    assert (killed["kind"], killed["node"]) == ("trainer-failed", "node-0")
    assert killed["fault"] == "have the OOM killer end a trainer of node-0 at step 110"
    assert re.search(OOM_KILLED, killed["reason"]), killed["reason"]
    assert_little_lost([lost, killed])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_trainer_that_hangs_is_named_with_the_line_of_its_program(tmp_path: Path) -> None:
    spec = {"healthPolicy": {"stepTimeoutSeconds": 40}}  # suspect after a fifth of it
    struck = faults("hang:0@step=15,for=1", "hang:1@step=40")
    done = run(tmp_path, Job(steps=80, workers=3, trainer=PACE, spec=spec), *struck, "--compare")
    assert_whole(done.report, 80)
    assert_equal(done.report)
    (hung,) = done.report["incidents"]
    assert (hung["kind"], hung["node"]) == ("hang", "node-1")
    assert hung["fault"] == "have a trainer of node-1 hang at step 40"
    where = r"rank \d on worker \d is in hang \(checkpointer/step_reports.py:\d+\), called by main \(programs/local_trainer.py:\d+\)"
    assert re.search(where, hung["reason"]), hung["reason"]
    assert_little_lost([hung])
    assert "the rank that hangs on node-0 continues" in done.said
