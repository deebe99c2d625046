"""Tests of `protocol.checkpoints.records`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.samples import sample
from surefoot.errors import ProtocolError
from surefoot.protocol.checkpoints.completeness import describe_uncovered_tensor
from surefoot.protocol.checkpoints.records import Layout, Piece, RankManifest, TensorLayout

# ---- coverage --------------------------------------------------------------------------------------------------------
# Whether what all ranks saved is the whole of every tensor, once: compared with counting each element.

Box = tuple[tuple[int, ...], tuple[int, ...]]


def layout(shape: tuple[int, ...], boxes: list[Box], name: str = "w", dtype: str = "float32") -> Layout:
    pieces = tuple(Piece(offsets, lengths, lengths, 0) for offsets, lengths in boxes)
    return Layout((TensorLayout(name, dtype, shape, pieces),), (0,), 0)


def once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    counts: Counter[tuple[int, ...]] = Counter()
    for offsets, lengths in boxes:
        counts.update(product(*(range(o, o + n) for o, n in zip(offsets, lengths, strict=True))))
    return counts == Counter(product(*(range(n) for n in shape)))


@st.composite
def boxes_in_two_dimensions(draw: st.DrawFn) -> tuple[tuple[int, int], list[Box]]:
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    corner = st.tuples(st.integers(0, 4), st.integers(0, 4))
    return (rows, columns), draw(st.lists(st.tuples(corner, corner), max_size=5))


@given(boxes_in_two_dimensions())
@example(((1, 1), [((0, 0), (1, 1)), ((2, 0), (0, 1))]))  # one without elements, beyond the tensor
def test_boxes_cover_exactly_if_each_element_is_in_one(drawn: tuple[tuple[int, int], list[Box]]) -> None:
    shape, boxes = drawn
    empty = not shape[0] * shape[1]
    assert (describe_uncovered_tensor([layout(shape, boxes)]) is None) == (empty or once(shape, boxes))


@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.integers(0, 6), max_size=4))
def test_cutting_along_a_dimension_covers_and_losing_a_piece_does_not(rows: int, columns: int, cuts: list[int]) -> None:
    edges = sorted({0, rows, *(c for c in cuts if c < rows)})
    boxes: list[Box] = [((a, 0), (b - a, columns)) for a, b in pairwise(edges)]
    each = [layout((rows, columns), [box]) for box in boxes]
    assert describe_uncovered_tensor(each) is None
    assert describe_uncovered_tensor([layout((rows, columns), []), *each[1:]]) is not None
    assert describe_uncovered_tensor([*each, each[0]]) is not None


def test_a_scalar_is_saved_once() -> None:
    scalar = layout((), [((), ())])
    assert describe_uncovered_tensor([scalar]) is None
    assert describe_uncovered_tensor([scalar, scalar]) is not None
    assert describe_uncovered_tensor([layout((), [])]) is not None


def test_an_equal_number_of_elements_is_not_enough() -> None:
    assert "overlap" in str(describe_uncovered_tensor([layout((4,), [((0,), (2,)), ((1,), (2,))])]))
    assert "beyond" in str(describe_uncovered_tensor([layout((4,), [((0,), (2,)), ((3,), (2,))])]))
    assert "negative" in str(describe_uncovered_tensor([layout((2, 2), [((0, 0), (-2, -2))])]))
    assert "dimensions" in str(describe_uncovered_tensor([layout((4,), [((0, 0), (2, 2))])]))


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    assert "shape" in str(describe_uncovered_tensor([layout((4,), [((0,), (4,))]), layout((5,), [])]))
    assert "dtype" in str(describe_uncovered_tensor([layout((4,), [((0,), (4,))]), layout((4,), [], dtype="float64")]))


# ---- manifest checksum -----------------------------------------------------------------------------------------------
# A manifest's checksum is of what was written, and one flipped byte anywhere makes it no manifest.

MANIFEST = sample(RankManifest)
TEXT = MANIFEST.to_json().encode()


@given(st.integers(0, len(TEXT) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_found_wherever_it_is(place: int, flip: int) -> None:
    damaged = bytearray(TEXT)
    damaged[place] ^= flip
    with pytest.raises(ProtocolError):
        RankManifest.from_json(bytes(damaged))


def test_what_another_program_wrote_in_its_own_order_is_read() -> None:
    body = json.loads(TEXT)
    for text in (json.dumps(body, indent=1), json.dumps(dict(reversed(body.items())))):
        assert RankManifest.from_json(text) == RankManifest.from_json(text.encode()) == MANIFEST


def test_an_object_that_is_called_like_the_checksum_is_none() -> None:
    for value in ("1", '"crc32":1,'):
        named = replace(MANIFEST, objects=(("crc32", value),))
        text = named.to_json()
        assert RankManifest.from_json(text) == named
        with pytest.raises(ProtocolError, match="checksum"):
            RankManifest.from_json(text.replace(f'"crc32":{json.loads(text)["crc32"]},', '"crc32":5,'))
