"""`surefoot local` with a cordoned node, a hang, a kill by the OOM killer and a full disk: what is blamed, and what nobody loses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_equal, assert_little_lost, assert_whole, faults, run, running

PACE = ("--pace", "0.05")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_cordoned_node_keeps_its_worker_and_takes_no_other(tmp_path: Path) -> None:
    """Its worker ends in the moment in which it is cordoned: there is no other node, so the job waits until it is open again."""
    struck = faults("cordon:0@step=20", "cordon:1@step=40,for=4", "agent:1@step=40")
    done = run(tmp_path, Job(steps=80, workers=3, trainer=PACE), *struck, "--compare")
    assert_whole(done.report, 80)
    assert_equal(done.report)
    (lost,) = done.report["incidents"]
    assert (lost["kind"], lost["node"], lost["fault"]) == ("agent-lost", "node-1", "kill agent of node-1 at step 40")
    assert_little_lost([lost])
    assert lost["world_after"] == 3
    assert lost["first_step_seconds"] > 3, "its new worker came to a node that was cordoned"
    assert "node-1 takes workers again" in done.said
    (again,) = done.told("WorkerCreated")[3:]
    assert again.endswith("(attempt 2)")


@pytest.mark.long
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
    where = r"rank \d on worker \d stands in hang \(checkpointer/injected_faults.py:\d+\), called by main \(programs/local_trainer.py:\d+\)"
    assert re.search(where, hung["reason"]), hung["reason"]
    assert_little_lost([hung])
    assert "whoever hangs on node-0 goes on" in done.said


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_trainer_that_the_oom_killer_ends_is_told_as_such(tmp_path: Path) -> None:
    done = run(tmp_path, Job(steps=80, workers=3, trainer=PACE), *faults("oom:1@step=40"), "--compare")
    assert_whole(done.report, 80)
    assert_equal(done.report)
    (killed,) = done.report["incidents"]
    assert (killed["kind"], killed["node"]) == ("trainer-failed", "node-1")
    assert killed["fault"] == "have the OOM killer end a trainer of node-1 at step 40"
    told = (
        r"killed by the kernel's OOM killer(: the limit of the memory group|, for which SIGKILL stands in here \(.+\))"
    )
    assert re.search(told, killed["reason"]), killed["reason"]
    assert_little_lost([killed])


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_full_disk_is_told_of_and_nobody_leaves(tmp_path: Path) -> None:
    job = Job(steps=80, workers=3, trainer=PACE, gates=(60,))
    with running(tmp_path, job, *faults("diskfull:1@step=20"), "--compare") as under_way:
        under_way.wait("a word about the disk", lambda: bool(under_way.told("DiskFull")))
        (there,) = [one for one in under_way.members() if one.node == "node-1"]
        done = under_way.finish()
    assert_whole(done.report, 80)
    assert_equal(done.report)
    assert done.report["incidents"] == []
    (told,) = done.told("DiskFull")
    assert told.startswith(f"worker {there.index} (attempt {there.attempt}): "), told
    assert told.endswith(f"logs/worker-{there.index}-{there.attempt} is full"), told
    assert done.report["faults"] == [{"fault": "have the disk of node-1 be full from step 20", "step": 20}]
