"""A world whose state only as many ranks can take up keeps its size, and says why and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, job, running, session, with_worker, worker
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.status import Incident, World
from surefoot_operator.job_snapshot import NodeSeen, Observed
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = BEGAN + 100
OWN = (("loader", ""), ("scheduler", "same"))


def decided(seen: Observed) -> Plan:
    made = plan(seen)
    check(made, seen)
    return made


def saving(seen: Observed, *objects: tuple[tuple[str, str], ...]) -> Observed:
    """The same with what each rank's manifests say of its objects; the last stands for all further ranks."""

    def told(rank: int) -> tuple[tuple[str, str], ...]:
        return objects[min(rank, len(objects) - 1)]

    holders = tuple(
        replace(h, entries=tuple(replace(m, objects=told(m.save.rank)) for m in h.entries)) for h in seen.holders
    )
    return replace(seen, holders=holders)


def claimed(seen: Observed, gone: int | None = None) -> Observed:
    """Epoch 2 is claimed since long, everybody has stopped but who is gone, and everything was read."""
    world = seen.status.world
    assert world is not None
    claim = World(2, "Claimed", None, world.size, world.members, "a test", NOW - 60)
    incident = Incident("node-lost", "a test", 1, "n1", 1, NOW - 60, NOW - 60, last_step=42, world_before=3)
    made = replace(
        seen,
        status=replace(seen.status, world=claim, phase="Recovering", incidents=(incident,)),
        sessions=tuple(replace(s, stopped=2) for s in seen.sessions if s.index != gone),
        holders=tuple(replace(h, fence=2, read_epoch=2) for h in seen.holders),
    )
    return made if gone is None else with_worker(made, gone, phase="Failed")


def condition(made: Plan, kind: str = "WorldSizeTied") -> str | None:
    return next((c.message for c in made.status.conditions if c.type == kind), None)


def members(made: Plan) -> int | None:
    world = made.status.world
    return len(world.members) if world is not None and world.state == "Committed" else None


def test_a_tied_world_that_lost_a_worker_waits_where_another_shrinks() -> None:
    assert members(decided(claimed(running(), gone=2))) == 2
    made = decided(saving(claimed(running(), gone=2), OWN))
    assert members(made) is None
    assert made.reason.startswith(
        "2 of 3 workers are ready, and no other number is possible: loader: each rank's own state"
    )
    assert "ElasticLoader" in made.reason
    assert "scheduler" not in made.reason


def test_it_goes_on_when_the_replacement_stands_ready() -> None:
    seen = saving(claimed(running(), gone=2), OWN)
    there = replace(
        seen,
        workers=(*seen.workers, worker(2, attempt=2)),
        sessions=(*seen.sessions, session(2, attempt=2, now=NOW, stopped=2)),
    )
    made = decided(there)
    assert members(made) == 3
    assert made.status.world is not None
    assert made.status.world.parent == Checkpoint(1, 40)


def test_values_that_differ_tie_as_well() -> None:
    made = decided(saving(claimed(running(), gone=2), (("meter", "a"),), (("meter", "b"),)))
    assert "no other number is possible: meter" in made.reason


def test_without_a_checkpoint_nothing_is_tied() -> None:
    seen = saving(claimed(running(), gone=2), OWN)
    lost = replace(
        seen,
        holders=tuple(replace(h, entries=()) for h in seen.holders),
        status=replace(seen.status, recorded=False, last_complete=None),
    )
    assert members(decided(lost)) == 2


def two_of_three(joining: bool = True) -> Observed:
    """Two workers train, a third is warm."""
    seen = replace(running(workers=2), job=job(3, 1))
    if not joining:
        return seen
    return replace(
        seen,
        workers=(*seen.workers, worker(2)),
        nodes=(*seen.nodes, NodeSeen("n2", "n2", True)),
        sessions=(*seen.sessions, session(2, now=NOW, stopped=1)),
    )


def test_a_tied_world_does_not_grow_and_says_so_once() -> None:
    assert any(isinstance(a, Barrier) for a in decided(two_of_three()).actions)
    made = decided(saving(two_of_three(), OWN))
    assert not any(isinstance(a, Barrier) for a in made.actions)
    assert "only 2 ranks can restore" in (condition(made) or "")
    assert [e.reason for e in made.events if e.warning] == ["WorldSizeTied"]
    again = decided(replace(saving(two_of_three(), OWN), status=made.status))
    assert [e.reason for e in again.events] == []


def test_until_holders_are_read_what_was_known_holds() -> None:
    known = decided(saving(two_of_three(), OWN)).status
    blind = replace(two_of_three(), status=known)
    blind = replace(blind, holders=tuple(replace(h, read_epoch=None, entries=()) for h in blind.holders))
    made = decided(blind)
    assert not any(isinstance(a, Barrier) for a in made.actions)
    assert condition(made) == condition(decided(saving(two_of_three(), OWN)))


def test_saves_of_some_ranks_alone_do_not_make_a_tie_vanish() -> None:
    unlike = ((("meter", "a"),), (("meter", "b"),))
    seen = saving(two_of_three(), *unlike)
    newer = tuple(replace(m, save=replace(m.save, step=50)) for m in seen.holders[0].entries if m.save.rank == 0)
    first = replace(seen.holders[0], entries=(*seen.holders[0].entries, *newer[:1]))
    made = decided(replace(seen, holders=(first, *seen.holders[1:])))
    assert "meter" in (condition(made) or "")


def test_a_smaller_scale_that_was_asked_for_is_not_carried_out_into_a_refusal() -> None:
    seen = replace(running(workers=3), job=job(2, 1))
    assert any(isinstance(a, Barrier) for a in decided(seen).actions)
    made = decided(saving(seen, OWN))
    assert not any(isinstance(a, Barrier) for a in made.actions)
    assert condition(made) is not None
    stuck = decided(saving(claimed(seen), OWN))
    assert stuck.reason.startswith(
        "no world is possible: the job asks for 2 workers of 1 ranks. Ask for 3 ranks again."
    )


def test_a_fixed_size_that_fits_needs_no_word() -> None:
    made = decided(saving(running(least=None), OWN))
    assert condition(made) is None
    assert members(made) == 3


@pytest.mark.parametrize("joining", [True, False], ids=["a spare is warm", "nobody is"])
def test_a_deleted_worker_of_a_tied_world_halts_it_with_a_spare_and_without(joining: bool) -> None:
    seen = saving(with_worker(two_of_three(joining=joining), 1, deleting=True), OWN)
    assert any(isinstance(a, Barrier) for a in decided(seen).actions)


@pytest.mark.parametrize("objects", [OWN, ()])
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_a_claimed_world_is_committed_with_as_many_ranks_as_its_parent_or_any(
    objects: tuple[tuple[str, str], ...], workers: int, wanted: int, gone: int
) -> None:
    seen = replace(running(workers=workers), job=job(wanted, 1))
    seen = saving(claimed(seen, gone if gone < workers else None), objects)
    there = sum(s.index < wanted for s in seen.sessions)
    size = members(decided(seen))
    if objects:
        assert size == (workers if there >= workers <= wanted else None)
    else:
        assert size == (min(there, wanted) or None)
