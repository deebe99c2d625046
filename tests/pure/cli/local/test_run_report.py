"""The report says what happened in seconds from the fault, and its last lines say it in words."""

from __future__ import annotations

import json
from typing import Any

from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Incident, JobStatus, TimeSpent
from surefoot_operator.cli.local import run_report
from surefoot_operator.cli.local.faults import Fault, Struck
from surefoot_operator.cli.local.progress import Account
from surefoot_operator.cli.local.run_report import Checkpoints, Comparison, RunRecords

NODE_KILL = Struck(Fault("node", "node-1", 40, 12.0), at_seconds=100.0, step=40)
TRAINER_KILL = Struck(Fault("trainer", "node-0", 60, None), at_seconds=150.0, step=60)
LOST = Incident(
    kind="node-lost",
    reason="node-1 is gone",
    worker=1,
    node="node-1",
    epoch=1,
    detected_seconds=100.2,
    claimed_seconds=100.25,
    assigned_seconds=101.0,
    first_step_seconds=103.5,
    last_step=40,
    parent_step=40,
    steps_lost=0,
    restored_from="memory",
    world_before=3,
    world_after=2,
)
GROWN = Incident(
    "planned",
    "grow to 3",
    None,
    None,
    2,
    113.0,
    assigned_seconds=113.5,
    restored_from="memory",
    world_before=2,
    world_after=3,
)


def test_seconds_count_from_the_fault_that_caused_the_incident() -> None:
    found = run_report.incident_report(LOST, [NODE_KILL, TRAINER_KILL])
    assert found["detected_seconds"] == 0.2
    assert found["assigned_seconds"] == 1.0
    assert found["first_step_seconds"] == 3.5
    assert found["stopped_seconds"] is None
    assert found["fault"] == "kill node-1 at step 40, returns after 12 s"


def test_a_planned_change_counts_from_its_own_beginning() -> None:
    found = run_report.incident_report(GROWN, [NODE_KILL])
    assert found["detected_seconds"] == 0.0
    assert found["assigned_seconds"] == 0.5
    assert found["fault"] is None


def test_an_incident_belongs_to_the_last_fault_on_its_own_node() -> None:
    later = Struck(Fault("node", "node-1", 80, None), 200.0, 80)
    again = Incident("node-lost", "gone", 1, "node-1", 3, 200.1)
    assert run_report.cause_of(again, [NODE_KILL, TRAINER_KILL, later]) == later
    assert run_report.cause_of(Incident("trainer-failed", "x", 2, "node-2", 3, 200.1), [NODE_KILL]) is None
    cordon = Struck(Fault("cordon", "node-1", 81, None), 200.05, 81)
    assert run_report.cause_of(again, [NODE_KILL, later, cordon]) == later, "what ends nothing is no cause"
    assert run_report.cause_of(Incident("coordinator", "x", None, None, 3, 200.1), [TRAINER_KILL]) == TRAINER_KILL
    assert run_report.cause_of(Incident("trainer-failed", "x", 0, "node-0", 3, 149.0), [TRAINER_KILL]) is None


RUN = RunRecords(
    lines=(),
    lineage=(LineageEntry(1, None, 3), LineageEntry(2, Checkpoint(1, 40), 2), LineageEntry(3, Checkpoint(2, 70), 3)),
    incidents=(LOST, GROWN),
    struck=(NODE_KILL,),
    checkpoints=Checkpoints(12, 3_400_000, 0.004),
    comparison=Comparison(3e-15, 1e-13, False, 120),
)


def report(status: JobStatus | None = None) -> dict[str, Any]:
    return run_report.build_report("Complete", RUN, Account(120, 24, 0, 0), status or JobStatus())


def test_where_the_seconds_went_is_reported_and_said() -> None:
    spent = TimeSpent(
        "", 1050.0, training_seconds=30, recovering_seconds=6, redone_seconds=4, waiting_seconds=0, suspended_seconds=10
    )
    body = report(JobStatus(start_seconds=1000.0, time_spent=spent))
    assert body["seconds"] == {"training": 30.0, "recovering": 6.0, "redone": 4.0, "suspended": 10.0}
    assert (body["goodput"], body["age_seconds"]) == (0.75, 50.0)
    said = "goodput 75.0%: training 30.0 s, suspended 10.0 s, recovering 6.0 s, redone 4.0 s"
    assert said in run_report.verdict(body)
    never = report()
    assert (never["goodput"], never["seconds"]) == (None, {})


def test_the_report_has_the_documented_keys() -> None:
    body = json.loads(json.dumps(report()))
    assert {
        "outcome",
        "epochs",
        "incidents",
        "max_loss_difference",
        "max_parameter_difference",
        "samples_lost",
        "samples_unknown",
        "samples_repeated",
        "checkpoints",
    } <= set(body)
    assert body["epochs"] == [
        {"epoch": 1, "world": 3, "from_step": 0, "restored_from": None},
        {"epoch": 2, "world": 2, "from_step": 40, "restored_from": "memory"},
        {"epoch": 3, "world": 3, "from_step": 70, "restored_from": "memory"},
    ]
    wanted = {"kind", "detected_seconds", "assigned_seconds", "first_step_seconds", "steps_lost", "restored_from"}
    assert all(wanted <= set(incident) for incident in body["incidents"])
    assert body["checkpoints"] == {"complete": 12, "bytes": 3_400_000, "median_stall_seconds": 0.004}


def test_the_last_lines_say_it_in_words() -> None:
    body = report()
    said = "\n".join([*run_report.timeline(body), *run_report.verdict(body)])
    assert "0.200 s  noticed" in said
    assert "world 3 -> 2, from step 40" in said
    assert "restored from memory, 0 steps lost" in said
    assert "worlds 3 -> 2 -> 3" in said
    assert "samples lost 0, repeated 0" in said
    assert "largest parameter difference 1e-13 (checkpoint of step 120)" in said
