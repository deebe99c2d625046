"""Which chunks of a save a target copies from the save before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.saves import arrays, stream_of
from surefoot.flush.engine import MOST_GENERATIONS, WrittenSave, base_of, successor
from surefoot.format.layouts import block_digests
from surefoot.geometry import Box
from surefoot.protocol.identities import RankSave

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
        assert base.has(STREAM, index, table[blocks.start * 8 : blocks.stop * 8]) == same[index]
    assert base.has_all(STREAM, range(CHUNKS), table) == all(same)


def test_nothing_is_copied_from_another_layout_another_rank_or_the_save_itself() -> None:
    written = WrittenSave(OLD, "layout", b"table")
    assert base_of(written, NEW, "layout") is written
    assert base_of(None, NEW, "layout") is None
    assert base_of(written, NEW, "another layout") is None
    assert base_of(written, RankSave(1, 20, 1), "layout") is None
    assert base_of(written, OLD, "layout") is None


def test_after_so_many_copies_of_copies_everything_is_sent_once() -> None:
    written, whole = None, []
    for step in range(3 * MOST_GENERATIONS):
        save = RankSave(1, step, 0)
        base = base_of(written, save, "layout")
        whole += [step] if base is None else []
        written = successor(base, save, "layout", b"table")
    assert whole == [0, MOST_GENERATIONS, 2 * MOST_GENERATIONS]
