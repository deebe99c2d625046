"""Tests of `policy.planning.plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support.builders import holder, job, running, told
from support.fakes.fake_world import FakeWorld
from support.operations import counted
from surefoot.protocol.checkpoints.completeness import is_on_lineage
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import Membership
from surefoot_operator.job_snapshot import JobSnapshot, ObservedBarrier
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

# ---- plan properties -------------------------------------------------------------------------------------------------
# Whatever happens, and wherever the operator dies: decisions come to rest, keep the invariants, and lead to a world.

FAULTS: dict[str, Callable[[FakeWorld, int], None]] = {
    "kill node": lambda world, n: world.kill_node(f"n{n}"),
    "return node": lambda world, n: world.return_node(f"n{n}"),
    "freeze": lambda world, n: world.freeze(f"n{n}"),
    "thaw": lambda world, n: world.thaw(f"n{n}"),
    "kill trainer": lambda world, n: world.kill_trainer(n),
    "drain": lambda world, n: world.drain(f"n{n}"),
    "drain in a hurry": lambda world, n: world.drain(f"n{n}", 0.2),
    "uncordon": lambda world, n: world.uncordon(f"n{n}"),
    "kill agent": lambda world, n: world.kill_agent(n),
    "restart operator": lambda world, n: world.restart_operator(),
}

histories = st.lists(
    st.tuples(st.sampled_from(sorted(FAULTS)), st.integers(0, 2), st.sampled_from([0.0, 0.1, 0.3, 1.2, 4.0])),
    max_size=6,
)


def begun(least: int | None = 1, total_steps: int = 10_000, **spec: object) -> FakeWorld:
    world = FakeWorld(job(3, least, **spec), total_steps=total_steps)
    world.settle()
    world.run(4.0)
    return world


def test_a_job_begins_with_all_its_workers() -> None:
    world = begun()
    assert world.status.phase == "Running"
    assert world.status.membership is not None
    assert world.status.membership.world_size == 3


def test_a_job_whose_trainers_finish_is_complete_and_leaves_nothing() -> None:
    world = begun(total_steps=25)
    world.run(2.0)
    assert world.status.phase == "Complete"
    assert all(n.holder is not None and not n.holder.entries for n in world.nodes.values())


def test_a_lost_node_shrinks_the_world_at_once_and_its_return_grows_it_again() -> None:
    world = begun()
    world.kill_node("n1")
    world.run(1.0)
    assert world.status.membership is not None
    assert world.status.membership.world_size == 2
    world.return_node("n1")
    world.run(5.0)
    assert world.status.membership.world_size == 3
    assert [i.kind for i in world.status.incidents] == ["node-lost", "planned"]
    assert world.status.incidents[-1].steps_lost == 0
    assert all(i.first_step_seconds is not None for i in world.status.incidents)


@pytest.mark.gate_only
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example([("kill node", 0, 0.0), ("kill node", 1, 0.0)], None)
@given(histories, st.sampled_from([None, 1, 2]))
def test_after_any_faults_that_pass_training_goes_on(history: list[tuple[str, int, float]], least: int | None) -> None:
    world = begun(least)
    for fault, place, seconds in history:
        FAULTS[fault](world, place)
        world.run(seconds)
    for name in world.nodes:
        world.thaw(name)
        world.return_node(name)
        world.uncordon(name)
    world.run(40.0, tick=1.0)
    if world.status.phase == "Failed":
        assert "lost" in world.status.message or "used up" in world.status.message
        return
    _accept_what_is_lost(world)
    assert world.status.phase == "Running", plan(world.observe()).reason
    assert world.status.membership is not None
    assert world.status.membership.world_size == 3


def _accept_what_is_lost(world: FakeWorld) -> None:
    """A job may wait for its user alone, and only where the truth has no checkpoint left; accepted, it goes on."""
    if world.status.phase == "Running":
        return
    assert "every copy of every checkpoint is lost" in plan(world.observe()).reason
    assert world.status.membership is not None
    kept = {save.checkpoint for save in world.tiers.all()}
    assert not [
        c
        for c in kept
        if is_on_lineage(world.status.lineage, c, world.status.membership.generation) and world.tiers.readable(c)
    ]
    world.job = replace(world.job, accepted_loss=str(world.status.membership.generation))
    world.run(10.0, tick=1.0)


@pytest.mark.gate_only
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories, st.lists(st.integers(0, 4), min_size=10, max_size=40))
def test_an_operator_that_dies_after_any_stroke_leads_to_the_same_world(
    history: list[tuple[str, int, float]], deaths: list[int]
) -> None:
    world, calm = begun(), begun()
    for fault, place, seconds in history[:1]:
        FAULTS[fault](world, place)
        FAULTS[fault](calm, place)
        del seconds
    for prefix in deaths:
        world.reconcile(prefix)
    for each in (world, calm):
        each.run(40.0, tick=1.0)
    assert (world.status.phase, _places(world)) == (calm.status.phase, _places(calm))


def _places(world: FakeWorld) -> list[int]:
    return [m.index for m in world.status.membership.members] if world.status.membership is not None else []


@pytest.mark.gate_only
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories)
def test_epochs_restarts_and_attempts_only_grow(history: list[tuple[str, int, float]]) -> None:
    world = begun()
    for fault, place, seconds in history:
        FAULTS[fault](world, place)
        world.run(seconds)
    for before, after in pairwise(world.written):
        assert after.restarts >= before.restarts
        assert after.next_attempt >= before.next_attempt
        assert (after.membership.generation if after.membership else 0) >= (
            before.membership.generation if before.membership else 0
        )


@pytest.mark.parametrize("least", [None, 1])
def test_suspending_loses_nothing_and_resuming_goes_on_from_there(least: int | None) -> None:
    world = begun(least)
    running = world.job
    world.job = replace(running, spec=replace(running.spec, suspend=True))
    world.run(3.0)
    assert world.status.phase == "Suspended"
    assert not world.workers
    parent = world.status.membership.parent if world.status.membership else None
    assert parent is not None
    world.job = running
    world.run(5.0)
    assert world.status.phase == "Running"
    assert world.status.lineage[-1].parent == parent


# ---- plan costs ------------------------------------------------------------------------------------------------------
# What a round decides costs in proportion to the workers: instructions are counted, so no busy machine changes it.
#
# A search in a list, made for each worker, is invisible at ten of them; at two thousand it is seconds a round, during
# which the operator hears nobody.

FEW, MANY = 20, 80
LEEWAY = 1.03
"""A pair of workers that is looked at once a round, in eight instructions, makes it 1.2."""


def steady(workers: int) -> JobSnapshot:
    return replace(running(workers=workers), free_nodes=1)


def starting(workers: int) -> JobSnapshot:
    """Nothing is there yet: everybody is to be made."""
    seen = claiming(workers)
    world = Membership(1, "Claimed", reason="the job starts", changed_seconds=seen.now_seconds)
    status = replace(
        seen.status, membership=world, lineage=(), had_checkpoint=False, last_complete=None, assigned_servers=()
    )
    return replace(seen, status=status, workers=(), sessions=(), servers=(), free_nodes=None)


def arriving(workers: int) -> JobSnapshot:
    """Everybody was made and has a node, and one agent of four is there."""
    seen, whole = starting(workers), steady(workers)
    sessions = tuple(told(s, generation=0, stopped=1, step=0, step_at_seconds=None) for s in whole.sessions[::4])
    return replace(seen, workers=whole.workers, sessions=sessions)


def one_ended(workers: int) -> JobSnapshot:
    seen = steady(workers)
    return replace(seen, workers=(*seen.workers[:-1], replace(seen.workers[-1], phase="Failed", exit_code=1)))


def every_line_broken(workers: int) -> JobSnapshot:
    """The operator's network was away for a moment, and steps go on."""
    seen = steady(workers)
    sessions = (replace(s, connected=False, since_seconds=seen.now_seconds - 0.2) for s in seen.sessions)
    return replace(seen, sessions=tuple(sessions))


