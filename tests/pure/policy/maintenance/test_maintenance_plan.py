"""Tests of `policy.maintenance.maintenance_plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, endpoint, holder, manifest, running, told, with_holder, with_session
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint, RankSave, WorkerId
from surefoot_operator.api.spec import (
    CheckpointPolicy,
    HealthPolicy,
    MemoryTierSpec,
    NumericsPolicy,
    PersistentTierSpec,
)
from surefoot_operator.api.status import Membership
from surefoot_operator.job_snapshot import JobSnapshot, ObservedMemoryServer, PersistentListing
from surefoot_operator.policy.core.actions import (
    DeleteUploaded,
    DropSaves,
    FenceMemoryServer,
    ListPersistentTier,
    RequestRepair,
    UploadSaves,
)
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.maintenance.last_good import checkpoints_kept_in_memory_for_rollback
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan, plan_maintenance
from surefoot_operator.policy.maintenance.upload_plan import MAX_FAILED_UPLOADS
from surefoot_operator.policy.membership.restore_decisions import DROP_SECONDS

# ---- maintain --------------------------------------------------------------------------------------------------------
# What the tiers need beside a committed world, and what is never done to them.

NOW = BEGAN + 100
PERSISTENT = CheckpointPolicy(
    MemoryTierSpec(interval_steps=10), PersistentTierSpec("file:///tmp/checkpoints", interval_steps=15, keep=1)
)


def of(kind: type, kept: MaintenancePlan) -> list[object]:
    return [errand for errand in kept.actions if isinstance(errand, kind)]


def thinned(seen: JobSnapshot, step: int) -> JobSnapshot:
    """Only the first copy of each rank save of `step` is left."""

    def cut(place: int, one: ObservedMemoryServer) -> ObservedMemoryServer:
        return replace(one, entries=tuple(m for m in one.entries if m.save.step != step or m.save.rank == place))

    return replace(seen, servers=tuple(cut(i, h) for i, h in enumerate(seen.servers)))


def with_saves(seen: JobSnapshot, *steps: int) -> JobSnapshot:
    """These steps of epoch 1 too, each rank on two holders."""

    def more(place: int, one: ObservedMemoryServer) -> ObservedMemoryServer:
        saves = [manifest(1, s, r, 3) for s in steps for r in range(3) if place in (r, (r + 1) % 3)]
        return replace(one, entries=(*one.entries, *saves))

    return replace(seen, servers=tuple(more(i, h) for i, h in enumerate(seen.servers)))


def promoted(*steps: int) -> dict[Checkpoint, frozenset[RankSave]]:
    return {Checkpoint(1, s): frozenset(RankSave(1, s, r) for r in range(3)) for s in steps}


def test_tiers_that_are_well_need_nothing() -> None:
    kept = plan_maintenance(running())
    assert kept.actions == ()
    assert kept.watermark == Checkpoint(1, 40)
    assert kept.status == running().status
    assert [e.instance.node for e in kept.servers] == ["n0", "n1", "n2"]


def test_nothing_is_done_while_the_world_is_claimed() -> None:
    seen = with_saves(running(), 10, 20)
    claim = Membership(2, "Claimed", None, 3, seen.status.membership.members if seen.status.membership else ())
    assert plan_maintenance(replace(seen, status=replace(seen.status, membership=claim))).actions == ()


def test_older_checkpoints_go_once_a_newer_one_is_full_beyond_those_kept() -> None:
    drops = of(DropSaves, plan_maintenance(with_saves(running(), 10, 20)))
    assert len(drops) == 3
    assert {s.step for d in drops if isinstance(d, DropSaves) for s in d.saves} == {10, 20}
    assert all(isinstance(d, DropSaves) and NOW < d.expires_seconds <= NOW + 5 for d in drops)


def test_nothing_goes_while_no_checkpoint_has_its_copies() -> None:
    seen = with_saves(running(), 10, 20)
    for step in (10, 20, 30, 40):
        seen = thinned(seen, step)
    assert not of(DropSaves, plan_maintenance(seen))


def test_a_holder_that_was_not_read_keeps_everything() -> None:
    seen = with_holder(with_saves(running(), 10, 20), "n1", state="Unreachable")
    drops = of(DropSaves, plan_maintenance(seen))
    assert "n1" not in {d.server.node for d in drops if isinstance(d, DropSaves)}


def without(seen: JobSnapshot, step: int, rank: int) -> JobSnapshot:
    """Nobody has this rank's save of this step."""

    def cut(one: ObservedMemoryServer) -> ObservedMemoryServer:
        return replace(one, entries=tuple(m for m in one.entries if m.save != RankSave(1, step, rank)))

    return replace(seen, servers=tuple(map(cut, seen.servers)))


