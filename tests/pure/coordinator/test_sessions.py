"""Tests of `coordinator.sessions`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.fake_agent import hello
from support.talk import CLAIMED, COMMITTED, NODES, STATUS, A, B, C, beat, talking, words
from surefoot.protocol.checkpoints.completeness import UnreadRecord
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint, RankSave, SourceJob, WorkerId
from surefoot.protocol.messages import (
    Assign,
    Barrier,
    BarrierReached,
    BarrierReply,
    DeletePersistent,
    DeleteReply,
    Finished,
    Heartbeat,
    ListPersistent,
    MemoryServers,
    Notice,
    PersistentPage,
    RepairReply,
    RepairSave,
    Shutdown,
    StopTrainers,
    StoreReady,
    TrainerFailure,
    TrainersStopped,
    UnreadableSave,
)
from surefoot.protocol.progress import Progress
from surefoot_operator.coordinator import conversations, listings, uploads
from surefoot_operator.coordinator.barrier import update_barrier
from surefoot_operator.coordinator.desired_messages import (
    Delivered,
    derive_desired_state,
    diff_messages,
    list_desired_messages,
)
from surefoot_operator.coordinator.sessions import (
    Sessions,
    apply_hello,
    apply_membership,
    apply_message,
    create_sessions,
    drop_removed_workers,
    find_store_address,
    hello_rejection,
    list_observed_sessions,
    record_disconnect,
)
from surefoot_operator.job_snapshot import Timings
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers

# ---- sessions --------------------------------------------------------------------------------------------------------
# What the coordinator makes of each message, and what each agent must hear: tables and properties.

# ---- who is let in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "reason", "retry"),
    [
        ({"job": "job-2"}, "serves job job-1, not job-2", False),
        ({"index": 7}, "worker 7 \\(attempt 1\\) is not among", True),
        ({"attempt": 0}, "replaced by attempt 1", False),
        ({"incarnation": "i1-1"}, "already worker 1 \\(attempt 1\\)", False),
    ],
)
def test_a_hello_that_does_not_belong_here_is_refused_by_name(
    other: dict[str, object], reason: str, retry: bool
) -> None:
    refused = hello_rejection(talking(), hello(**other), frozenset({A, B, C}))
    assert refused is not None
    assert refused.retry is retry
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refused.reason)


def test_before_the_first_look_at_the_fabric_everyone_is_asked_to_come_again() -> None:
    refused = hello_rejection(create_sessions("job-1", 1.0), hello(), None)
    assert refused is not None
    assert refused.retry


def test_an_incarnation_that_was_replaced_does_not_come_back() -> None:
    sessions = apply_hello(talking(0), hello(0, incarnation="newer"), 1001.0)
    assert hello_rejection(sessions, hello(0), frozenset({A})) is not None
    assert hello_rejection(sessions, hello(0, incarnation="newer"), frozenset({A})) is None


# ---- lines ---------------------------------------------------------------------------------------------------------


def test_a_broken_line_keeps_what_is_known_and_its_return_goes_on_with_it() -> None:
    sessions = apply_message(talking(0), A, beat(2, 45, restored=True), 1001.0)
    sessions = record_disconnect(sessions, A, 1002.0)
    (gone,) = list_observed_sessions(sessions)
    assert (gone.connected, gone.since_seconds, gone.last_message_seconds, gone.progress.step) == (
        False,
        1002.0,
        1001.0,
        45,
    )
    (back,) = list_observed_sessions(apply_hello(sessions, hello(0, generation=2, stopped=2), 1003.0))
    assert (back.connected, back.since_seconds, back.progress.step, back.progress.restored) == (True, 1003.0, 45, True)


def test_another_incarnation_begins_without_the_facts_of_the_one_before() -> None:
    sessions = apply_message(talking(0), A, beat(2, 45), 1001.0)
    (fresh,) = list_observed_sessions(apply_hello(sessions, hello(0, incarnation="newer"), 1002.0))
    assert (fresh.incarnation, fresh.progress.step, fresh.generation) == ("newer", 0, 0)


def test_workers_that_left_the_fabric_are_forgotten_once_their_line_is_broken() -> None:
    sessions = talking(0, 1)
    assert len(list_observed_sessions(drop_removed_workers(sessions, [A]))) == 2
    assert [
        s.index for s in list_observed_sessions(drop_removed_workers(record_disconnect(sessions, B, 1001.0), [A]))
    ] == [0]


def test_a_worker_that_finished_the_epoch_is_remembered_without_its_pod_until_the_world_moves() -> None:
    """Deleted right behind its last step it would count as lost, and the step be made again (simulator, seed 3213)."""
    sessions = apply_message(talking(0, 1), B, beat(2, 45), 1000.5)
    sessions = record_disconnect(apply_message(sessions, B, Finished(2, 0, 45), 1001.0), B, 1001.5)
    kept = drop_removed_workers(sessions, [A])
    assert [s.index for s in list_observed_sessions(kept)] == [0, 1]
    assert [
        s.index for s in list_observed_sessions(drop_removed_workers(apply_membership(kept, CLAIMED.membership), [A]))
    ] == [0]
    failed = record_disconnect(apply_message(talking(0, 1), B, Finished(2, 3, 45), 1001.0), B, 1001.5)
    assert [s.index for s in list_observed_sessions(drop_removed_workers(failed, [A]))] == [0]


# ---- facts ---------------------------------------------------------------------------------------------------------


def test_a_step_counts_from_the_restore_point_of_its_epoch() -> None:
    sessions = apply_message(talking(0), A, beat(2, 40, restored=True), 1001.0)
    assert list_observed_sessions(sessions)[0].step_at_seconds is None
    sessions = apply_message(sessions, A, beat(2, 41), 1002.0)
    assert (list_observed_sessions(sessions)[0].progress.step, list_observed_sessions(sessions)[0].step_at_seconds) == (
        41,
        1002.0,
    )
    sessions = apply_message(sessions, A, beat(2, 41), 1003.0)
    assert (
        list_observed_sessions(sessions)[0].step_at_seconds,
        list_observed_sessions(sessions)[0].last_message_seconds,
    ) == (
        1002.0,
        1003.0,
    )


def test_what_an_agent_says_of_its_saves_ends_with_its_epoch() -> None:
    sessions = apply_message(talking(0), A, beat(2, 45, closed_steps=ClosedSteps(44, (40,))), 1001.0)
    (said,) = list_observed_sessions(apply_message(sessions, A, beat(1, 50, closed_steps=ClosedSteps(49)), 1002.0))
    assert said.progress.closed_steps == ClosedSteps(44, (40,)), "a late word of an older epoch says nothing"
    (said,) = list_observed_sessions(apply_message(sessions, A, TrainersStopped(3), 1003.0))
    assert said.progress.closed_steps.is_missing(43), "it stays true"
    (begun,) = list_observed_sessions(apply_message(sessions, A, beat(3, 0), 1004.0))
    assert begun.progress.closed_steps == ClosedSteps()


def test_progress_is_not_taken_back_within_an_epoch_and_forgotten_with_it() -> None:
    full = Progress(45, 2.5, 0.4, True, restored_from="memory", loss_is_finite=False)
    sessions = apply_message(talking(0), A, Heartbeat(2, 2, True, full), 1001.0)
    (later,) = list_observed_sessions(
        apply_message(sessions, A, Heartbeat(2, 2, True, Progress(44, save_bytes=9)), 1002.0)
    )
    assert later.progress == replace(full, save_bytes=9)
    (begun,) = list_observed_sessions(apply_message(sessions, A, Heartbeat(3, 3, True), 1003.0))
    assert begun.progress == Progress()


def test_facts_of_an_epoch_stay_after_its_trainers_stopped_and_end_with_the_next() -> None:
    sessions = apply_message(talking(0), A, beat(2, 45), 1001.0)
    sessions = apply_message(sessions, A, TrainerFailure(2, 1, -9, "killed by signal 9", False, 45), 1002.0)
    sessions = apply_message(sessions, A, beat(0, 0, stopped=3), 1003.0)
    (after,) = list_observed_sessions(sessions)
    assert after.exit is not None
    assert (after.generation, after.stopped, after.exit.code, after.progress.step) == (2, 3, -9, 45)
    (begun,) = list_observed_sessions(apply_message(sessions, A, beat(3, 0), 1004.0))
    assert (begun.generation, begun.exit, begun.progress.step) == (3, None, 0)


def test_the_first_exit_is_kept_unless_it_was_only_the_echo_of_another() -> None:
    sessions = apply_message(talking(0), A, TrainerFailure(2, 1, 1, "connection reset", True, 45), 1002.0)
    sessions = apply_message(sessions, A, TrainerFailure(2, 0, 3, "ValueError", False, 45), 1003.0)
    sessions = apply_message(sessions, A, TrainerFailure(2, 2, 4, "KeyError", False, 45), 1004.0)
    found = list_observed_sessions(sessions)[0].exit
    assert found is not None
    assert (found.code, found.secondary, found.received_seconds) == (3, False, 1002.0)


def test_what_an_older_epoch_still_says_changes_nothing() -> None:
    sessions = apply_message(talking(0), A, beat(3, 1), 1001.0)
    for late in (
        TrainerFailure(2, 1, 1, "late", False, 45),
        BarrierReached(2, 40),
        Finished(2, 0, 100),
        UnreadableSave(2, Checkpoint(1, 40), 0, False, "bad"),
    ):
        after = apply_message(sessions, A, late, 1002.0)
        assert (
            replace(list_observed_sessions(after)[0], last_message_seconds=1001.0)
            == list_observed_sessions(sessions)[0]
        )


def test_an_unreadable_save_outranks_an_absent_one() -> None:
    sessions = apply_message(talking(0), A, UnreadableSave(2, Checkpoint(1, 40), 0, True, "absent"), 1001.0)
    sessions = apply_message(sessions, A, UnreadableSave(2, Checkpoint(1, 40), 1, False, "corrupt"), 1001.0)
    sessions = apply_message(sessions, A, UnreadableSave(2, Checkpoint(1, 40), 2, True, "absent"), 1001.0)
    assert list_observed_sessions(sessions)[0].unreadable_report == (Checkpoint(1, 40), False, "corrupt")


def test_finished_held_and_stopped_are_noted() -> None:
    sessions = apply_message(talking(0), A, BarrierReached(2, 50), 1001.0)
    sessions = apply_message(sessions, A, Finished(2, 0, 100), 1001.0)
    sessions = apply_message(sessions, A, TrainersStopped(3), 1001.0)
    (s,) = list_observed_sessions(sessions)
    assert (s.barrier_step, s.finished, s.finished_steps, s.stopped) == (50, 0, 100, 3)


def test_what_was_saved_last_is_told_by_the_first_heartbeat_behind_the_end() -> None:
    sessions = apply_message(talking(0), A, beat(2, 100), 1001.0)
    assert not list_observed_sessions(sessions)[0].final_saves_reported
    sessions = apply_message(sessions, A, Finished(2, 0, 100), 1001.1)
    assert not list_observed_sessions(sessions)[0].final_saves_reported
    told = apply_message(sessions, A, beat(2, 100), 1001.5)
    assert list_observed_sessions(told)[0].final_saves_reported
    assert list_observed_sessions(apply_message(told, A, Finished(2, 0, 100), 1002.0))[0].final_saves_reported, (
        "said again over a new line"
    )
    assert not list_observed_sessions(apply_message(told, A, beat(3, 0), 1002.0))[0].final_saves_reported


def test_notices_are_kept_for_whoever_tells_people() -> None:
    sessions = apply_message(talking(0), A, Notice("CheckpointSkipped", "both slots busy"), 1001.0)
    assert sessions.notices == ((A, Notice("CheckpointSkipped", "both slots busy")),)


Step = tuple[int, int, int]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 4)), max_size=30))
@settings(deadline=None)
def test_epoch_and_stopped_never_go_back_and_steps_never_within_an_epoch(beats: list[Step]) -> None:
    sessions = talking(0)
    before = list_observed_sessions(sessions)[0]
    for now, (epoch, step, stopped) in enumerate(beats):
        sessions = apply_message(sessions, A, beat(epoch, step, stopped=stopped), 1001.0 + now)
        after = list_observed_sessions(sessions)[0]
        assert after.generation >= before.generation
        assert after.stopped >= before.stopped
        assert after.generation > before.generation or after.progress.step >= before.progress.step
        before = after


# ---- what agents hear ----------------------------------------------------------------------------------------------


def test_while_claimed_everyone_hears_stop_and_nothing_of_the_world() -> None:
    for worker in (A, B, C):
        assert words(talking(status=CLAIMED), worker, CLAIMED) == (StopTrainers(3, "worker 1 lost"),)


def test_members_hear_their_place_and_others_wait_warm() -> None:
    sessions = talking()
    (mine,) = words(sessions, B)
    assert isinstance(mine, Assign)
    assert (mine.generation, mine.world_size, mine.first_rank, mine.local_ranks) == (2, 4, 2, 2)
    assert (mine.group_rank, mine.group_size, mine.hosts_store, mine.store) == (1, 2, False, None)
    assert mine.targets[0].node == "node-1"
    assert len(mine.targets) == mine.replicas == 2
    assert mine.lineage == ((1, None, 6), (2, Checkpoint(1, 40), 4))
    assert all(isinstance(word, StopTrainers) and word.generation == 2 for word in words(sessions, C))


def test_another_incarnation_of_a_member_is_no_member() -> None:
    sessions = apply_hello(talking(), hello(1, incarnation="newer"), 1001.0)
    assert [type(word) for word in words(sessions, B)] == [StopTrainers]


def test_the_store_is_told_when_its_host_names_it_and_only_for_its_epoch() -> None:
    sessions = talking()
    assert find_store_address(apply_message(sessions, A, StoreReady(1, "h:1"), 1001.0)) is None
    assert find_store_address(apply_message(sessions, B, StoreReady(2, "h:1"), 1001.0)) is None
    ready = apply_message(sessions, A, StoreReady(2, "h:2"), 1001.0)
    (mine,) = words(ready, B)
    assert isinstance(mine, Assign)
    assert mine.store == "h:2"


def test_after_a_restart_of_the_coordinator_the_store_is_known_from_the_hello() -> None:
    sessions = apply_hello(
        apply_membership(create_sessions("job-1", 2000.0), COMMITTED), hello(0, generation=2, store="h:3"), 2000.0
    )
    assert find_store_address(sessions) == "h:3"


def test_a_holder_that_status_does_not_name_is_told_to_nobody() -> None:
    unnamed = replace(STATUS, assigned_servers=(NODES[0],))
    (mine,) = list_desired_messages(derive_desired_state(unnamed, UsableMemoryServers(NODES), 2), talking(), A)
    assert isinstance(mine, Assign)
    assert (mine.servers, mine.replicas) == ((NODES[0],), 1)


def test_nothing_is_said_twice_on_one_line_and_everything_again_on_a_new_one() -> None:
    sessions = talking()
    first, told = diff_messages({}, words(sessions, A))
    assert [type(word) for word in first] == [Assign]
    assert diff_messages(told, words(sessions, A)) == ((), told)
    assert diff_messages({}, words(sessions, A))[0] == first


def test_a_change_of_holders_within_an_epoch_is_said_as_holders_alone() -> None:
    sessions = talking()
    _, told = diff_messages({}, words(sessions, A))
    fewer = list_desired_messages(derive_desired_state(STATUS, UsableMemoryServers(NODES[:2]), 2), sessions, A)
    said, told = diff_messages(told, fewer)
    assert [type(word) for word in said] == [MemoryServers]
    assert said[0].servers == tuple(NODES[:2])  # type: ignore[union-attr]  # Holders, by the line above
    assert diff_messages(told, fewer)[0] == ()
    pruned = replace(STATUS, lineage=STATUS.lineage[1:])
    assert (
        diff_messages(
            told, list_desired_messages(derive_desired_state(pruned, UsableMemoryServers(NODES[:2]), 2), sessions, A)
        )[0]
        == ()
    )


def test_one_agent_alone_is_asked_to_look_after_holders_that_the_operator_does_not_reach() -> None:
    sessions, unseen = talking(), derive_desired_state(STATUS, UsableMemoryServers(NODES, are_reachable=False), 2)
    (first,), (second,) = list_desired_messages(unseen, sessions, A), list_desired_messages(unseen, sessions, B)
    assert isinstance(first, Assign)
    assert isinstance(second, Assign)
    assert (first.group_rank, first.servers_unreachable) == (0, True)
    assert (second.group_rank, second.servers_unreachable) == (1, False)
    _, told = diff_messages({}, [first])
    said, told = diff_messages(told, words(sessions, A))
    assert said == (MemoryServers(2, first.servers, first.targets, 2, servers_unreachable=False),), "seen again"
    assert diff_messages(told, words(sessions, A))[0] == ()


def test_nobody_is_asked_to_where_there_is_no_holder_or_a_newer_checkpoint_is_bad() -> None:
    """What is to be dropped follows from what is complete, and that agent does not know which of it is bad."""
    assert not derive_desired_state(STATUS, UsableMemoryServers(are_reachable=False), 2).servers_unreachable
    assert not derive_desired_state(
        replace(STATUS, unreadable_checkpoints=(Checkpoint(2, 60),)), UsableMemoryServers(NODES, are_reachable=False), 2
    ).servers_unreachable
    assert derive_desired_state(
        replace(STATUS, unreadable_checkpoints=(Checkpoint(1, 30),)), UsableMemoryServers(NODES, are_reachable=False), 2
    ).servers_unreachable


def test_a_claim_and_the_next_world_are_said_after_an_assignment() -> None:
    sessions = talking()
    _, told = diff_messages({}, words(sessions, A))
    said, told = diff_messages(told, words(sessions, A, CLAIMED))
    assert said == (StopTrainers(3, "worker 1 lost"),)
    committed = replace(CLAIMED, membership=replace(COMMITTED, generation=3))
    said, _ = diff_messages(told, words(apply_membership(sessions, committed.membership), A, committed))
    assert [type(word) for word in said] == [Assign]


@given(st.lists(st.sampled_from(["drop", "hear", "claim", "commit", "store", "propose", "accept"]), max_size=25))
@settings(deadline=None)
def test_whatever_happens_an_agent_ends_up_having_heard_the_present_word(happenings: list[str]) -> None:
    """Level-triggered: after any schedule, what a line was told last is what follows from the present state."""
    sessions, status = talking(), STATUS
    told: Delivered = {}
    for now, what in enumerate(happenings):
        match what:
            case "drop":
                sessions, told = apply_hello(record_disconnect(sessions, A, now), hello(0), now), {}
            case "hear":
                _, told = diff_messages(told, words(sessions, A, status))
            case "claim" | "commit":
                assert status.membership is not None
                state = "Claimed" if what == "claim" else "Committed"
                world = replace(
                    status.membership, generation=status.membership.generation + (what == "claim"), state=state
                )
                status = replace(status, membership=world)
                sessions = apply_membership(sessions, world)
            case "store":
                sessions = apply_message(
                    sessions, A, StoreReady(status.membership.generation if status.membership else 0, f"h:{now}"), now
                )
            case "propose":
                epoch = status.membership.generation if status.membership else 0
                barrier = update_barrier(sessions.requests.barrier, Barrier(epoch, int(now), "proposed"), (A,), now)
                sessions = replace(sessions, requests=replace(sessions.requests, barrier=barrier))
            case "accept":
                barrier = sessions.requests.barrier
                if barrier is not None:
                    sent = barrier.barrier
                    sessions = apply_message(sessions, A, BarrierReply(sent.generation, sent.step, True), now)
    wanted = words(sessions, A, status)
    _, told = diff_messages(told, wanted)
    assert set(wanted) <= set(told.values())
    assert diff_messages(told, wanted)[0] == ()


# ---- listings --------------------------------------------------------------------------------------------------------
# Listings, repairs, uploads and deletions as the coordinator asks for them and takes the answers.

# ---- requests ------------------------------------------------------------------------------------------------------


def manifest(step: int = 40, rank: int = 0, world: int = 1) -> RankManifest:
    return RankManifest(RankSave(1, step, rank), world, "i", "layout", 10, 1, "d", 8, "v", 2, 0.0)


def asked(sessions: Sessions) -> Sessions:
    return replace(sessions, requests=listings.request_listing(sessions.requests, A, 3, 1001.0))


def request_of(sessions: Sessions) -> int:
    return max(sessions.requests.by_id)


def test_a_listing_counts_for_the_epoch_it_was_asked_for() -> None:
    sessions = asked(talking(status=CLAIMED))
    number = request_of(sessions)
    assert ListPersistent(number, layouts=()) in words(sessions, A, CLAIMED)
    answer = PersistentPage(number, (manifest().to_json(), "{}"), {"layout": "{}"})
    assert apply_message(sessions, B, answer, 1002.0).requests.persistent_listing.read_generation is None
    sessions = apply_message(sessions, A, answer, 1002.0)
    assert sessions.requests.persistent_listing.read_generation == 3
    assert sessions.requests.persistent_listing.entries == (manifest(),)
    assert sessions.requests.persistent_layouts == {"layout": "{}"}
    assert "cannot read a manifest in the persistent tier" in sessions.requests.failures[0]
    assert words(sessions, A, CLAIMED) == (StopTrainers(3, "worker 1 lost"),)


def test_an_older_jobs_listing_stands_beside_ours_with_its_epochs_negated() -> None:
    older = SourceJob("file:///tmp/checkpoints", "old")
    sessions = asked(talking(status=CLAIMED))
    sessions = replace(sessions, requests=listings.request_listing(sessions.requests, A, 3, 1001.0, older))
    number = request_of(sessions)
    assert ListPersistent(number, older, layouts=()) in words(sessions, A, CLAIMED)
    assert len(sessions.requests.by_id) == 2
    sessions = replace(sessions, requests=listings.discard_listing(sessions.requests))
    sessions = apply_message(sessions, A, PersistentPage(number, (manifest().to_json(),), {"layout": "{}"}), 1002.0)
    seen = sessions.requests.source_listing
    assert (seen.read_generation, seen.source_job, sessions.requests.persistent_listing.entries) == (3, older, None)
    assert [m.save for m in seen.entries or ()] == [replace(manifest().save, generation=-1)]
    assert (sessions.requests.source_layouts, sessions.requests.persistent_layouts) == ({"layout": "{}"}, {})


def test_an_older_jobs_listing_may_be_asked_of_another_agent() -> None:
    older = SourceJob("file:///tmp/checkpoints", "old")
    sessions = talking(status=CLAIMED)
    sessions = replace(sessions, requests=listings.request_listing(sessions.requests, A, 3, 1001.0, older))
    sessions = apply_hello(sessions, hello(0, incarnation="newer"), 1002.0)
    assert sessions.requests.source_listing.requested_seconds is None
    assert not sessions.requests.by_id


def test_a_listing_is_void_once_another_holder_was_read() -> None:
    sessions = asked(talking(status=CLAIMED))
    number = request_of(sessions)
    sessions = replace(sessions, requests=listings.discard_listing(sessions.requests))
    sessions = apply_message(sessions, A, PersistentPage(number), 1002.0)
    assert sessions.requests.persistent_listing.read_generation is None
    assert sessions.requests.persistent_listing.requested_seconds is None


def test_a_failed_listing_says_why() -> None:
    sessions = asked(talking(status=CLAIMED))
    sessions = apply_message(sessions, A, PersistentPage(request_of(sessions), error="bucket away"), 1002.0)
    assert sessions.requests.persistent_listing.error == "bucket away"
    assert sessions.requests.persistent_listing.read_generation is None


def test_a_listing_whose_agent_was_replaced_may_be_asked_of_another() -> None:
    sessions = asked(talking(status=CLAIMED))
    sessions = apply_hello(sessions, hello(0, incarnation="newer"), 1002.0)
    assert sessions.requests.persistent_listing.requested_seconds is None
    assert sessions.requests.by_id == {}


def test_requests_of_two_terms_never_share_a_number() -> None:
    first, second = asked(create_sessions("job-1", 1000.0)), asked(create_sessions("job-1", 1001.0))
    assert request_of(first) != request_of(second)


def test_a_repair_is_asked_once_and_again_only_after_an_answer() -> None:
    sessions = talking()
    save, source, target = RankSave(2, 50, 0), NODES[0].instance, NODES[1].instance
    copy = RepairSave(0, 2, save, source, target)
    book = uploads.request_repairs(sessions.requests, [(A, copy), (B, copy)], 1001.0)
    assert uploads.request_repairs(book, [(B, copy)], 1001.5) is book
    sessions = replace(sessions, requests=book)
    number = request_of(sessions)
    assert RepairSave(number, 2, save, source, target) in words(sessions, A)
    sessions = apply_message(sessions, A, RepairReply(number, "source away"), 1002.0)
    assert sessions.requests.by_id == {}
    assert "source away" in sessions.requests.failures[0]


def test_a_repair_that_was_made_is_asked_for_again_only_once_the_holder_must_have_been_read() -> None:
    """Found on a real run: one save of 25 MB was copied five times in 0.2 s, until its target's index was read."""
    sessions = talking()
    save, source, target = RankSave(2, 50, 0), NODES[0].instance, NODES[1].instance
    copy = RepairSave(0, 2, save, source, target)
    sessions = replace(sessions, requests=uploads.request_repairs(sessions.requests, [(A, copy)], 1001.0))
    sessions = apply_message(sessions, A, RepairReply(request_of(sessions)), 1002.0)
    assert uploads.request_repairs(sessions.requests, [(A, copy)], 1002.1) is sessions.requests
    elsewhere = replace(copy, target=replace(target, run_id="restarted"))
    assert uploads.request_repairs(sessions.requests, [(A, elsewhere)], 1002.1).by_id
    assert uploads.request_repairs(sessions.requests, [(A, copy)], 1002.0 + uploads.INDEX_REFRESH_SECONDS).by_id


