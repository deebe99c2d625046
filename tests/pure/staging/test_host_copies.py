"""Tests of `staging.host_copies`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.geometry import Tiling
from surefoot.geometry import block_shape as geometry_block_shape
from surefoot.geometry.box import block_shape
from surefoot.staging import CopySource, Stager, prepare_copies
from surefoot.staging.host_copies import (
    BAND_BYTES,
    SMALL_BYTES,
    Arena,
    CopyBuffers,
    CopyTarget,
    GatheredSources,
    SmallTensors,
    is_gatherable,
    split_into_band_slices,
    split_into_regions,
)

# ---- gathering -------------------------------------------------------------------------------------------------------
# Small tensors that are gathered by one call are saved to the byte as if each were copied alone.

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn)

Making = Callable[[torch.Tensor], torch.Tensor]
KINDS: dict[str, Making] = {
    "plain": lambda t: t,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
    "turned": lambda t: t.transpose(0, -1) if t.dim() > 1 else t,
    "every other": lambda t: t.repeat_interleave(2, 0)[::2] if t.dim() else t,
    "within another": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)])[t.numel() :].view(t.shape),
    "conjugated": lambda t: t.conj(),
    "subclass": lambda t: t.as_subclass(Own),
}


class Own(torch.Tensor):
    pass


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    size = prod(shape) * torch.empty((), dtype=dtype).element_size()
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, size, np.uint8))
    return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def of(tensor: torch.Tensor, start: int) -> CopySource:
    size = tensor.numel() * tensor.element_size()
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    tile = block_shape(tuple(tensor.shape), tensor.element_size())
    return CopySource(
        f"at {start}", lambda: tensor, lambda: tensor, tile, start, start + size, (), tensor if plain else None
    )


def laid(tensors: list[torch.Tensor]) -> list[CopySource]:
    """One behind the other, the larger elements first, as in every layout."""
    found: list[CopySource] = []
    for tensor in sorted(tensors, key=lambda t: -t.element_size()):
        found.append(of(tensor, found[-1].stop if found else 0))
    return found


def plainly(sources: list[CopySource]) -> bytes:
    slot = np.zeros(sources[-1].stop if sources else 0, dtype=np.uint8)
    for source in sources:
        for copy in prepare_copies(source.read().detach(), source.tile, slot[source.start : source.stop]):
            copy.run()
    return slot.tobytes()


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.just((70, 300)) | st.just((16384,))
made = st.tuples(shapes, st.sampled_from(DTYPES), st.sampled_from(sorted(KINDS)), st.integers(0, 99))
moves = st.lists(st.tuples(st.integers(0, 29), st.sampled_from(("new", "in place", "turned"))), max_size=4)


def moved(tensor: torch.Tensor, how: str) -> None:
    """What a program may do to a tensor between two saves."""
    with torch.no_grad():
        if how == "new":
            tensor.data = torch.ones_like(tensor.data)
        elif how == "in place":
            tensor.zero_()
        elif how == "turned" and tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
            tensor.data = tensor.data.t()


@pytest.fixture(scope="module")
def stager():
    owner = Stager()
    yield owner
    owner.close()


@pytest.mark.gate_only
@settings(max_examples=150, deadline=None)
@given(st.lists(made, max_size=30), moves, st.integers(0, 30))
def test_a_save_of_any_mix_has_the_bytes_of_single_copies(
    stager: Stager, mix: list[tuple[tuple[int, ...], torch.dtype, str, int]], steps: list[tuple[int, str]], eager: int
) -> None:
    tensors = [KINDS[kind](filled(shape, dtype, seed)) for shape, dtype, kind, seed in mix]
    sources = laid(tensors)
    now, lazy = sources[:eager], sources[eager:]
    slots = [np.zeros(sources[-1].stop if sources else 0, dtype=np.uint8) for _ in range(2)]
    for number, (index, how) in enumerate([(0, "nothing"), *steps]):
        if tensors:
            moved(tensors[index % len(tensors)], how)
        slot = slots[number % 2]
        stager.start_save(slot, now, lazy, lambda outcome: None)
        stager.wait_for_save()
        assert slot.tobytes() == plainly(sources)
    stager.release_prepared()


def test_what_lies_side_by_side_is_one_copy_and_no_longer_than_a_band() -> None:
    tensors = [torch.zeros(2048) for _ in range(300)]
    tensors[100] = torch.zeros(SMALL_BYTES + 4, dtype=torch.uint8).view(torch.float32)  # not small: parts the others
    sources = laid(tensors)
    small = SmallTensors(source for source in sources if is_gatherable(source))
    copies = small.prepare_copies(CopyTarget.of(np.zeros(sources[-1].stop, dtype=np.uint8)))
    assert [len(copy.sources) for copy in copies] == [100, 128, 71]


def test_memory_that_was_replaced_is_noticed_and_its_neighbours_are_kept() -> None:
    tensors = [torch.full((4,), float(n)) for n in range(5)]
    sources = laid(tensors)
    small = SmallTensors(sources)
    slot = np.zeros(sources[-1].stop, dtype=np.uint8)
    (copy,) = small.prepare_copies(CopyTarget.of(slot))
    kept = [view.data_ptr() for view in copy.sources]
    tensors[2].data = torch.full((4,), 9.0)
    assert small.refresh_views()
    (copy,) = small.prepare_copies(CopyTarget.of(slot))
    copy.run()
    assert slot.view(np.float32).reshape(5, 4)[:, 0].tolist() == [0, 1, 9, 3, 4]
    assert [n for n in range(5) if copy.sources[n].data_ptr() != kept[n]] == [2]


@pytest.mark.parametrize("change", ["dtype", "length", "strides", "class", "freed"])
def test_what_can_no_longer_be_gathered_is_said(change: str) -> None:
    tensor = torch.arange(16.0).reshape(4, 4)
    small = SmallTensors([of(tensor, 0)])
    assert small.refresh_views()
    match change:
        case "dtype":
            tensor.data = tensor.data.double()
        case "length":
            tensor.data = torch.zeros(5, 5)
        case "strides":
            tensor.data = tensor.data.t()
        case "class":
            torch.utils.swap_tensors(tensor, torch.zeros(4, 4).as_subclass(Own))
        case "freed":
            tensor.untyped_storage().resize_(0)
    assert not small.refresh_views()


def test_large_tensors_parts_and_devices_are_left_to_others() -> None:
    whole = torch.zeros(SMALL_BYTES // 4)
    assert is_gatherable(of(whole, 0))
    assert not is_gatherable(of(torch.zeros(SMALL_BYTES // 4 + 1), 0))
    assert not is_gatherable(CopySource("a part", lambda: whole[:4], lambda: whole, (4,), 0, 16, (slice(0, 4),), None))
    assert not is_gatherable(of(torch.zeros(4, device="meta"), 0))


def gathered(prepared: GatheredSources, size: int) -> bytes:
    slot = np.zeros(size, dtype=np.uint8)
    for copy in prepared.small.prepare_copies(CopyTarget.of(slot)):
        copy.run()
    return slot.tobytes()


def test_a_tensor_that_another_replaces_costs_no_other_its_view() -> None:
    large = torch.zeros(SMALL_BYTES, dtype=torch.float32)
    tensors = [large, *(torch.full((4,), float(n)) for n in range(5))]
    sources = laid(tensors)
    prepared = GatheredSources([], sources)
    views = prepared.small.prepare_copies(CopyTarget.of(np.zeros(sources[-1].stop, dtype=np.uint8)))[0].sources
    kept = [id(view) for view in views]
    replaced = [*sources]
    replaced[0] = of(torch.ones(SMALL_BYTES), 0)
    replaced[3] = of(torch.full((4,), 7.0), sources[3].start)
    assert prepared.prepare_for([replaced[3]], [*replaced[:3], *replaced[4:]])
    assert [n for n in range(5) if id(views[n]) != kept[n]] == [2]
    assert prepared.lazy == [replaced[0]]
    assert prepared.eager == []
    assert gathered(prepared, sources[-1].stop)[large.nbytes :] == plainly(replaced)[large.nbytes :]


@pytest.mark.parametrize("other", ["turned", "more", "small where none was"])
def test_sources_that_do_not_take_the_place_of_others_are_divided_anew(other: str) -> None:
    tensors = [torch.zeros(4, 4), torch.zeros(4, 4).t(), torch.zeros(4, 4)]
    sources = laid(tensors)
    prepared = GatheredSources([], sources)
    assert prepared.prepare_for([], list(sources)), "the same in another list"
    match other:
        case "turned":
            sources[0] = of(torch.arange(16.0).reshape(4, 4).t(), 0)
        case "more":
            sources.append(of(torch.zeros(4), sources[-1].stop))
        case _:
            sources[1] = of(torch.zeros(4, 4), sources[1].start)
    assert not prepared.prepare_for([], sources)


# ---- blocks ----------------------------------------------------------------------------------------------------------
# Strided copies lay every element exactly where the tiling says, for any shape, tile, stride and dtype.

shapes_blocks = st.lists(st.integers(0, 9), max_size=4).map(tuple)
DTYPES_BLOCKS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.bool,
    torch.int16,
    torch.complex64,
    torch.complex128,
]


def laid_blocks(tensor: torch.Tensor, tile: tuple[int, ...]) -> bytes:
    target = np.full(tensor.numel() * tensor.element_size(), 0xEE, dtype=np.uint8)
    for copy in prepare_copies(tensor, tile, target):
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


@given(shapes_blocks, st.data(), st.sampled_from(DTYPES_BLOCKS))
def test_copies_lay_the_blocks_in_order(shape: tuple[int, ...], data: st.DataObject, dtype: torch.dtype) -> None:
    tile = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    tensor = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape).to(dtype)
    assert laid_blocks(tensor, tile) == expected(tensor, tile)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_tensors_that_are_not_contiguous_are_laid_alike(a: int, b: int, c: int, x: int, y: int, z: int) -> None:
    tensor = torch.randn(2 * c, a, 3 * b)[::2, :, 1::3].permute(1, 2, 0)
    assert laid_blocks(tensor, (x, y, z)) == expected(tensor, (x, y, z))


@pytest.mark.parametrize("shape", [(3001, 1003), (70, 90_001), (3, 1_100_003), (2, 3, 300, 701), (2_100_001,)])
def test_large_tensors_are_copied_in_bands_and_laid_alike(shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2**31, shape, dtype=torch.int32)
    tile = geometry_block_shape(shape, 4)
    for found in (tensor, tensor.t() if len(shape) == 2 else tensor.flip(0)):
        tile = geometry_block_shape(tuple(found.shape), 4)
        assert laid_blocks(found, tile) == expected(found, tile)
        target = np.empty(found.numel() * 4, dtype=np.uint8)
        copies = prepare_copies(found, tile, target)
        assert max(c.size_bytes for c in copies) <= BAND_BYTES
        assert len(copies) < 4 + 3 * target.size // BAND_BYTES


@given(shapes_blocks.filter(bool), st.data(), st.integers(1, 8), st.integers(1, 2000))
def test_bands_are_whole_tiles_in_the_order_of_the_stream(
    shape: tuple[int, ...], data: st.DataObject, size: int, limit: int
) -> None:
    """Laid one after the other, each as a piece of its own, they are the piece."""
    tile = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    tensor = torch.arange(int(np.prod(shape, dtype=int)), dtype=torch.int64).reshape(shape)
    found = [tensor[part] for part in split_into_band_slices(shape, tile, size, limit)]
    assert b"".join(expected(band, tile) for band in found) == expected(tensor, tile)
    assert all(band.numel() * size <= max(limit, size * int(np.prod(tile))) for band in found)


@given(
    shapes_blocks, st.data(), st.sampled_from(DTYPES_BLOCKS), st.sampled_from(["as it lies", "turned", "every other"])
)
def test_a_verified_copy_lays_the_same_and_knows_its_digest(
    shape: tuple[int, ...], data: st.DataObject, dtype: torch.dtype, how: str
) -> None:
    tensor = torch.arange(int(np.prod(shape, dtype=int)) * 2).reshape((*shape, 2)).to(dtype)
    tensor = {"as it lies": tensor, "turned": tensor.movedim(-1, 0), "every other": tensor[..., 0]}[how]
    tile = tuple(data.draw(st.integers(1, 10)) for _ in tensor.shape)
    target = np.full(tensor.numel() * tensor.element_size(), 0xEE, dtype=np.uint8)
    scratch = CopyBuffers()
    for copy in prepare_copies(tensor, tile, target):
        digest = copy.digest(scratch)
        assert copy.run_verified(digest, scratch)
        assert not copy.run_verified(digest ^ 1, scratch)
    assert target.tobytes() == expected(tensor, tile)


@pytest.mark.parametrize("turned", [False, True])
def test_what_changes_places_within_a_copy_changes_its_digest(turned: bool) -> None:
    tensor = torch.eye(300, dtype=torch.int32)
    copy = prepare_copies(tensor.t() if turned else tensor, (32, 128), np.zeros(360_000, dtype=np.uint8))[0]
    before = copy.digest(CopyBuffers())
    tensor[[3, 8]] = tensor[[8, 3]]
    assert copy.digest(CopyBuffers()) != before
    tensor[[3, 8]] = tensor[[8, 3]]
    assert copy.digest(CopyBuffers()) == before


@given(shapes_blocks)
def test_a_piece_takes_at_most_one_copy_for_each_combination_of_edges(shape: tuple[int, ...]) -> None:
    assert len(list(split_into_regions(shape, tuple(3 for _ in shape)))) <= 2 ** len(shape)


def test_a_conjugated_tensor_is_laid_as_what_it_means() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert laid_blocks(tensor.conj(), (2,)) == laid_blocks(tensor.conj().resolve_conj(), (2,))


def test_slots_of_an_arena_share_nothing() -> None:
    memory = bytearray(30)
    arena = Arena(memoryview(memory), 2, 10)
    arena.slot_view(0)[:] = 1
    arena.slot_view(1)[:] = 2
    assert memory == b"\x01" * 10 + b"\x02" * 10 + b"\x00" * 10
    with pytest.raises(ValueError, match="slot 2"):
        arena.slot_view(2)


def test_an_arena_larger_than_its_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        Arena(memoryview(bytearray(10)), 2, 6)
