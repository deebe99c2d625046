"""`explain` asks the operator's own plan: now, and with one fault in the snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, running
from support.stored import stored_document, view_of_snapshot, written
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.status import Condition, Incident, JobStatus
from surefoot_operator.cli.jobs.explain import FaultCost, assumed_snapshot, explain, explanation_lines, recovery_seconds
from surefoot_operator.cli.jobs.read_jobs import JobView, stored_job
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.planning.plan import plan

PROTECTED = Condition("CheckpointProtected", "True", "Protected", "", BEGAN)
ELASTIC = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 3}}


def view(status: JobStatus | None = None, seen: Observed | None = None, **spec: Any) -> JobView:
    seen = seen or running()
    found = view_of_snapshot(seen)
    document = written(status or replace(seen.status, conditions=(PROTECTED,)), seen)
    return replace(found, stored=stored_job({**document, "spec": {**document["spec"], **(spec or ELASTIC)}}))


def faults(found: JobView) -> dict[str, FaultCost]:
    return {one.fault: one for one in explain(found).faults}


def test_a_healthy_job_is_at_rest_for_the_plan_as_well() -> None:
    found = explain(view())
    assert found.decision == "epoch 1 runs with 3 ranks on 3 workers"
    assert found.actions == ()


def test_what_is_assumed_plans_as_what_the_operator_sees() -> None:
    """The snapshot of every agent that is heard, and the one made here, lead to one sentence."""
    seen, job = running(), parse_job({**stored_document(), "spec": {**stored_document()["spec"], **ELASTIC}})
    made = assumed_snapshot(view(), job, seen.status, 0.1)
    assert plan(made).reason == plan(replace(seen, job=job)).reason
    assert plan(made).actions == plan(replace(seen, job=job)).actions


def test_each_fault_has_the_operators_sentence_and_its_price() -> None:
    lost = Incident("node-lost", "r", 2, "n2", 1, BEGAN, first_step_seconds=BEGAN + 6)
    slow = replace(lost, first_step_seconds=BEGAN + 10)
    status = replace(running().status, conditions=(PROTECTED,), incidents=(lost, slow))
    found = faults(view(status))
    failed, gone, drained = (
        found[f"{name}"] for name in ("a trainer on worker 2 fails", "node n2 is lost", "node n2 is drained")
    )
    assert "exit code 1: an error, assumed here" in failed.decision
    assert "node n2 of worker 2 is gone: lost, assumed here" in gone.decision
    assert "proposing a hold at step" in drained.decision
    assert [one.steps_lost for one in (failed, gone, drained)] == [2, 2, 0]
    assert [one.workers_after for one in (failed, gone, drained)] == [3, 2, 2]
    assert [one.recovery_seconds for one in (failed, gone, drained)] == [8.0, 8.0, None]
    assert gone.steps_lost_seconds == pytest.approx(2 * 99.95 / 42)


def test_a_job_of_fixed_size_waits_for_a_replacement() -> None:
    assert faults(view(replicas=3))["node n2 is lost"].workers_after == 0


def test_the_failure_that_would_end_the_job_is_foretold() -> None:
    found = explain(view(runPolicy={"backoffLimit": 0}, **ELASTIC))
    [ending] = [one for one in found.faults if one.ends_job]
    assert ending.fault == "a trainer on worker 2 fails"
    assert "backoffLimit (0)" in ending.decision
    assert any("THE JOB WOULD FAIL" in line for line in explanation_lines(found))


@pytest.mark.parametrize(
    ("changes", "steps", "said"),
    [
        ({"conditions": (PROTECTED,)}, 2, "complete and protected"),
        ({"conditions": (replace(PROTECTED, status="False"),), "floor": Checkpoint(1, 30)}, 12, "persistent tier"),
        ({"conditions": (replace(PROTECTED, status="Unknown"),)}, None, "not known"),
        ({"conditions": ()}, None, "not known"),
        ({"conditions": (replace(PROTECTED, status="False"),), "last_complete": None}, 42, "the beginning"),
    ],
)
def test_what_is_lost_depends_on_what_is_safe(changes: dict[str, Any], steps: int | None, said: str) -> None:
    found = faults(view(replace(running().status, **changes)))["node n2 is lost"]
    assert (found.steps_lost, said in found.restored) == (steps, True)


@pytest.mark.parametrize("changes", [{"world": None, "lineage": ()}, {"phase": "Complete", "message": "over"}])
def test_a_job_without_a_world_has_no_next_fault(changes: dict[str, Any]) -> None:
    found = explain(view(replace(running().status, **changes)))
    assert found.faults == ()
    assert found.decision


def test_a_job_that_cannot_be_read_is_not_explained() -> None:
    found = explain(JobView(now=BEGAN, stored=stored_job(stored_document({"schemaVersion": 9}))))
    assert found.decision == "cannot be told"
    assert "another version" in found.doubts[0]


def test_nodes_that_may_not_be_seen_are_a_doubt() -> None:
    found = explain(replace(view(), nodes=None, unread=("you may not list nodes",)))
    assert "you may not list nodes" in found.doubts
    assert "nodes are taken for well" in found.doubts
    assert found.faults[1].decision  # the pods tell it too


def test_recoveries_that_were_planned_are_no_measure_of_others() -> None:
    lost = Incident("node-lost", "r", 2, "n2", 1, BEGAN, first_step_seconds=BEGAN + 6)
    grown = replace(lost, kind="planned", first_step_seconds=BEGAN + 2)
    status = replace(running().status, incidents=(lost, grown, replace(lost, first_step_seconds=None)))
    assert (recovery_seconds(status, planned=False), recovery_seconds(status, planned=True)) == (6, 2)
    assert recovery_seconds(running().status, planned=False) is None


def test_the_words_name_now_faults_budgets_and_doubts() -> None:
    lines = explanation_lines(explain(view()))
    text = "\n".join(lines)
    for part in ("from here it would say:", "if node n2 is lost now:", "budgets:", "not certain:"):
        assert part in text
    assert "restarts that the program caused: 0 of backoffLimit 6" in text
