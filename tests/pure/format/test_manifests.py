"""Layouts, digests and manifests: what is written is what is read, and any flipped byte is found and named."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import Corrupt, ProtocolError, StateMismatch
from surefoot.format.layouts import (
    DIGEST_BYTES,
    ITEMSIZE,
    Stream,
    TensorParts,
    block_digests,
    build_layout,
    first_bad_block,
    itemsize,
    layout_digest,
    read_layout,
)
from surefoot.format.manifests import build_manifest, check_digests, check_values
from surefoot.geometry.box import Box
from surefoot.geometry.sharding import shard_box
from surefoot.protocol.checkpoints.completeness import describe_uncovered_tensor
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES, Layout, RankManifest, encode_tensor
from surefoot.protocol.identities import RankSave

shapes = st.lists(st.sampled_from((0, 1, 3, 40, 300, 1500)), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZE))), max_size=8)


def whole_parts(many: list[tuple[tuple[int, ...], str]]) -> list[TensorParts]:
    return [TensorParts(f"t{i}", dtype, shape, (Box.whole(shape),)) for i, (shape, dtype) in enumerate(many)]


@given(tensors.filter(lambda many: all(len(shape) < 3 for shape, _ in many)), st.randoms(use_true_random=False))
def test_a_layout_survives_its_record_and_does_not_depend_on_order(many: list, shuffle) -> None:
    parts = whole_parts(many)
    layout = build_layout(parts)
    shuffle.shuffle(parts)
    assert build_layout(parts) == layout
    assert describe_uncovered_tensor([layout]) is None
    stream = Stream(layout)
    assert read_layout(stream.digest, stream.text).layout == layout
    assert layout.to_json(list(map(encode_tensor, layout.tensors))) == stream.text, "one by one or all at once"
    assert json.dumps(json.loads(stream.text), separators=(",", ":"), ensure_ascii=False) == stream.text
    assert all(0 < length <= MAX_CHUNK_BYTES for length in layout.chunk_lengths())
    assert all(placed.piece.stream_offset % placed.tiling.itemsize == 0 for placed in stream.pieces)
    edges = list(stream.edges)
    assert len(edges) - 1 == stream.blocks
    assert edges[-1] == layout.stream_bytes == sum(placed.tiling.size_bytes for placed in stream.pieces)
    assert set(layout.chunk_starts) <= set(edges)
    chunks = [stream.blocks_of_chunk(i) for i in range(len(layout.chunk_starts))]
    assert [i for blocks in chunks for i in blocks] == list(range(stream.blocks))
    for placed in stream.pieces:
        first = placed.first_block
        wanted = [placed.piece.stream_offset + placed.tiling.block_start(i) for i in range(placed.tiling.blocks)]
        assert edges[first : first + placed.tiling.blocks] == wanted


def test_ranks_that_shard_a_tensor_cover_it_once_together() -> None:
    shape = (1001, 65)
    layouts = [
        build_layout([TensorParts("w", "bfloat16", shape, (shard_box(shape, 0, 3, rank),))]) for rank in range(3)
    ]
    assert describe_uncovered_tensor(layouts) is None
    assert describe_uncovered_tensor(layouts[:2]) is not None


def test_a_tensor_of_which_a_rank_saves_nothing_is_still_named() -> None:
    layout = build_layout([TensorParts("w", "float32", (4,), ())])
    assert layout.tensors[0].pieces == ()
    assert (layout.stream_bytes, layout.chunk_starts, Stream(layout).blocks) == (0, (), 0)


def test_layouts_that_cannot_be_are_refused_when_built() -> None:
    with pytest.raises(ValueError, match="two tensors are called 'w'"):
        build_layout([TensorParts("w", "float32", (1,), ()), TensorParts("w", "float32", (1,), ())])
    with pytest.raises(ValueError, match="not inside tensor w"):
        build_layout([TensorParts("w", "float32", (3,), (Box((1,), (3,)),))])
    with pytest.raises(StateMismatch, match="'object' cannot be saved"):
        itemsize("object")


def test_damaged_layout_records_are_refused_by_name() -> None:
    layout = build_layout([TensorParts("w", "float32", (100,), (Box((0,), (100,)),))])
    text = layout.to_json()
    with pytest.raises(Corrupt, match=layout_digest(text)):
        read_layout(layout_digest(text), text.replace("100", "101"))
    gap = dataclasses.replace(layout, stream_bytes=layout.stream_bytes + 4).to_json()
    with pytest.raises(ProtocolError, match="end at byte 400, its stream at 404"):
        read_layout(layout_digest(gap), gap)
    piece = dataclasses.replace(layout.tensors[0].pieces[0], stream_offset=8)
    moved = Layout((dataclasses.replace(layout.tensors[0], pieces=(piece,)),), (0,), 408).to_json()
    with pytest.raises(ProtocolError, match="leaves bytes 0 to 8 unused"):
        read_layout(layout_digest(moved), moved)


def saved(data: bytes) -> tuple[Stream, memoryview, bytes]:
    count = len(data) // 4
    stream = Stream(build_layout([TensorParts("w", "float32", (count,), (Box((0,), (count,)),))]))
    view = memoryview(data)
    return stream, view, block_digests(view, stream.edges, range(stream.blocks))


def test_any_flipped_byte_is_found_in_the_block_where_it_is() -> None:
    clean = bytes(range(256)) * 1200
    stream, view, table = saved(clean)
    assert stream.blocks > 3
    assert len(table) == stream.blocks * DIGEST_BYTES
    everything = range(stream.blocks)
    assert first_bad_block(view, stream.edges, everything, table) is None
    for position in (0, 70_000, len(clean) - 1):
        dirty = bytearray(clean)
        dirty[position] ^= 1
        block = next(i for i, (a, b) in enumerate(pairwise(stream.edges)) if a <= position < b)
        assert first_bad_block(memoryview(dirty), stream.edges, everything, table) == block
        alone = range(block, block + 1)
        part = memoryview(dirty)[stream.edges[block] : stream.edges[block + 1]]
        wanted = table[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        assert first_bad_block(part, stream.edges, alone, wanted) == block
    with pytest.raises(ValueError, match="are not those of blocks"):
        first_bad_block(view[:-1], stream.edges, everything, table)


def test_hashing_chunk_by_chunk_gives_the_same_table() -> None:
    stream, view, table = saved(bytes(9 * 1024 * 1024))
    chunks = range(len(stream.layout.chunk_starts))
    assert len(chunks) == 3
    assert b"".join(block_digests(view, stream.edges, stream.blocks_of_chunk(i)) for i in chunks) == table


def test_a_manifest_vouches_for_its_tables_and_for_itself() -> None:
    stream, _, table = saved(bytes(400))
    values = b'{"format":1,"values":{}}'
    manifest = build_manifest(RankSave(3, 40, 1), 2, "abc", stream, (table, values), 1.25)
    assert RankManifest.from_json(manifest.to_json()) == manifest
    assert manifest.layout == stream.digest
    check_digests(manifest, table, "memory:node-1")
    check_values(manifest, values, "memory:node-1")
    with pytest.raises(Corrupt, match="digest table of rank 1 at step 40 of generation 3 at memory:node-1"):
        check_digests(manifest, bytes(len(table)), "memory:node-1")
    with pytest.raises(Corrupt, match="the values of"):
        check_values(manifest, values + b" ", "memory:node-1")
    with pytest.raises(ValueError, match="hash every block"):
        build_manifest(RankSave(3, 40, 1), 2, "abc", stream, (table + table, values), 1.25)


def test_every_flipped_byte_of_a_manifest_makes_it_unreadable() -> None:
    stream, _, table = saved(bytes(400))
    manifest = build_manifest(RankSave(3, 40, 1), 2, "abc", stream, (table, b"{}"), 1.25)
    text = manifest.to_json().encode()
    for position in range(len(text)):
        for bit in (1, 32, 128):
            dirty = bytearray(text)
            dirty[position] ^= bit
            with pytest.raises(ProtocolError):
                RankManifest.from_json(bytes(dirty))