def test_what_was_deleted_leaves_the_listing() -> None:
    sessions = asked(talking(status=CLAIMED))
    listing = PersistentPage(request_of(sessions), (manifest(20).to_json(), manifest(40).to_json()), {"layout": "{}"})
    sessions = apply_message(sessions, A, listing, 1002.0)
    book = listings.request_deletion(sessions.requests, B, 3, (Checkpoint(1, 20),), 1003.0)
    assert listings.request_deletion(book, B, 3, (Checkpoint(1, 40),), 1003.0) == book
    sessions = replace(sessions, requests=book)
    number = request_of(sessions)
    assert DeletePersistent(number, (Checkpoint(1, 20),)) in words(sessions, B, CLAIMED)
    sessions = apply_message(sessions, B, DeleteReply(number), 1004.0)
    assert sessions.requests.persistent_listing.deleting == frozenset()
    assert sessions.requests.persistent_listing.entries == (manifest(40),)


def test_what_is_being_deleted_counts_as_gone_until_a_listing_lacks_it() -> None:
    """Its agent may be slow, fail half-way or be cut off, and still delete the rest."""
    sessions = asked(talking(status=CLAIMED))
    texts = (manifest(20).to_json(), manifest(40).to_json())
    sessions = apply_message(sessions, A, PersistentPage(request_of(sessions), texts, {"layout": "{}"}), 1002.0)
    old = Checkpoint(1, 20)
    uploaded = {old: frozenset({RankSave(1, 20, 0)}), Checkpoint(1, 40): frozenset({RankSave(1, 40, 0)})}
    sessions = replace(sessions, requests=replace(sessions.requests, uploaded_saves=uploaded))
    sessions = replace(sessions, requests=listings.request_deletion(sessions.requests, B, 3, (old,), 1003.0))
    assert sessions.requests.persistent_listing.entries == (manifest(40),)
    assert sessions.requests.persistent_listing.deleting == {old}
    assert sessions.requests.uploaded_saves.keys() == {Checkpoint(1, 40)}
    failed = apply_message(sessions, B, DeleteReply(request_of(sessions), "store away"), 1004.0)
    assert failed.requests.persistent_listing.deleting == {old}
    again = asked(failed)
    away = apply_message(again, A, PersistentPage(request_of(again), error="store away"), 1005.0)
    assert away.requests.persistent_listing.deleting == {old}, "a listing that failed tells nothing"
    shown = apply_message(again, A, PersistentPage(request_of(again), texts, {"layout": "{}"}), 1005.0)
    assert (shown.requests.persistent_listing.entries, shown.requests.persistent_listing.deleting) == (
        (manifest(40),),
        {old},
    )
    gone = apply_message(again, A, PersistentPage(request_of(again), texts[1:], {"layout": "{}"}), 1005.0)
    assert (gone.requests.persistent_listing.entries, gone.requests.persistent_listing.deleting) == (
        (manifest(40),),
        frozenset(),
    )


