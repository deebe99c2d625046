"""Tests of `policy.membership.restore_point`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import (
    BEGAN,
    COVERED,
    endpoint,
    holder,
    job,
    manifest,
    running,
    session,
    told,
    with_holder,
    with_session,
    worker,
)
from support.talk import COMMITTED, STATUS, A, talking, words
from surefoot.protocol.checkpoints.completeness import (
    LineageEntry,
    UnreadRecord,
    first_own_step,
    generation_of_step,
    is_on_lineage,
)
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.retention import memory_saves_to_delete
from surefoot.protocol.identities import Checkpoint, SourceJob, WorkerId
from surefoot.protocol.messages import Assign
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec, RestoreFrom
from surefoot_operator.api.status import Incident, JobStatus, Membership
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.job_snapshot import JobSnapshot, PersistentListing
from surefoot_operator.policy.core.actions import FenceMemoryServer, ListPersistentTier, Plan
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance, retention_inputs
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

# ---- restore point ---------------------------------------------------------------------------------------------------
# From where a claimed epoch goes on: what is sealed, read, listed and waited for, and which checkpoint is chosen.

NOW = BEGAN + 100
PERSISTENT = CheckpointPolicy(MemoryTierSpec(interval_steps=10), PersistentTierSpec("file:///tmp/checkpoints"))


def decided(seen: JobSnapshot) -> Plan:
    made = plan(seen)
    check_plan(made, seen)
    return made


def claimed(read: bool = True, ago: float = 2.0, **spec: object) -> JobSnapshot:
    """Epoch 2 is claimed since `ago`; everybody has stopped, everything was read (or not)."""
    seen = running(**spec)  # type: ignore[arg-type]  # fields of the spec, as they come
    world = seen.status.membership
    assert world is not None
    claim = Membership(2, "Claimed", None, 3, world.members, "a test", NOW - ago)
    incident = Incident("node-lost", "a test", 1, "n1", 1, NOW - ago, NOW - ago, last_step=42, world_size_before=3)
    return replace(
        seen,
        status=replace(seen.status, membership=claim, phase="Recovering", incidents=(incident,)),
        sessions=tuple(replace(s, stopped=2) for s in seen.sessions),
        servers=tuple(replace(h, fence=2, read_generation=2 if read else None) for h in seen.servers),
    )


def parent(seen: JobSnapshot) -> Checkpoint | str | None:
    """The parent that is committed now, or why not yet."""
    made = decided(seen)
    world = made.status.membership
    return world.parent if world is not None and world.state == "Committed" else made.reason


def test_the_newest_complete_checkpoint_is_the_parent() -> None:
    assert parent(claimed()) == Checkpoint(1, 40)


def test_every_ready_holder_is_sealed_and_read_first() -> None:
    made = decided(claimed(read=False))
    assert sum(isinstance(a, FenceMemoryServer) and a.generation == 2 for a in made.actions) == 3
    late = with_holder(claimed(), "n2", read_generation=None)
    assert [a.server.node for a in decided(late).actions if isinstance(a, FenceMemoryServer)] == ["n2"]


def test_nothing_is_sealed_while_trainers_run_or_saves_are_on_their_way() -> None:
    stopping = with_session(claimed(read=False, ago=0.5), 0, stopped=1)
    assert not decided(stopping).actions
    draining = with_session(claimed(read=False, ago=0.5), 0, pending=(Checkpoint(1, 50),))
    assert not decided(draining).actions
    assert decided(draining).wake_after_seconds == pytest.approx(0.5)


def test_the_drain_grace_ends() -> None:
    draining = with_session(claimed(read=False, ago=1.0), 0, pending=(Checkpoint(1, 50),))
    assert any(isinstance(a, FenceMemoryServer) for a in decided(draining).actions)


def test_a_checkpoint_that_lacks_a_rank_is_not_the_parent() -> None:
    seen = claimed()
    cut = tuple(
        replace(h, entries=tuple(m for m in h.entries if (m.save.step, m.save.rank) != (40, 1))) for h in seen.servers
    )
    assert parent(replace(seen, servers=cut)) == Checkpoint(1, 30)


def test_a_checkpoint_that_was_put_aside_is_not_the_parent() -> None:
    seen = claimed()
    assert parent(
        replace(seen, status=replace(seen.status, unreadable_checkpoints=(Checkpoint(1, 40),)))
    ) == Checkpoint(1, 30)


def test_copies_of_unsealed_holders_are_not_read() -> None:
    seen = claimed()
    stale = tuple(manifest(1, 60, r, 3) for r in range(3))
    seen = replace(seen, servers=(*seen.servers, holder("n9", 1, *stale, state="Unreachable")))
    assert parent(seen) == Checkpoint(1, 40)


def test_a_silent_holder_is_waited_for_no_longer_than_the_lost_steps_cost() -> None:
    seen = with_holder(claimed(ago=0.1), "n1", state="Unreachable", read_generation=None)  # 42 - 40 steps of 0.1 s each
    assert "waiting up to 0.2 s" in str(parent(seen))
    made = decided(with_holder(claimed(ago=0.3), "n1", state="Unreachable", read_generation=None))
    assert made.status.membership is not None
    assert made.status.membership.parent == Checkpoint(1, 40)
    assert made.status.lost_servers == ("n1-i0",)
    assert any(e.reason == "MemoryServerLost" for e in made.events)


def test_a_silent_holder_that_may_hold_everything_is_waited_for_to_the_limit() -> None:
    seen = claimed(ago=9.9)
    empty = tuple(replace(h, entries=()) for h in seen.servers)
    seen = with_holder(replace(seen, servers=empty), "n1", state="Unreachable", read_generation=None)
    assert "waiting up to 10.0 s" in str(parent(seen))


def test_a_holder_that_was_read_to_have_nothing_newer_is_not_waited_for_nor_told_as_a_loss() -> None:
    made = decided(with_holder(claimed(ago=0.1), "n1", state="Unreachable"))
    assert made.status.membership is not None
    assert made.status.membership.parent == Checkpoint(1, 40)
    assert made.status.lost_servers == ("n1-i0",), "what it has is looked for again if step 40 is lost"
    assert not [e for e in made.events if e.reason == "MemoryServerLost"]


@pytest.mark.parametrize("read", [2, None])
def test_a_holder_that_fell_silent_is_waited_for_only_if_it_was_not_read_or_has_what_is_wanted(
    read: int | None,
) -> None:
    policy = CheckpointPolicy(MemoryTierSpec(interval_steps=10), on_total_loss="Restart")
    seen = claimed(checkpoint=policy)
    empty = tuple(replace(h, entries=()) for h in seen.servers)
    lost = with_holder(
        replace(seen, servers=empty), "n1", state="Unreachable", read_generation=read, since_seconds=NOW - 1
    )
    said = parent(lost)
    assert said is None if read else "which the operator cannot reach" in str(said)
    a_part = with_holder(lost, "n1", entries=(manifest(1, 40, 1, 3),))
    assert "which the operator cannot reach" in str(parent(a_part))


def test_a_holder_that_is_gone_is_not_waited_for() -> None:
    assert parent(with_holder(claimed(ago=0.1), "n1", state="Gone", entries=())) == Checkpoint(1, 40)


def test_a_holder_whose_node_runs_another_instance_is_not_waited_for() -> None:
    seen = claimed(ago=0.1)
    fresh = replace(seen.servers[1], endpoint=endpoint("n1", "i1"), entries=())
    assert parent(replace(seen, servers=(seen.servers[0], fresh, seen.servers[2]))) == Checkpoint(1, 40)


def test_a_named_holder_that_nobody_shows_is_unknown_not_empty() -> None:
    seen = claimed(ago=0.1)
    assert "waiting up to" in str(parent(replace(seen, servers=seen.servers[::2])))


def test_losing_every_copy_fails_a_job_that_says_so_unless_it_may_begin_again() -> None:
    lost = tuple(replace(h, entries=()) for h in claimed().servers)
    fails = CheckpointPolicy(MemoryTierSpec(interval_steps=10), on_total_loss="Fail")
    made = decided(replace(claimed(checkpoint=fails), servers=lost))
    assert made.status.phase == "Failed"
    assert "onTotalLoss" in made.status.message
    again = CheckpointPolicy(MemoryTierSpec(interval_steps=10), on_total_loss="Restart")
    assert parent(replace(claimed(checkpoint=again), servers=lost)) is None


def test_a_first_checkpoint_that_never_was_full_may_be_lost_quietly() -> None:
    seen = replace(claimed(), servers=tuple(replace(h, entries=()) for h in claimed().servers))
    assert parent(replace(seen, status=replace(seen.status, had_checkpoint=False))) is None


def test_the_persistent_tier_is_listed_after_the_last_index_was_read() -> None:
    made = decided(claimed(read=False, checkpoint=PERSISTENT))
    assert not any(isinstance(a, ListPersistentTier) for a in made.actions)
    made = decided(claimed(checkpoint=PERSISTENT))
    assert ListPersistentTier(2, 0) in made.actions


def test_a_newer_checkpoint_in_the_persistent_tier_is_the_parent() -> None:
    saved = tuple(manifest(1, 50, r, 3) for r in range(3))
    listed = PersistentListing(2, saved, NOW - 0.1)
    made = decided(replace(claimed(checkpoint=PERSISTENT), persistent=listed))
    assert made.status.membership is not None
    assert made.status.membership.parent == Checkpoint(1, 50)
    assert made.status.last_uploaded == Checkpoint(1, 50)


def test_a_persistent_tier_that_does_not_answer_is_awaited_where_memory_has_nothing() -> None:
    seen = claimed(ago=60, checkpoint=PERSISTENT)
    failed = PersistentListing(None, None, NOW - 5, "connection refused")
    empty = tuple(replace(h, entries=()) for h in seen.servers)
    made = decided(replace(seen, persistent=failed, servers=empty))
    assert made.status.phase == "Recovering"
    assert ListPersistentTier(2, 0) in made.actions
    assert parent(replace(seen, persistent=failed)) == Checkpoint(1, 40)


def test_nothing_below_the_floor_is_a_parent() -> None:
    seen = claimed(ago=60, checkpoint=PERSISTENT)
    seen = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 41)))
    failed = PersistentListing(None, None, NOW - 0.5, "connection refused")
    assert "waiting for the listing" in str(parent(replace(seen, persistent=failed)))


def test_a_damaged_floor_binds_no_longer() -> None:
    seen = claimed(checkpoint=PERSISTENT)
    floor = Checkpoint(1, 41)
    seen = replace(seen, status=replace(seen.status, last_uploaded=floor, unreadable_checkpoints=(floor,)))
    made = decided(replace(seen, persistent=PersistentListing(2, (), NOW)))
    assert made.status.membership is not None
    assert made.status.membership.parent == Checkpoint(1, 40)
    assert made.status.last_uploaded is None


def test_layouts_that_are_not_checked_yet_are_waited_for() -> None:
    assert "cover every tensor" in str(parent(replace(claimed(), covers={})))
    assert parent(replace(claimed(), covers=dict.fromkeys(COVERED, False))) != Checkpoint(1, 40)


def test_agents_that_must_still_stop_are_waited_for_and_strangers_are_not() -> None:
    seen = claimed(ago=2.0)
    assert "others are starting" in str(parent(with_session(seen, 1, warm=False)))
    made = decided(with_session(claimed(ago=3.1), 1, warm=False))
    assert made.status.membership is not None
    assert made.status.membership.world_size == 2


def test_a_fixed_world_waits_for_its_replacement() -> None:
    seen = claimed(ago=50.0, least=None)
    assert "too few" in str(parent(with_session(seen, 1, connected=False, since_seconds=NOW - 50)))


def test_the_incident_says_what_was_lost() -> None:
    incident = decided(claimed()).status.incidents[-1]
    assert (incident.restored_step, incident.steps_lost, incident.world_size_after) == (40, 2, 3)
    assert incident.committed_seconds == NOW


def unreadable(*left_out: UnreadRecord, step: int = 50, **changes: object) -> PersistentListing:
    """A listing that lacks what of `step` could not be read."""
    unjudged = frozenset({Checkpoint(1, step)})
    return replace(PersistentListing(2, (), NOW - 0.1, unread_records=left_out, undecidable=unjudged), **changes)  # type: ignore[arg-type]


DAMAGED = UnreadRecord("50-1/rank-0.json does not match its checksum", False, checkpoint=Checkpoint(1, 50))
SILENT = UnreadRecord("50-1/rank-0.json: SlowDown", True, checkpoint=Checkpoint(1, 50))


def without_memory(seen: JobSnapshot) -> JobSnapshot:
    return replace(seen, servers=tuple(replace(h, entries=()) for h in seen.servers))


def test_what_a_listing_could_not_read_keeps_nobody_from_an_older_checkpoint() -> None:
    seen = replace(claimed(checkpoint=PERSISTENT), persistent=unreadable(DAMAGED))
    assert parent(seen) == Checkpoint(1, 40), "what memory has"
    older = tuple(manifest(1, 30, r, 3) for r in range(3))
    listed = unreadable(DAMAGED, entries=older)
    floored = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 50)), persistent=listed)
    assert parent(without_memory(floored)) == Checkpoint(1, 30), "a floor that cannot be read binds nobody"


def test_a_floor_whose_record_was_not_given_binds_and_is_asked_for_again() -> None:
    older = tuple(manifest(1, 30, r, 3) for r in range(3))
    listed = unreadable(SILENT, entries=older, requested_seconds=NOW - 6)
    seen = replace(claimed(ago=60, checkpoint=PERSISTENT), persistent=listed)
    floored = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 50)))
    made = decided(without_memory(floored))
    assert made.status.membership == floored.status.membership, "step 30 would lose what is safe"
    assert ListPersistentTier(2, 0) in made.actions
    both = replace(listed, unread_records=(SILENT, DAMAGED))
    assert parent(without_memory(replace(floored, persistent=both))) == Checkpoint(1, 30)


@pytest.mark.parametrize("policy", ["Wait", "Fail", "Restart"])
def test_where_what_was_stored_last_is_gone_an_older_one_that_is_there_is_restored(policy: str) -> None:
    """Found by the simulator: a bucket had lost its newest checkpoint, and the job said that every copy of every one was lost."""
    checkpoint = replace(PERSISTENT, on_total_loss=policy)  # type: ignore[arg-type]  # one of its words
    older = tuple(manifest(1, 30, r, 3) for r in range(3))
    seen = without_memory(claimed(ago=60, checkpoint=checkpoint))
    seen = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 40)))
    early = decided(replace(seen, persistent=PersistentListing(2, older, NOW - 50)))
    assert early.status.membership == seen.status.membership, "a network file system may show what was"
    assert any(isinstance(action, ListPersistentTier) for action in early.actions)
    seen = replace(seen, persistent=PersistentListing(2, older, NOW - 5))
    noted = decided(seen)
    assert (noted.status.unreadable_checkpoints, noted.status.phase) == ((Checkpoint(1, 40),), "Recovering")
    assert [event.reason for event in noted.events if "is missing from the persistent tier" in event.message] == [
        "CheckpointUnreadable"
    ]
    made = decided(replace(seen, status=noted.status)).status
    assert made.membership is not None
    assert (made.membership.state, made.membership.parent, made.last_uploaded) == (
        "Committed",
        Checkpoint(1, 30),
        Checkpoint(1, 30),
    )


def test_a_layout_that_nobody_can_bring_is_not_waited_for() -> None:
    newer = tuple(replace(manifest(1, 50, r, 3), layout="lost") for r in range(3))
    listed = unreadable(UnreadRecord("layouts/lost.json is damaged", False, digest="lost"), entries=newer)
    assert parent(replace(claimed(checkpoint=PERSISTENT), persistent=listed)) == Checkpoint(1, 40)


@pytest.mark.parametrize(("policy", "phase"), [("Wait", "Recovering"), ("Fail", "Failed")])
def test_where_only_what_cannot_be_read_is_left_its_name_is_said(policy: str, phase: str) -> None:
    checkpoint = replace(PERSISTENT, on_total_loss=policy)  # type: ignore[arg-type]  # one of its words
    seen = without_memory(replace(claimed(ago=90, checkpoint=checkpoint), persistent=unreadable(DAMAGED)))
    made = decided(seen)
    assert made.status.phase == phase
    assert "50-1/rank-0.json does not match its checksum" in made.reason
    nothing_known = replace(seen, status=replace(seen.status, had_checkpoint=False, last_complete=None))
    assert parent(nothing_known) is not None, "what is there and cannot be read is not absent: never step 0"


def test_a_record_that_the_tier_did_not_give_is_asked_for_again_and_named() -> None:
    seen = without_memory(replace(claimed(ago=60, checkpoint=PERSISTENT), persistent=unreadable(SILENT)))
    made = decided(seen)
    assert made.status.phase == "Recovering"
    assert "SlowDown" in made.reason
    later = replace(seen, persistent=unreadable(SILENT, requested_seconds=NOW - 6))
    assert ListPersistentTier(2, 0) in decided(later).actions


@pytest.mark.parametrize("ago", [0.5, 15.0])
def test_with_a_complete_checkpoint_in_memory_a_slow_listing_is_waited_for_a_little_while(ago: float) -> None:
    seen = replace(claimed(ago=20, checkpoint=PERSISTENT), persistent=PersistentListing(requested_seconds=NOW - ago))
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
        gone = replace(seen.servers[-1], state="Gone", since_seconds=NOW - 0.5, entries=(), read_generation=None)
        seen = replace(seen, servers=(*seen.servers[:-1], gone))
        asked = NOW - 1.0 if listed is not None else None
        seen = replace(seen, persistent=PersistentListing(listed, () if listed else None, asked))
        assert (parent(seen) == Checkpoint(1, 40)) == chosen


def test_a_listing_that_takes_long_is_asked_of_another_agent_only() -> None:
    slow = PersistentListing(requested_seconds=NOW - 30, requested_from=frozenset({WorkerId(0, 1)}))
    seen = without_memory(replace(claimed(ago=60, checkpoint=PERSISTENT), persistent=slow))
    assert decided(seen).actions == ()
    longer = replace(seen, persistent=replace(slow, requested_seconds=NOW - 61))
    assert ListPersistentTier(2, 1) in decided(longer).actions


def test_a_listing_is_not_waited_for_of_an_agent_that_is_not_heard_any_more() -> None:
    """Of a machine without power the line never breaks, and its worker may have a new attempt under the same number."""
    asked = PersistentListing(requested_seconds=NOW - 5, requested_from=frozenset({WorkerId(0, 1)}))
    seen = without_memory(replace(claimed(ago=60, checkpoint=PERSISTENT), persistent=asked))
    silent = with_session(seen, 0, last_message_seconds=NOW - 4)
    assert ListPersistentTier(2, 1) in decided(silent).actions
    again = replace(asked, requested_seconds=NOW, requested_from=frozenset({WorkerId(0, 1), WorkerId(1, 1)}))
    assert decided(replace(silent, persistent=again)).actions == ()
    replaced = replace(silent, sessions=(*silent.sessions, session(0, 2, now=NOW, generation=1, stopped=2)))
    assert ListPersistentTier(2, 0) in decided(replaced).actions


# ---- initial restore -------------------------------------------------------------------------------------------------
# Where a job begins that has nothing of its own: at step 0, or where an older job stood, decided once.

OLDER = SourceJob("file:///ckpt", "old")


def policy(step: Any = "latest", **other: Any) -> CheckpointPolicy:
    given = RestoreFrom(uri="file:///ckpt/old", step=step)
    tier = PersistentTierSpec("file:///own")
    return CheckpointPolicy(MemoryTierSpec(interval_steps=10), tier, restore_from=given, **other)


def older(*checkpoints: tuple[int, int], world: int = 2) -> tuple[RankManifest, ...]:
    """What the older job has, by (epoch, step), as its listing shows it."""
    return tuple(manifest(-e, s, r, world) for e, s in checkpoints for r in range(world))


THERE = (*older((1, 20), (1, 40), (3, 40), (3, 60)), manifest(-3, 80, 0, 2))


def first(entries: tuple[RankManifest, ...] | None = THERE, **spec: Any) -> JobSnapshot:
    """Epoch 1 is claimed, all is read, three workers are warm; `entries`: None while nobody listed the older job."""
    listed = PersistentListing(1, entries, NOW - 1, source_job=OLDER) if entries is not None else PersistentListing()
    return JobSnapshot(
        now_seconds=NOW,
        term_seconds=BEGAN,
        job=job(3, **{"checkpoint": policy(), **spec}),
        status=JobStatus(
            membership=Membership(1, "Claimed", changed_seconds=NOW - 2), next_attempt=2, start_seconds=BEGAN
        ),
        workers=tuple(worker(i) for i in range(3)),
        sessions=tuple(session(i, now=NOW, stopped=1) for i in range(3)),
        servers=tuple(holder(f"n{i}", 1) for i in range(3)),
        source_listing=listed,
        covers=COVERED,
        free_nodes=0,
    )


def claimed_again(*own: tuple[int, int], recorded: bool = False, ago: float = 20.0, **spec: Any) -> JobSnapshot:
    """Epoch 2 is claimed after epoch 1, which began at step 60 of the older job; `own` lies on all holders."""
    seen = running(step=65, **{"checkpoint": policy(), **spec})
    origin, old = Checkpoint(-3, 60), seen.status.membership
    assert old is not None
    entries = tuple(manifest(e, s, r, 3) for e, s in own for r in range(3))
    incident = Incident("node-lost", "a test", 1, "n1", 1, NOW - 20, NOW - 20, last_step=65, world_size_before=3)
    status = replace(
        seen.status,
        membership=Membership(2, "Claimed", origin, 3, old.members, "a test", NOW - ago),
        lineage=(LineageEntry(1, origin, 3),),
        initial_checkpoint=origin,
        source_job=OLDER,
        had_checkpoint=recorded,
        last_complete=None,
        incidents=(incident,),
    )
    return replace(
        seen,
        status=status,
        sessions=tuple(told(s, stopped=2, step=65, saved=None) for s in seen.sessions),
        servers=tuple(replace(h, fence=2, read_generation=2, entries=entries) for h in seen.servers),
        persistent=PersistentListing(2, (), NOW - 1),
    )


def parent_initial_restore(seen: JobSnapshot) -> Checkpoint | str | None:
    """The parent that is committed now, or why not."""
    made = decided(seen)
    world = made.status.membership
    return world.parent if world is not None and world.state == "Committed" else made.reason


def test_the_older_jobs_folder_is_listed_through_one_agent_first() -> None:
    made = decided(first(None))
    assert made.actions == (ListPersistentTier(1, 0, OLDER),)
    assert made.reason == "listing job old in file:///ckpt through worker 0"
    failed = replace(first(None), source_listing=PersistentListing(None, None, NOW - 0.5, "no such mount", OLDER))
    assert "no such mount" in str(parent_initial_restore(failed))
    assert not decided(failed).actions


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        ("latest", Checkpoint(-3, 60)),  # step 80 lacks a rank
        (40, Checkpoint(-3, 40)),  # of two epochs that completed it, the newer
        (20, Checkpoint(-1, 20)),
    ],
)
def test_the_wanted_checkpoint_is_the_first_epochs_parent_and_durable(step: Any, wanted: Checkpoint) -> None:
    seen = first(checkpoint=policy(step))
    assert parent_initial_restore(seen) == wanted
    status = decided(seen).status
    assert (status.initial_checkpoint, status.source_job) == (wanted, OLDER)
    assert status.lineage == (LineageEntry(1, wanted, 3),)
    assert status_from_json(status_to_json(status)) == status


@pytest.mark.parametrize(
    ("step", "entries", "said"),
    [
        (50, THERE, "no complete checkpoint of step 50 to start from: complete checkpoints are at steps 60, 40, 20;"),
        (80, THERE, "no complete checkpoint of step 80"),
        ("latest", (), "no checkpoint to start from: none is complete there"),
        (40, older(*((1, s) for s in range(1, 30))), "steps 29, 28, 27, 26, 25, 24, 23, 22, …"),
    ],
)
def test_what_is_not_there_fails_the_job_and_names_what_is(
    step: Any, entries: tuple[RankManifest, ...], said: str
) -> None:
    made = decided(first(entries, checkpoint=policy(step)))
    assert made.status.phase == "Failed"
    assert said in made.status.message
    assert "job old in file:///ckpt" in made.status.message


def test_another_older_jobs_listing_is_not_taken_for_this_ones() -> None:
    seen = first()
    other = replace(seen.source_listing, source_job=SourceJob("file:///ckpt", "other"), requested_seconds=None)
    assert decided(replace(seen, source_listing=other)).actions == (ListPersistentTier(1, 0, OLDER),)


def test_layouts_that_do_not_cover_every_tensor_make_no_checkpoint_to_begin_from() -> None:
    assert decided(replace(first(), covers={frozenset({"layout"}): False})).status.phase == "Failed"


def test_a_job_without_restore_from_begins_at_step_0() -> None:
    assert parent_initial_restore(first(None, checkpoint=CheckpointPolicy())) is None


def test_before_a_checkpoint_of_its_own_the_job_goes_back_to_where_it_began() -> None:
    seen = claimed_again()
    assert parent_initial_restore(seen) == Checkpoint(-3, 60)
    made = decided(seen)
    assert made.status.incidents[-1].steps_lost == 5
    assert parent_initial_restore(replace(seen, source_listing=PersistentListing())) == Checkpoint(
        -3, 60
    )  # known: nothing is listed again


def test_what_is_decided_stays_whatever_the_spec_says_later() -> None:
    other = replace(policy(), restore_from=RestoreFrom(uri="file:///elsewhere/x", step=7))
    assert parent_initial_restore(claimed_again(checkpoint=other)) == Checkpoint(-3, 60)
    assert parent_initial_restore(claimed_again(checkpoint=replace(policy(), restore_from=None))) == Checkpoint(-3, 60)


def test_a_job_that_began_at_step_0_does_not_turn_to_an_older_job_later() -> None:
    seen = claimed_again()
    status = replace(seen.status, initial_checkpoint=None, source_job=None, lineage=(LineageEntry(1, None, 3),))
    assert parent_initial_restore(replace(seen, status=status)) is None


def test_a_checkpoint_of_its_own_goes_before_the_older_jobs() -> None:
    assert parent_initial_restore(claimed_again((1, 62))) == Checkpoint(1, 62)
    assert isinstance(
        parent_initial_restore(claimed_again((1, 50), recorded=True)), str
    )  # not after the branching point: not its own


def test_total_loss_fails_the_job_or_begins_again_where_it_began() -> None:
    lost = decided(claimed_again(recorded=True, ago=90.0, checkpoint=policy(on_total_loss="Fail")))
    assert lost.status.phase == "Failed"
    assert "would start over at step 60 of generation 3 of the source job" in lost.status.message
    restart = decided(claimed_again(recorded=True, ago=90.0, checkpoint=policy(on_total_loss="Restart")))
    assert restart.status.membership is not None
    assert restart.status.membership.parent == Checkpoint(-3, 60)
    assert any("begins again at step 60 of generation 3" in event.message for event in restart.events)


@pytest.mark.parametrize("absent", [True, False])
def test_one_that_turns_out_to_be_unreadable_is_not_chosen_again(absent: bool) -> None:
    seen = claimed_again()
    world = seen.status.membership
    assert world is not None
    committed = replace(seen.status, membership=replace(world, generation=1, state="Committed"), incidents=())
    broken = (Checkpoint(-3, 60), absent, "a test")
    sessions = tuple(
        told(s, generation=1, stopped=1, step=60, step_at_seconds=None, unreadable_report=broken) for s in seen.sessions
    )
    holders = tuple(replace(h, fence=1, read_generation=1) for h in seen.servers)
    made = decided(replace(seen, status=committed, sessions=sessions, servers=holders))
    assert made.status.unreadable_checkpoints == (Checkpoint(-3, 60),)
    again = replace(seen, status=replace(seen.status, unreadable_checkpoints=made.status.unreadable_checkpoints))
    assert decided(again).actions == (ListPersistentTier(2, 0, OLDER),)
    listed = replace(again, source_listing=PersistentListing(2, THERE, NOW, source_job=OLDER))
    assert parent_initial_restore(listed) == Checkpoint(-3, 40)
    assert decided(listed).status.initial_checkpoint == Checkpoint(-3, 40)
    spec = replace(listed.job.spec, checkpoint=policy(60))
    failed = decided(replace(listed, job=replace(listed.job, spec=spec)))
    assert "apart from unreadable ones (step 60 of generation 3 of the source job)" in failed.status.message


def test_the_origin_is_a_plain_parent_on_the_lineage() -> None:
    lineage = (LineageEntry(1, Checkpoint(-3, 60), 3), LineageEntry(2, Checkpoint(1, 70), 2))
    assert is_on_lineage(lineage[:1], Checkpoint(-3, 60), 1)
    assert is_on_lineage(lineage, Checkpoint(-3, 60), 2)
    assert not is_on_lineage(lineage, Checkpoint(-3, 50), 2)
    assert not is_on_lineage(lineage, Checkpoint(1, 60), 2)
    assert (
        generation_of_step(lineage, 2, 61),
        generation_of_step(lineage, 2, 71),
        generation_of_step(lineage, 2, 60),
    ) == (1, 2, None)
    assert (first_own_step(lineage), first_own_step(()), first_own_step((LineageEntry(1, None, 1),))) == (61, 1, 1)


def test_nothing_of_the_older_job_is_ever_dropped_copied_or_uploaded() -> None:
    seen = claimed_again((1, 70), (1, 80), (1, 90))
    world = seen.status.membership
    assert world is not None
    running_on = replace(seen.status, membership=replace(world, generation=1, state="Committed"), incidents=())
    seen = replace(
        seen,
        status=running_on,
        sessions=tuple(told(s, generation=1, stopped=1, step=95, step_at_seconds=NOW) for s in seen.sessions),
        servers=tuple(replace(h, fence=1, read_generation=1) for h in seen.servers),
    )
    facts = build_facts(seen)
    saves = memory_saves_to_delete(
        [m for h in seen.servers for m in h.entries], retention_inputs(facts, Checkpoint(1, 90), None, None), 2
    )
    assert {s.checkpoint for s in saves} == {Checkpoint(1, 70)}
    assert not any("epoch=-3" in repr(errand) or "ckpt" in repr(errand) for errand in plan_maintenance(seen).actions)


def test_members_are_told_where_the_parent_lies_as_long_as_it_is_the_older_jobs() -> None:
    for parent, older in ((Checkpoint(-3, 60), OLDER), (Checkpoint(1, 70), None)):
        status = replace(
            STATUS,
            membership=replace(COMMITTED, parent=parent),
            initial_checkpoint=Checkpoint(-3, 60),
            source_job=OLDER,
        )
        assert [w.source_job for w in words(talking(), A, status) if isinstance(w, Assign)] == [older]