def steps_dropped(kept: MaintenancePlan) -> set[int]:
    return {s.step for d in of(DropSaves, kept) if isinstance(d, DropSaves) for s in d.saves}


@pytest.mark.parametrize(
    ("said", "dropped"),
    [
        (ClosedSteps(), set()),  # it may still come
        (ClosedSteps(closed_up_to=49), set()),
        (ClosedSteps(closed_up_to=50), {50}),  # it never will
        (
            ClosedSteps(closed_up_to=60, handed_over=(40, 50, 60)),
            set(),
        ),  # handed over: it may be on a holder that nobody reaches
        (ClosedSteps(closed_up_to=60, handed_over=(40, 60)), {50}),
        (ClosedSteps(closed_up_to=99, handed_over=(80, 90), unknown_up_to=70), set()),  # nobody knows any more
    ],
)
def test_what_a_rank_never_saved_goes_though_nothing_newer_is_safe(said: ClosedSteps, dropped: set[int]) -> None:
    seen = without(with_saves(running(), 50), 50, rank=1)
    kept = plan_maintenance(with_session(seen, 1, closed_steps=said))
    assert steps_dropped(kept) == dropped
    assert kept.watermark == Checkpoint(1, 40)
    assert [h.checkpoint.step for h in kept.unrecoverable] == sorted(dropped)
    if dropped:
        told = "step 50 of generation 1 can never become complete: worker 1 on n1 has not saved it, and never will"
        assert kept.reason.startswith(told)


def test_what_a_rank_never_saved_goes_whoever_is_silent_and_while_nothing_was_ever_whole() -> None:
    seen = running()
    for step in (30, 40):
        seen = without(seen, step, rank=1)
    seen = with_session(with_holder(seen, "n2", state="Unreachable"), 1, closed_steps=ClosedSteps(closed_up_to=41))
    kept = plan_maintenance(seen)
    assert (kept.watermark, steps_dropped(kept)) == (None, {30, 40})
    assert "n2" not in {d.server.node for d in of(DropSaves, kept) if isinstance(d, DropSaves)}


def test_only_a_member_of_the_epoch_can_say_that_it_saved_nothing() -> None:
    seen = without(with_saves(running(), 50), 50, rank=1)
    said = ClosedSteps(closed_up_to=60)
    assert steps_dropped(plan_maintenance(with_session(seen, 1, closed_steps=said, generation=2))) == set()
    assert steps_dropped(plan_maintenance(with_session(seen, 1, closed_steps=said, incarnation="another"))) == set()


def test_what_was_read_to_be_complete_is_never_taken_for_hopeless() -> None:
    seen = with_session(with_saves(running(), 50), 1, closed_steps=ClosedSteps(closed_up_to=60))
    assert plan_maintenance(seen).unrecoverable == ()


def test_a_checkpoint_that_cannot_become_complete_takes_nobodys_place_among_those_kept() -> None:
    policy = CheckpointPolicy(MemoryTierSpec(interval_steps=10, keep=2))
    seen = with_saves(running(step=62, checkpoint=policy), 20, 50, 60)
    seen = without(seen, 50, rank=1)
    assert steps_dropped(plan_maintenance(seen)) == {20, 30, 40}
    known = with_session(seen, 1, closed_steps=ClosedSteps(closed_up_to=61, handed_over=(20, 30, 40, 60)))
    assert steps_dropped(plan_maintenance(known)) == {20, 30, 50}


def test_saves_of_an_overtaken_world_go() -> None:
    seen = running()
    stray = manifest(0, 35, 0, 3)
    seen = with_holder(seen, "n0", entries=(*seen.servers[0].entries, stray))
    assert [d.saves for d in of(DropSaves, plan_maintenance(seen)) if isinstance(d, DropSaves)] == [(stray.save,)]


