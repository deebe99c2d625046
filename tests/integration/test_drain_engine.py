"""The drain's threads against tiers that fail in every way: nothing is raised, slots come back, saving resumes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from support.fakes.fake_tiers import MemoryPlace, no_hook
from support.saves import Saver, arrays
from surefoot.errors import TierFull, TierUnavailable
from surefoot.flush.engine import FlushOptions
from surefoot.flush.state_machine import RetryLimits, StagedSave
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave

A, B, C = (MemoryServerInstance(f"node-{name}", "1") for name in "abc")
SHAPES: dict[str, tuple[int, ...]] = {"weight": (300, 70), "bias": (70,), "count": ()}
FAST = FlushOptions(RetryLimits(attempts=3, retry_seconds=0.01, no_target_timeout_seconds=0.3))


@pytest.fixture
def places() -> dict[MemoryServerInstance, MemoryPlace]:
    return {holder: MemoryPlace(f"memory:{holder.node}") for holder in (A, B, C)}


@pytest.fixture
def saver(places: dict[MemoryServerInstance, MemoryPlace]) -> Iterator[Saver]:
    made = Saver(lambda holder: places[holder].tier(), (A, B), options=FAST)
    yield made
    made.close()


def failing(calls: set[str], error: Exception) -> Callable[[str, RankSave | None], None]:
    def hook(call: str, save: RankSave | None) -> None:
        if call in calls:
            raise error

    return hook


def waiting(gate: threading.Event, reached: threading.Event | None = None) -> Callable[[str, RankSave | None], None]:
    def hook(call: str, save: RankSave | None) -> None:
        if reached is not None:
            reached.set()
        gate.wait(10)

    return hook


def save(step: int, epoch: int = 1) -> RankSave:
    return RankSave(epoch, step, 0)


def test_a_save_lies_on_both_holders_with_equal_manifests_and_every_byte(
    saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]
) -> None:
    stream = saver.save(save(10), arrays(10, SHAPES))
    assert saver.watched.freed == [(0, 10, True)]
    assert saver.watched.saved == [(save(10), 1), (save(10), 2)]
    assert places[A].index == places[B].index
    for place in (places[A], places[B]):
        chunks = [place.parts[save(10), i] for i in range(len(stream.layout.chunk_starts))]
        assert b"".join(chunks) == bytes(saver.memory[: stream.layout.stream_bytes])
        assert place.parts[save(10), "values"] == b'{"plain": 1}'
        assert place.layouts == {stream.digest: stream.text}


def test_both_slots_drain_at_once(saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]) -> None:
    gate = threading.Event()
    places[A].hook = places[B].hook = waiting(gate)
    saver.stage(0, save(10), arrays(10, SHAPES))
    saver.stage(1, save(20), arrays(20, SHAPES))
    assert saver.drain.pending_checkpoints() == (Checkpoint(1, 10), Checkpoint(1, 20))
    assert not saver.drain.wait_until_idle(0.05)
    gate.set()
    assert saver.drain.wait_until_idle(10)
    assert sorted(saver.watched.freed) == [(0, 10, True), (1, 20, True)]


def test_a_holder_that_stands_still_within_a_chunk_keeps_no_digest_from_the_other(
    saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]
) -> None:
    within, gate = threading.Event(), threading.Event()

    def hook(call: str, _: RankSave | None) -> None:
        if call == "put_chunk":
            within.set()
            gate.wait(60)

    places[A].hook, places[B].hook = hook, waiting(within)
    saver.stage(0, save(10), arrays(10, SHAPES))
    saver.watched.wait(lambda: (save(10), 1) in saver.watched.saved)
    assert [place for place in (A, B) if places[place].index] == [B]
    gate.set()
    assert saver.drain.wait_until_idle(10)
    assert places[A].index == places[B].index


def test_a_rank_that_saves_no_tensor_has_a_save_too(
    saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]
) -> None:
    saver.save(save(10), {})
    assert saver.watched.freed == [(0, 10, True)]
    assert places[A].index == places[B].index != {}


def test_a_full_holder_costs_a_copy_and_takes_the_next_save_when_it_has_room(
    saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]
) -> None:
    places[B].hook = failing({"put_chunk"}, TierFull("no room"))
    saver.save(save(10), arrays(10, SHAPES))
    assert saver.watched.freed[-1] == (0, 10, True)
    assert saver.watched.saved[-1] == (save(10), 1)
    assert saver.watched.notices[-1][0] == "SaveUnderReplicated"
    places[B].hook = no_hook
    saver.save(save(20), arrays(20, SHAPES))
    assert saver.watched.saved[-1] == (save(20), 2)


def test_all_holders_away_frees_the_slot_with_nothing_saved_and_saving_resumes(
    saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]
) -> None:
    for place in places.values():
        place.hook = failing({"put_chunk", "commit"}, TierUnavailable("no answer"))
    saver.save(save(10), arrays(10, SHAPES))
    assert saver.watched.freed == [(0, 10, False)]
    assert saver.watched.saved == []
    for place in places.values():
        place.hook = no_hook
    saver.save(save(20), arrays(20, SHAPES))
    assert saver.watched.freed[-1] == (0, 20, True)


def test_a_short_absence_is_bridged_by_retries(saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]) -> None:
    failures = iter([True, True])

    def hook(call: str, _: RankSave | None) -> None:
        if call == "commit" and next(failures, False):
            raise TierUnavailable("no answer")

    places[A].hook = hook
    saver.save(save(10), arrays(10, SHAPES))
    assert saver.watched.saved[-1] == (save(10), 2)


def test_a_holder_that_lost_everything_before_the_commit_is_written_anew(
    saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]
) -> None:
    def hook(call: str, _: RankSave | None) -> None:
        if call == "commit" and not places[B].index:
            places[B].hook = no_hook
            places[B].parts.clear()
            places[B].layouts.clear()

    places[B].hook = hook
    saver.save(save(10), arrays(10, SHAPES))
    assert saver.watched.saved[-1] == (save(10), 2)


def test_a_fenced_drain_frees_its_slot_and_leaves_no_index_entry(
    saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]
) -> None:
    for place in places.values():
        place.fence = 5
    saver.save(save(10, epoch=4), arrays(10, SHAPES))
    assert saver.watched.freed == [(0, 10, False)]
    assert not places[A].index
    assert not places[B].index


def test_an_error_nobody_thought_of_costs_the_save_and_not_the_drain(
    saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]
) -> None:
    for place in (places[A], places[B]):
        place.hook = failing({"put_digests"}, RuntimeError("a bug"))
    saver.save(save(10), arrays(10, SHAPES))
    assert saver.watched.freed == [(0, 10, False)]
    for place in (places[A], places[B]):
        place.hook = no_hook
    saver.save(save(20), arrays(20, SHAPES))
    assert saver.watched.saved[-1] == (save(20), 2)


def test_a_holder_that_is_replaced_mid_drain_gets_its_copy_on_the_new_one(
    saver: Saver, places: dict[MemoryServerInstance, MemoryPlace]
) -> None:
    reached, gate = threading.Event(), threading.Event()

    def hook(call: str, _: RankSave | None) -> None:
        reached.set()
        gate.wait(10)
        raise TierUnavailable("no answer")

    places[B].hook = hook
    saver.stage(0, save(10), arrays(10, SHAPES))
    assert reached.wait(10)
    saver.drain.set_targets((A, C), frozenset({A, C}), 2)
    gate.set()
    assert saver.drain.wait_until_idle(10)
    assert saver.watched.saved[-1] == (save(10), 2)
    assert save(10) in places[C].index


def test_without_any_target_the_slot_comes_back_after_the_limit(saver: Saver) -> None:
    saver.drain.set_targets((), frozenset(), 2)
    saver.save(save(10), arrays(10, SHAPES))
    assert saver.watched.freed == [(0, 10, False)]


def test_what_cannot_be_described_is_refused_with_a_notice_and_the_slot_comes_back(saver: Saver) -> None:
    saver.drain.add_staged(0, StagedSave(save(10), 1, "me", "0123456789abcdef", 100, 2), None)
    saver.watched.wait(lambda: saver.watched.freed == [(0, 10, False)])
    assert saver.watched.notices[0][0] == "SaveRejected"


def test_closing_gives_up_what_hangs_and_ends_every_thread(places: dict[MemoryServerInstance, MemoryPlace]) -> None:
    gate, reached = threading.Event(), threading.Event()
    before = set(threading.enumerate())
    saver = Saver(lambda holder: places[holder].tier(), (A, B), options=FAST)
    places[B].hook = waiting(gate, reached)
    saver.stage(0, save(10), arrays(10, SHAPES))
    saver.watched.wait(lambda: (save(10), 1) in saver.watched.saved)
    assert reached.wait(10)
    assert not saver.drain.close(0.1), "a writer is still in the memory"
    gate.set()
    assert saver.drain.close(10)
    assert set(threading.enumerate()) <= before