def most_nodes_gone(workers: int) -> JobSnapshot:
    seen = every_line_broken(workers)
    return replace(seen, nodes=tuple(replace(n, unconfirmed_failure="unreachable") for n in seen.nodes))


def claiming(workers: int) -> JobSnapshot:
    """An epoch is claimed, and no holder was sealed for it yet."""
    seen = one_ended(workers)
    return replace(seen, status=plan(seen).status)


def sealed(workers: int) -> JobSnapshot:
    """Every index was read and every trainer has stopped: the epoch can be committed."""
    seen = replace(claiming(workers), now_seconds=steady(workers).now_seconds + 10)
    epoch = seen.status.membership.generation if seen.status.membership is not None else 0
    holders = tuple(replace(h, fence=epoch, read_generation=epoch) for h in seen.servers)
    sessions = tuple(replace(s, stopped=epoch, last_message_seconds=seen.now_seconds) for s in seen.sessions[:-1])
    return replace(seen, servers=holders, sessions=sessions)


def silent(workers: int) -> JobSnapshot:
    """Every holder is silent, and agents are asked what they see of them."""
    seen = sealed(workers)
    return replace(
        seen, servers=tuple(replace(h, state="Unreachable", since_seconds=seen.now_seconds) for h in seen.servers)
    )


