"""What people read of a job: whether its workers have nodes, and what became of an edit that cannot be carried out."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, running, with_worker
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Condition, JobStatus, World
from surefoot_operator.api.topology_levels import topology_path
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.membership.lifecycle import accepted, refused
from surefoot_operator.policy.planning.plan import plan


def condition(status: JobStatus, kind: str) -> Condition | None:
    return next((c for c in status.conditions if c.type == kind), None)


def told(made: Plan) -> list[str]:
    return [e.message for e in made.events if e.reason == "JobRefused"]


def after(seen: Observed, kind: str) -> Condition | None:
    return condition(plan(seen).status, kind)


def test_workers_with_nodes_are_scheduled_and_one_without_says_why() -> None:
    found = after(running(), "PodsScheduled")
    assert found is not None
    assert (found.status, found.message) == ("True", "3 of 3 workers have a node")
    pending = with_worker(running(), 1, node=None, phase="Pending", message="0/3 nodes are available")
    found = after(pending, "PodsScheduled")
    assert found is not None
    assert (found.status, found.reason) == ("False", "Unschedulable")
    assert found.message == "2 of 3 workers have a node; worker 1 has no node: 0/3 nodes are available"


def test_a_refused_edit_is_told_once_for_each_sentence() -> None:
    seen = replace(running(), refusal="spec.x: 3 is not allowed")
    first = plan(seen)
    assert told(first) == ["spec.x: 3 is not allowed; the job continues with its former spec"]
    assert condition(first.status, "SpecRefused") is not None
    assert first.status.phase == "Running"
    again = replace(seen, status=first.status)
    assert told(plan(again)) == []
    other = plan(replace(again, refusal="spec.y: 4 is not allowed"))
    assert told(other) == ["spec.y: 4 is not allowed; the job continues with its former spec"]
    assert condition(plan(replace(again, refusal="")).status, "SpecRefused") is None


def test_a_refusal_before_the_beginning_fails_the_job_until_it_can_be_read() -> None:
    old = JobStatus(serial=3)
    told = refused(old, "no such thing", 2, BEGAN)
    assert (told.phase, told.message, told.observed_generation, told.serial) == ("Failed", "no such thing", 2, 3)
    assert refused(told, "no such thing", 2, BEGAN + 10) == told
    assert refused(told, "another thing", 3, BEGAN + 10).conditions[0].last_transition_seconds == BEGAN
    assert accepted(told).phase == "Pending"
    assert condition(accepted(told), "Failed") is None


def test_a_refusal_later_changes_nothing_but_what_is_told() -> None:
    runs = JobStatus(phase="Running", world=World(1, "Committed"), serial=3)
    told = refused(runs, "no such thing", 2, BEGAN)
    assert (told.phase, told.world) == ("Running", runs.world)
    assert condition(told, "SpecRefused") is not None
    assert accepted(told) == told


def test_a_job_that_is_over_stays_as_it_ended() -> None:
    for phase in ("Complete", "Failed"):
        over = JobStatus(
            phase=phase, world=World(1, "Committed"), conditions=(Condition(phase, "True", phase, "", 1.0),)
        )
        assert refused(over, "no such thing", 2, BEGAN) == over
        assert accepted(over) == over


def test_a_memory_tier_that_is_away_protects_nothing_once_training_has_gone_on() -> None:
    """Found on a cluster: as no holder was there to be read, the condition stayed what it was for good."""
    safe = after(running(step=42), "CheckpointProtected")
    assert safe is not None
    assert safe.status == "True"
    soon, late = (replace(running(step=step), holders=()) for step in (79, 81))
    soon, late = (
        replace(s, status=replace(s.status, conditions=(safe,), floor=Checkpoint(1, 30))) for s in (soon, late)
    )
    kept, lost = after(soon, "CheckpointProtected"), after(late, "CheckpointProtected")
    assert kept is not None
    assert lost is not None
    assert (kept.status, lost.status, lost.reason) == ("True", "False", "Stalled")
    new_leader = after(replace(late, term_seconds=late.now - 1), "CheckpointProtected")
    assert new_leader is not None
    assert new_leader.status == "True"


def protected(racks: tuple[str, ...] = ()) -> str:
    """What is said of three nodes in these racks; ranks save to their own node and the next."""
    seen = running()
    nodes = tuple(
        replace(node, path=topology_path({"topology.kubernetes.io/zone": "z", "topology.kubernetes.io/rack": rack}))
        for node, rack in zip(seen.nodes, racks or ("", "", ""), strict=True)
    )
    found = after(replace(seen, nodes=nodes), "CheckpointProtected")
    assert found is not None
    assert found.status == "True"
    return found.message


def test_the_spread_of_copies_is_told() -> None:
    assert protected() == "a complete checkpoint has 2 copies on 2 nodes"
    assert protected(("r1", "r2", "r3")) == "a complete checkpoint has 2 copies in 2 racks"
    assert protected(("r1", "r1", "r2")) == "a complete checkpoint has 2 copies, for some ranks all within 1 rack"
    assert protected(("r1", "r1", "r1")) == "a complete checkpoint has 2 copies on 2 nodes", "there is one rack only"


def test_records_that_break_a_bound_are_told_by_name_and_training_goes_on() -> None:
    why = "holder n/i: index entry 1:113:0: world is 1000000000, allowed are 1 to 1048576"
    seen = replace(running(), refused_records=(why, "another"))
    made = plan(seen)
    found = condition(made.status, "RecordsRefused")
    assert found is not None
    assert (found.status, found.reason, found.message) == ("True", "OutOfBounds", f"{why} (and 1 more)")
    assert [e.message for e in made.events if e.reason == "RecordsRefused"] == [
        f"ignored a record of this job: {why} (and 1 more)"
    ]
    assert (made.status.phase, made.actions) == ("Running", plan(running()).actions)
    assert not [e for e in plan(replace(seen, status=made.status)).events if e.reason == "RecordsRefused"]
    assert condition(plan(running()).status, "RecordsRefused") is None
