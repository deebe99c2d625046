"""A claim whose holders the operator does not reach goes on with what an agent sealed and read there."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, endpoint, holder, manifest, running
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.job_snapshot import HolderSeen, Observed, PersistentSeen, SightSeen
from surefoot_operator.policy.core.actions import ListPersistentTier, LookAround, Plan, SealHolder
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = BEGAN + 100
MEMORY = MemoryTierSpec(interval_steps=10)


def decided(seen: Observed) -> Plan:
    made = plan(seen)
    check(made, seen)
    return made


def claimed(*holders: HolderSeen, persistent: bool = False) -> Observed:
    """Epoch 2 is claimed since a moment; every agent has stopped."""
    tier = PersistentTierSpec("file:///tmp/checkpoints") if persistent else None
    seen = running(checkpoint=CheckpointPolicy(MEMORY, tier))
    world = seen.status.world
    assert world is not None
    claim = replace(world, epoch=2, state="Claimed", reason="trainer of rank 1 failed", changed_seconds=NOW - 1)
    return replace(
        seen,
        status=replace(seen.status, world=claim, phase="Recovering"),
        sessions=tuple(replace(s, stopped=2, saved=None, copies=0) for s in seen.sessions),
        holders=holders,
    )


def whole(node: str) -> HolderSeen:
    return holder(node, 2, *(manifest(1, 40, rank, 3) for rank in range(3)))


def silent(node: str) -> HolderSeen:
    return HolderSeen(endpoint(node), "Silent", NOW - 1, trouble="invalid username-password pair", refusing=True)


def by_proxy(node: str) -> HolderSeen:
    return replace(whole(node), state="Proxied")


def seen_by_an_agent(seen: Observed) -> Observed:
    sights = {h.endpoint.holder: SightSeen(2, NOW - 1, NOW - 1, NOW, True) for h in seen.holders}
    return replace(seen, sights=sights)


def test_silent_holders_are_read_by_agents_and_waited_for_until_they_are() -> None:
    made = decided(claimed(*map(silent, ("n0", "n1", "n2"))))
    asked = {e.holder.node for a in made.actions if isinstance(a, LookAround) for e in a.holders}
    assert asked == {"n0", "n1", "n2"}
    assert made.status.world is not None
    assert made.status.world.state == "Claimed"
    waits = decided(seen_by_an_agent(claimed(*map(silent, ("n0", "n1", "n2")))))
    assert "which the operator cannot reach" in waits.reason, "an agent of a former version reads for nobody"


def test_a_world_is_committed_from_what_agents_read_and_names_those_holders() -> None:
    made = decided(seen_by_an_agent(claimed(*map(by_proxy, ("n0", "n1", "n2")))))
    world = made.status.world
    assert world is not None
    assert (world.state, world.parent) == ("Committed", Checkpoint(1, 40))
    assert {e.holder.node for e in made.status.named_holders} == {"n0", "n1", "n2"}
    assert made.status.given_up == ()
    assert not [a for a in made.actions if isinstance(a, SealHolder | LookAround)]


def test_parts_that_the_operator_and_an_agent_read_make_one_checkpoint() -> None:
    seen = claimed(
        holder("n0", 2, manifest(1, 40, 0, 3)),
        replace(holder("n1", 2, manifest(1, 40, 1, 3), manifest(1, 40, 2, 3)), state="Proxied"),
        holder("n2", 2),
    )
    world = decided(seen).status.world
    assert world is not None
    assert world.parent == Checkpoint(1, 40)


def test_one_of_several_that_nobody_has_read_is_still_waited_for() -> None:
    empty = replace(by_proxy("n0"), entries=())
    waits = decided(claimed(empty, holder("n1", 2), silent("n2")))
    assert waits.status.world is not None
    assert waits.status.world.state == "Claimed"
    assert "n2" in waits.reason


def test_what_a_proxied_holder_has_makes_no_listing_void() -> None:
    """It was read, however long it is silent to the operator: nothing of it went to the persistent tier unseen."""
    listed = PersistentSeen(2, (), NOW - 0.5)
    seen = replace(claimed(*map(by_proxy, ("n0", "n1", "n2")), persistent=True), persistent=listed)
    later = tuple(replace(h, since_seconds=NOW) for h in seen.holders)
    made = decided(replace(seen, holders=later))
    assert not [a for a in made.actions if isinstance(a, ListPersistentTier)]
    assert made.status.world is not None
    assert made.status.world.state == "Committed"


def test_people_are_told_while_the_claim_goes_on_without_the_operator_s_sight() -> None:
    seen = seen_by_an_agent(claimed(*map(by_proxy, ("n0", "n1", "n2"))))
    old = tuple(replace(h, since_seconds=NOW - 30, trouble="timed out") for h in seen.holders)
    made = decided(replace(seen, holders=old))
    found = next(c for c in made.status.conditions if c.type == "CheckpointProtected")
    assert (found.status, found.reason) == ("Unknown", "HoldersUnseen")
