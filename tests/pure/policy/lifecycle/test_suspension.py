"""A suspension is done when its checkpoint is where it survives the nodes, or says that it is not."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, manifest, running
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.job_snapshot import Observed, ObservedBarrier
from surefoot_operator.policy.maintenance.maintenance_plan import maintain
from surefoot_operator.policy.membership.lifecycle import PROMOTION_SECONDS
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 100
GOAL = Checkpoint(1, 44)
MEMORY = MemoryTierSpec(interval_steps=10)


def halting(persistent: bool = True, floor: int | None = None, ago: float = 5.0) -> Observed:
    """Every rank waits at step 44 because the job is suspended; that save is on two holders each."""
    tier = PersistentTierSpec("file:///there", interval_steps=20) if persistent else None
    seen = running(step=44, suspend=True, checkpoint=CheckpointPolicy(MEMORY, tier))
    saves = [manifest(1, 44, r, 3) for r in range(3)]
    return replace(
        seen,
        barrier=ObservedBarrier(Barrier(1, 44, "bound"), NOW - ago),
        sessions=tuple(replace(s, barrier_step=44, saved=GOAL) for s in seen.sessions),
        holders=tuple(
            replace(h, entries=(*h.entries, *(m for m in saves if n in (m.save.rank, (m.save.rank + 1) % 3))))
            for n, h in enumerate(seen.holders)
        ),
        status=replace(seen.status, floor=Checkpoint(1, floor) if floor is not None else None),
    )


def state(seen: Observed) -> str:
    world = plan(seen).status.world
    assert world is not None
    return world.state


def test_the_step_of_a_suspension_is_uploaded_before_the_workers_go() -> None:
    seen = halting(floor=40)
    made = plan(seen)
    assert state(seen) == "Committed"
    assert "goes to the persistent tier first" in made.reason
    assert maintain(replace(seen, status=made.status)).pinned == GOAL
    assert state(halting(floor=44)) == "Claimed"


def test_a_store_that_does_not_answer_holds_no_nodes_for_ever() -> None:
    assert state(halting(floor=40, ago=PROMOTION_SECONDS - 1)) == "Committed"
    assert state(halting(floor=40, ago=PROMOTION_SECONDS + 1)) == "Claimed"
    seen = halting(floor=40)
    away = replace(seen, sessions=tuple(replace(s, connected=False, since_seconds=NOW) for s in seen.sessions))
    assert "persistent tier first" not in plan(away).reason, "nobody is there who could upload it"


def test_without_a_persistent_tier_nothing_is_waited_for() -> None:
    assert state(halting(persistent=False)) == "Claimed"


def suspended(floor: int | None) -> Observed:
    seen = halting(floor=floor)
    world = seen.status.world
    assert world is not None
    empty = replace(world, epoch=2, parent=GOAL, size=0, members=(), reason="the job is suspended")
    return replace(
        seen,
        barrier=None,
        sessions=(),
        workers=(),
        holders=tuple(replace(h, fence=2, read_epoch=2) for h in seen.holders),
        status=replace(seen.status, world=empty, phase="Suspended"),
    )


def test_a_suspended_job_says_where_its_checkpoint_lies_where_that_is_in_memory_alone() -> None:
    made = plan(suspended(None))
    condition = next(c for c in made.status.conditions if c.type == "Suspended")
    assert condition.status == "True"
    assert "step 44 of epoch 1, which is in memory only" in condition.message
    assert "n0, n1, n2" in condition.message
    assert "memory only" not in plan(suspended(44)).status.message
