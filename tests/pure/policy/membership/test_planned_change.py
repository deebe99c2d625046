"""Tests of `policy.membership.planned_change`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from support.builders import (
    BEGAN,
    job,
    running,
    session,
    told,
    with_holder,
    with_node,
    with_session,
    with_worker,
    worker,
)
from support.fakes.fake_world import FakeWorld
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.spec import CheckpointPolicy, FailurePolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import Incident, Membership
from surefoot_operator.job_snapshot import JobSnapshot, ObservedBarrier, ObservedExit, ObservedNode
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker, RequestRepair, UploadSaves
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance
from surefoot_operator.policy.membership.planned_change import (
    FIRST_STEP_SECONDS,
    MAX_SNAPSHOT_AGE_SECONDS,
    MOVE_SECONDS,
    describe_data_lost_with_node,
)
from surefoot_operator.policy.planning.plan import plan

# ---- leaving ---------------------------------------------------------------------------------------------------------
# An announced loss is no loss: whoever is to leave, of whatever job, the world halts at a saved step and goes on from it.

NOW = BEGAN + 100
GOAL = Checkpoint(1, 48)

SHAPES: dict[str, dict[str, Any]] = {
    "fixed": {"least": None},
    "elastic": {"least": 1},
    "elastic, at its minimum": {"least": 3},
    "fixed, of one worker": {"least": None, "workers": 1},
}
NOTICES: dict[str, Callable[[JobSnapshot, int], JobSnapshot]] = {
    "deleted": lambda seen, index: with_worker(seen, index, deleting=True),
    "evicted": lambda seen, index: with_worker(seen, index, deleting=True, disruption_announced=True, message="EvictionByEvictionAPI: x"),
    "about to be evicted": lambda seen, index: with_worker(seen, index, disruption_announced=True, message="PreemptionByScheduler: y"),
    "told to end by its node alone": lambda seen, index: with_session(seen, index, terminating=True),
}  # fmt: skip


def actions(seen: JobSnapshot, *kinds: type[Any]) -> list[Any]:
    return [a for a in plan(seen).actions if isinstance(a, kinds)]


def bound(seen: JobSnapshot, held: bool = True, copies: int = 2) -> JobSnapshot:
    """Every rank has accepted to halt at step 48, and waits there with what it saved."""
    seen = replace(seen, barrier=ObservedBarrier(Barrier(1, GOAL.step, "bound"), NOW - 1))
    if not held:
        return seen
    there = {"step": GOAL.step, "barrier_step": GOAL.step, "saved": GOAL, "copies": copies}
    return replace(seen, sessions=tuple(told(s, **there) for s in seen.sessions))


@pytest.mark.parametrize("notice", sorted(NOTICES))
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_whoever_is_to_leave_the_world_is_asked_to_halt_and_nobody_is_lost(shape: str, notice: str) -> None:
    seen = NOTICES[notice](running(**SHAPES[shape]), 0)
    made = plan(seen)
    assert [a.phase for a in made.actions if isinstance(a, Barrier)] == ["proposed"]
    assert made.reason.startswith(
        "worker 0 is being deleted" if "told" not in notice else "worker 0 was asked to terminate"
    )
    assert made.status.membership == seen.status.membership
    assert made.status.incidents == ()


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_once_all_wait_with_their_saves_the_epoch_is_claimed_and_no_budget_knows_of_it(shape: str) -> None:
    seen = bound(NOTICES["evicted"](running(**SHAPES[shape]), 0))
    made = plan(seen)
    assert made.status.membership is not None
    assert (made.status.membership.state, made.status.membership.generation) == ("Claimed", 2)
    assert [i.kind for i in made.status.incidents] == ["planned"]
    assert (made.status.restarts, made.status.restarts_counted, made.status.recent_restarts) == (0, 0, ())


def test_nobody_is_left_to_train_where_all_leave_at_once_and_that_too_is_a_halt() -> None:
    seen = running(least=None)
    for index in range(3):
        seen = NOTICES["deleted"](seen, index)
    assert len(actions(seen, Barrier)) == 1
    assert claims(bound(seen))


def test_of_a_thousand_that_leave_a_few_are_named() -> None:
    seen = running(workers=30, least=None)
    for index in range(30):
        seen = NOTICES["deleted"](seen, index)
    assert plan(seen).reason.startswith(
        "; ".join(f"worker {n} is being deleted" for n in range(4)) + "; 26 more: proposing a barrier at step"
    )


def _before_its_first_step() -> JobSnapshot:
    seen = running(least=None)
    fresh = tuple(told(s, step=0, step_at_seconds=None, saved=None) for s in seen.sessions)
    return NOTICES["deleted"](replace(seen, sessions=fresh), 1)


def test_a_world_is_halted_also_in_its_first_step() -> None:
    """Word of that step may be on its way: a claim that halts nobody loses it."""
    seen = _before_its_first_step()
    (asked,) = actions(seen, Barrier)
    assert asked.step == 6
    parent = Checkpoint(1, 40)
    again = replace(seen.status, membership=replace(seen.status.membership, parent=parent))  # type: ignore[type-var]
    (asked,) = actions(replace(seen, status=again), Barrier)
    assert asked.step == parent.step + 6


@pytest.mark.parametrize(("age", "claimed"), [(FIRST_STEP_SECONDS - 1.0, False), (FIRST_STEP_SECONDS, True)])
def test_a_world_that_is_long_in_starting_and_refuses_is_left_without_a_halt(age: float, claimed: bool) -> None:
    seen = _before_its_first_step()
    world = seen.status.membership
    assert world is not None
    barrier = ObservedBarrier(Barrier(world.generation, 3, "cancelled"), NOW - 0.2)
    young = replace(seen.status, membership=replace(world, changed_seconds=NOW - age))
    made = plan(replace(seen, status=young, barrier=barrier))
    assert made.status.membership is not None
    assert (made.status.membership.state == "Claimed") is claimed


@pytest.mark.parametrize(
    ("pace", "since", "ahead"), [(0.1, 0.05, 6), (2.0, 0.1, 1), (2.0, 1.8, 2), (20.0, 0.5, 1), (None, 0.1, 3)]
)
def test_a_notice_shorter_than_two_steps_is_met_at_the_end_of_the_step_under_way(
    pace: float | None, since: float, ahead: int
) -> None:
    seen = NOTICES["deleted"](running(least=None), 1)
    sessions = tuple(told(s, step_seconds=pace, step_at_seconds=NOW - since) for s in seen.sessions)
    (asked,) = actions(replace(seen, sessions=sessions), Barrier)
    assert asked.step == 42 + ahead


def test_a_second_notice_while_all_wait_changes_only_who_is_waited_for() -> None:
    once = bound(NOTICES["deleted"](running(least=1), 0), held=False)
    twice = NOTICES["deleted"](once, 1)
    assert plan(once).actions == tuple(a for a in plan(once).actions if isinstance(a, CreateWorker))
    assert actions(twice, Barrier) == []
    assert "worker 0 is being deleted; worker 1 is being deleted" in plan(twice).reason


def test_a_halt_that_was_refused_is_named_again() -> None:
    seen = NOTICES["deleted"](running(least=None), 1)
    refused = replace(seen, barrier=ObservedBarrier(Barrier(1, 45, "cancelled"), NOW - 1))
    assert [a.phase for a in actions(refused, Barrier)] == ["proposed"]


def test_what_takes_its_place_is_asked_for_while_it_still_trains() -> None:
    seen = NOTICES["deleted"](running(least=None), 1)
    assert actions(seen, CreateWorker, DeleteWorker) == [CreateWorker(1, 2, ())]
    coming = replace(seen, workers=(*seen.workers, worker(1, 2, node=None, phase="Pending")))
    assert actions(replace(coming, status=replace(seen.status, next_attempt=3)), CreateWorker, DeleteWorker) == []


def test_a_suspension_goes_before_and_halts_in_the_same_way() -> None:
    seen = NOTICES["deleted"](running(least=None, suspend=True), 1)
    assert plan(seen).reason.startswith("the job is suspended")
    assert len(actions(seen, Barrier)) == 1


def test_a_job_that_is_over_in_a_moment_is_over_and_one_that_fails_fails() -> None:
    seen = NOTICES["deleted"](running(least=None), 1)
    done = replace(
        seen,
        sessions=tuple(replace(s, finished=0, finished_steps=42, final_saves_reported=True) for s in seen.sessions),
    )
    assert plan(done).status.phase == "Complete"
    broken = with_session(seen, 0, exit=ObservedExit(1, 0, 1, "ValueError: bad data", False, NOW))
    assert plan(broken).status.incidents[-1].kind == "trainer-failed"
    assert plan(broken).status.restarts_counted == 1


# ---- claimed without a world -----------------------------------------------------------------------------------------


def waiting(least: int | None = None) -> JobSnapshot:
    """The world has halted at step 48 since worker 1 is being deleted; everybody has stopped, and was read."""
    seen = with_worker(running(least=least), 1, deleting=True)
    world = seen.status.membership
    assert world is not None
    world = replace(world, generation=2, state="Claimed", changed_seconds=NOW - 60, reason="worker 1 is being deleted")
    planned = Incident("planned", world.reason, None, None, 1, NOW - 60, claimed_seconds=NOW - 60, last_step=40)
    return replace(
        seen,
        status=replace(seen.status, membership=world, incidents=(planned,), next_attempt=3),
        sessions=tuple(replace(s, stopped=2) for s in seen.sessions),
        servers=tuple(replace(h, fence=2, read_generation=2) for h in seen.servers),
    )


def test_a_job_without_a_world_says_what_it_waits_for_and_costs_nothing_meanwhile() -> None:
    there = replace(
        waiting(), workers=(*waiting().workers, worker(1, 2, node=None, phase="Pending", message="0/3 nodes"))
    )
    made = plan(there)
    assert made.status.membership == there.status.membership
    assert made.reason == (
        "worker 1 is being deleted; training continues from step 40 once enough workers run: 2 workers are ready, too few for"
        " any allowed size up to 3 workers; worker 1 has no node: 0/3 nodes"
    )
    scheduled = next(c for c in made.status.conditions if c.type == "PodsScheduled")
    assert (scheduled.status, scheduled.message) == (
        "False",
        "2 of 3 workers have a node; worker 1 has no node: 0/3 nodes",
    )
    assert made.actions == ()


def test_it_goes_on_from_that_very_step_once_a_worker_has_a_place() -> None:
    seen = waiting()
    seen = replace(
        seen, workers=(*seen.workers, worker(1, 2)), sessions=(*seen.sessions, session(1, 2, now=NOW, stopped=2))
    )
    world = plan(seen).status.membership
    assert world is not None
    assert (world.state, world.parent, [m.attempt for m in world.members]) == (
        "Committed",
        Checkpoint(1, 40),
        [1, 2, 1],
    )


def test_an_elastic_job_does_not_wait_for_who_leaves() -> None:
    world = plan(waiting(least=1)).status.membership
    assert world is not None
    assert [m.index for m in world.members] == [0, 2]


@pytest.mark.parametrize("notice", sorted(NOTICES))
def test_nobody_who_is_about_to_leave_becomes_a_member(notice: str) -> None:
    seen = NOTICES[notice](with_worker(waiting(least=1), 1, deleting=False), 2)
    world = plan(seen).status.membership
    assert world is not None
    assert [m.index for m in world.members] == [0, 1]


# ---- copies that stay ------------------------------------------------------------------------------------------------


def drained(
    *nodes: str, replicas: int = 2, persistent: bool = False, least: int | None = None, copies: int = 2
) -> JobSnapshot:
    """Three workers and a node more with a holder alone; `nodes` are cordoned and their workers leave, all wait at 40."""
    tier = PersistentTierSpec("s3://b/p") if persistent else None
    policy = CheckpointPolicy(memory=MemoryTierSpec(interval_steps=10, replicas=replicas), persistent=tier)
    seen = running(least=least, checkpoint=policy)
    seen = replace(seen, barrier=ObservedBarrier(Barrier(1, 40, "bound"), NOW - 1))
    at = {"step": 40, "barrier_step": 40, "saved": Checkpoint(1, 40), "copies": copies}
    seen = replace(seen, sessions=tuple(told(s, **at) for s in seen.sessions))
    for name in nodes:
        seen = with_node(with_worker(seen, int(name[1:]), deleting=True), name, schedulable=False)
    return seen


def claims(seen: JobSnapshot) -> bool:
    made = plan(seen).status.membership
    return made is not None and made.state == "Claimed"


def test_a_fixed_world_waits_until_as_many_copies_stay_as_there_can_be() -> None:
    seen = drained("n1")
    assert not claims(seen)
    assert "step 40 of generation 1 has 1 of 2 copies on nodes that stay" in plan(seen).reason
    copied = {(e.save.rank, e.target.node) for e in plan_maintenance(seen).actions if isinstance(e, RequestRepair)}
    assert copied == {(0, "n2"), (1, "n0")}, "ranks 0 and 1 have a copy on n1 that goes"
    entries = [h.entries for h in seen.servers]
    whole = tuple(dict.fromkeys(m for e in entries for m in e))
    assert claims(with_holder(with_holder(seen, "n0", entries=whole), "n2", entries=whole))
    assert claims(
        replace(
            seen, now_seconds=NOW + 60, sessions=tuple(replace(s, last_message_seconds=NOW + 60) for s in seen.sessions)
        )
    )


def test_an_elastic_world_goes_on_at_once_with_one_copy_that_stays() -> None:
    assert claims(drained("n1", least=1))
    alone = with_holder(drained("n1", least=1, copies=1), "n2", entries=())
    assert not claims(alone), "that of rank 1 lies on the node that goes"
    assert not claims(drained("n0", "n1", least=1)), "both copies of rank 0 may go"


def test_a_pod_that_is_deleted_from_a_node_that_stays_takes_no_copy_along() -> None:
    assert claims(with_worker(with_node(drained("n1"), "n1", schedulable=True), 1, deleting=True))


def test_a_node_that_shuts_down_by_itself_takes_its_copies_along() -> None:
    seen = with_node(with_worker(drained("n1"), 1, deleting=False), "n1", schedulable=True)
    assert not claims(with_session(seen, 1, terminating=True))


def test_where_no_node_stays_the_step_goes_to_the_persistent_tier_first() -> None:
    alone = drained("n0", "n1", "n2")
    assert claims(alone)
    assert "step 40 of generation 1 has no copy on a node that stays" in plan(alone).reason
    seen = drained("n0", "n1", "n2", persistent=True)
    assert not claims(seen)
    assert {s for e in plan_maintenance(seen).actions if isinstance(e, UploadSaves) for s in e.saves} == {
        m.save for h in seen.servers for m in h.entries if m.save.step == 40
    }
    assert claims(replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 40))))


# ---- what no halt could save -----------------------------------------------------------------------------------------


def test_who_had_to_go_before_the_halt_came_is_counted_by_no_budget() -> None:
    once = FailurePolicy(max_restarts=1)
    for gone in (
        with_worker(running(least=None, failure_policy=once), 1, phase="Failed", exit_code=143, deleting=True),
        replace(with_session(running(least=None, failure_policy=once), 1, terminating=True, connected=False), workers=running().workers[::2]),
    ):  # fmt: skip
        made = plan(gone)
        assert made.status.membership is not None
        assert made.status.membership.state == "Claimed"
        assert made.status.recent_restarts == ()
        assert made.status.incidents[-1].kind == "agent-lost"


def test_its_peers_that_only_heard_its_line_break_are_not_a_program_that_fails() -> None:
    seen = NOTICES["deleted"](running(least=None), 1)
    echo = {"exit": ObservedExit(1, 0, 1, "Connection reset by peer", True, NOW - 5)}
    made = plan(with_session(with_session(seen, 0, **echo), 2, **echo))
    (incident,) = made.status.incidents
    assert (incident.kind, incident.worker, incident.unexplained) == ("agent-lost", 1, False)
    assert "worker 1 is being deleted, and ended before all ranks could save at a barrier" in incident.reason
    assert (made.status.recent_restarts, made.status.no_progress_restarts) == ((), 0)


# ---- whole lives -----------------------------------------------------------------------------------------------------


def begun(least: int | None, nodes: int) -> FakeWorld:
    world = FakeWorld(job(3, least), node_count=nodes)
    world.settle()
    world.run(4.0)
    return world


@pytest.mark.gate_only
@pytest.mark.parametrize("nodes", [3, 4], ids=["no node is free", "one is"])
@pytest.mark.parametrize("least", [None, 1, 3], ids=["fixed", "elastic", "at its minimum"])
@pytest.mark.parametrize("drained", [("n0",), ("n0", "n1"), ("n0", "n1", "n2")], ids=["one", "two", "all"])
def test_a_drained_node_costs_no_step_and_the_job_is_whole_once_it_is_back(
    drained: tuple[str, ...], least: int | None, nodes: int
) -> None:
    world = begun(least, nodes)
    before = max(s.progress.step for s in world.observe().sessions)
    for name in drained:
        world.drain(name)
        world.run(0.3)
    world.run(3.0)
    for name in drained:
        world.kill_node(name)  # as a reboot does, memory and all
        if len(drained) < 3:
            world.return_node(name)
    if len(drained) == 3:
        return  # nothing that stays was ever there to copy to
    for name in drained:
        world.uncordon(name)
    world.run(8.0, tick=0.5)
    assert world.status.phase == "Running", plan(world.observe()).reason
    assert world.status.membership is not None
    assert world.status.membership.world_size == 3
    assert [i.kind for i in world.status.incidents if i.kind != "planned"] == []
    assert sum(i.steps_lost or 0 for i in world.status.incidents) == 0
    assert world.status.step > before
    assert (world.status.restarts, world.status.recent_restarts) == (0, ())


@pytest.mark.gate_only
@pytest.mark.parametrize("least", [None, 1, 3], ids=["fixed", "elastic", "at its minimum"])
@pytest.mark.parametrize("prefix", range(4))
def test_an_operator_that_dies_after_any_stroke_of_it_loses_no_step_either(prefix: int, least: int | None) -> None:
    for deaths in (1, 3, 8):
        world = begun(least, 3)
        world.drain("n1", 60.0)
        for _ in range(deaths):
            world.now += 0.1
            world._step()
            world.reconcile(prefix)
        world.run(6.0, tick=0.5)
        world.uncordon("n1")
        world.run(8.0, tick=0.5)
        assert world.status.phase == "Running", plan(world.observe()).reason
        assert sum(i.steps_lost or 0 for i in world.status.incidents) == 0, (deaths, world.status.incidents)


def test_the_nodes_that_stay_are_named_where_no_signal_was_given() -> None:
    seen = replace(running(least=None), nodes=())
    assert len(actions(NOTICES["deleted"](seen, 1), Barrier)) == 1
    assert claims(replace(drained("n1"), nodes=(ObservedNode("n0", "n0", True),)))


# ---- node departure --------------------------------------------------------------------------------------------------
# What a job loses with a node that is being left: the last copies, and nothing that is elsewhere or comes there.

PERSISTENT = CheckpointPolicy(
    memory=MemoryTierSpec(interval_steps=10), persistent=PersistentTierSpec(uri="s3://bucket/jobs")
)


def lone(**spec: Any) -> JobSnapshot:
    """One whose rank 0 has saved on its own node alone."""
    seen = running(**spec)
    return with_holder(seen, "n1", entries=tuple(m for m in _entries(seen, "n1") if m.save.rank != 0))


def _entries(seen: JobSnapshot, node: str) -> Any:
    return next(h.entries for h in seen.servers if h.endpoint.instance.node == node)


def said(seen: JobSnapshot, node: str = "n0", now: float = NOW) -> str:
    return describe_data_lost_with_node(seen, seen.status, node, now)


def test_a_node_whose_copies_are_elsewhere_too_may_be_left() -> None:
    assert [said(running(), f"n{index}") for index in range(3)] == ["", "", ""]


def test_the_last_copy_is_waited_for_and_is_being_made_meanwhile() -> None:
    seen = with_node(lone(), "n0", schedulable=False)
    assert said(seen) == "step 40 of generation 1 has no copy on a node that stays, and is being copied to one"
    copies = [a for a in plan_maintenance(seen).actions if isinstance(a, RequestRepair)]
    assert [(a.save.rank, a.target.node) for a in copies if a.save.step == 40] == [(0, "n1")], copies


def test_of_a_world_that_trains_the_copies_may_be_a_little_behind_but_never_missing() -> None:
    """It saves faster than copies are seen; before its worker ends it halts, and copies what it saved then."""
    seen = running()
    behind = with_holder(seen, "n1", entries=tuple(m for m in _entries(seen, "n1") if m.save != RankSave(1, 40, 0)))
    assert said(behind) == "", "step 30 of all ranks is on nodes that stay"
    halted = replace(seen.status, membership=replace(seen.status.membership, state="Claimed"))
    assert said(replace(behind, status=halted)).startswith("step 40 of generation 1 has no copy on a node that stays")
    assert said(lone()), "of rank 0 nothing is there, however few steps that is"


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_copy_is_brought_to_a_node_that_stays_while_others_are_left(replicas: int) -> None:
    memory = MemoryTierSpec(interval_steps=10, replicas=replicas)
    seen = with_node(
        with_node(running(checkpoint=CheckpointPolicy(memory=memory)), "n0", schedulable=False),
        "n1",
        evacuation_reason="x",
    )
    copies = [a for a in plan_maintenance(seen).actions if isinstance(a, RequestRepair)]
    assert [(a.save.checkpoint.step, a.save.rank, a.target.node) for a in copies] == [(40, 0, "n2")]
    stored = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 40)))
    assert not [a for a in plan_maintenance(stored).actions if isinstance(a, RequestRepair)]


def test_where_no_node_is_left_or_none_stays_nothing_more_is_copied() -> None:
    seen = running()
    assert not [a for a in plan_maintenance(seen).actions if isinstance(a, RequestRepair)]
    for name in ("n0", "n1", "n2"):
        seen = with_node(seen, name, schedulable=False)
    assert not [a for a in plan_maintenance(seen).actions if isinstance(a, RequestRepair)]


def test_it_is_waited_for_before_the_operator_has_heard_of_the_cordon() -> None:
    assert said(lone())
    assert said(lone(), "n2") == "", "what n2 has, n1 or n0 has too"


def test_of_two_nodes_that_are_left_the_second_waits_for_what_both_had() -> None:
    assert said(with_node(running(), "n1", schedulable=False), "n0").startswith("step 40 of generation 1 has no copy")


def test_what_is_in_the_persistent_tier_is_waited_for_by_nobody() -> None:
    seen = lone(checkpoint=PERSISTENT)
    assert said(seen)
    assert said(replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 40)))) == ""


def test_where_no_node_stays_the_way_out_is_named() -> None:
    seen = running()
    for name in ("n1", "n2"):
        seen = with_node(seen, name, schedulable=False)
    assert said(seen).endswith("; keep one node that runs the job, or set spec.checkpoint.persistent")
    stored = replace(seen, job=running(checkpoint=PERSISTENT).job)
    assert said(stored).endswith(", and is on its way to the persistent tier")


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_a_job_that_is_over_holds_no_node(phase: Any) -> None:
    seen = lone()
    assert said(replace(seen, status=replace(seen.status, phase=phase))) == ""


def test_a_job_that_is_being_deleted_or_has_saved_nothing_holds_no_node() -> None:
    seen = lone()
    assert said(replace(seen, job=replace(seen.job, deleted=True))) == ""
    assert said(replace(seen, status=replace(seen.status, last_complete=None))) == ""


def test_a_node_without_a_holder_or_with_an_empty_one_may_be_left() -> None:
    seen = lone()
    assert said(seen, "elsewhere") == ""
    assert said(with_holder(seen, "n0", entries=())) == ""
    assert said(with_holder(seen, "n0", state="Gone")) == ""


def test_what_cannot_be_seen_is_not_taken_for_safe() -> None:
    seen = running()
    for name in ("n0", "n1", "n2"):
        seen = with_holder(seen, name, state="Unreachable", read_generation=None, entries=())
    assert said(seen) == "no memory server reports at present where the copies of step 40 of generation 1 are"


def test_a_round_that_is_long_past_decides_nothing() -> None:
    assert said(running(), now=NOW + MAX_SNAPSHOT_AGE_SECONDS + 1) == "it was not reconciled for 16 s"


# ---- moving ----------------------------------------------------------------------------------------------------------
# A node that others want left: its worker trains on until another is warm, and nothing is lost by the move.


def sick(least: int | None = None, **other: Any) -> JobSnapshot:
    """Three workers run well; node n1 bears a signal, and n3 is free."""
    seen = with_node(running(least=least), "n1", evacuation_reason="it has the label x=y")
    return replace(seen, nodes=(*seen.nodes, ObservedNode("n3", "n3", True)), **other)


def beside(seen: JobSnapshot, warm: bool, created: float = NOW, node: str = "n3") -> JobSnapshot:
    """The second attempt of worker 1, on another node."""
    new = worker(1, 2, node=node, phase="Running", created_seconds=created)
    heard = session(1, 2, now=seen.now_seconds, node=node, warm=warm)
    status = replace(seen.status, next_attempt=3)
    return replace(seen, status=status, workers=(*seen.workers, new), sessions=(*seen.sessions, heard))


def actions_moving(seen: JobSnapshot, kind: type[Any]) -> list[Any]:
    return [a for a in plan(seen).actions if isinstance(a, kind)]


def test_a_worker_is_made_beside_it_on_another_node() -> None:
    seen = sick()
    assert actions_moving(seen, CreateWorker) == [CreateWorker(1, 2, ("n1",))]
    assert actions_moving(seen, DeleteWorker) == []
    assert actions_moving(seen, Barrier) == []
    coming = beside(seen, warm=False)
    assert actions_moving(coming, CreateWorker) == []
    assert actions_moving(coming, DeleteWorker) == []
    assert actions_moving(coming, Barrier) == []


def test_the_world_moves_once_that_one_is_warm_and_loses_nothing() -> None:
    made = plan(beside(sick(), warm=True))
    assert [a.phase for a in made.actions if isinstance(a, Barrier)] == ["proposed"]
    assert "worker 1 is moved off node n1 (it has the label x=y)" in made.reason


def claimed(seen: JobSnapshot) -> JobSnapshot:
    """Everybody has saved and stopped; the next epoch is claimed."""
    world = replace(
        seen.status.membership or Membership(1, "Committed"), generation=2, state="Claimed", changed_seconds=NOW - 60
    )
    sessions = tuple(replace(s, stopped=2) for s in seen.sessions)
    holders = tuple(replace(h, fence=2, read_generation=2) for h in seen.servers)
    return replace(seen, status=replace(seen.status, membership=world), sessions=sessions, servers=holders)


def members(seen: JobSnapshot) -> list[tuple[int, int]]:
    world = plan(seen).status.membership
    assert world is not None
    assert world.state == "Committed"
    return [(m.index, m.attempt) for m in world.members]


def test_the_new_world_has_the_worker_on_the_other_node() -> None:
    assert members(claimed(beside(sick(), warm=True))) == [(0, 1), (1, 2), (2, 1)]


def test_a_claim_meanwhile_takes_the_old_one_while_the_new_one_is_not_warm() -> None:
    assert members(claimed(beside(sick(), warm=False))) == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("ghost", ["its pod is deleted", "its machine lost its power"])
def test_a_second_one_that_died_without_a_word_hides_not_the_first(ghost: str) -> None:
    """Of a machine that loses its power nobody closes the line: its agent counts as connected, and is not heard."""
    seen = claimed(beside(sick(), warm=True))
    if ghost == "its pod is deleted":
        seen = replace(seen, workers=tuple(w for w in seen.workers if w.attempt == 1))
    else:
        silent = tuple(replace(s, last_message_seconds=NOW - 30) if s.attempt == 2 else s for s in seen.sessions)
        seen = replace(seen, sessions=silent)
    assert members(seen) == [(0, 1), (1, 1), (2, 1)]


def test_an_elastic_job_moves_with_fewer_workers_after_a_while() -> None:
    seen = sick(least=2)
    early = beside(seen, warm=False, created=NOW - MOVE_SECONDS + 1)
    assert actions_moving(early, Barrier) == []
    late = beside(seen, warm=False, created=NOW - MOVE_SECONDS)
    assert len(actions_moving(late, Barrier)) == 1
    assert members(claimed(late)) == [(0, 1), (2, 1)]


def test_a_job_that_would_have_no_world_without_the_node_stays_there() -> None:
    late = beside(sick(), warm=False, created=NOW - 10 * MOVE_SECONDS)
    assert actions_moving(late, Barrier) == []


def test_who_left_such_a_node_does_not_come_back_to_it() -> None:
    seen = sick(least=2)
    world = seen.status.membership
    assert world is not None
    small = replace(world, world_size=2, members=tuple(m for m in world.members if m.index != 1))
    seen = with_session(replace(seen, status=replace(seen.status, membership=small)), 1, generation=0)
    assert actions_moving(seen, Barrier) == []
    well = with_node(seen, "n1", evacuation_reason="")
    assert "grow from 2 to 3" in plan(well).reason


def test_when_nobody_wants_it_left_any_more_the_second_one_goes() -> None:
    seen = with_node(beside(sick(), warm=True), "n1", evacuation_reason="")
    assert [d.name for d in actions_moving(seen, DeleteWorker)] == ["gpt-1-2"]
    assert actions_moving(seen, Barrier) == []


def test_a_second_one_that_fails_at_once_is_not_made_again_at_once() -> None:
    failed = worker(1, 2, node="n3", phase="Failed", exit_code=1, created_seconds=NOW - 1)
    seen = sick()
    seen = replace(seen, workers=(*seen.workers, failed), status=replace(seen.status, next_attempt=3))
    assert actions_moving(seen, CreateWorker) == []
    later = replace(
        seen, now_seconds=NOW + 10, sessions=tuple(replace(s, last_message_seconds=NOW + 10) for s in seen.sessions)
    )
    assert actions_moving(later, CreateWorker) == [CreateWorker(1, 3, ("n1",))]


# ---- planned change --------------------------------------------------------------------------------------------------
# A halt that is named again and again while a trainer stands still: seldom, and never far ahead.


def growing() -> JobSnapshot:
    """Two workers train at step 42, a tenth of a second a step, and a third is warm."""
    seen = running(workers=2, least=1)
    return replace(
        seen,
        job=job(3, least=1),
        workers=(*seen.workers, worker(2)),
        sessions=(*seen.sessions, session(2, now=NOW)),
        nodes=(*seen.nodes, ObservedNode("n2", "n2", True)),
    )


def at(seen: JobSnapshot, now: float, barrier: ObservedBarrier | None, step: int | None = None) -> JobSnapshot:
    """Later, everybody heard; `step`: it was just made, else all stand as they stood."""
    sessions = tuple(replace(s, last_message_seconds=now) for s in seen.sessions)
    if step is not None:
        sessions = tuple(told(s, step=step, step_at_seconds=now) if s.generation else s for s in sessions)
    return replace(seen, now_seconds=now, barrier=barrier, sessions=sessions)


def test_a_world_that_stands_still_is_asked_seldom_and_about_the_next_steps() -> None:
    seen, now, barrier, named = growing(), NOW, None, []
    while now < NOW + 590:
        made = plan(at(seen, now, barrier))
        for action in made.actions:
            assert isinstance(action, Barrier)
            if action.phase == "proposed":
                named.append(action.step)
                barrier = ObservedBarrier(Barrier(1, action.step, "proposed"), now)
            elif barrier is not None:
                barrier = replace(barrier, barrier=replace(barrier.barrier, phase="cancelled"))
        assert made.wake_after_seconds is not None
        now += max(0.01, made.wake_after_seconds)
    assert named[0] == 42 + 6
    assert len(named) < 10, named
    assert named[-1] < 42 + 6 + 10, named
    assert len(set(named)) == len(named), "an answer to an older one is never taken for it"
    assert barrier is not None
    (thawed,) = plan(
        at(seen, now, replace(barrier, barrier=replace(barrier.barrier, phase="cancelled")), step=43)
    ).actions
    assert isinstance(thawed, Barrier)
    assert thawed.step <= named[-1] + 6, "the next one lies where all get to at once"


def test_a_world_that_moves_and_refuses_is_asked_about_a_later_step() -> None:
    barrier = ObservedBarrier(Barrier(1, 48, "cancelled"), NOW)
    (again,) = plan(at(growing(), NOW + 0.6, barrier, step=49)).actions
    assert again == Barrier(1, 49 + 6, "proposed")