def test_retiring_means_this_attempt_and_not_the_next() -> None:
    sessions = talking()
    book = conversations.request_shutdown(sessions.requests, (A,), Shutdown("job complete", 0))
    sessions = apply_hello(replace(sessions, requests=book), hello(0, 2), 1001.0)
    assert Shutdown("job complete", 0) in words(sessions, A)
    assert Shutdown("job complete", 0) not in words(sessions, WorkerId(0, 2))


def test_a_listing_in_pages_counts_once_the_last_has_come_and_begins_anew_with_its_first() -> None:
    sessions = asked(talking(status=CLAIMED))
    number = request_of(sessions)
    first = PersistentPage(number, (manifest(20).to_json(),), {"layout": "{}"}, page=0, more=True)
    last = PersistentPage(number, (manifest(40).to_json(),), page=1)
    for message in (first, first):  # said again on a new line
        sessions = apply_message(sessions, A, message, 1002.0)
        assert sessions.requests.persistent_listing.entries is None
    sessions = apply_message(sessions, A, last, 1002.0)
    assert sessions.requests.persistent_listing.entries == (manifest(20), manifest(40))
    assert sessions.requests.persistent_layouts == {"layout": "{}"}


def test_a_page_that_did_not_come_makes_the_listing_fail() -> None:
    sessions = asked(talking(status=CLAIMED))
    sessions = apply_message(
        sessions, A, PersistentPage(request_of(sessions), (manifest(40).to_json(),), page=2), 1002.0
    )
    assert "page 1 of 3" in str(sessions.requests.persistent_listing.error)


