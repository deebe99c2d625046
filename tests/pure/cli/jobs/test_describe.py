"""Tests of `cli.jobs.describe`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, running, with_node, with_worker, worker
from support.stored import stored_document, view_of_snapshot, written
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import (
    CheckpointLatency,
    Condition,
    DataProgress,
    ExcludedNode,
    Incident,
    JobStatus,
    LatencyQuantiles,
    Restart,
    SaveInterval,
    StoredCheckpoints,
    TierContents,
    TimeSpent,
)
from surefoot_operator.cli.jobs.describe import (
    JobDescription,
    TimelinePhase,
    describe_job,
    description_lines,
    incident_line,
    node_lines,
    node_rows,
    timeline_lines,
    timeline_of,
    worker_state,
)
from surefoot_operator.cli.jobs.list_jobs import (
    JobSummary,
    format_at_risk,
    format_newest_checkpoint,
    format_progress,
    format_seconds,
    job_lines,
    summarize,
)
from surefoot_operator.cli.jobs.read_jobs import JobProgress, JobView, pace_of, stored_job
from surefoot_operator.cli.local.run_event import RunEvent
from surefoot_operator.job_snapshot import ObservedNode

# ---- describe job ----------------------------------------------------------------------------------------------------
# The description of a job names what is known, what happened, and what could not be read.

LOST = Incident("node-lost", "node n2 is gone", 2, "n2", 1, BEGAN + 40, first_step_seconds=BEGAN + 46, steps_lost=3)


def text(view: JobView, wide: bool = False) -> str:
    return "\n".join(description_lines(describe_job(view), wide))


def test_a_running_job_is_described_in_the_order_people_ask() -> None:
    seen = running()
    status = replace(
        seen.status,
        message="generation 1 runs with 3 ranks on 3 workers",
        conditions=(
            Condition("Running", "True", "Running", "", BEGAN),
            Condition("Resizing", "False", "Running", "", BEGAN),
            Condition("CheckpointProtected", "False", "Overdue", "no checkpoint became complete", BEGAN),
        ),
        incidents=(LOST,),
        excluded_nodes=(ExcludedNode("n7", "it failed twice", BEGAN + 900),),
    )
    told = text(view_of_snapshot(replace(seen, status=status), RunEvent(BEGAN + 40, "WorkerLost", "worker 2", True)))
    places = [
        told.index(word)
        for word in (
            "State:",
            "Checkpoint latency:",
            "Goodput:",
            "Step:",
            "At risk:",
            "Workers:",
            "Conditions:",
            "Incidents:",
        )
    ]
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
    assert "Step:               0\n" in told
    assert "Checkpoint:         none yet\n" in told


def test_what_the_loader_told_of_the_data_is_shown() -> None:
    seen = running()
    read = replace(seen, status=replace(seen.status, data=DataProgress(1.25, 48.0), loss=2.34567))
    assert "Data:               1.25 passes, 48 samples/s" in text(view_of_snapshot(read))
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
    assert "Stored:             persistent tier 512 bytes in 1 checkpoint\n" in text(
        view_of_snapshot(replace(seen, status=over))
    )


PROTECTED = Condition("CheckpointProtected", "True", "SufficientCopies", "", BEGAN)
ELASTIC = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 3}}


def at_risk(spec: dict[str, Any], **changes: Any) -> JobDescription:
    """The description of a job with this spec, its status changed."""
    seen = running()
    status = replace(seen.status, **changes)
    view = view_of_snapshot(replace(seen, status=status))
    document = view.stored.document
    return describe_job(replace(view, stored=stored_job({**document, "spec": {**document["spec"], **spec}})))


@pytest.mark.parametrize(
    ("changes", "steps", "said"),
    [
        ({"conditions": (PROTECTED,)}, 2, "(complete and protected) and runs 2 steps again, with 2 workers"),
        (
            {"conditions": (replace(PROTECTED, status="False"),), "last_uploaded": Checkpoint(1, 30)},
            12,
            "persistent tier",
        ),
        ({"conditions": (replace(PROTECTED, status="Unknown"),)}, None, "an unknown checkpoint"),
        ({"conditions": ()}, None, "an unknown checkpoint"),
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
    assert "and runs 2 steps again, once the node is replaced" in told


@pytest.mark.parametrize("changes", [{"membership": None, "lineage": ()}, {"phase": "Complete", "message": "over"}])
def test_a_job_that_does_not_train_has_no_node_to_lose(changes: dict[str, Any]) -> None:
    assert at_risk(ELASTIC, **changes).node_loss is None


def test_recoveries_and_planned_changes_are_measured_apart() -> None:
    grown = replace(LOST, kind="planned", first_step_seconds=BEGAN + 42)
    slow, still = replace(LOST, first_step_seconds=BEGAN + 50), replace(LOST, first_step_seconds=None)
    found = at_risk(ELASTIC, incidents=(LOST, grown, slow, still))
    assert found.recovery_seconds == {"failure": 8, "planned change": 2}
    told = "\n".join(description_lines(found))
    assert (
        "Recovery:           8.0 s after a failure, 2.0 s after a planned change, the median of this job's own" in told
    )
    assert "Recovery:" not in "\n".join(description_lines(at_risk(ELASTIC)))


def test_a_budget_that_is_used_up_is_said_to_be() -> None:
    spec = {"runPolicy": {"backoffLimit": 2}, "failurePolicy": {"maxRestarts": 4, "evalPeriodSeconds": 50}}
    restarts = tuple(Restart(BEGAN + at, count=2) for at in (40, 70))  # the first is too old
    told = "\n".join(description_lines(at_risk(spec, restarts_counted=2, recent_restarts=restarts)))
    assert (
        "Budgets:            2 of 2 backoffLimit (used up: the next restart that counts fails the job),"
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


# ---- job summary -----------------------------------------------------------------------------------------------------
# Progress, rate, what is left and what a failure now would cost: known, or said to be unknown.

TOTAL = {"annotations": {"surefoot.dev/total-steps": "142"}}


def cells(found: list[JobSummary]) -> list[dict[str, str]]:
    """Each row of the list by its columns."""
    columns, *rows = (re.split(r" {3,}", line) for line in job_lines(found, wide=True, everywhere=True))
    return [dict(zip(columns, [*row, ""], strict=False)) for row in rows]


def pace(status: JobStatus | None = None, now: float = BEGAN + 100, **metadata: Any) -> JobProgress:
    seen = running()
    return pace_of(stored_job(written(status or seen.status, seen, **metadata)), now)


def test_rate_and_rest_are_of_the_present_world() -> None:
    found = pace(**TOTAL)
    assert found.steps_per_second == pytest.approx(42 / 99.95)
    assert found.remaining_seconds == pytest.approx(100 * 99.95 / 42)
    assert (found.checkpoint_step, found.exposed_steps) == (40, 2)
    assert found.exposed_seconds == pytest.approx(2 * 99.95 / 42)


def test_what_the_operator_measured_goes_before() -> None:
    chosen = SaveInterval(5, 0, "auto", BEGAN, 0, BEGAN, step_seconds=0.5)
    assert pace(replace(running().status, memory_interval=chosen)).steps_per_second == 2


@pytest.mark.parametrize(
    "changes", [{"step": 2}, {"progress_seconds": None}, {"membership": None}, {"step": 0, "last_complete": None}]
)
def test_a_rate_of_too_little_is_unknown(changes: dict[str, Any]) -> None:
    found = pace(replace(running().status, **changes), **TOTAL)
    assert (found.steps_per_second, found.remaining_seconds, found.exposed_seconds) == (None, None, None)


def test_a_checkpoint_that_is_newer_than_the_step_counts_as_the_step() -> None:
    newer = replace(running().status, step=38)
    found = pace(newer, BEGAN + 99.95)
    assert (found.step, found.exposed_steps) == (40, 0), "a failure now would repeat nothing"


def test_what_is_at_risk_counts_the_steps_since_the_status_was_written() -> None:
    seen = replace(running().status, memory_interval=SaveInterval(5, 0, "auto", BEGAN, 0, BEGAN, step_seconds=0.5))
    assert seen.progress_seconds is not None
    at = seen.progress_seconds
    assert [pace(seen, at + late).exposed_steps for late in (-1, 0, 3, 8, 600)] == [2, 2, 8, 18, 18]
    held = replace(seen, phase="Suspended")
    assert pace(held, at + 3).exposed_steps == 2


def test_wide_rows_have_the_bytes_of_each_tier() -> None:
    seen = running()
    stored = StoredCheckpoints(TierContents(2_500_000_000, 2), TierContents(512, 1))
    found = summarize(stored_job(written(replace(seen.status, checkpoints=stored), seen)), BEGAN + 100)
    row = cells([found])[0]
    assert (row["IN-MEMORY"], row["PERSISTENT"]) == ("2.50 GB", "512 bytes")
    over = summarize(stored_job(written(replace(seen.status, checkpoints=stored, phase="Complete"), seen)), BEGAN + 100)
    assert (over.memory_bytes, over.persistent_bytes) == (None, 512)
    unknown = summarize(stored_job(written(seen.status, seen)), BEGAN + 100)
    assert (cells([unknown])[0]["IN-MEMORY"], cells([unknown])[0]["PERSISTENT"]) == ("-", "-")


def test_a_job_that_is_over_risks_nothing() -> None:
    found = pace(replace(running().status, phase="Complete"), **TOTAL)
    assert (found.exposed_steps, found.remaining_seconds) == (None, None)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (JobProgress(), ("-", "-", "-")),
        (JobProgress(7), ("7", "-", "-")),
        (JobProgress(7, 10, 1.0, 3.0, 5, 12.0, 1, 1.0), ("7/10 (70%)", "5 (12s)", "1 step (1s)")),
        (JobProgress(12, 10, None, None, 5, None, 2, None), ("12/10 (100%)", "5", "2 steps")),
    ],
)
def test_words_of_a_pace(found: JobProgress, words: tuple[str, str, str]) -> None:
    assert (format_progress(found), format_newest_checkpoint(found), format_at_risk(found)) == words


def test_the_list_has_a_row_for_each_job_whatever_is_wrong_with_it() -> None:
    seen = running()
    jobs = (
        stored_job(written(seen.status, seen, creationTimestamp="1970-01-01T00:16:40Z", **TOTAL)),
        stored_job(stored_document(name="new")),
        stored_job(stored_document({"schemaVersion": 9, "phase": "Running", "step": 3}, name="newer")),
    )
    found = [summarize(one, BEGAN + 100) for one in jobs]
    well, new, newer = cells(found)
    assert list(well.values())[:6] == ["team", "gpt", "Running", "-", "-", "-"]
    assert [well[name] for name in ("READY", "WORLD SIZE", "STEP", "LEFT", "CHECKPOINT")] == [
        "3/3", "3", "42/142 (29%)", "3m57s", "40 (0s)",
    ]  # fmt: skip
    assert [new[name] for name in ("STATE", "READY", "WORLD SIZE", "STEP", "LEFT")] == ["Unseen", "-", "-", "-", "-"]
    assert "is surefoot-operator running" in new["MESSAGE"]
    assert newer["STEP"] == "3"
    assert "another version" in newer["MESSAGE"]
    assert len(re.split(" {3,}", job_lines(found, wide=False, everywhere=False)[0])) == 11


LATENCY = CheckpointLatency(LatencyQuantiles(0.0077, 0.019), LatencyQuantiles(0.033, 0.09))


def test_list_begins_with_checkpoint_latency_then_recovery_then_goodput() -> None:
    seen = running()
    spent = TimeSpent("training", BEGAN + 100, training_seconds=75, recovering_seconds=25)
    incidents = (replace(LOST, first_step_seconds=BEGAN + 90), replace(LOST, kind="planned"), LOST)
    status = replace(seen.status, checkpoint_latency=LATENCY, time_spent=spent, incidents=incidents)
    [row] = cells([summarize(stored_job(written(status, seen)), BEGAN + 100)])
    assert list(row.items())[2:6] == [
        ("STATE", "Running"), ("CHECKPOINT LATENCY", "19ms/90ms/-"), ("RECOVERY", "6s"), ("GOODPUT", "75.0%"),
    ]  # fmt: skip


def test_description_compares_checkpoint_latency_with_the_save_interval() -> None:
    seen = running()
    status = replace(seen.status, checkpoint_latency=LATENCY)
    lines = text(view_of_snapshot(replace(seen, status=status))).splitlines()
    assert lines[3] == (
        "Checkpoint latency: stall 7.7ms (p99 19ms), replicated 33ms (p99 90ms); saved to memory every 10 steps (23.8s)"
    )
    unmeasured = text(view_of_snapshot(seen)).splitlines()[3]
    assert unmeasured.startswith("Checkpoint latency: not measured yet; saved to memory every 10 steps")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0004, "0.4ms"), (0.0996, "100ms"), (0.9994, "999ms"), (1.0, "1s"), (12.34, "12.3s"), (300.0, "5m0s")],
)
def test_durations_keep_their_milliseconds(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words


def test_no_jobs_are_said_to_be_none() -> None:
    assert "-A lists all" in job_lines([], wide=False, everywhere=False)[0]
    assert job_lines([], wide=False, everywhere=True) == ["no TrainingJobs"]


# ---- list nodes ------------------------------------------------------------------------------------------------------
# A job's nodes: what runs there, and why they are left; what may not be read is a dash.


def test_each_node_has_its_workers_ranks_and_holder() -> None:
    found = node_rows(view_of_snapshot(running()))
    assert [(one.name, one.state, one.workers, one.ranks, one.server) for one in found] == [
        (f"n{n}", "Ready", (f"{n}-1",), (str(n),), "running") for n in range(3)
    ]
    assert node_lines(found)[1].split() == ["n0", "Ready", "n0", "0-1", "0", "running"]


def test_states_and_reasons_are_told_apart() -> None:
    seen = with_node(running(), "n0", ready=False, reason="its taint")
    seen = with_node(seen, "n1", schedulable=False, evacuation_reason="it has the taint x")
    seen = with_node(seen, "n2", unconfirmed_failure="its kubelet is silent")
    seen = replace(
        seen, status=replace(seen.status, excluded_nodes=(ExcludedNode("n9", "it failed twice", BEGAN + 900),))
    )
    found = {one.name: (one.state, one.why) for one in node_rows(view_of_snapshot(seen))}
    assert found == {
        "n0": ("NotReady", "its taint"),
        "n1": ("Ready, cordoned", "it has the taint x"),
        "n2": ("doubted", "its kubelet is silent"),
        "n9": ("gone", "it failed twice"),
    }


def test_nodes_that_may_not_be_read_are_not_gone() -> None:
    view = replace(view_of_snapshot(running()), nodes=None, servers=None)
    assert {(one.state, one.domain, one.server) for one in node_rows(view)} == {("-", "-", "-")}


def test_a_worker_that_ended_holds_no_node_but_its_member_is_shown() -> None:
    found = node_rows(view_of_snapshot(with_worker(running(), 1, phase="Failed")))
    assert [(one.name, one.workers) for one in found][1] == ("n1", ())


def test_other_nodes_of_the_cluster_are_shown_when_asked_for() -> None:
    seen = running()
    view = view_of_snapshot(replace(seen, nodes=(*seen.nodes, ObservedNode("spare", "spare", True))))
    view = replace(view, servers={"n0": False})
    assert [one.name for one in node_rows(view)] == ["n0", "n1", "n2"]
    assert [(one.name, one.server) for one in node_rows(view, everything=True)][-1] == ("spare", "none")
    assert node_rows(view)[0].server == "not ready"


def test_a_job_that_is_nowhere_says_so() -> None:
    assert node_lines([]) == ["the job has no node"]


# ---- job timeline ----------------------------------------------------------------------------------------------------
# Events, incidents and the ends of a job in one order.

LOST_JOB_TIMELINE = Incident(
    "node-lost", "node n2 is gone", 2, "n2", 1, BEGAN + 40.25,
    claimed_seconds=BEGAN + 40.5, first_step_seconds=BEGAN + 46, steps_lost=3, restored_from="memory",
)  # fmt: skip


def test_everything_is_in_order_and_an_incident_has_its_phases() -> None:
    seen = running()
    status = replace(
        seen.status,
        incidents=(LOST_JOB_TIMELINE,),
        phase="Complete",
        completion_seconds=BEGAN + 90,
        message="every trainer finished",
    )
    happened = (RunEvent(BEGAN + 41, "WorkerLost", "worker 2", True), RunEvent(BEGAN + 46.5, "Restored", "on", False))
    found = timeline_of(view_of_snapshot(replace(seen, status=status), *happened))
    assert [one.kind for one in found] == ["start", "incident", "WorkerLost", "Restored", "end"]
    lines = timeline_lines(found)
    assert lines[1] == "1970-01-01 00:17:20     +40.2 s ! incident: node-lost: node n2 is gone"
    assert [line.strip() for line in lines[2:5]] == [
        "0.000 s  noticed",
        "0.250 s  new generation claimed",
        "5.750 s  first new step, restored from memory, 3 steps lost",
    ]
    assert lines[-1].endswith("end: Complete: every trainer finished")
    # for a script the same phases are numbers with names, not lines of text
    assert found[1].phases[1] == TimelinePhase("claimed", 0.25, "new generation claimed")


def test_incidents_can_be_had_without_events() -> None:
    seen = running()
    view = view_of_snapshot(
        replace(seen, status=replace(seen.status, incidents=(LOST_JOB_TIMELINE,))), RunEvent(BEGAN, "x", "y", False)
    )
    assert [one.kind for one in timeline_of(view, events=False)] == ["start", "incident"]


def test_a_planned_change_is_no_warning() -> None:
    seen = running()
    planned = replace(LOST_JOB_TIMELINE, kind="planned")
    found = timeline_of(view_of_snapshot(replace(seen, status=replace(seen.status, incidents=(planned,)))))
    assert [one.warning for one in found] == [False, False]


def test_nothing_known_is_said() -> None:
    assert "nothing is known" in timeline_lines([])[0]
