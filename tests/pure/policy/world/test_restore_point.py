"""From where a claimed epoch goes on: what is sealed, read, listed and waited for, and which checkpoint is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, COVERED, endpoint, holder, manifest, running, session, with_holder, with_session
from surefoot.protocol.checkpoints.completeness import LeftOut
from surefoot.protocol.identities import Checkpoint, WorkerId
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import Incident, World
from surefoot_operator.job_snapshot import Observed, PersistentSeen
from surefoot_operator.policy.core.actions import ListPersistentTier, Plan, SealHolder
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = BEGAN + 100
PERSISTENT = CheckpointPolicy(MemoryTierSpec(interval_steps=10), PersistentTierSpec("file:///tmp/checkpoints"))


def decided(seen: Observed) -> Plan:
    made = plan(seen)
    check(made, seen)
    return made


def claimed(read: bool = True, ago: float = 2.0, **spec: object) -> Observed:
    """Epoch 2 is claimed since `ago`; everybody has stopped, everything was read (or not)."""
    seen = running(**spec)  # type: ignore[arg-type]  # fields of the spec, as they come
    world = seen.status.world
    assert world is not None
    claim = World(2, "Claimed", None, 3, world.members, "a test", NOW - ago)
    incident = Incident("node-lost", "a test", 1, "n1", 1, NOW - ago, NOW - ago, last_step=42, world_before=3)
    return replace(
        seen,
        status=replace(seen.status, world=claim, phase="Recovering", incidents=(incident,)),
        sessions=tuple(replace(s, stopped=2) for s in seen.sessions),
        holders=tuple(replace(h, fence=2, read_epoch=2 if read else None) for h in seen.holders),
    )


def parent(seen: Observed) -> Checkpoint | str | None:
    """The parent that is committed now, or why not yet."""
    made = decided(seen)
    world = made.status.world
    return world.parent if world is not None and world.state == "Committed" else made.reason


def test_the_newest_complete_checkpoint_is_the_parent() -> None:
    assert parent(claimed()) == Checkpoint(1, 40)


def test_every_ready_holder_is_sealed_and_read_first() -> None:
    made = decided(claimed(read=False))
    assert sum(isinstance(a, SealHolder) and a.epoch == 2 for a in made.actions) == 3
    late = with_holder(claimed(), "n2", read_epoch=None)
    assert [a.holder.node for a in decided(late).actions if isinstance(a, SealHolder)] == ["n2"]


def test_nothing_is_sealed_while_trainers_run_or_saves_are_on_their_way() -> None:
    stopping = with_session(claimed(read=False, ago=0.5), 0, stopped=1)
    assert not decided(stopping).actions
    draining = with_session(claimed(read=False, ago=0.5), 0, pending=(Checkpoint(1, 50),))
    assert not decided(draining).actions
    assert decided(draining).wake_after_seconds == pytest.approx(0.5)


def test_the_drain_grace_ends() -> None:
    draining = with_session(claimed(read=False, ago=1.0), 0, pending=(Checkpoint(1, 50),))
    assert any(isinstance(a, SealHolder) for a in decided(draining).actions)


def test_a_checkpoint_that_lacks_a_rank_is_not_the_parent() -> None:
    seen = claimed()
    cut = tuple(
        replace(h, entries=tuple(m for m in h.entries if (m.save.step, m.save.rank) != (40, 1))) for h in seen.holders
    )
    assert parent(replace(seen, holders=cut)) == Checkpoint(1, 30)


def test_a_checkpoint_that_was_put_aside_is_not_the_parent() -> None:
    seen = claimed()
    assert parent(replace(seen, status=replace(seen.status, bad=(Checkpoint(1, 40),)))) == Checkpoint(1, 30)


def test_copies_of_unsealed_holders_are_not_read() -> None:
    seen = claimed()
    stale = tuple(manifest(1, 60, r, 3) for r in range(3))
    seen = replace(seen, holders=(*seen.holders, holder("n9", 1, *stale, state="Silent")))
    assert parent(seen) == Checkpoint(1, 40)


def test_a_silent_holder_is_waited_for_no_longer_than_the_lost_steps_cost() -> None:
    seen = with_holder(claimed(ago=0.1), "n1", state="Silent", read_epoch=None)  # 42 - 40 steps of 0.1 s each
    assert "waiting up to 0.2 s" in str(parent(seen))
    made = decided(with_holder(claimed(ago=0.3), "n1", state="Silent", read_epoch=None))
    assert made.status.world is not None
    assert made.status.world.parent == Checkpoint(1, 40)
    assert made.status.given_up == ("n1-i0",)
    assert any(e.reason == "HolderGivenUp" for e in made.events)


def test_a_silent_holder_that_may_hold_everything_is_waited_for_to_the_limit() -> None:
    seen = claimed(ago=9.9)
    empty = tuple(replace(h, entries=()) for h in seen.holders)
    seen = with_holder(replace(seen, holders=empty), "n1", state="Silent", read_epoch=None)
    assert "waiting up to 10.0 s" in str(parent(seen))


def test_a_holder_that_was_read_to_have_nothing_newer_is_not_waited_for_nor_told_as_a_loss() -> None:
    made = decided(with_holder(claimed(ago=0.1), "n1", state="Silent"))
    assert made.status.world is not None
    assert made.status.world.parent == Checkpoint(1, 40)
    assert made.status.given_up == ("n1-i0",), "what it has is looked for again if step 40 is lost"
    assert not [e for e in made.events if e.reason == "HolderGivenUp"]


@pytest.mark.parametrize("read", [2, None])
def test_a_holder_that_fell_silent_is_waited_for_only_if_it_was_not_read_or_has_what_is_wanted(
    read: int | None,
) -> None:
    policy = CheckpointPolicy(MemoryTierSpec(interval_steps=10), on_total_loss="Restart")
    seen = claimed(checkpoint=policy)
    empty = tuple(replace(h, entries=()) for h in seen.holders)
    lost = with_holder(replace(seen, holders=empty), "n1", state="Silent", read_epoch=read, since_seconds=NOW - 1)
    said = parent(lost)
    assert said is None if read else "which the operator cannot reach" in str(said)
    a_part = with_holder(lost, "n1", entries=(manifest(1, 40, 1, 3),))
    assert "which the operator cannot reach" in str(parent(a_part))


def test_a_holder_that_is_gone_is_not_waited_for() -> None:
    assert parent(with_holder(claimed(ago=0.1), "n1", state="Gone", entries=())) == Checkpoint(1, 40)


def test_a_holder_whose_node_runs_another_instance_is_not_waited_for() -> None:
    seen = claimed(ago=0.1)
    fresh = replace(seen.holders[1], endpoint=endpoint("n1", "i1"), entries=())
    assert parent(replace(seen, holders=(seen.holders[0], fresh, seen.holders[2]))) == Checkpoint(1, 40)


def test_a_named_holder_that_nobody_shows_is_unknown_not_empty() -> None:
    seen = claimed(ago=0.1)
    assert "waiting up to" in str(parent(replace(seen, holders=seen.holders[::2])))


def test_losing_every_copy_fails_a_job_that_says_so_unless_it_may_begin_again() -> None:
    lost = tuple(replace(h, entries=()) for h in claimed().holders)
    fails = CheckpointPolicy(MemoryTierSpec(interval_steps=10), on_total_loss="Fail")
    made = decided(replace(claimed(checkpoint=fails), holders=lost))
    assert made.status.phase == "Failed"
    assert "onTotalLoss" in made.status.message
    again = CheckpointPolicy(MemoryTierSpec(interval_steps=10), on_total_loss="Restart")
    assert parent(replace(claimed(checkpoint=again), holders=lost)) is None


def test_a_first_checkpoint_that_never_was_full_may_be_lost_quietly() -> None:
    seen = replace(claimed(), holders=tuple(replace(h, entries=()) for h in claimed().holders))
    assert parent(replace(seen, status=replace(seen.status, recorded=False))) is None


def test_the_persistent_tier_is_listed_after_the_last_index_was_read() -> None:
    made = decided(claimed(read=False, checkpoint=PERSISTENT))
    assert not any(isinstance(a, ListPersistentTier) for a in made.actions)
    made = decided(claimed(checkpoint=PERSISTENT))
    assert ListPersistentTier(2, 0) in made.actions


def test_a_newer_checkpoint_in_the_persistent_tier_is_the_parent() -> None:
    saved = tuple(manifest(1, 50, r, 3) for r in range(3))
    listed = PersistentSeen(2, saved, NOW - 0.1)
    made = decided(replace(claimed(checkpoint=PERSISTENT), persistent=listed))
    assert made.status.world is not None
    assert made.status.world.parent == Checkpoint(1, 50)
    assert made.status.floor == Checkpoint(1, 50)


def test_a_persistent_tier_that_does_not_answer_is_awaited_where_memory_has_nothing() -> None:
    seen = claimed(ago=60, checkpoint=PERSISTENT)
    failed = PersistentSeen(None, None, NOW - 5, "connection refused")
    empty = tuple(replace(h, entries=()) for h in seen.holders)
    made = decided(replace(seen, persistent=failed, holders=empty))
    assert made.status.phase == "Recovering"
    assert ListPersistentTier(2, 0) in made.actions
    assert parent(replace(seen, persistent=failed)) == Checkpoint(1, 40)


def test_nothing_below_the_floor_is_a_parent() -> None:
    seen = claimed(ago=60, checkpoint=PERSISTENT)
    seen = replace(seen, status=replace(seen.status, floor=Checkpoint(1, 41)))
    failed = PersistentSeen(None, None, NOW - 0.5, "connection refused")
    assert "waiting for the listing" in str(parent(replace(seen, persistent=failed)))


def test_a_damaged_floor_binds_no_longer() -> None:
    seen = claimed(checkpoint=PERSISTENT)
    floor = Checkpoint(1, 41)
    seen = replace(seen, status=replace(seen.status, floor=floor, bad=(floor,)))
    made = decided(replace(seen, persistent=PersistentSeen(2, (), NOW)))
    assert made.status.world is not None
    assert made.status.world.parent == Checkpoint(1, 40)
    assert made.status.floor is None


def test_layouts_that_are_not_checked_yet_are_waited_for() -> None:
    assert "cover every tensor" in str(parent(replace(claimed(), covers={})))
    assert parent(replace(claimed(), covers=dict.fromkeys(COVERED, False))) != Checkpoint(1, 40)


def test_agents_that_must_still_stop_are_waited_for_and_strangers_are_not() -> None:
    seen = claimed(ago=2.0)
    assert "on their way" in str(parent(with_session(seen, 1, warm=False)))
    made = decided(with_session(claimed(ago=3.1), 1, warm=False))
    assert made.status.world is not None
    assert made.status.world.size == 2


def test_a_fixed_world_waits_for_its_replacement() -> None:
    seen = claimed(ago=50.0, least=None)
    assert "too few" in str(parent(with_session(seen, 1, connected=False, since_seconds=NOW - 50)))


def test_the_incident_says_what_was_lost() -> None:
    incident = decided(claimed()).status.incidents[-1]
    assert (incident.parent_step, incident.steps_lost, incident.world_after) == (40, 2, 3)
    assert incident.assigned_seconds == NOW


def unreadable(*left_out: LeftOut, step: int = 50, **changes: object) -> PersistentSeen:
    """A listing that lacks what of `step` could not be read."""
    unjudged = frozenset({Checkpoint(1, step)})
    return replace(PersistentSeen(2, (), NOW - 0.1, left_out=left_out, unjudged=unjudged), **changes)  # type: ignore[arg-type]


DAMAGED = LeftOut("50-1/rank-0.json does not match its checksum", False, checkpoint=Checkpoint(1, 50))
SILENT = LeftOut("50-1/rank-0.json: SlowDown", True, checkpoint=Checkpoint(1, 50))


def without_memory(seen: Observed) -> Observed:
    return replace(seen, holders=tuple(replace(h, entries=()) for h in seen.holders))


def test_what_a_listing_could_not_read_keeps_nobody_from_an_older_checkpoint() -> None:
    seen = replace(claimed(checkpoint=PERSISTENT), persistent=unreadable(DAMAGED))
    assert parent(seen) == Checkpoint(1, 40), "what memory has"
    older = tuple(manifest(1, 30, r, 3) for r in range(3))
    listed = unreadable(DAMAGED, entries=older)
    floored = replace(seen, status=replace(seen.status, floor=Checkpoint(1, 50)), persistent=listed)
    assert parent(without_memory(floored)) == Checkpoint(1, 30), "a floor that cannot be read binds nobody"


def test_a_floor_whose_record_was_not_given_binds_and_is_asked_for_again() -> None:
    older = tuple(manifest(1, 30, r, 3) for r in range(3))
    listed = unreadable(SILENT, entries=older, asked_seconds=NOW - 6)
    seen = replace(claimed(ago=60, checkpoint=PERSISTENT), persistent=listed)
    floored = replace(seen, status=replace(seen.status, floor=Checkpoint(1, 50)))
    made = decided(without_memory(floored))
    assert made.status.world == floored.status.world, "step 30 would lose what is safe"
    assert ListPersistentTier(2, 0) in made.actions
    both = replace(listed, left_out=(SILENT, DAMAGED))
    assert parent(without_memory(replace(floored, persistent=both))) == Checkpoint(1, 30)


@pytest.mark.parametrize("policy", ["Wait", "Fail", "Restart"])
def test_where_what_was_stored_last_is_gone_an_older_one_that_is_there_is_restored(policy: str) -> None:
    """Found by the simulator: a bucket had lost its newest checkpoint, and the job said that every copy of every one was lost."""
    checkpoint = replace(PERSISTENT, on_total_loss=policy)  # type: ignore[arg-type]  # one of its words
    older = tuple(manifest(1, 30, r, 3) for r in range(3))
    seen = without_memory(claimed(ago=60, checkpoint=checkpoint))
    seen = replace(seen, status=replace(seen.status, floor=Checkpoint(1, 40)))
    early = decided(replace(seen, persistent=PersistentSeen(2, older, NOW - 50)))
    assert early.status.world == seen.status.world, "a network file system may show what was"
    assert any(isinstance(action, ListPersistentTier) for action in early.actions)
    seen = replace(seen, persistent=PersistentSeen(2, older, NOW - 5))
    noted = decided(seen)
    assert (noted.status.bad, noted.status.phase) == ((Checkpoint(1, 40),), "Recovering")
    assert [event.reason for event in noted.events if "is in the persistent tier no more" in event.message] == [
        "CheckpointBad"
    ]
    made = decided(replace(seen, status=noted.status)).status
    assert made.world is not None
    assert (made.world.state, made.world.parent, made.floor) == ("Committed", Checkpoint(1, 30), Checkpoint(1, 30))


def test_a_layout_that_nobody_can_bring_is_not_waited_for() -> None:
    newer = tuple(replace(manifest(1, 50, r, 3), layout="lost") for r in range(3))
    listed = unreadable(LeftOut("layouts/lost.json is damaged", False, digest="lost"), entries=newer)
    assert parent(replace(claimed(checkpoint=PERSISTENT), persistent=listed)) == Checkpoint(1, 40)


@pytest.mark.parametrize(("policy", "phase"), [("Wait", "Recovering"), ("Fail", "Failed")])
def test_where_only_what_cannot_be_read_is_left_its_name_is_said(policy: str, phase: str) -> None:
    checkpoint = replace(PERSISTENT, on_total_loss=policy)  # type: ignore[arg-type]  # one of its words
    seen = without_memory(replace(claimed(ago=90, checkpoint=checkpoint), persistent=unreadable(DAMAGED)))
    made = decided(seen)
    assert made.status.phase == phase
    assert "50-1/rank-0.json does not match its checksum" in made.reason
    nothing_known = replace(seen, status=replace(seen.status, recorded=False, last_complete=None))
    assert parent(nothing_known) is not None, "what is there and cannot be read is not absent: never step 0"


def test_a_record_that_the_tier_did_not_give_is_asked_for_again_and_named() -> None:
    seen = without_memory(replace(claimed(ago=60, checkpoint=PERSISTENT), persistent=unreadable(SILENT)))
    made = decided(seen)
    assert made.status.phase == "Recovering"
    assert "SlowDown" in made.reason
    later = replace(seen, persistent=unreadable(SILENT, asked_seconds=NOW - 6))
    assert ListPersistentTier(2, 0) in decided(later).actions


@pytest.mark.parametrize("ago", [0.5, 15.0])
def test_with_a_complete_checkpoint_in_memory_a_slow_listing_is_waited_for_a_little_while(ago: float) -> None:
    seen = replace(claimed(ago=20, checkpoint=PERSISTENT), persistent=PersistentSeen(asked_seconds=NOW - ago))
    found = parent(seen)
    if ago < 2:
        assert "listing" in str(found)
    else:
        assert found == Checkpoint(1, 40)


@pytest.mark.parametrize("listed", [None, 2])
def test_a_holder_that_comes_and_goes_voids_no_listing_for_ever(listed: int | None) -> None:
    """Each reading voids the listing, and each loss asks for another one; memory has a complete checkpoint."""
    for ago, chosen in ((20, False), (40, True)):
        seen = claimed(ago=ago, checkpoint=PERSISTENT)
        gone = replace(seen.holders[-1], state="Gone", since_seconds=NOW - 0.5, entries=(), read_epoch=None)
        seen = replace(seen, holders=(*seen.holders[:-1], gone))
        asked = NOW - 1.0 if listed is not None else None
        seen = replace(seen, persistent=PersistentSeen(listed, () if listed else None, asked))
        assert (parent(seen) == Checkpoint(1, 40)) == chosen


def test_a_listing_that_takes_long_is_asked_of_another_agent_only() -> None:
    slow = PersistentSeen(asked_seconds=NOW - 30, asked_of=frozenset({WorkerId(0, 1)}))
    seen = without_memory(replace(claimed(ago=60, checkpoint=PERSISTENT), persistent=slow))
    assert decided(seen).actions == ()
    longer = replace(seen, persistent=replace(slow, asked_seconds=NOW - 61))
    assert ListPersistentTier(2, 1) in decided(longer).actions


def test_a_listing_is_not_waited_for_of_an_agent_that_is_not_heard_any_more() -> None:
    """Of a machine without power the line never breaks, and its worker may have a new attempt under the same number."""
    asked = PersistentSeen(asked_seconds=NOW - 5, asked_of=frozenset({WorkerId(0, 1)}))
    seen = without_memory(replace(claimed(ago=60, checkpoint=PERSISTENT), persistent=asked))
    silent = with_session(seen, 0, heard_seconds=NOW - 4)
    assert ListPersistentTier(2, 1) in decided(silent).actions
    again = replace(asked, asked_seconds=NOW, asked_of=frozenset({WorkerId(0, 1), WorkerId(1, 1)}))
    assert decided(replace(silent, persistent=again)).actions == ()
    replaced = replace(silent, sessions=(*silent.sessions, session(0, 2, now=NOW, epoch=1, stopped=2)))
    assert ListPersistentTier(2, 0) in decided(replaced).actions