def test_a_late_answer_of_whoever_was_asked_first_counts_and_layouts_are_remembered() -> None:
    sessions = asked(talking(status=CLAIMED))
    number = request_of(sessions)
    sessions = replace(sessions, requests=listings.request_listing(sessions.requests, B, 3, 1061.0))
    assert sessions.requests.persistent_listing.requested_from == {A, B}
    sessions = apply_message(sessions, A, PersistentPage(number, (manifest().to_json(),), {"layout": "{}"}), 1062.0)
    assert sessions.requests.persistent_listing.entries == (manifest(),)
    assert sessions.requests.by_id == {}, "B's answer is no longer needed"
    sessions = replace(sessions, requests=listings.request_listing(sessions.requests, A, 3, 1070.0))
    sessions = apply_message(sessions, A, PersistentPage(request_of(sessions), (manifest().to_json(),)), 1071.0)
    assert sessions.requests.by_id == {}, "a layout that is known is not asked for"
    assert sessions.requests.persistent_layouts == {"layout": "{}"}


def test_what_a_listing_left_out_is_told_by_name_and_judged_by_nobody() -> None:
    sessions = asked(talking(status=CLAIMED))
    left_out = (
        UnreadRecord("rank-0.json is damaged", False, checkpoint=Checkpoint(1, 20)),
        UnreadRecord("layouts/layout.json is damaged", False, digest="layout"),
    )
    listing = PersistentPage(request_of(sessions), (manifest(40).to_json(),), unread_records=left_out)
    sessions = apply_message(sessions, A, listing, 1002.0)
    assert sessions.requests.persistent_listing.undecidable == {Checkpoint(1, 20), Checkpoint(1, 40)}
    assert [any(str(one) in told for told in sessions.requests.failures) for one in left_out] == [True, True]


