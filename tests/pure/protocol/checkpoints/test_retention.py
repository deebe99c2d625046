"""Tests of `protocol.checkpoints.retention`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import manifest
from surefoot.protocol.checkpoints.completeness import (
    Lineage,
    LineageEntry,
    TierReading,
    complete_checkpoints,
    count_copies,
    find_watermark,
)
from surefoot.protocol.checkpoints.placement import Topology
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.retention import (
    LossHistory,
    RetentionInputs,
    find_known_good,
    last_checkpoint_before_anomaly,
    memory_saves_to_delete,
    milestone_checkpoints,
    persistent_checkpoints_to_delete,
    plan_repairs,
    superseded_checkpoints,
)
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance

# ---- retention -------------------------------------------------------------------------------------------------------
# Deleting never takes the last thing that could be restored: every small scope, to the end.

A, B = MemoryServerInstance("a", "a"), MemoryServerInstance("b", "b")
DOMAINS = {A: "a", B: "b"}
COVERS = {frozenset({"layout"}): True}
LINEAGE: Lineage = (LineageEntry(1, None, 2), LineageEntry(2, Checkpoint(1, 10), 2))
CHECKPOINTS = (Checkpoint(1, 10), Checkpoint(1, 20), Checkpoint(2, 20))
NONE: frozenset[Checkpoint] = frozenset()


def saves(mask: int) -> tuple[RankManifest, ...]:
    """The subset of all rank saves that the bits of `mask` choose."""
    every = [manifest(c.generation, c.step, r, 2) for c in CHECKPOINTS for r in range(2)]
    return tuple(m for bit, m in enumerate(every) if mask >> bit & 1)


def standing(reading: TierReading, floor: Checkpoint | None = None, replicas: int = 2) -> RetentionInputs:
    full = find_watermark(reading, LINEAGE, 2, NONE, COVERS, DOMAINS, replicas)
    return RetentionInputs(LINEAGE, 2, False, Checkpoint(1, 10), full, floor, None, NONE)


@pytest.mark.gate_only
@pytest.mark.parametrize(("keep", "replicas"), [(1, 1), (1, 2), (2, 2)])
def test_a_complete_checkpoint_goes_only_after_a_newer_one_is_safe(keep: int, replicas: int) -> None:
    for one, other in product(range(64), repeat=2):
        before = TierReading({A: saves(one), B: saves(other)}, None)
        now = standing(before, replicas=replicas)
        gone = {h: set(memory_saves_to_delete(entries, now, keep)) for h, entries in before.servers.items()}
        for dropped in complete_checkpoints(before, LINEAGE, 2, NONE, COVERS):
            if any(s.checkpoint == dropped for saves_gone in gone.values() for s in saves_gone):
                assert now.watermark is not None
                assert now.watermark.step > dropped.step
        # Whichever part of the drops arrives, what is safe stays safe.
        for partly in ({A}, {B}, {A, B}):
            left = {
                h: tuple(m for m in e if h not in partly or m.save not in gone[h]) for h, e in before.servers.items()
            }
            if now.watermark is not None:
                assert count_copies(now.watermark, TierReading(left, None), DOMAINS) >= replicas


@pytest.mark.gate_only
@pytest.mark.parametrize("keep", [1, 2])
def test_what_is_outlived_is_missed_by_no_loss_of_holders(keep: int) -> None:
    went = 0
    for one, other in product(range(64), repeat=2):
        before = TierReading({A: saves(one), B: saves(other)}, None)
        whole = complete_checkpoints(before, LINEAGE, 2, NONE, COVERS)
        gone = superseded_checkpoints(before.servers, whole)
        now = RetentionInputs(LINEAGE, 2, False, None, None, None, None, NONE, superseded=gone)
        drops = {h: set(memory_saves_to_delete(entries, now, keep)) for h, entries in before.servers.items()}
        for lost, partly in product(((), (A,), (B,)), ((), (A,), (B,), (A, B))):
            kept = {h: e for h, e in before.servers.items() if h not in lost}
            left = {h: tuple(m for m in e if h not in partly or m.save not in drops[h]) for h, e in kept.items()}
            could = complete_checkpoints(TierReading(kept, None), LINEAGE, 2, NONE, COVERS)
            can = complete_checkpoints(TierReading(left, None), LINEAGE, 2, NONE, COVERS)
            assert not could or can[-1].step >= could[-1].step
        went += sum(map(len, drops.values()))
    assert went


def test_saves_do_not_pile_up_where_a_copy_cannot_be_made() -> None:
    steps = [manifest(2, step, rank, 2) for step in range(20, 120, 10) for rank in range(2)]
    alone = {A: tuple(steps)}
    whole = complete_checkpoints(TierReading(alone, None), LINEAGE, 2, NONE, COVERS)
    gone = superseded_checkpoints(alone, whole)
    assert gone == {Checkpoint(2, step) for step in range(20, 110, 10)}
    apart = {
        A: tuple(m for m in steps if m.save.rank == 0),
        B: (*steps[-4:-3], *(m for m in steps if m.save.rank == 1)),
    }
    assert Checkpoint(2, 110) not in superseded_checkpoints(apart, whole)
    assert Checkpoint(2, 100) not in superseded_checkpoints(apart, whole), (
        "b has rank 0 of it, and not of the newer one"
    )


def test_a_silent_holder_cannot_make_the_other_lose_what_both_protect_together() -> None:
    for one in range(64):
        seen = TierReading({A: saves(one)}, None)
        now = standing(seen, replicas=1)
        kept = tuple(m for m in saves(one) if m.save not in memory_saves_to_delete(saves(one), now, 1))
        before, after = (
            complete_checkpoints(TierReading({A: e}, None), LINEAGE, 2, NONE, COVERS) for e in (saves(one), kept)
        )
        assert [c.step for c in before][-1:] == [c.step for c in after][-1:]


def test_nothing_goes_while_the_world_is_claimed() -> None:
    now = replace(standing(TierReading({A: saves(63), B: saves(63)}, None)), is_claimed=True)
    assert memory_saves_to_delete(saves(63), now, 1) == []
    assert persistent_checkpoints_to_delete(CHECKPOINTS, CHECKPOINTS, now, 1) == []


def test_a_checkpoint_that_is_safe_in_the_persistent_tier_supersedes_older_ones() -> None:
    now = standing(TierReading({}, None), floor=Checkpoint(2, 20))
    assert {s.checkpoint for s in memory_saves_to_delete(saves(63), now, 1)} == {Checkpoint(1, 10), Checkpoint(1, 20)}


def test_saves_that_another_world_overtook_go_at_once() -> None:
    now = standing(TierReading({}, None))
    assert {s.checkpoint for s in memory_saves_to_delete(saves(63), now, 2)} == {Checkpoint(1, 20)}


def test_the_parent_and_the_pinned_one_stay() -> None:
    now = standing(TierReading({}, None), floor=Checkpoint(1, 10))
    assert Checkpoint(1, 10) not in {s.checkpoint for s in memory_saves_to_delete(saves(63), now, 1)}
    pinned = replace(standing(TierReading({A: saves(63), B: saves(63)}, None)), pinned=Checkpoint(1, 10))
    assert Checkpoint(1, 10) not in {s.checkpoint for s in memory_saves_to_delete(saves(63), pinned, 1)}


steps = st.lists(st.sampled_from([10, 20, 30, 40, 50]), unique=True)


@given(steps, steps, st.integers(1, 3))
def test_the_persistent_tier_keeps_its_newest_complete_ones(done: list[int], parts: list[int], keep: int) -> None:
    lineage: Lineage = (LineageEntry(1, None, 1),)
    whole = [Checkpoint(1, s) for s in done]
    now = RetentionInputs(lineage, 1, False, None, None, max(whole, default=None), None, NONE)
    gone = persistent_checkpoints_to_delete(whole, [Checkpoint(1, s) for s in {*done, *parts}], now, keep)
    newest = sorted(whole)[-keep:]
    assert not set(gone) & set(newest)
    assert all(c < max(whole) for c in gone)
    assert set(whole) - set(gone) == set(newest)


@pytest.mark.parametrize(
    ("done", "every", "kept"),
    [
        ([10, 20, 30, 40, 50], 20, [20, 40]),
        ([10, 30, 50], 20, [30, 50]),
        ([96, 128, 192, 224, 256], 100, [128, 224]),
        ([10, 20], 100, []),
        ([1, 2, 3], 1, [1, 2, 3]),
        ([], 5, []),
    ],
)
def test_milestones_are_the_first_at_or_after_each_multiple(done: list[int], every: int, kept: list[int]) -> None:
    assert sorted(c.step for c in milestone_checkpoints([Checkpoint(1, s) for s in done], every)) == kept


@given(st.lists(st.integers(1, 300), unique=True, min_size=1), st.integers(1, 60), st.integers(1, 3))
def test_milestones_stay_milestones_while_others_come_and_go(done: list[int], every: int, keep: int) -> None:
    """Saved one after another, with deletes behind each: what is there at the end is what all of them would leave."""
    lineage: Lineage = (LineageEntry(1, None, 1),)
    there: list[Checkpoint] = []
    for step in sorted(done):
        there.append(Checkpoint(1, step))
        now = RetentionInputs(lineage, 1, False, None, None, there[-1], None, NONE)
        gone = persistent_checkpoints_to_delete(there, there, now, keep, milestone_checkpoints(there, every))
        there = [c for c in there if c not in gone]
    every_one = [Checkpoint(1, s) for s in sorted(done)]
    assert set(there) == milestone_checkpoints(every_one, every) | set(every_one[-keep:])


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
def test_repairs_copy_what_is_there_to_where_it_is_not(one: int, two: int, three: int, replicas: int) -> None:
    holders = [MemoryServerInstance(n, n) for n in "abc"]
    every = [manifest(1, 10, r, 2) for r in range(2)]
    readings = {
        h: tuple(m for bit, m in enumerate(every) if mask >> bit & 1)
        for h, mask in zip(holders, (one, two, three), strict=True)
    }
    domains = {h: h.node for h in holders}
    for repair in plan_repairs(readings, domains, Checkpoint(1, 10), replicas):
        assert any(m.save == repair.save for m in readings[repair.source])
        assert all(m.save != repair.save for m in readings[repair.target])
        assert sum(any(m.save == repair.save for m in e) for e in readings.values()) < replicas


@pytest.mark.parametrize("racks_left", [1, 2])
def test_a_missing_copy_is_made_in_another_rack_where_there_is_one(racks_left: int) -> None:
    """The emptiest holder stands beside the only copy; only where no other rack is left does it get the save."""
    nodes = {"a1": "r1", "a2": "r1", **({"b1": "r2", "b2": "r2"} if racks_left == 2 else {})}
    holders = {name: MemoryServerInstance(name, name) for name in nodes}
    saved, other = manifest(1, 10, 0, 1), manifest(1, 5, 0, 1)
    readings = {holders[n]: (saved,) if n == "a1" else () if n == "a2" else (other,) for n in nodes}
    topology = Topology("job", {name: (rack,) for name, rack in nodes.items()})
    (repair,) = plan_repairs(readings, {h: h.node for h in readings}, Checkpoint(1, 10), 2, topology=topology)
    assert repair.target.node in ({"b1", "b2"} if racks_left == 2 else {"a2"})
    leaving = frozenset({"b1", "b2"})
    (repair,) = plan_repairs(readings, {h: h.node for h in readings}, Checkpoint(1, 10), 2, leaving, topology)
    assert repair.target.node == "a2", "a rack that is left takes nothing"


# ---- the last good one ---------------------------------------------------------------------------------------------

STEPS = [Checkpoint(1, step) for step in range(10, 70, 10)]


@given(st.integers(0, 63), st.integers(1, 3))
def test_suspects_push_out_no_last_good_checkpoint_of_either_tier(mask: int, keep: int) -> None:
    """Whatever steps had a loss that was no number, the newest that had one stays, and nothing else changes."""
    suspect = {c for bit, c in enumerate(STEPS) if mask >> bit & 1}
    entries = tuple(replace(manifest(c.generation, c.step, 0, 1), suspect=c in suspect) for c in STEPS)
    good = last_checkpoint_before_anomaly(STEPS, entries)
    lineage: Lineage = (LineageEntry(1, None, 1),)
    plain = RetentionInputs(lineage, 1, False, None, STEPS[-1], None, None, NONE)
    held = replace(plain, known_good=frozenset(c for c in (good,) if c is not None))
    kept = {m.save.checkpoint for m in entries} - {s.checkpoint for s in memory_saves_to_delete(entries, held, keep)}
    kept_persistent = set(STEPS) - set(persistent_checkpoints_to_delete(STEPS, STEPS, held, keep))
    for left in (kept, kept_persistent):
        assert len(suspect) == len(STEPS) or max(set(STEPS) - suspect) in left
        assert left == set(STEPS[-keep:]) | ({good} if good is not None else set())
    if STEPS[-1] not in suspect or len(suspect) == len(STEPS):
        assert good is None, "a sound run keeps no more than before, and one without a good checkpoint neither"


def test_one_rank_that_had_no_number_makes_a_checkpoint_suspect() -> None:
    entries = [replace(manifest(1, step, r, 2), suspect=(step, r) == (20, 1)) for step in (10, 20) for r in (0, 1)]
    assert last_checkpoint_before_anomaly((Checkpoint(1, 10), Checkpoint(1, 20)), entries) == Checkpoint(1, 10)
    text = entries[-1].to_json()
    assert RankManifest.from_json(text) == entries[-1]
    assert "suspect" not in entries[0].to_json()


# ---- good checkpoints ------------------------------------------------------------------------------------------------
# Which checkpoint is proven to be good, and that retention never lets it go for newer suspects.

C = {step: Checkpoint(1, step) for step in range(1, 200)}


def test_a_checkpoint_is_good_once_so_many_later_steps_were_well() -> None:
    held = (C[10], C[20], C[30])
    assert find_known_good(held, frozenset(), LossHistory(29, 0, 10)) == (C[10], {C[10], C[20]})
    assert find_known_good(held, frozenset(), LossHistory(30, 0, 10)) == (C[20], {C[20], C[30]})
    assert find_known_good(held, frozenset({C[20]}), LossHistory(35, 0, 10)) == (C[10], {C[10], C[30]})
    # odd at 25: what was saved before is not proven by steps behind it
    assert find_known_good(held, frozenset(), LossHistory(41, 25, 10), C[10]) == (C[30], {C[30]})
    assert find_known_good(held, frozenset({C[30]}), LossHistory(31, 31, 10), C[10]) == (C[10], {C[10]})


def test_what_a_good_one_grew_from_is_good_where_that_is_not_at_hand() -> None:
    # a part of it may lie on a holder that is silent
    assert find_known_good((C[10], C[30]), frozenset(), LossHistory(0, 0, 10), C[20]) == (
        C[20],
        {C[10], C[20], C[30]},
    )


@given(
    interval=st.integers(1, 7),
    keep=st.integers(1, 3),
    later=st.integers(1, 12),
    odd=st.sets(st.integers(1, 120), max_size=8),
    asleep=st.sets(st.integers(1, 120), max_size=60),
)
def test_the_last_good_one_is_always_there_and_little_else_is_kept(
    interval: int, keep: int, later: int, odd: set[int], asleep: set[int]
) -> None:
    """A run of 120 steps with odd ones, whose holder is looked at now and then: what was ever proven stays, or newer."""
    held: set[Checkpoint] = set()
    known: Checkpoint | None = None
    lineage = (LineageEntry(1, None, 1),)
    for step in range(1, 121):
        if step % interval == 0:
            held.add(C[step])
        suspect = frozenset(c for c in held if c.step in odd)
        if step in asleep:
            continue
        sound = LossHistory(step, max((s for s in odd if s <= step), default=0), later)
        known, spared = find_known_good(held, suspect, sound, known)
        entries = [manifest(1, c.step, 0, 1) for c in held]
        newest = max(held, default=None)
        standing = RetentionInputs(lineage, 1, False, None, newest, None, None, frozenset(), known_good=spared)
        held -= {s.checkpoint for s in memory_saves_to_delete(entries, standing, keep)}
        assert known is None or known in held
        assert known is None or not any(s in odd for s in range(known.step, known.step + later + 1) if s <= step)
        assert len(held) <= keep + 2
        if not odd and not asleep and step > interval + later:
            assert known is not None
            assert known.step > step - later - 2 * max(interval, later) - 1