def few_copies(workers: int) -> JobSnapshot:
    """Half of the holders came back empty: every save wants another copy."""
    seen = steady(workers)
    holders = tuple(holder(h.endpoint.instance.node, 1) if n % 2 else h for n, h in enumerate(seen.servers))
    return replace(seen, servers=holders)


def uploading(workers: int) -> JobSnapshot:
    """A checkpoint goes up, of a world whose members' agents were all replaced but one."""
    seen = steady(workers)
    checkpoint = CheckpointPolicy(
        memory=MemoryTierSpec(interval_steps=10), persistent=PersistentTierSpec(uri="s3://a/b", interval_steps=10)
    )
    job = replace(seen.job, spec=replace(seen.job.spec, checkpoint=checkpoint))
    return replace(seen, job=job)


def leaving(workers: int) -> JobSnapshot:
    """Every node is wanted left, and a barrier was accepted by all."""
    seen = steady(workers)
    nodes = tuple(replace(n, evacuation_reason="maintenance") for n in seen.nodes)
    sessions = tuple(told(s, barrier_step=50, step=50, saved=Checkpoint(1, 50)) for s in seen.sessions)
    return replace(
        seen, nodes=nodes, sessions=sessions, barrier=ObservedBarrier(Barrier(1, 50, "bound"), seen.now_seconds)
    )


def deleted(workers: int) -> JobSnapshot:
    seen = steady(workers)
    return replace(seen, job=replace(seen.job, deleted=True))


def a_round(seen: JobSnapshot) -> None:
    decided = plan(seen)
    check_plan(decided, seen)
    plan_maintenance(replace(seen, status=decided.status))


@pytest.mark.parametrize(
    "scene",
    [
        steady, starting, arriving, one_ended, every_line_broken, most_nodes_gone, claiming, sealed, silent, few_copies,
        uploading, leaving, deleted,
    ],
    ids=lambda scene: scene.__name__,
)  # fmt: skip
def test_a_round_costs_in_proportion_to_the_workers(scene: Callable[[int], JobSnapshot]) -> None:
    few, many = scene(FEW), scene(MANY)
    a_round(few)  # what is worked out once for each class and each spec
    a_round(many)
    costs = counted(lambda: a_round(few)), counted(lambda: a_round(many))
    assert costs[1] <= costs[0] * MANY / FEW * LEEWAY, (
        f"{costs[0] / FEW:.0f} instructions a worker at {FEW} workers, {costs[1] / MANY:.0f} at {MANY}"
    )