def with_layouts(*digests: str) -> list[str]:
    """A manifest each, of one rank at steps 10, 20, …, with these layouts."""
    return [replace(manifest(10 * n), layout=digest).to_json() for n, digest in enumerate(digests, 1)]


def test_layouts_are_asked_for_once_the_manifests_name_them_and_only_those_unknown() -> None:
    sessions = talking(status=CLAIMED)
    book = listings.request_listing(sessions.requests, A, 3, 1001.0, known_layouts=frozenset({"a"}))
    sessions = replace(sessions, requests=book)
    first = request_of(sessions)
    sessions = apply_message(sessions, A, PersistentPage(first, tuple(with_layouts("a", "b", "c", "c"))), 1002.0)
    number = request_of(sessions)
    assert sessions.requests.persistent_listing.read_generation is None, "it counts with its layouts"
    assert words(sessions, A, CLAIMED)[-1] == ListPersistent(number, manifests=False, layouts=("b", "c"))
    again = PersistentPage(first, tuple(with_layouts("a")))
    assert apply_message(sessions, A, again, 1002.0) == replace(
        sessions, by_worker=apply_message(sessions, A, again, 1002.0).by_worker
    )
    sessions = apply_message(sessions, A, PersistentPage(number, layouts={"b": "{}"}, more=True), 1003.0)
    sessions = apply_message(sessions, A, PersistentPage(number, layouts={"c": "{}"}, page=1), 1003.0)
    assert sessions.requests.persistent_listing.read_generation == 3
    assert len(sessions.requests.persistent_listing.entries or ()) == 4
    assert sessions.requests.persistent_layouts == {"b": "{}", "c": "{}"}
    assert sessions.requests.by_id == {}