def test_a_new_holder_is_sealed_and_read_before_it_is_named() -> None:
    fresh = ObservedMemoryServer(endpoint("n3"), "Ready", NOW)
    seen = replace(running(), servers=(*running().servers, fresh))
    kept = plan_maintenance(seen)
    assert kept.actions == (FenceMemoryServer(fresh.endpoint.instance, 1),)
    assert fresh.endpoint not in kept.servers
    kept = plan_maintenance(with_holder(seen, "n3", fence=1, read_generation=1))
    assert fresh.endpoint in kept.status.assigned_servers
    assert fresh.endpoint in kept.servers


def test_another_server_of_a_node_does_not_stand_for_one_that_is_silent() -> None:
    beside = ObservedMemoryServer(endpoint("n1", "i1", server=1), "Ready", NOW, fence=1, read_generation=1)
    seen = with_holder(running(), "n1", state="Unreachable")
    kept = plan_maintenance(replace(seen, servers=(*seen.servers, beside)))
    assert {e.instance.run_id for e in kept.status.assigned_servers} == {"n0-i0", "n1-i0", "n1-i1", "n2-i0"}
    again = replace(beside, endpoint=endpoint("n1", "i2"))
    kept = plan_maintenance(replace(seen, servers=(*seen.servers, again)))
    assert {e.instance.run_id for e in kept.status.assigned_servers} == {"n0-i0", "n1-i2", "n2-i0"}, "it restarted"


def test_a_holder_that_is_gone_is_forgotten_and_a_silent_one_is_not() -> None:
    gone = plan_maintenance(with_holder(running(), "n1", state="Gone"))
    assert [e.instance.node for e in gone.status.assigned_servers] == ["n0", "n2"]
    silent = plan_maintenance(with_holder(running(), "n1", state="Unreachable"))
    assert [e.instance.node for e in silent.status.assigned_servers] == ["n0", "n1", "n2"]
    assert [e.instance.node for e in silent.servers] == ["n0", "n2"]


def test_a_holder_that_returned_is_no_longer_given_up() -> None:
    seen = running()
    seen = replace(seen, status=replace(seen.status, lost_servers=("n1-i0", "elsewhere")))
    assert plan_maintenance(seen).status.lost_servers == ("elsewhere",)


def test_too_few_copies_are_repaired_unless_a_newer_save_is_due_soon() -> None:
    seen = thinned(running(), 40)
    assert not of(RequestRepair, plan_maintenance(seen))
    slow = replace(seen, sessions=tuple(told(s, step_seconds=30.0) for s in seen.sessions))
    copies = of(RequestRepair, plan_maintenance(slow))
    assert len(copies) == 3
    assert all(isinstance(c, RequestRepair) and c.source != c.target and c.save.step == 40 for c in copies)


def test_a_world_that_hangs_is_repaired_though_a_save_was_due_soon() -> None:
    """Found by the simulator: two copies of three for as long as the hang was not found."""
    seen = thinned(running(), 40)
    for index in range(3):
        seen = with_session(seen, index, step_at_seconds=NOW - 20)
    assert len(of(RequestRepair, plan_maintenance(seen))) == 3


def test_repairs_do_not_wait_for_ever_for_newer_saves() -> None:
    seen = thinned(thinned(running(step=62), 40), 30)
    assert of(RequestRepair, plan_maintenance(seen))


def test_a_save_on_its_way_is_not_repaired() -> None:
    seen = thinned(running(), 40)
    slow = replace(seen, sessions=tuple(told(s, step_seconds=30.0) for s in seen.sessions))
    assert not of(RequestRepair, plan_maintenance(with_session(slow, 1, pending=(Checkpoint(1, 40),))))


def test_the_newest_due_checkpoint_is_pinned_and_each_rank_uploads_its_own() -> None:
    kept = plan_maintenance(running(step=62, checkpoint=PERSISTENT))
    assert kept.pinned == Checkpoint(1, 40)  # 15 steps are rounded up to 20
    uploads = of(UploadSaves, kept)
    assert [u.worker for u in uploads if isinstance(u, UploadSaves)] == [WorkerId(i, 1) for i in range(3)]


