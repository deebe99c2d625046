"""Tests of `flush.state_machine`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.saves import arrays, stream_of
from surefoot.errors import ProtocolError
from surefoot.flush.engine import SaveWork
from surefoot.flush.state_machine import (
    Acknowledged,
    Command,
    CommitOn,
    CopyReport,
    Event,
    FlushClosed,
    FlushState,
    FreeSlot,
    FreeSlotState,
    GenerationStarted,
    RejectStaged,
    Retargeted,
    RetryLimits,
    SaveAbandoned,
    SaveWritten,
    SlotStaged,
    StagedSave,
    StagedSlot,
    StopTransfer,
    TargetFailed,
    Tick,
    TransferFenced,
    TransferStopped,
    WriteTo,
    apply_event,
)
from surefoot.geometry import Box
from surefoot.protocol.bounds import MAX_PART_BYTES
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave

# ---- transitions -----------------------------------------------------------------------------------------------------
# The drain's decisions, alone and against an environment that answers, fails, refuses and renames targets at will.

A, B, C = (MemoryServerInstance(f"node-{name}", "1") for name in "abc")


def sealed(number: int = 10, epoch: int = 3, incarnation: str = "me") -> StagedSave:
    return StagedSave(RankSave(epoch, number, 0), 1, incarnation, "layout", 100, 10)


def state(*targets: MemoryServerInstance, replicas: int = 2, attempts: int = 3) -> FlushState:
    return FlushState(
        (FreeSlotState(), FreeSlotState()),
        "me",
        targets,
        frozenset(targets),
        replicas,
        limits=RetryLimits(attempts, 0.1, no_target_timeout_seconds=5),
    )


def play(begin: FlushState, *events: Event) -> tuple[FlushState, list[Command]]:
    commands: list[Command] = []
    for event in events:
        begin, more = apply_event(begin, event)
        commands += more
    return begin, commands


def test_a_save_is_written_to_every_target_and_its_slot_is_freed_by_the_last_acknowledgement() -> None:
    now, commands = play(
        state(A, B), SlotStaged(0, sealed(), 0), SaveWritten(0, A), SaveWritten(0, B), Acknowledged(0, A)
    )
    save = sealed().save
    assert commands == [WriteTo(0, A), WriteTo(0, B), CommitOn(0, A), CommitOn(0, B), CopyReport(save, 1)]
    assert now.pending_checkpoints() == (Checkpoint(3, 10),)
    now, commands = play(now, Acknowledged(0, B))
    assert commands == [CopyReport(save, 2), FreeSlot(0, save, True, 2)]
    assert now.pending_checkpoints() == ()


def test_a_refusal_ends_the_save_but_the_slot_waits_for_the_other_writer() -> None:
    now, commands = play(state(A, B), SlotStaged(0, sealed(), 0), SaveWritten(0, A), TransferFenced(0, A))
    assert commands[-1] == StopTransfer(0, B)
    now, commands = play(now, TransferStopped(0, B))
    assert commands == [FreeSlot(0, sealed().save, False, 0)]


def test_a_target_that_stays_away_is_given_up_and_the_true_copies_are_told() -> None:
    now, _ = play(state(A, B), SlotStaged(0, sealed(), 0), SaveWritten(0, A), Acknowledged(0, A))
    seen: list[Command] = []
    for attempt in range(3):
        now, commands = play(now, TargetFailed(0, B, "unavailable", float(attempt)), Tick(attempt + 0.9))
        seen += commands
    assert seen == [
        WriteTo(0, B),
        WriteTo(0, B),
        SaveAbandoned(sealed().save, B, "unavailable"),
        FreeSlot(0, sealed().save, True, 1),
    ]
    assert now.unreachable == {B}


def test_a_target_known_to_be_away_gets_one_try_and_all_of_them_again_after_it_took_one() -> None:
    away = replace(state(A, B), unreachable=frozenset({B}))
    now, commands = play(away, SlotStaged(0, sealed(), 0), TargetFailed(0, B, "full", 0))
    assert SaveAbandoned(sealed().save, B, "full") in commands
    now, _ = play(now, SaveWritten(0, A), Acknowledged(0, A))
    now, _ = play(now, SlotStaged(1, sealed(20), 1), SaveWritten(1, B), Acknowledged(1, B))
    assert now.unreachable == frozenset()


def test_the_newest_save_is_kept_and_tried_on_while_no_target_took_it() -> None:
    """The last save of a job was given up within a second, beside a holder that came back a moment later."""
    now, commands = _given_up_everywhere(state(A, B))
    assert [c for c in commands if isinstance(c, SaveAbandoned | FreeSlot)] == [
        SaveAbandoned(sealed().save, A, "unavailable"),
        SaveAbandoned(sealed().save, B, "unavailable"),
    ]
    assert now.pending_checkpoints() == (Checkpoint(3, 10),)
    now, commands = play(now, Tick(4.0), TargetFailed(0, A, "unavailable", 4.1), SaveWritten(0, B), Acknowledged(0, B))
    assert commands == [
        WriteTo(0, A),
        WriteTo(0, B),
        CommitOn(0, B),
        CopyReport(sealed().save, 1),
        FreeSlot(0, sealed().save, True, 1),
    ], "given up is told once, and one copy is enough to leave the rest to a repair"


def test_a_save_that_was_kept_goes_to_a_target_that_is_named_later() -> None:
    now, _ = _given_up_everywhere(state(A, B))
    now, commands = play(now, Retargeted((C,), frozenset({C}), 2, 3.5))
    assert commands == [WriteTo(0, C)]
    _, commands = play(now, SaveWritten(0, C), Acknowledged(0, C))
    assert commands[-1] == FreeSlot(0, sealed().save, True, 1)


def test_a_save_that_was_kept_makes_room_for_a_newer_one() -> None:
    now, _ = _given_up_everywhere(state(A, B))
    now, commands = play(now, SlotStaged(1, sealed(20), 4.0))
    assert FreeSlot(0, sealed().save, False, 0, lost=True) in commands
    assert [c for c in commands if isinstance(c, WriteTo)] == [WriteTo(1, A), WriteTo(1, B)]


def test_an_older_save_is_not_kept_beside_a_newer_one() -> None:
    now, _ = play(state(A), SlotStaged(0, sealed(10), 0), SlotStaged(1, sealed(20), 0))
    for attempt in range(3):
        now, commands = play(now, Tick(attempt + 0.9), TargetFailed(0, A, "unavailable", float(attempt) + 0.9))
    assert commands[-1] == FreeSlot(0, sealed(10).save, False, 0, lost=True)


def test_a_save_is_kept_no_longer_than_one_without_a_target() -> None:
    now, _ = _given_up_everywhere(state(A))
    now, commands = play(now, Tick(5.5), TargetFailed(0, A, "unavailable", 5.6))
    assert commands[-1] == FreeSlot(0, sealed().save, False, 0, lost=True)


def test_an_arena_of_one_slot_keeps_nothing_that_no_target_takes() -> None:
    _, commands = _given_up_everywhere(replace(state(A), slots=(FreeSlotState(),)))
    assert commands[-1] == FreeSlot(0, sealed().save, False, 0, lost=True)


def _given_up_everywhere(begin: FlushState) -> tuple[FlushState, list[Command]]:
    """A save whose targets all failed three times, within three seconds."""
    now, seen = play(begin, SlotStaged(0, sealed(), 0))
    for attempt in range(3):
        for target in begin.targets:
            now, commands = play(now, TargetFailed(0, target, "unavailable", float(attempt)))
            seen += commands
        if attempt < 2:
            now, commands = play(now, Tick(attempt + 0.9))
            seen += commands
    return now, seen


def test_a_retry_waits_twice_as_long_each_time_and_jitter_spreads_it() -> None:
    now, _ = play(state(A), SlotStaged(0, sealed(), 0), TargetFailed(0, A, "full", 10.0, jitter=1.0))
    assert now.next_tick() == pytest.approx(10.05)
    now, commands = play(now, Tick(10.04))
    assert commands == []
    now, commands = play(now, Tick(10.05), TargetFailed(0, A, "full", 11.0, jitter=0.0))
    assert commands == [WriteTo(0, A)]
    assert now.next_tick() == pytest.approx(11.2)


def test_a_save_without_any_target_waits_for_one_and_is_given_up_at_its_limit() -> None:
    now, commands = play(state(), SlotStaged(0, sealed(), 0), Tick(4.9))
    assert commands == []
    assert isinstance(now.slots[0], StagedSlot)
    _, commands = play(now, Retargeted((A,), frozenset({A}), 2, 4.95))
    assert commands == [WriteTo(0, A)]
    _, commands = play(now, Tick(5.0))
    assert commands == [FreeSlot(0, sealed().save, False, 0, lost=True)]


def test_a_holder_that_goes_is_replaced_by_the_one_named_in_its_place() -> None:
    now, _ = play(state(A, B), SlotStaged(0, sealed(), 0), SaveWritten(0, A), Acknowledged(0, A))
    now, commands = play(now, Retargeted((A, C), frozenset({A, C}), 2, 1))
    assert commands == [StopTransfer(0, B), WriteTo(0, C)]
    now, commands = play(now, SaveWritten(0, C), Acknowledged(0, C))
    assert commands == [CommitOn(0, C), CopyReport(sealed().save, 2)], "node-b's writer still reads the slot"
    now, commands = play(now, TransferStopped(0, B))
    assert commands == [FreeSlot(0, sealed().save, True, 2)]


def test_copies_on_a_holder_that_vanished_do_not_count() -> None:
    now, _ = play(state(A, B), SlotStaged(0, sealed(), 0), SaveWritten(0, A), Acknowledged(0, A))
    now, commands = play(now, Retargeted((B,), frozenset({B}), 2, 1), SaveWritten(0, B), Acknowledged(0, B))
    assert FreeSlot(0, sealed().save, True, 1) in commands


def test_a_target_that_left_and_came_back_is_written_to_again() -> None:
    now, _ = play(state(A), SlotStaged(0, sealed(), 0), Retargeted((), frozenset(), 2, 1), TransferStopped(0, A))
    now, commands = play(now, Retargeted((A,), frozenset({A}), 2, 2))
    assert commands == [WriteTo(0, A)]


def test_draining_goes_on_when_a_newer_epoch_is_staged_beside_it() -> None:
    now, _ = play(state(A), SlotStaged(0, sealed(10, epoch=3), 0), SlotStaged(1, sealed(20, epoch=4), 1))
    now, commands = play(now, SaveWritten(0, A), Acknowledged(0, A))
    assert commands[-1] == FreeSlot(0, RankSave(3, 10, 0), True, 1)


def test_an_epoch_that_begins_takes_the_slots_of_the_one_before() -> None:
    """Two saves that no holder takes any more kept every slot, and nothing of the new epoch was saved."""
    homeless, _ = play(state(), SlotStaged(0, sealed(8, epoch=1), 0), SlotStaged(1, sealed(12, epoch=1), 1))
    now, commands = play(homeless, GenerationStarted(1))
    assert (now, commands) == (homeless, [])
    now, commands = play(homeless, GenerationStarted(2))
    freed = [FreeSlot(0, RankSave(1, 8, 0), False, 0, lost=True), FreeSlot(1, RankSave(1, 12, 0), False, 0, lost=True)]
    assert commands == freed
    now, commands = play(now, SlotStaged(0, sealed(4, epoch=2), 3), Retargeted((A,), frozenset({A}), 1, 4))
    assert commands == [WriteTo(0, A)]


def test_an_epoch_that_begins_waits_for_whoever_reads_a_slot() -> None:
    now, _ = play(state(A, B), SlotStaged(0, sealed(8, epoch=1), 0), SaveWritten(0, A), Acknowledged(0, A))
    now, commands = play(now, GenerationStarted(2))
    assert commands == [StopTransfer(0, B)]
    _, commands = play(now, TransferStopped(0, B))
    assert commands == [FreeSlot(0, RankSave(1, 8, 0), True, 1)]


def test_what_another_incarnation_sealed_is_not_drained() -> None:
    now, commands = play(state(A), SlotStaged(0, sealed(incarnation="other"), 0))
    assert [type(c) for c in commands] == [RejectStaged, FreeSlot]
    assert not now.is_busy()


def test_a_slot_that_is_draining_cannot_be_staged_over() -> None:
    now, _ = play(state(A), SlotStaged(0, sealed(10), 0))
    after, commands = play(now, SlotStaged(0, sealed(20), 1))
    assert after == now
    assert [type(c) for c in commands] == [RejectStaged]


def test_closing_gives_up_what_is_not_there_yet_and_keeps_what_is() -> None:
    now, _ = play(
        state(A, B), SlotStaged(0, sealed(), 0), SaveWritten(0, A), Acknowledged(0, A), SlotStaged(1, sealed(20), 1)
    )
    now, commands = play(now, FlushClosed())
    assert set(commands) == {StopTransfer(0, B), StopTransfer(1, A), StopTransfer(1, B)}
    now, commands = play(now, TransferStopped(0, B), TransferStopped(1, A), TransferStopped(1, B))
    assert commands == [FreeSlot(0, sealed().save, True, 1), FreeSlot(1, sealed(20).save, False, 0, lost=True)]


@dataclass
class World:
    """Threads and holders as the transitions must be able to rely on them: one answer to each order."""

    now: float = 0.0
    orders: dict[tuple[int, MemoryServerInstance], str] = field(default_factory=dict)
    stored: dict[RankSave, set[MemoryServerInstance]] = field(default_factory=dict)
    staged: dict[int, RankSave] = field(default_factory=dict)
    freed: list[FreeSlot] = field(default_factory=list)
    asked: set[RankSave] = field(default_factory=set)
    """Saves that some holder was asked to commit."""

    def obey(self, state: FlushState, commands: tuple[Command, ...]) -> None:
        for command in commands:
            match command:
                case WriteTo(slot, target) | CommitOn(slot, target):
                    assert (slot, target) not in self.orders, "one order at a time for each leg"
                    assert slot in self.staged, "only sealed slots are read"
                    self.orders[slot, target] = "write" if isinstance(command, WriteTo) else "commit"
                    if isinstance(command, CommitOn):
                        self.asked.add(self.staged[slot])
                case StopTransfer(slot, target):
                    assert (slot, target) in self.orders, "only what runs can be stopped"
                case FreeSlot(slot, save, ok, copies, lost):
                    assert lost == (save not in self.asked), "nobody may find what is said to be lost"
                    assert not [key for key in self.orders if key[0] == slot], "nothing may read a free slot"
                    assert self.staged.pop(slot) == save
                    assert copies == len(self.stored.get(save, set()) & state.servers), "true copies are told"
                    assert not ok or copies > 0
                    self.freed.append(command)
                case CopyReport(save, copies):
                    assert copies == len(self.stored[save] & state.servers)


def answer(draw: st.DrawFn, world: World, key: tuple[int, MemoryServerInstance]) -> Event:
    """What the thread with this order says; a commit may have happened although it failed to say so."""
    slot, target = key
    order, save = world.orders.pop(key), world.staged[slot]
    result = draw(st.sampled_from(["ok", "ok", "ok", "fail", "refuse", "end"]))
    if result == "ok" and order == "write":
        return SaveWritten(slot, target)
    if result == "ok":
        world.stored.setdefault(save, set()).add(target)
        return Acknowledged(slot, target)
    if result == "refuse" and order == "commit":
        return TransferFenced(slot, target)
    if result == "end":
        return TargetFailed(slot, target, "missing", world.now)
    return TargetFailed(slot, target, "unavailable", world.now, draw(st.floats(0, 0.99)))


def random_event(draw: st.DrawFn, world: World, current: FlushState, number: int) -> Event:
    kinds = ["tick", "retarget", "begin"] + ["answer"] * (4 * len(world.orders)) + ["stage"] * 2
    kind = draw(st.sampled_from(kinds))
    free = [i for i, slot in enumerate(current.slots) if isinstance(slot, FreeSlotState)]
    if kind == "answer":
        return answer(draw, world, draw(st.sampled_from(sorted(world.orders))))
    if kind == "stage" and free:
        slot = draw(st.sampled_from(free))
        epoch = draw(st.integers(1, 4))
        world.staged[slot] = sealed(number, epoch).save
        return SlotStaged(slot, sealed(number, epoch), world.now)
    if kind == "begin":
        return GenerationStarted(draw(st.integers(1, 5)))
    if kind == "retarget":
        targets = tuple(draw(st.permutations([A, B, C]))[: draw(st.integers(0, 3))])
        return Retargeted(targets, frozenset(targets) | draw(st.sets(st.sampled_from([A, B, C]))), 2, world.now)
    world.now += draw(st.sampled_from([0.05, 0.3, 2.0]))
    return Tick(world.now)


@pytest.mark.gate_only
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_fails_no_slot_is_freed_under_a_reader_and_every_slot_is_freed_in_the_end(data: st.DataObject) -> None:
    draw: st.DrawFn = data.draw  # type: ignore[assignment]  # a DataObject's draw takes the same strategies
    world, current = World(), state(A, B)
    for number in range(1, draw(st.integers(1, 40))):
        event = random_event(draw, world, current, number)
        current, commands = apply_event(current, event)
        world.obey(current, commands)
    for _ in range(200):
        if not current.is_busy():
            break
        pending = sorted(world.orders)
        if pending:
            slot, target = pending[0]
            del world.orders[slot, target]
            event: Event = TargetFailed(slot, target, "unavailable", world.now)
        else:
            world.now += 60
            event = Tick(world.now)
        current, commands = apply_event(current, event)
        world.obey(current, commands)
    assert not current.is_busy()
    assert not world.staged


@pytest.mark.gate_only
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_closing_at_any_moment_frees_every_slot_once_the_readers_left(data: st.DataObject) -> None:
    draw: st.DrawFn = data.draw  # type: ignore[assignment]  # a DataObject's draw takes the same strategies
    world, current = World(), state(A, B)
    for number in range(1, draw(st.integers(1, 20))):
        event = random_event(draw, world, current, number)
        current, commands = apply_event(current, event)
        world.obey(current, commands)
    current, commands = apply_event(current, FlushClosed())
    world.obey(current, commands)
    for slot, target in sorted(world.orders):
        del world.orders[slot, target]
        current, commands = apply_event(current, TransferStopped(slot, target))
        world.obey(current, commands)
    assert not current.is_busy()


# ---- save work -------------------------------------------------------------------------------------------------------
# What a save may be before any of it is written.


def test_values_that_no_reader_takes_are_refused_before_a_byte_is_written() -> None:
    stream, data = stream_of(arrays(1, {"w": (4,)}), {"w": (Box.whole((4,)),)})
    sealed = StagedSave(RankSave(1, 10, 0), 1, "me", stream.digest, len(data), MAX_PART_BYTES + 1)
    with pytest.raises(ProtocolError, match="keep large data in tensors"):
        SaveWork(sealed, stream, memoryview(data))