def test_a_layout_that_the_agent_neither_gives_nor_names_is_not_asked_for_without_an_end() -> None:
    sessions = asked(talking(status=CLAIMED))
    sessions = apply_message(sessions, A, PersistentPage(request_of(sessions), tuple(with_layouts("a", "b"))), 1002.0)
    lost = UnreadRecord("layouts/a.json is damaged", False, digest="a")
    sessions = apply_message(sessions, A, PersistentPage(request_of(sessions), unread_records=(lost,)), 1003.0)
    seen = sessions.requests.persistent_listing
    assert (seen.read_generation, seen.lost_layouts, len(seen.undecidable)) == (3, {"a", "b"}, 2)


def test_layouts_are_asked_for_a_few_at_a_time() -> None:
    digests = [f"{n:016x}" for n in range(300)]
    sessions = asked(talking(status=CLAIMED))
    sessions = apply_message(sessions, A, PersistentPage(request_of(sessions), tuple(with_layouts(*digests))), 1002.0)
    counts = []
    while sessions.requests.persistent_listing.read_generation is None:
        order = sessions.requests.by_id[request_of(sessions)].message
        assert isinstance(order, ListPersistent)
        counts.append(len(order.layouts or ()))
        sessions = apply_message(
            sessions, A, PersistentPage(order.request, layouts=dict.fromkeys(order.layouts or (), "{}")), 1003.0
        )
    assert counts == [128, 128, 44]
    assert sorted(sessions.requests.persistent_layouts) == digests


