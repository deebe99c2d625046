"""What a round decides costs in proportion to the workers: instructions are counted, so no busy machine changes it.

A search in a list, made for each worker, is invisible at ten of them; at two thousand it is seconds a round, during
which the operator hears nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from support.builders import holder, running, told
from support.operations import counted
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import World
from surefoot_operator.job_snapshot import Observed, ObservedBarrier
from surefoot_operator.policy.maintenance.maintenance_plan import maintain
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

FEW, MANY = 20, 80
LEEWAY = 1.03
"""A pair of workers that is looked at once a round, in eight instructions, makes it 1.2."""


def steady(workers: int) -> Observed:
    return replace(running(workers=workers), free_nodes=1)


def starting(workers: int) -> Observed:
    """Nothing is there yet: everybody is to be made."""
    seen = claiming(workers)
    world = World(1, "Claimed", reason="the job starts", changed_seconds=seen.now)
    status = replace(seen.status, world=world, lineage=(), recorded=False, last_complete=None, named_holders=())
    return replace(seen, status=status, workers=(), sessions=(), holders=(), free_nodes=None)


def arriving(workers: int) -> Observed:
    """Everybody was made and has a node, and one agent of four is there."""
    seen, whole = starting(workers), steady(workers)
    sessions = tuple(told(s, epoch=0, stopped=1, step=0, step_at_seconds=None) for s in whole.sessions[::4])
    return replace(seen, workers=whole.workers, sessions=sessions)


def one_ended(workers: int) -> Observed:
    seen = steady(workers)
    return replace(seen, workers=(*seen.workers[:-1], replace(seen.workers[-1], phase="Failed", exit_code=1)))


def every_line_broken(workers: int) -> Observed:
    """The operator's network was away for a moment, and steps go on."""
    seen = steady(workers)
    sessions = (replace(s, connected=False, since_seconds=seen.now - 0.2) for s in seen.sessions)
    return replace(seen, sessions=tuple(sessions))


def most_nodes_gone(workers: int) -> Observed:
    seen = every_line_broken(workers)
    return replace(seen, nodes=tuple(replace(n, doubt="unreachable") for n in seen.nodes))


def claiming(workers: int) -> Observed:
    """An epoch is claimed, and no holder was sealed for it yet."""
    seen = one_ended(workers)
    return replace(seen, status=plan(seen).status)


def sealed(workers: int) -> Observed:
    """Every index was read and every trainer has stopped: the epoch can be committed."""
    seen = replace(claiming(workers), now=steady(workers).now + 10)
    epoch = seen.status.world.epoch if seen.status.world is not None else 0
    holders = tuple(replace(h, fence=epoch, read_epoch=epoch) for h in seen.holders)
    sessions = tuple(replace(s, stopped=epoch, heard_seconds=seen.now) for s in seen.sessions[:-1])
    return replace(seen, holders=holders, sessions=sessions)


def silent(workers: int) -> Observed:
    """Every holder is silent, and agents are asked what they see of them."""
    seen = sealed(workers)
    return replace(seen, holders=tuple(replace(h, state="Silent", since_seconds=seen.now) for h in seen.holders))


def few_copies(workers: int) -> Observed:
    """Half of the holders came back empty: every save wants another copy."""
    seen = steady(workers)
    holders = tuple(holder(h.endpoint.holder.node, 1) if n % 2 else h for n, h in enumerate(seen.holders))
    return replace(seen, holders=holders)


def uploading(workers: int) -> Observed:
    """A checkpoint goes up, of a world whose members' agents were all replaced but one."""
    seen = steady(workers)
    checkpoint = CheckpointPolicy(
        memory=MemoryTierSpec(interval_steps=10), persistent=PersistentTierSpec(uri="s3://a/b", interval_steps=10)
    )
    job = replace(seen.job, spec=replace(seen.job.spec, checkpoint=checkpoint))
    return replace(seen, job=job)


def leaving(workers: int) -> Observed:
    """Every node is wanted left, and a barrier was accepted by all."""
    seen = steady(workers)
    nodes = tuple(replace(n, signal="maintenance") for n in seen.nodes)
    sessions = tuple(told(s, barrier_step=50, step=50, saved=Checkpoint(1, 50)) for s in seen.sessions)
    return replace(seen, nodes=nodes, sessions=sessions, barrier=ObservedBarrier(Barrier(1, 50, "bound"), seen.now))


def deleted(workers: int) -> Observed:
    seen = steady(workers)
    return replace(seen, job=replace(seen.job, deleted=True))


def a_round(seen: Observed) -> None:
    decided = plan(seen)
    check(decided, seen)
    maintain(replace(seen, status=decided.status))


@pytest.mark.parametrize(
    "scene",
    [
        steady, starting, arriving, one_ended, every_line_broken, most_nodes_gone, claiming, sealed, silent, few_copies,
        uploading, leaving, deleted,
    ],
    ids=lambda scene: scene.__name__,
)  # fmt: skip
def test_a_round_costs_in_proportion_to_the_workers(scene: Callable[[int], Observed]) -> None:
    few, many = scene(FEW), scene(MANY)
    a_round(few)  # what is worked out once for each class and each spec
    a_round(many)
    costs = counted(lambda: a_round(few)), counted(lambda: a_round(many))
    assert costs[1] <= costs[0] * MANY / FEW * LEEWAY, (
        f"{costs[0] / FEW:.0f} instructions a worker at {FEW} workers, {costs[1] / MANY:.0f} at {MANY}"
    )