def test_a_pin_stays_until_it_is_promoted() -> None:
    seen = with_saves(running(step=62, checkpoint=PERSISTENT), 60)
    assert plan_maintenance(seen).pinned == Checkpoint(1, 60)
    assert plan_maintenance(seen, pinned=Checkpoint(1, 40)).pinned == Checkpoint(1, 40)


def test_a_checkpoint_that_cannot_be_uploaded_blocks_no_newer_one() -> None:
    seen = with_saves(running(step=62, checkpoint=PERSISTENT), 60)
    damaged, good = Checkpoint(1, 40), Checkpoint(1, 60)
    almost = replace(seen, failed_uploads={RankSave(1, 40, 2): MAX_FAILED_UPLOADS - 1})
    assert plan_maintenance(almost, pinned=damaged).pinned == damaged
    hopeless = replace(seen, failed_uploads={RankSave(1, 40, 2): MAX_FAILED_UPLOADS})
    kept = plan_maintenance(hopeless, pinned=damaged)
    assert kept.pinned == good
    assert [e.reason for e in kept.events] == ["UploadAbandoned"]
    after = plan_maintenance(hopeless, pinned=good)
    assert (after.pinned, after.events) == (good, ()), "it is told once"


def test_where_every_upload_fails_the_newest_is_tried_on() -> None:
    seen = with_saves(running(step=62, checkpoint=PERSISTENT), 60)
    away = replace(seen, failed_uploads={RankSave(1, step, 0): MAX_FAILED_UPLOADS for step in (40, 60)})
    kept = plan_maintenance(away, pinned=Checkpoint(1, 60))
    assert (kept.pinned, kept.events) == (Checkpoint(1, 60), ())


def test_a_pinned_checkpoint_is_never_dropped() -> None:
    seen = with_saves(running(step=92, checkpoint=PERSISTENT), 50, 60, 70, 80, 90)
    kept = plan_maintenance(seen, pinned=Checkpoint(1, 40))
    assert {s.step for d in of(DropSaves, kept) if isinstance(d, DropSaves) for s in d.saves} == {30, 50, 60, 70}


def test_the_floor_moves_when_every_rank_is_there_and_only_then() -> None:
    seen = running(step=62, checkpoint=PERSISTENT)
    two = {Checkpoint(1, 40): frozenset(RankSave(1, 40, r) for r in range(2))}
    assert plan_maintenance(replace(seen, uploaded=two)).status.last_uploaded is None
    kept = plan_maintenance(replace(seen, uploaded=promoted(40)))
    assert kept.status.last_uploaded == Checkpoint(1, 40)
    assert kept.pinned is None
    assert [e.reason for e in kept.events] == ["CheckpointUploaded"]


def test_the_floor_never_leaves_the_lineage_nor_falls() -> None:
    seen = running(step=62, checkpoint=PERSISTENT)
    stray = {Checkpoint(0, 60): frozenset({RankSave(0, 60, 0)})}
    assert plan_maintenance(replace(seen, uploaded=stray)).status.last_uploaded is None
    high = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 60)), uploaded=promoted(40))
    assert plan_maintenance(high).status.last_uploaded == Checkpoint(1, 60)


def test_the_persistent_tier_is_listed_before_anything_of_it_is_deleted() -> None:
    seen = running(step=62, checkpoint=PERSISTENT)
    seen = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 40)))
    assert plan_maintenance(seen).actions[-1:] == (ListPersistentTier(1, 0),)
    entries = tuple(manifest(1, s, r, 3) for s in (20, 40) for r in range(3))
    kept = plan_maintenance(replace(seen, persistent=PersistentListing(1, entries, NOW - 1)))
    assert of(DeleteUploaded, kept) == [DeleteUploaded(WorkerId(0, 1), 1, (Checkpoint(1, 20),))]
    assert not plan_maintenance(replace(seen, persistent=PersistentListing(1, entries[3:], NOW - 1))).actions