def test_a_listing_of_older_agents_that_tell_everything_counts_at_once() -> None:
    sessions = asked(talking(status=CLAIMED))
    told = PersistentPage(request_of(sessions), tuple(with_layouts("a")), {"a": "{}"})
    assert apply_message(sessions, A, told, 1002.0).requests.persistent_listing.read_generation == 3
    # and one that tells manifests again, where layouts alone were asked for, doubles none
    sessions = apply_message(sessions, A, replace(told, layouts={}), 1002.0)
    sessions = apply_message(sessions, A, replace(told, request=request_of(sessions)), 1002.0)
    assert len(sessions.requests.persistent_listing.entries or ()) == 1


def test_what_is_asked_again_each_minute_is_answered_by_the_first_after_many() -> None:
    sessions = asked(talking(status=CLAIMED))
    first = request_of(sessions)
    for minute in range(1, 8):
        book = listings.request_listing(sessions.requests, (A, B)[minute % 2], 3, 1001.0 + 60 * minute)
        sessions = replace(sessions, requests=book)
    sessions = apply_message(sessions, A, PersistentPage(first, (manifest().to_json(),), {"layout": "{}"}), 1440.0)
    assert sessions.requests.persistent_listing.read_generation == 3
    assert sessions.requests.by_id == {}


