"""Where a job begins that has nothing of its own: at step 0, or where an older job stood, decided once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, COVERED, holder, job, manifest, running, session, told, worker
from support.talk import COMMITTED, STATUS, A, talking, words
from surefoot.protocol.checkpoints.completeness import LineageEntry, epoch_at, first_step, on_lineage
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.retention import memory_drops
from surefoot.protocol.identities import Checkpoint, OlderJob
from surefoot.protocol.messages import Assign
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec, RestoreFrom
from surefoot_operator.api.status import Incident, JobStatus, World
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.job_snapshot import Observed, PersistentSeen
from surefoot_operator.policy.core.actions import ListPersistentTier, Plan
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.maintenance.maintenance_plan import maintain, standing_of
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = BEGAN + 100
OLDER = OlderJob("file:///ckpt", "old")


def policy(step: Any = "latest", **other: Any) -> CheckpointPolicy:
    given = RestoreFrom(uri="file:///ckpt/old", step=step)
    tier = PersistentTierSpec("file:///own")
    return CheckpointPolicy(MemoryTierSpec(interval_steps=10), tier, restore_from=given, **other)


def older(*checkpoints: tuple[int, int], world: int = 2) -> tuple[RankManifest, ...]:
    """What the older job has, by (epoch, step), as its listing shows it."""
    return tuple(manifest(-e, s, r, world) for e, s in checkpoints for r in range(world))


THERE = (*older((1, 20), (1, 40), (3, 40), (3, 60)), manifest(-3, 80, 0, 2))


def first(entries: tuple[RankManifest, ...] | None = THERE, **spec: Any) -> Observed:
    """Epoch 1 is claimed, all is read, three workers are warm; `entries`: None while nobody listed the older job."""
    listed = PersistentSeen(1, entries, NOW - 1, older_job=OLDER) if entries is not None else PersistentSeen()
    return Observed(
        now=NOW,
        term_seconds=BEGAN,
        job=job(3, **{"checkpoint": policy(), **spec}),
        status=JobStatus(world=World(1, "Claimed", changed_seconds=NOW - 2), next_attempt=2, start_seconds=BEGAN),
        workers=tuple(worker(i) for i in range(3)),
        sessions=tuple(session(i, now=NOW, stopped=1) for i in range(3)),
        holders=tuple(holder(f"n{i}", 1) for i in range(3)),
        older=listed,
        covers=COVERED,
        free_nodes=0,
    )


def claimed_again(*own: tuple[int, int], recorded: bool = False, ago: float = 20.0, **spec: Any) -> Observed:
    """Epoch 2 is claimed after epoch 1, which began at step 60 of the older job; `own` lies on all holders."""
    seen = running(step=65, **{"checkpoint": policy(), **spec})
    origin, old = Checkpoint(-3, 60), seen.status.world
    assert old is not None
    entries = tuple(manifest(e, s, r, 3) for e, s in own for r in range(3))
    incident = Incident("node-lost", "a test", 1, "n1", 1, NOW - 20, NOW - 20, last_step=65, world_before=3)
    status = replace(
        seen.status,
        world=World(2, "Claimed", origin, 3, old.members, "a test", NOW - ago),
        lineage=(LineageEntry(1, origin, 3),),
        origin=origin,
        older_job=OLDER,
        recorded=recorded,
        last_complete=None,
        incidents=(incident,),
    )
    return replace(
        seen,
        status=status,
        sessions=tuple(told(s, stopped=2, step=65, saved=None) for s in seen.sessions),
        holders=tuple(replace(h, fence=2, read_epoch=2, entries=entries) for h in seen.holders),
        persistent=PersistentSeen(2, (), NOW - 1),
    )


def decided(seen: Observed) -> Plan:
    made = plan(seen)
    check(made, seen)
    return made


def parent(seen: Observed) -> Checkpoint | str | None:
    """The parent that is committed now, or why not."""
    made = decided(seen)
    world = made.status.world
    return world.parent if world is not None and world.state == "Committed" else made.reason


def test_the_older_jobs_folder_is_listed_through_one_agent_first() -> None:
    made = decided(first(None))
    assert made.actions == (ListPersistentTier(1, 0, OLDER),)
    assert made.reason == "listing job old in file:///ckpt through worker 0"
    failed = replace(first(None), older=PersistentSeen(None, None, NOW - 0.5, "no such mount", OLDER))
    assert "no such mount" in str(parent(failed))
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
    assert parent(seen) == wanted
    status = decided(seen).status
    assert (status.origin, status.older_job) == (wanted, OLDER)
    assert status.lineage == (LineageEntry(1, wanted, 3),)
    assert status_from_json(status_to_json(status)) == status


@pytest.mark.parametrize(
    ("step", "entries", "said"),
    [
        (50, THERE, "no complete checkpoint of step 50 to begin from: complete are those of steps 60, 40, 20;"),
        (80, THERE, "no complete checkpoint of step 80"),
        ("latest", (), "no checkpoint to begin from: none is complete there"),
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
    other = replace(seen.older, older_job=OlderJob("file:///ckpt", "other"), asked_seconds=None)
    assert decided(replace(seen, older=other)).actions == (ListPersistentTier(1, 0, OLDER),)


def test_layouts_that_do_not_cover_every_tensor_make_no_checkpoint_to_begin_from() -> None:
    assert decided(replace(first(), covers={frozenset({"layout"}): False})).status.phase == "Failed"


def test_a_job_without_restore_from_begins_at_step_0() -> None:
    assert parent(first(None, checkpoint=CheckpointPolicy())) is None


def test_before_a_checkpoint_of_its_own_the_job_goes_back_to_where_it_began() -> None:
    seen = claimed_again()
    assert parent(seen) == Checkpoint(-3, 60)
    made = decided(seen)
    assert made.status.incidents[-1].steps_lost == 5
    assert parent(replace(seen, older=PersistentSeen())) == Checkpoint(-3, 60)  # known: nothing is listed again


def test_what_is_decided_stays_whatever_the_spec_says_later() -> None:
    other = replace(policy(), restore_from=RestoreFrom(uri="file:///elsewhere/x", step=7))
    assert parent(claimed_again(checkpoint=other)) == Checkpoint(-3, 60)
    assert parent(claimed_again(checkpoint=replace(policy(), restore_from=None))) == Checkpoint(-3, 60)


def test_a_job_that_began_at_step_0_does_not_turn_to_an_older_job_later() -> None:
    seen = claimed_again()
    status = replace(seen.status, origin=None, older_job=None, lineage=(LineageEntry(1, None, 3),))
    assert parent(replace(seen, status=status)) is None


def test_a_checkpoint_of_its_own_goes_before_the_older_jobs() -> None:
    assert parent(claimed_again((1, 62))) == Checkpoint(1, 62)
    assert isinstance(parent(claimed_again((1, 50), recorded=True)), str)  # not after the branching point: not its own


def test_total_loss_fails_the_job_or_begins_again_where_it_began() -> None:
    lost = decided(claimed_again(recorded=True, ago=90.0, checkpoint=policy(on_total_loss="Fail")))
    assert lost.status.phase == "Failed"
    assert "would begin again at step 60 of epoch 3 of an older job" in lost.status.message
    restart = decided(claimed_again(recorded=True, ago=90.0, checkpoint=policy(on_total_loss="Restart")))
    assert restart.status.world is not None
    assert restart.status.world.parent == Checkpoint(-3, 60)
    assert any("begins again at step 60 of epoch 3" in event.message for event in restart.events)


@pytest.mark.parametrize("absent", [True, False])
def test_one_that_turns_out_to_be_unreadable_is_not_chosen_again(absent: bool) -> None:
    seen = claimed_again()
    world = seen.status.world
    assert world is not None
    committed = replace(seen.status, world=replace(world, epoch=1, state="Committed"), incidents=())
    broken = (Checkpoint(-3, 60), absent, "a test")
    sessions = tuple(
        told(s, epoch=1, stopped=1, step=60, step_at_seconds=None, unreadable=broken) for s in seen.sessions
    )
    holders = tuple(replace(h, fence=1, read_epoch=1) for h in seen.holders)
    made = decided(replace(seen, status=committed, sessions=sessions, holders=holders))
    assert made.status.bad == (Checkpoint(-3, 60),)
    again = replace(seen, status=replace(seen.status, bad=made.status.bad))
    assert decided(again).actions == (ListPersistentTier(2, 0, OLDER),)
    listed = replace(again, older=PersistentSeen(2, THERE, NOW, older_job=OLDER))
    assert parent(listed) == Checkpoint(-3, 40)
    assert decided(listed).status.origin == Checkpoint(-3, 40)
    spec = replace(listed.job.spec, checkpoint=policy(60))
    failed = decided(replace(listed, job=replace(listed.job, spec=spec)))
    assert "apart from what could not be read (step 60 of epoch 3 of an older job)" in failed.status.message


def test_the_origin_is_a_plain_parent_on_the_lineage() -> None:
    lineage = (LineageEntry(1, Checkpoint(-3, 60), 3), LineageEntry(2, Checkpoint(1, 70), 2))
    assert on_lineage(lineage[:1], Checkpoint(-3, 60), 1)
    assert on_lineage(lineage, Checkpoint(-3, 60), 2)
    assert not on_lineage(lineage, Checkpoint(-3, 50), 2)
    assert not on_lineage(lineage, Checkpoint(1, 60), 2)
    assert (epoch_at(lineage, 2, 61), epoch_at(lineage, 2, 71), epoch_at(lineage, 2, 60)) == (1, 2, None)
    assert (first_step(lineage), first_step(()), first_step((LineageEntry(1, None, 1),))) == (61, 1, 1)


def test_nothing_of_the_older_job_is_ever_dropped_copied_or_uploaded() -> None:
    seen = claimed_again((1, 70), (1, 80), (1, 90))
    world = seen.status.world
    assert world is not None
    running_on = replace(seen.status, world=replace(world, epoch=1, state="Committed"), incidents=())
    seen = replace(
        seen,
        status=running_on,
        sessions=tuple(told(s, epoch=1, stopped=1, step=95, step_at_seconds=NOW) for s in seen.sessions),
        holders=tuple(replace(h, fence=1, read_epoch=1) for h in seen.holders),
    )
    facts = gather(seen)
    saves = memory_drops(
        [m for h in seen.holders for m in h.entries], standing_of(facts, Checkpoint(1, 90), None, None), 2
    )
    assert {s.checkpoint for s in saves} == {Checkpoint(1, 70)}
    assert not any("epoch=-3" in repr(errand) or "ckpt" in repr(errand) for errand in maintain(seen).actions)


def test_members_are_told_where_the_parent_lies_as_long_as_it_is_the_older_jobs() -> None:
    for parent, older in ((Checkpoint(-3, 60), OLDER), (Checkpoint(1, 70), None)):
        status = replace(STATUS, world=replace(COMMITTED, parent=parent), origin=Checkpoint(-3, 60), older_job=OLDER)
        assert [w.older_job for w in words(talking(), A, status) if isinstance(w, Assign)] == [older]
