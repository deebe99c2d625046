"""What the coordinator makes of each message, and what each agent must hear: tables and properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.fake_agent import hello
from support.talk import CLAIMED, COMMITTED, NODES, STATUS, A, B, C, beat, talking, words
from surefoot.protocol.checkpoints.save_state import Settled
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import (
    Assign,
    Barrier,
    BarrierReached,
    BarrierReply,
    Exited,
    Finished,
    Heartbeat,
    Holders,
    Notice,
    Stop,
    Stopped,
    StoreReady,
    UnreadableSave,
)
from surefoot.protocol.progress import Progress
from surefoot_operator.coordinator.barrier import update_barrier
from surefoot_operator.coordinator.desired_messages import Delivered, desired_messages, desired_state, outbox_diff
from surefoot_operator.coordinator.sessions import (
    begin,
    broken,
    connected,
    forgotten,
    heard,
    refusal,
    ruled,
    seen,
    store_address,
)
from surefoot_operator.policy.failure.memory_server_liveness import UsableHolders

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
    refused = refusal(talking(), hello(**other), frozenset({A, B, C}))
    assert refused is not None
    assert refused.retry is retry
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refused.reason)


def test_before_the_first_look_at_the_fabric_everyone_is_asked_to_come_again() -> None:
    refused = refusal(begin("job-1", 1.0), hello(), None)
    assert refused is not None
    assert refused.retry


def test_an_incarnation_that_was_replaced_does_not_come_back() -> None:
    sessions = connected(talking(0), hello(0, incarnation="newer"), 1001.0)
    assert refusal(sessions, hello(0), frozenset({A})) is not None
    assert refusal(sessions, hello(0, incarnation="newer"), frozenset({A})) is None


# ---- lines ---------------------------------------------------------------------------------------------------------


def test_a_broken_line_keeps_what_is_known_and_its_return_goes_on_with_it() -> None:
    sessions = heard(talking(0), A, beat(2, 45, restored=True), 1001.0)
    sessions = broken(sessions, A, 1002.0)
    (gone,) = seen(sessions)
    assert (gone.connected, gone.since_seconds, gone.heard_seconds, gone.progress.step) == (False, 1002.0, 1001.0, 45)
    (back,) = seen(connected(sessions, hello(0, epoch=2, stopped=2), 1003.0))
    assert (back.connected, back.since_seconds, back.progress.step, back.progress.restored) == (True, 1003.0, 45, True)


def test_another_incarnation_begins_without_the_facts_of_the_one_before() -> None:
    sessions = heard(talking(0), A, beat(2, 45), 1001.0)
    (fresh,) = seen(connected(sessions, hello(0, incarnation="newer"), 1002.0))
    assert (fresh.incarnation, fresh.progress.step, fresh.epoch) == ("newer", 0, 0)


def test_workers_that_left_the_fabric_are_forgotten_once_their_line_is_broken() -> None:
    sessions = talking(0, 1)
    assert len(seen(forgotten(sessions, [A]))) == 2
    assert [s.index for s in seen(forgotten(broken(sessions, B, 1001.0), [A]))] == [0]


def test_a_worker_that_finished_the_epoch_is_remembered_without_its_pod_until_the_world_moves() -> None:
    """Deleted right behind its last step it would count as lost, and the step be made again (simulator, seed 3213)."""
    sessions = heard(talking(0, 1), B, beat(2, 45), 1000.5)
    sessions = broken(heard(sessions, B, Finished(2, 0, 45), 1001.0), B, 1001.5)
    kept = forgotten(sessions, [A])
    assert [s.index for s in seen(kept)] == [0, 1]
    assert [s.index for s in seen(forgotten(ruled(kept, CLAIMED.world), [A]))] == [0]
    failed = broken(heard(talking(0, 1), B, Finished(2, 3, 45), 1001.0), B, 1001.5)
    assert [s.index for s in seen(forgotten(failed, [A]))] == [0]


# ---- facts ---------------------------------------------------------------------------------------------------------


def test_a_step_counts_from_the_restore_point_of_its_epoch() -> None:
    sessions = heard(talking(0), A, beat(2, 40, restored=True), 1001.0)
    assert seen(sessions)[0].step_at_seconds is None
    sessions = heard(sessions, A, beat(2, 41), 1002.0)
    assert (seen(sessions)[0].progress.step, seen(sessions)[0].step_at_seconds) == (41, 1002.0)
    sessions = heard(sessions, A, beat(2, 41), 1003.0)
    assert (seen(sessions)[0].step_at_seconds, seen(sessions)[0].heard_seconds) == (1002.0, 1003.0)


def test_what_an_agent_says_of_its_saves_ends_with_its_epoch() -> None:
    sessions = heard(talking(0), A, beat(2, 45, settled=Settled(44, (40,))), 1001.0)
    (said,) = seen(heard(sessions, A, beat(1, 50, settled=Settled(49)), 1002.0))
    assert said.progress.settled == Settled(44, (40,)), "a late word of an older epoch says nothing"
    (said,) = seen(heard(sessions, A, Stopped(3), 1003.0))
    assert said.progress.settled.misses(43), "it stays true"
    (begun,) = seen(heard(sessions, A, beat(3, 0), 1004.0))
    assert begun.progress.settled == Settled()


def test_progress_is_not_taken_back_within_an_epoch_and_forgotten_with_it() -> None:
    full = Progress(45, 2.5, 0.4, True, restored_from="memory", loss_is_finite=False)
    sessions = heard(talking(0), A, Heartbeat(2, 2, True, full), 1001.0)
    (later,) = seen(heard(sessions, A, Heartbeat(2, 2, True, Progress(44, save_bytes=9)), 1002.0))
    assert later.progress == replace(full, save_bytes=9)
    (begun,) = seen(heard(sessions, A, Heartbeat(3, 3, True), 1003.0))
    assert begun.progress == Progress()


def test_facts_of_an_epoch_stay_after_its_trainers_stopped_and_end_with_the_next() -> None:
    sessions = heard(talking(0), A, beat(2, 45), 1001.0)
    sessions = heard(sessions, A, Exited(2, 1, -9, "killed by signal 9", False, 45), 1002.0)
    sessions = heard(sessions, A, beat(0, 0, stopped=3), 1003.0)
    (after,) = seen(sessions)
    assert after.exit is not None
    assert (after.epoch, after.stopped, after.exit.code, after.progress.step) == (2, 3, -9, 45)
    (begun,) = seen(heard(sessions, A, beat(3, 0), 1004.0))
    assert (begun.epoch, begun.exit, begun.progress.step) == (3, None, 0)


def test_the_first_exit_is_kept_unless_it_was_only_the_echo_of_another() -> None:
    sessions = heard(talking(0), A, Exited(2, 1, 1, "connection reset", True, 45), 1002.0)
    sessions = heard(sessions, A, Exited(2, 0, 3, "ValueError", False, 45), 1003.0)
    sessions = heard(sessions, A, Exited(2, 2, 4, "KeyError", False, 45), 1004.0)
    found = seen(sessions)[0].exit
    assert found is not None
    assert (found.code, found.secondary, found.at_seconds) == (3, False, 1002.0)


def test_what_an_older_epoch_still_says_changes_nothing() -> None:
    sessions = heard(talking(0), A, beat(3, 1), 1001.0)
    for late in (
        Exited(2, 1, 1, "late", False, 45),
        BarrierReached(2, 40),
        Finished(2, 0, 100),
        UnreadableSave(2, Checkpoint(1, 40), 0, False, "bad"),
    ):
        after = heard(sessions, A, late, 1002.0)
        assert replace(seen(after)[0], heard_seconds=1001.0) == seen(sessions)[0]


def test_an_unreadable_save_outranks_an_absent_one() -> None:
    sessions = heard(talking(0), A, UnreadableSave(2, Checkpoint(1, 40), 0, True, "absent"), 1001.0)
    sessions = heard(sessions, A, UnreadableSave(2, Checkpoint(1, 40), 1, False, "corrupt"), 1001.0)
    sessions = heard(sessions, A, UnreadableSave(2, Checkpoint(1, 40), 2, True, "absent"), 1001.0)
    assert seen(sessions)[0].unreadable == (Checkpoint(1, 40), False, "corrupt")


def test_finished_held_and_stopped_are_noted() -> None:
    sessions = heard(talking(0), A, BarrierReached(2, 50), 1001.0)
    sessions = heard(sessions, A, Finished(2, 0, 100), 1001.0)
    sessions = heard(sessions, A, Stopped(3), 1001.0)
    (s,) = seen(sessions)
    assert (s.barrier_step, s.finished, s.finished_steps, s.stopped) == (50, 0, 100, 3)


def test_what_was_saved_last_is_told_by_the_first_heartbeat_behind_the_end() -> None:
    sessions = heard(talking(0), A, beat(2, 100), 1001.0)
    assert not seen(sessions)[0].saves_told
    sessions = heard(sessions, A, Finished(2, 0, 100), 1001.1)
    assert not seen(sessions)[0].saves_told
    told = heard(sessions, A, beat(2, 100), 1001.5)
    assert seen(told)[0].saves_told
    assert seen(heard(told, A, Finished(2, 0, 100), 1002.0))[0].saves_told, "said again over a new line"
    assert not seen(heard(told, A, beat(3, 0), 1002.0))[0].saves_told


def test_notices_are_kept_for_whoever_tells_people() -> None:
    sessions = heard(talking(0), A, Notice("CheckpointSkipped", "both slots busy"), 1001.0)
    assert sessions.notices == ((A, Notice("CheckpointSkipped", "both slots busy")),)


Step = tuple[int, int, int]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 4)), max_size=30))
@settings(deadline=None)
def test_epoch_and_stopped_never_go_back_and_steps_never_within_an_epoch(beats: list[Step]) -> None:
    sessions = talking(0)
    before = seen(sessions)[0]
    for now, (epoch, step, stopped) in enumerate(beats):
        sessions = heard(sessions, A, beat(epoch, step, stopped=stopped), 1001.0 + now)
        after = seen(sessions)[0]
        assert after.epoch >= before.epoch
        assert after.stopped >= before.stopped
        assert after.epoch > before.epoch or after.progress.step >= before.progress.step
        before = after


# ---- what agents hear ----------------------------------------------------------------------------------------------


def test_while_claimed_everyone_hears_stop_and_nothing_of_the_world() -> None:
    for worker in (A, B, C):
        assert words(talking(status=CLAIMED), worker, CLAIMED) == (Stop(3, "worker 1 lost"),)


def test_members_hear_their_place_and_others_wait_warm() -> None:
    sessions = talking()
    (mine,) = words(sessions, B)
    assert isinstance(mine, Assign)
    assert (mine.epoch, mine.world, mine.first_rank, mine.local_ranks) == (2, 4, 2, 2)
    assert (mine.group_rank, mine.group_size, mine.hosts_store, mine.store) == (1, 2, False, None)
    assert mine.targets[0].node == "node-1"
    assert len(mine.targets) == mine.replicas == 2
    assert mine.lineage == ((1, None, 6), (2, Checkpoint(1, 40), 4))
    assert all(isinstance(word, Stop) and word.epoch == 2 for word in words(sessions, C))


def test_another_incarnation_of_a_member_is_no_member() -> None:
    sessions = connected(talking(), hello(1, incarnation="newer"), 1001.0)
    assert [type(word) for word in words(sessions, B)] == [Stop]


def test_the_store_is_told_when_its_host_names_it_and_only_for_its_epoch() -> None:
    sessions = talking()
    assert store_address(heard(sessions, A, StoreReady(1, "h:1"), 1001.0)) is None
    assert store_address(heard(sessions, B, StoreReady(2, "h:1"), 1001.0)) is None
    ready = heard(sessions, A, StoreReady(2, "h:2"), 1001.0)
    (mine,) = words(ready, B)
    assert isinstance(mine, Assign)
    assert mine.store == "h:2"


def test_after_a_restart_of_the_coordinator_the_store_is_known_from_the_hello() -> None:
    sessions = connected(ruled(begin("job-1", 2000.0), COMMITTED), hello(0, epoch=2, store="h:3"), 2000.0)
    assert store_address(sessions) == "h:3"


def test_a_holder_that_status_does_not_name_is_told_to_nobody() -> None:
    unnamed = replace(STATUS, named_holders=(NODES[0],))
    (mine,) = desired_messages(desired_state(unnamed, UsableHolders(NODES), 2), talking(), A)
    assert isinstance(mine, Assign)
    assert (mine.holders, mine.replicas) == ((NODES[0],), 1)


def test_nothing_is_said_twice_on_one_line_and_everything_again_on_a_new_one() -> None:
    sessions = talking()
    first, told = outbox_diff({}, words(sessions, A))
    assert [type(word) for word in first] == [Assign]
    assert outbox_diff(told, words(sessions, A)) == ((), told)
    assert outbox_diff({}, words(sessions, A))[0] == first


def test_a_change_of_holders_within_an_epoch_is_said_as_holders_alone() -> None:
    sessions = talking()
    _, told = outbox_diff({}, words(sessions, A))
    fewer = desired_messages(desired_state(STATUS, UsableHolders(NODES[:2]), 2), sessions, A)
    said, told = outbox_diff(told, fewer)
    assert [type(word) for word in said] == [Holders]
    assert said[0].holders == tuple(NODES[:2])  # type: ignore[union-attr]  # Holders, by the line above
    assert outbox_diff(told, fewer)[0] == ()
    pruned = replace(STATUS, lineage=STATUS.lineage[1:])
    assert outbox_diff(told, desired_messages(desired_state(pruned, UsableHolders(NODES[:2]), 2), sessions, A))[0] == ()


def test_one_agent_alone_is_asked_to_look_after_holders_that_the_operator_does_not_reach() -> None:
    sessions, unseen = talking(), desired_state(STATUS, UsableHolders(NODES, seen=False), 2)
    (first,), (second,) = desired_messages(unseen, sessions, A), desired_messages(unseen, sessions, B)
    assert isinstance(first, Assign)
    assert isinstance(second, Assign)
    assert (first.group_rank, first.unseen) == (0, True)
    assert (second.group_rank, second.unseen) == (1, False)
    _, told = outbox_diff({}, [first])
    said, told = outbox_diff(told, words(sessions, A))
    assert said == (Holders(2, first.holders, first.targets, 2, unseen=False),), "seen again"
    assert outbox_diff(told, words(sessions, A))[0] == ()


def test_nobody_is_asked_to_where_there_is_no_holder_or_a_newer_checkpoint_is_bad() -> None:
    """What is to be dropped follows from what is complete, and that agent does not know which of it is bad."""
    assert not desired_state(STATUS, UsableHolders(seen=False), 2).unseen
    assert not desired_state(replace(STATUS, bad=(Checkpoint(2, 60),)), UsableHolders(NODES, seen=False), 2).unseen
    assert desired_state(replace(STATUS, bad=(Checkpoint(1, 30),)), UsableHolders(NODES, seen=False), 2).unseen


def test_a_claim_and_the_next_world_are_said_after_an_assignment() -> None:
    sessions = talking()
    _, told = outbox_diff({}, words(sessions, A))
    said, told = outbox_diff(told, words(sessions, A, CLAIMED))
    assert said == (Stop(3, "worker 1 lost"),)
    committed = replace(CLAIMED, world=replace(COMMITTED, epoch=3))
    said, _ = outbox_diff(told, words(ruled(sessions, committed.world), A, committed))
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
                sessions, told = connected(broken(sessions, A, now), hello(0), now), {}
            case "hear":
                _, told = outbox_diff(told, words(sessions, A, status))
            case "claim" | "commit":
                assert status.world is not None
                state = "Claimed" if what == "claim" else "Committed"
                world = replace(status.world, epoch=status.world.epoch + (what == "claim"), state=state)
                status = replace(status, world=world)
                sessions = ruled(sessions, world)
            case "store":
                sessions = heard(sessions, A, StoreReady(status.world.epoch if status.world else 0, f"h:{now}"), now)
            case "propose":
                epoch = status.world.epoch if status.world else 0
                barrier = update_barrier(sessions.orders.barrier, Barrier(epoch, int(now), "proposed"), (A,), now)
                sessions = replace(sessions, orders=replace(sessions.orders, barrier=barrier))
            case "accept":
                barrier = sessions.orders.barrier
                if barrier is not None:
                    sent = barrier.sent
                    sessions = heard(sessions, A, BarrierReply(sent.generation, sent.step, True), now)
    wanted = words(sessions, A, status)
    _, told = outbox_diff(told, wanted)
    assert set(wanted) <= set(told.values())
    assert outbox_diff(told, wanted)[0] == ()