# ---- agent timings ---------------------------------------------------------------------------------------------------
# What the coordinator makes of the times in heartbeats.

C1, C2 = Checkpoint(2, 50), Checkpoint(2, 60)


def after(sessions: Sessions, now: float, step: int = 41, **other: object) -> Sessions:
    return apply_message(sessions, A, beat(2, step, **other), now)


def known(sessions: Sessions) -> Timings:
    return sessions.by_worker[A].observed.timings


def test_one_slow_step_is_no_trend_and_few_steps_are_none() -> None:
    sessions = talking()
    for step, seconds in ((41, 9.0), (42, 1.0)):
        sessions = after(sessions, 1000.0 + step, step, step_seconds=seconds)
        assert known(sessions).step_seconds is None
    sessions = after(sessions, 1043.0, 43, step_seconds=1.2)
    assert known(sessions).step_seconds == 1.2


def test_a_step_that_is_told_again_counts_once() -> None:
    sessions = talking()
    for at in range(10):
        sessions = after(sessions, 1000.0 + at, 41, step_seconds=1.0)
    assert known(sessions).step_seconds is None


def test_a_stall_that_is_told_again_counts_once() -> None:
    sessions = talking()
    for at, stall in enumerate((0.5, 0.1, 0.1, 0.1, 0.3)):
        sessions = after(sessions, 1000.0 + at, stall_seconds=stall)
    assert known(sessions).stall_seconds == 0.3


def test_a_drain_lasts_from_the_word_that_it_is_pending_to_the_word_that_it_is_not() -> None:
    sessions = after(talking(), 1000.0, pending=(C1,))
    sessions = after(sessions, 1000.5, pending=(C1, C2))
    assert known(sessions).flush_seconds is None
    sessions = after(sessions, 1002.0, pending=(C2,))
    assert known(sessions).flush_seconds == 2.0
    sessions = after(sessions, 1004.5)
    assert known(sessions).flush_seconds == 3.0  # of 2 and 4


def test_what_another_epoch_left_is_no_drain_of_this_one() -> None:
    sessions = after(talking(), 1000.0, pending=(Checkpoint(1, 40),))
    sessions = after(sessions, 1009.0)
    assert known(sessions).flush_seconds is None


def test_another_epoch_begins_without_the_times_of_the_last() -> None:
    sessions = talking()
    for step in range(41, 46):
        sessions = after(sessions, 1000.0 + step, step, step_seconds=1.0, stall_seconds=0.1)
    sessions = apply_message(sessions, A, replace(beat(3, 0), stopped=3), 1100.0)
    assert (known(sessions).step_seconds, known(sessions).stall_seconds) == (None, None)