@pytest.mark.parametrize(
    ("longer", "gone"),
    [({}, {10, 20, 30}), ({"keep_every_steps": 15}, {10}), ({"keep_seconds": 25.0}, {10}), ({"keep_seconds": 5.0}, {10, 20, 30})],
)  # fmt: skip
def test_the_persistent_tier_keeps_milestones_and_what_is_young(longer: dict[str, Any], gone: set[int]) -> None:
    tier = PersistentTierSpec("file:///tmp/checkpoints", interval_steps=10, keep=1, **longer)
    seen = running(step=62, checkpoint=CheckpointPolicy(MemoryTierSpec(interval_steps=10), tier))
    seen = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 40)))
    # saved ten seconds apart, the newest just now
    entries = tuple(replace(manifest(1, s, r, 3), saved_at=NOW - (40 - s)) for s in (10, 20, 30, 40) for r in range(3))
    dropped = of(DeleteUploaded, plan_maintenance(replace(seen, persistent=PersistentListing(1, entries, NOW - 1))))
    assert {c.step for d in dropped if isinstance(d, DeleteUploaded) for c in d.checkpoints} == gone


def test_a_listing_that_cannot_be_had_is_not_asked_for_in_a_loop() -> None:
    seen = running(step=62, checkpoint=PERSISTENT)
    seen = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 40)))
    failed = PersistentListing(None, None, NOW - 1, "refused")
    kept = plan_maintenance(replace(seen, persistent=failed))
    assert kept.actions == ()
    assert kept.wake_after_seconds == 59.0


def test_the_parent_stays_until_something_newer_is_safe() -> None:
    seen = running()
    world, lineage = seen.status.membership, seen.status.lineage
    assert world is not None
    parent = Checkpoint(1, 30)
    second = replace(world, generation=2, parent=parent)
    saves = [manifest(1, 30, r, 3) for r in range(3)] + [manifest(2, 40, r, 3) for r in range(3)]
    single = tuple(holder(f"n{i}", 2, saves[i], saves[3 + i]) for i in range(3))
    status = replace(
        seen.status, membership=second, lineage=(*lineage, replace(lineage[0], generation=2, parent=parent))
    )
    assert not of(DropSaves, plan_maintenance(replace(seen, status=status, servers=single)))


# ---- two housekeepers ------------------------------------------------------------------------------------------------
# Where an agent may keep house beside the operator, neither drops what is the other's last good checkpoint.

WHOLE = [Checkpoint(1, step) for step in (18, 22, 24, 26)]
LONG_AGO = BEGAN - 1000


def heard_of(seen: JobSnapshot) -> JobSnapshot:
    """Every line has stood for long, and nobody has told of a step that proves one of them."""
    for one in seen.sessions:
        seen = with_session(seen, one.index, step=10, since_seconds=LONG_AGO)
    return seen


def spared(seen: JobSnapshot) -> set[int]:
    return {one.step for one in checkpoints_kept_in_memory_for_rollback(build_facts(seen), WHOLE, [])}


def watched() -> JobSnapshot:
    return heard_of(running(health_policy=HealthPolicy(numerics=NumericsPolicy())))


def test_who_keeps_house_alone_spares_the_next_to_be_proven() -> None:
    assert spared(watched()) == {18}
    assert spared(with_session(watched(), 1, connected=False)) == {18}, "another member drops nothing"


@pytest.mark.parametrize(
    "line",
    [{"connected": False}, {"last_message_seconds": BEGAN}, {"incarnation": "another"}],
    ids=["broken", "silent", "another agent's"],
)
def test_while_the_first_member_s_line_does_not_stand_all_are_spared(line: dict[str, object]) -> None:
    assert spared(with_session(watched(), 0, **line)) == {18, 22, 24, 26}


def test_what_it_dropped_while_it_was_away_is_read_before_anything_goes() -> None:
    back = with_session(watched(), 0, since_seconds=watched().now_seconds - DROP_SECONDS + 0.1)
    assert spared(back) == {18, 22, 24, 26}
    assert spared(with_session(watched(), 0, since_seconds=watched().now_seconds - DROP_SECONDS)) == {18}


def test_a_job_that_goes_back_to_nothing_keeps_what_it_kept() -> None:
    seen = heard_of(running())
    assert spared(with_session(seen, 0, connected=False)) == spared(seen) == set()


def test_a_world_without_members_has_no_other_housekeeper() -> None:
    seen = watched()
    assert seen.status.membership is not None
    empty = replace(seen, status=replace(seen.status, membership=replace(seen.status.membership, members=())))
    assert spared(empty) == {18}
