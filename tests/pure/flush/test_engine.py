"""Tests of `flush.engine`."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from support.saves import arrays, stream_of
from surefoot.flush.engine import (
    MAX_COPY_DEPTH,
    Outcome,
    TargetWriteLock,
    TargetWriteLocks,
    WrittenSave,
    choose_copy_base,
    describe_written_save,
)
from surefoot.format.layouts import block_digests
from surefoot.geometry import Box
from surefoot.protocol.identities import MemoryServerInstance, RankSave

# ---- target turns ----------------------------------------------------------------------------------------------------
# Ranks of one agent write to a target one after another, and to several targets at once.

NODE_A, NODE_B = MemoryServerInstance("node-a", "1"), MemoryServerInstance("node-b", "1")
SECONDS = 10.0


class Writer:
    """Takes a turn in a thread of its own, and holds it until it is let go."""

    def __init__(self, turn: TargetWriteLock, told: list[str], name: str) -> None:
        self.came, self.release, self.stopped = threading.Event(), threading.Event(), threading.Event()
        self.outcome: Outcome | None = None
        self._turn, self._told, self._name = turn, told, name
        self.asked = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self.asked.wait(SECONDS)

    def _run(self) -> None:
        def is_stopped() -> bool:
            self.asked.set()  # it stands in the row
            return self.stopped.is_set()

        with self._turn.acquire(is_stopped) as outcome:
            self.outcome = outcome
            self._told.append(self._name)
            self.came.set()
            if outcome == "turn":
                assert self.release.wait(SECONDS)

    def end(self) -> None:
        self.release.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


def row(turn: TargetWriteLock, told: list[str], *names: str) -> list[Writer]:
    return [Writer(turn, told, name) for name in names]


def test_first_come_first_served_and_one_at_a_time() -> None:
    told: list[str] = []
    first, *others = row(TargetWriteLock(), told, "a", "b", "c", "d")
    assert first.came.wait(SECONDS)
    for writer in others:
        assert not writer.came.is_set()
    for place, writer in enumerate((first, *others)):
        assert writer.came.wait(SECONDS)
        assert told == ["a", "b", "c", "d"][: place + 1]
        writer.end()
    assert {w.outcome for w in (first, *others)} == {"turn"}


def test_one_that_is_called_off_waits_no_longer_and_holds_up_nobody() -> None:
    first, second, third = row(TargetWriteLock(), [], "a", "b", "c")
    second.stopped.set()
    assert second.came.wait(SECONDS)
    assert second.outcome == "stopped"
    first.end()
    assert third.came.wait(SECONDS)
    assert third.outcome == "turn"
    for writer in (second, third):
        writer.end()


def test_all_that_wait_behind_a_silent_target_hear_of_it_at_once_and_who_comes_later_tries() -> None:
    turn = TargetWriteLock()
    first, second, third = row(turn, [], "a", "b", "c")
    assert first.came.wait(SECONDS)
    turn.report_unavailable()
    for writer in (second, third):
        assert writer.came.wait(SECONDS)
        assert writer.outcome == "unavailable"
        writer.end()
    first.end()
    (again,) = row(turn, [], "d")
    assert again.came.wait(SECONDS)
    assert again.outcome == "turn"
    again.end()


def test_an_error_in_a_turn_ends_it() -> None:
    turn = TargetWriteLock()
    never: Callable[[], bool] = lambda: False  # noqa: E731
    try:
        with turn.acquire(never):
            raise ValueError("a writer failed")
    except ValueError:
        pass
    with turn.acquire(never) as outcome:
        assert outcome == "turn"


def test_targets_share_no_turn_and_one_that_nobody_writes_to_is_forgotten() -> None:
    turns = TargetWriteLocks()
    (first,) = row(turns.lock_of(NODE_A), [], "a")
    (other,) = row(turns.lock_of(NODE_B), [], "b")
    assert first.came.wait(SECONDS)
    assert other.came.wait(SECONDS)
    for writer in (first, other):
        writer.end()
    kept = turns.lock_of(NODE_A)
    assert turns.lock_of(NODE_A) is kept
    del kept, first, other, writer
    gc.collect()
    assert not turns._locks_by_target


# ---- unchanged chunks ------------------------------------------------------------------------------------------------
# Which chunks of a save a target copies from the save before.

SHAPES = {f"w{i}": (300, 70) for i in range(6)}
BOXES = {name: (Box.whole(shape),) for name, shape in SHAPES.items()}
STREAM, DATA = stream_of(arrays(1, SHAPES), BOXES, chunk_blocks=2)
CHUNKS = len(STREAM.layout.chunk_starts)
OLD, NEW = RankSave(1, 10, 0), RankSave(1, 20, 0)


def table_of(data: bytes) -> bytes:
    return block_digests(memoryview(data), STREAM.edges, range(STREAM.blocks))


@given(st.lists(st.integers(0, len(DATA) - 1), max_size=4))
def test_a_chunk_is_the_same_exactly_where_none_of_its_bytes_changed(changed: list[int]) -> None:
    data = bytearray(DATA)
    for place in changed:
        data[place] ^= 0x40
    base, table = WrittenSave(OLD, STREAM.digest, table_of(DATA)), table_of(bytes(data))
    starts, lengths = STREAM.layout.chunk_starts, STREAM.layout.chunk_lengths()
    same = [data[s : s + n] == DATA[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    for index in range(CHUNKS):
        blocks = STREAM.blocks_of_chunk(index)
        assert base.has_equal_chunk(STREAM, index, table[blocks.start * 8 : blocks.stop * 8]) == same[index]
    assert base.has_equal_chunks(STREAM, range(CHUNKS), table) == all(same)


def test_nothing_is_copied_from_another_layout_another_rank_or_the_save_itself() -> None:
    written = WrittenSave(OLD, "layout", b"table")
    assert choose_copy_base(written, NEW, "layout") is written
    assert choose_copy_base(None, NEW, "layout") is None
    assert choose_copy_base(written, NEW, "another layout") is None
    assert choose_copy_base(written, RankSave(1, 20, 1), "layout") is None
    assert choose_copy_base(written, OLD, "layout") is None


def test_after_so_many_copies_of_copies_everything_is_sent_once() -> None:
    written, whole = None, []
    for step in range(3 * MAX_COPY_DEPTH):
        save = RankSave(1, step, 0)
        base = choose_copy_base(written, save, "layout")
        whole += [step] if base is None else []
        written = describe_written_save(base, save, "layout", b"table")
    assert whole == [0, MAX_COPY_DEPTH, 2 * MAX_COPY_DEPTH]
