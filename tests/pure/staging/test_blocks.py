"""Strided copies lay every element exactly where the tiling says, for any shape, tile, stride and dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.geometry import Tiling, block_shape
from surefoot.staging import copies_of
from surefoot.staging.host_copies import BAND_BYTES, Arena, Scratch, bands, regions

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64, torch.complex128]


def laid(tensor: torch.Tensor, tile: tuple[int, ...]) -> bytes:
    target = np.full(tensor.numel() * tensor.element_size(), 0xEE, dtype=np.uint8)
    for copy in copies_of(tensor, tile, target):
        copy.run()
    return target.tobytes()


def expected(tensor: torch.Tensor, tile: tuple[int, ...]) -> bytes:
    """Block by block, as the format defines it."""
    tiling = Tiling(tuple(tensor.shape), tile, tensor.element_size())
    parts = []
    for index in range(tiling.blocks):
        box = tiling.block_box(index)
        block = tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
        parts.append(
            torch.empty(block.numel(), dtype=block.dtype).copy_(block.reshape(-1)).view(torch.uint8).numpy().tobytes()
        )
    return b"".join(parts)


@given(shapes, st.data(), st.sampled_from(DTYPES))
def test_copies_lay_the_blocks_in_order(shape: tuple[int, ...], data: st.DataObject, dtype: torch.dtype) -> None:
    tile = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    tensor = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape).to(dtype)
    assert laid(tensor, tile) == expected(tensor, tile)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_tensors_that_are_not_contiguous_are_laid_alike(a: int, b: int, c: int, x: int, y: int, z: int) -> None:
    tensor = torch.randn(2 * c, a, 3 * b)[::2, :, 1::3].permute(1, 2, 0)
    assert laid(tensor, (x, y, z)) == expected(tensor, (x, y, z))


@pytest.mark.parametrize("shape", [(3001, 1003), (70, 90_001), (3, 1_100_003), (2, 3, 300, 701), (2_100_001,)])
def test_large_tensors_are_copied_in_bands_and_laid_alike(shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2**31, shape, dtype=torch.int32)
    tile = block_shape(shape, 4)
    for found in (tensor, tensor.t() if len(shape) == 2 else tensor.flip(0)):
        tile = block_shape(tuple(found.shape), 4)
        assert laid(found, tile) == expected(found, tile)
        target = np.empty(found.numel() * 4, dtype=np.uint8)
        copies = copies_of(found, tile, target)
        assert max(c.size_bytes for c in copies) <= BAND_BYTES
        assert len(copies) < 4 + 3 * target.size // BAND_BYTES


@given(shapes.filter(bool), st.data(), st.integers(1, 8), st.integers(1, 2000))
def test_bands_are_whole_tiles_in_the_order_of_the_stream(
    shape: tuple[int, ...], data: st.DataObject, size: int, limit: int
) -> None:
    """Laid one after the other, each as a piece of its own, they are the piece."""
    tile = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    tensor = torch.arange(int(np.prod(shape, dtype=int)), dtype=torch.int64).reshape(shape)
    found = [tensor[part] for part in bands(shape, tile, size, limit)]
    assert b"".join(expected(band, tile) for band in found) == expected(tensor, tile)
    assert all(band.numel() * size <= max(limit, size * int(np.prod(tile))) for band in found)


@given(shapes, st.data(), st.sampled_from(DTYPES), st.sampled_from(["as it lies", "turned", "every other"]))
def test_a_verified_copy_lays_the_same_and_knows_its_digest(
    shape: tuple[int, ...], data: st.DataObject, dtype: torch.dtype, how: str
) -> None:
    tensor = torch.arange(int(np.prod(shape, dtype=int)) * 2).reshape((*shape, 2)).to(dtype)
    tensor = {"as it lies": tensor, "turned": tensor.movedim(-1, 0), "every other": tensor[..., 0]}[how]
    tile = tuple(data.draw(st.integers(1, 10)) for _ in tensor.shape)
    target = np.full(tensor.numel() * tensor.element_size(), 0xEE, dtype=np.uint8)
    scratch = Scratch()
    for copy in copies_of(tensor, tile, target):
        digest = copy.digest(scratch)
        assert copy.run_verified(digest, scratch)
        assert not copy.run_verified(digest ^ 1, scratch)
    assert target.tobytes() == expected(tensor, tile)


@pytest.mark.parametrize("turned", [False, True])
def test_what_changes_places_within_a_copy_changes_its_digest(turned: bool) -> None:
    tensor = torch.eye(300, dtype=torch.int32)
    copy = copies_of(tensor.t() if turned else tensor, (32, 128), np.zeros(360_000, dtype=np.uint8))[0]
    before = copy.digest(Scratch())
    tensor[[3, 8]] = tensor[[8, 3]]
    assert copy.digest(Scratch()) != before
    tensor[[3, 8]] = tensor[[8, 3]]
    assert copy.digest(Scratch()) == before


@given(shapes)
def test_a_piece_takes_at_most_one_copy_for_each_combination_of_edges(shape: tuple[int, ...]) -> None:
    assert len(list(regions(shape, tuple(3 for _ in shape)))) <= 2 ** len(shape)


def test_a_conjugated_tensor_is_laid_as_what_it_means() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert laid(tensor.conj(), (2,)) == laid(tensor.conj().resolve_conj(), (2,))


def test_slots_of_an_arena_share_nothing() -> None:
    memory = bytearray(30)
    arena = Arena(memoryview(memory), 2, 10)
    arena.slot(0)[:] = 1
    arena.slot(1)[:] = 2
    assert memory == b"\x01" * 10 + b"\x02" * 10 + b"\x00" * 10
    with pytest.raises(ValueError, match="slot 2"):
        arena.slot(2)


def test_an_arena_larger_than_its_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        Arena(memoryview(bytearray(10)), 2, 6)
