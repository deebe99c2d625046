"""The description of a job names what is known, what happened, and what could not be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, running, with_worker, worker
from support.stored import stored_document, view_of_snapshot
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import (
    Condition,
    DataRead,
    ExcludedNode,
    Incident,
    Restart,
    StoredCheckpoints,
    TierContents,
)
from surefoot_operator.cli.jobs.describe import (
    JobDescription,
    described,
    description_lines,
    incident_line,
    worker_state,
)
from surefoot_operator.cli.jobs.read_jobs import JobView, stored_job
from surefoot_operator.cli.local.progress import Happened

LOST = Incident("node-lost", "node n2 is gone", 2, "n2", 1, BEGAN + 40, first_step_seconds=BEGAN + 46, steps_lost=3)


def text(view: JobView, wide: bool = False) -> str:
    return "\n".join(description_lines(described(view), wide))


def test_a_running_job_is_described_in_the_order_people_ask() -> None:
    seen = running()
    status = replace(
        seen.status,
        message="epoch 1 runs with 3 ranks on 3 workers",
        conditions=(
            Condition("Running", "True", "Running", "", BEGAN),
            Condition("Resizing", "False", "Running", "", BEGAN),
            Condition("CheckpointProtected", "False", "Stalled", "no checkpoint became complete", BEGAN),
        ),
        incidents=(LOST,),
        excluded_nodes=(ExcludedNode("n7", "it failed twice", BEGAN + 900),),
    )
    told = text(view_of_snapshot(replace(seen, status=status), Happened(BEGAN + 40, "WorkerLost", "worker 2", True)))
    places = [told.index(word) for word in ("State:", "Message:", "At risk:", "Workers:", "Conditions:", "Incidents:")]
    assert places == sorted(places)
    assert "2 steps (4s) would be run again after a failure now" in told
    assert "60s ago, node-lost: node n2 is gone (6.0 s to the first new step, 3 steps lost)" in told
    assert "60s ago   Warning WorkerLost: worker 2" in told
    assert "n7: it failed twice" in told
    assert "Resizing" not in told  # what is false and has nothing to say
    assert "Could not be read" not in told


def test_what_is_not_known_yet_leaves_no_dash_in_a_sentence() -> None:
    seen = running()
    young = replace(seen.status, step=0, progress_seconds=None, last_complete=None)
    told = text(view_of_snapshot(replace(seen, status=young)))
    assert "Step:        0\n" in told
    assert "Checkpoint:  none yet\n" in told


def test_what_the_loader_told_of_the_data_is_shown() -> None:
    seen = running()
    read = replace(seen, status=replace(seen.status, data=DataRead(1.25, 48.0), loss=2.34567))
    assert "Data:        1.25 passes, 48 samples/s" in text(view_of_snapshot(read))
    assert "steps/s, loss 2.346" in text(view_of_snapshot(read))
    assert "Data:" not in text(view_of_snapshot(seen))
    assert "loss" not in text(view_of_snapshot(seen)).partition("Workers:")[0]


def test_the_bytes_of_each_tier_are_shown_once_they_are_known() -> None:
    seen = running()
    assert "Stored:" not in text(view_of_snapshot(seen))
    stored = StoredCheckpoints(TierContents(1_200_000_000, 2), TierContents(512, 1), copies=2)
    told = text(view_of_snapshot(replace(seen, status=replace(seen.status, checkpoints=stored))))
    assert "memory 1.20 GB in 2 checkpoints, 2 copies of the newest; persistent tier 512 bytes in 1 checkpoint" in told
    over = replace(seen.status, checkpoints=stored, phase="Complete")  # memory is given back
    assert "Stored:      persistent tier 512 bytes in 1 checkpoint\n" in text(
        view_of_snapshot(replace(seen, status=over))
    )


PROTECTED = Condition("CheckpointProtected", "True", "Protected", "", BEGAN)
ELASTIC = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 3}}


def at_risk(spec: dict[str, Any], **changes: Any) -> JobDescription:
    """The description of a job with this spec, its status changed."""
    seen = running()
    status = replace(seen.status, **changes)
    view = view_of_snapshot(replace(seen, status=status))
    document = view.stored.document
    return described(replace(view, stored=stored_job({**document, "spec": {**document["spec"], **spec}})))


@pytest.mark.parametrize(
    ("changes", "steps", "said"),
    [
        ({"conditions": (PROTECTED,)}, 2, "complete and protected (2 steps again); 2 workers go on"),
        ({"conditions": (replace(PROTECTED, status="False"),), "floor": Checkpoint(1, 30)}, 12, "persistent tier"),
        ({"conditions": (replace(PROTECTED, status="Unknown"),)}, None, "not known"),
        ({"conditions": ()}, None, "not known"),
        ({"conditions": (replace(PROTECTED, status="False"),), "last_complete": None}, 42, "the beginning"),
    ],
)
def test_what_the_loss_of_a_node_costs_depends_on_what_survives_it(
    changes: dict[str, Any], steps: int | None, said: str
) -> None:
    found = at_risk(ELASTIC, **changes)
    assert found.node_loss is not None
    assert found.node_loss.steps_again == steps
    assert said in "\n".join(description_lines(found))


def test_a_job_of_fixed_size_waits_for_a_replacement_of_a_lost_node() -> None:
    told = "\n".join(description_lines(at_risk({"replicas": 3}, conditions=(PROTECTED,))))
    assert "(2 steps again); training waits for a replacement" in told


@pytest.mark.parametrize("changes", [{"world": None, "lineage": ()}, {"phase": "Complete", "message": "over"}])
def test_a_job_that_does_not_train_has_no_node_to_lose(changes: dict[str, Any]) -> None:
    assert at_risk(ELASTIC, **changes).node_loss is None


def test_recoveries_and_planned_changes_are_measured_apart() -> None:
    grown = replace(LOST, kind="planned", first_step_seconds=BEGAN + 42)
    slow, still = replace(LOST, first_step_seconds=BEGAN + 50), replace(LOST, first_step_seconds=None)
    found = at_risk(ELASTIC, incidents=(LOST, grown, slow, still))
    assert found.recovery_seconds == {"failure": 8, "planned change": 2}
    told = "\n".join(description_lines(found))
    assert "Recovery:    8.0 s after a failure, 2.0 s after a planned change, the median of this job's own" in told
    assert "Recovery:" not in "\n".join(description_lines(at_risk(ELASTIC)))


def test_a_budget_that_is_used_up_is_said_to_be() -> None:
    spec = {"runPolicy": {"backoffLimit": 2}, "failurePolicy": {"maxRestarts": 4, "evalPeriodSeconds": 50}}
    restarts = tuple(Restart(BEGAN + at, True, True, True, count=2) for at in (40, 70))  # the first is too old
    told = "\n".join(description_lines(at_risk(spec, restarts_counted=2, recent_restarts=restarts)))
    assert (
        "Budgets:     2 of 2 backoffLimit (used up: the next restart that counts fails the job),"
        " 0 of 3 maxNoProgressRestarts, 2 of 4 maxRestarts\n" in told
    )


def test_what_could_not_be_read_is_named() -> None:
    view = replace(view_of_snapshot(running()), nodes=None, unread=("you may not list nodes",))
    assert "Could not be read:\n  you may not list nodes" in text(view)


def test_a_job_that_no_operator_has_seen_is_described_too() -> None:
    told = text(JobView(now=BEGAN, stored=stored_job(stored_document())))
    assert "Unseen" in told
    assert "every step: no checkpoint is known to be complete yet" in told


def test_of_many_workers_those_are_shown_that_are_not_well() -> None:
    seen = with_worker(running(workers=100), 7, phase="Failed", exit_code=1)
    told = text(view_of_snapshot(seen))
    assert told.count("Running\n") == 0
    assert "Failed (1)" in told
    assert "and 99 that run; -o wide shows them" in told
    assert "and 99" not in text(view_of_snapshot(seen), wide=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, "Running"), ({"deleting": True}, "Running, leaving"), ({"phase": "Failed", "exit_code": -9}, "Failed (-9)")],
)
def test_a_workers_state_in_words(changes: dict[str, object], said: str) -> None:
    assert worker_state(worker(0, **changes)) == said


def test_an_incident_that_is_not_over_says_so() -> None:
    open_one = replace(LOST, first_step_seconds=None, steps_lost=None)
    assert incident_line(open_one, BEGAN + 50) == "10s ago, node-lost: node n2 is gone (still recovering)"
