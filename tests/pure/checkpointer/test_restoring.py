"""Tests of `checkpointer.restoring`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.fake_tiers import MemoryPlace
from support.saves import Arrays, arrays, put_save, split, stream_of
from surefoot.checkpointer import restoring
from surefoot.checkpointer.restoring import Relays, TensorRelay, memory_of
from surefoot.format.layouts import ITEMSIZE
from surefoot.geometry import Box
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.restore import CheckpointReader, ReadOptions, SaveSource, read_catalogue
from surefoot.state.entries import Entry, LocalBox, TensorLocation

# ---- filled memory ---------------------------------------------------------------------------------------------------
# A restore fills tensors however they lie in memory; what the host does not write goes through a buffer a thread.

Lying = Callable[[tuple[int, ...]], torch.Tensor]


def in_rows(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape)


def in_columns(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape[::-1]).permute(tuple(reversed(range(len(shape)))))


def within_another(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros([n + 3 for n in shape])[tuple(slice(1, n + 1) for n in shape)]


def every_second(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros((*shape, 2))[..., 1]


def negated(shape: tuple[int, ...]) -> torch.Tensor:
    found = torch.zeros(shape, dtype=torch.complex64).conj().imag
    assert found.is_neg()
    return found


LYING: dict[str, Lying] = {f.__name__: f for f in (in_rows, in_columns, within_another, every_second, negated)}


def stored(tensors: Arrays, ranks: int) -> MemoryPlace:
    """A checkpoint whose ranks have a part of each tensor, along its first dimension."""
    place = MemoryPlace("memory:one")
    for rank in range(ranks):
        boxes = {name: split(array.shape, ranks, rank) for name, array in tensors.items()}
        stream, saved = stream_of(tensors, boxes)
        put_save(place.tier(), RankSave(1, 10, rank), ranks, stream, saved)
    return place


def filled(place: MemoryPlace, lives: dict[str, torch.Tensor]) -> None:
    entries = []
    for name, live in lives.items():
        shape = tuple(live.shape)
        entries.append(Entry(name, live, "float32", TensorLocation(shape, Box.whole(shape), None), "split"))
    source = SaveSource(place.name, "memory", place.tier)
    with CheckpointReader(Checkpoint(1, 10), read_catalogue([source]), ReadOptions(max_threads=2)) as reader:
        restoring.fill(reader, entries)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_tensor_is_filled_however_it_lies_directly_or_through_a_buffer(data: st.DataObject) -> None:
    dims = st.sampled_from([1, 2, 31, 33, 130, 300])
    lying = {f"t{i}": data.draw(st.sampled_from(sorted(LYING))) for i in range(data.draw(st.integers(1, 4)))}
    shapes = {name: tuple(data.draw(st.lists(dims, max_size=3))) for name in lying}
    tensors = arrays(data.draw(st.integers(0, 99)), shapes, "float32")
    place = stored(tensors, data.draw(st.integers(1, 3)))
    lives = {name: LYING[kind](shapes[name]) for name, kind in lying.items()}
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), label="as if on a device"):
            patch.setattr(restoring, "needs_relay", lambda live: True)
        filled(place, lives)
    for name, live in lives.items():
        assert np.array_equal(live.resolve_neg().numpy(), tensors[name]), (name, lying[name])


def test_what_lies_beside_a_tensor_in_its_memory_is_left_alone() -> None:
    around = torch.full((40, 50), 7.0)
    tensors = arrays(1, {"w": (20, 30)}, "float32")
    filled(stored(tensors, 2), {"w": around[5:25, 10:40]})
    assert np.array_equal(around[5:25, 10:40].numpy(), tensors["w"])
    around[5:25, 10:40] = 7.0
    assert bool((around == 7.0).all())


def test_a_restore_to_devices_takes_a_buffer_a_thread_of_the_host_not_the_state_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(restoring.torch, "empty", lambda n, **how: made.append(n) or empty(n, **how))
    monkeypatch.setattr(restoring, "needs_relay", lambda live: True)
    tensors = arrays(2, {f"t{i}": (1024, 1500) for i in range(6)}, "float32")
    assert sum(array.nbytes for array in tensors.values()) > 8 * MAX_CHUNK_BYTES
    lives = {name: torch.zeros(array.shape) for name, array in tensors.items()}
    filled(stored(tensors, 2), lives)
    assert all(np.array_equal(lives[name].numpy(), array) for name, array in tensors.items())
    assert 1 <= len(made) <= 2, "one for each reading thread"
    assert set(made) == {MAX_CHUNK_BYTES}


def test_a_window_of_a_tensor_on_a_device_is_filled_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "needs_relay", lambda live: True)
    tensors = arrays(3, {"w": (8, 6)}, "float32")
    whole = torch.zeros(20, 20)
    entry = Entry(
        "w", whole, "float32", TensorLocation((8, 6), Box.whole((8, 6)), None), "split", window=LocalBox((3, 4))
    )
    source = SaveSource("memory:one", "memory", stored(tensors, 2).tier)
    with CheckpointReader(Checkpoint(1, 10), read_catalogue([source]), ReadOptions(max_threads=2)) as reader:
        restoring.fill(reader, [entry])
    assert np.array_equal(whole[3:11, 4:10].numpy(), tensors["w"])
    assert int((whole != 0).sum()) == int((tensors["w"] != 0).sum())


def test_a_receiver_gives_a_thread_the_same_memory_again() -> None:
    relays = Relays()
    first, second = TensorRelay(torch.zeros(4, 4), relays), TensorRelay(torch.zeros(9), relays)
    one, other = np.frombuffer(first.part_buffer(16), np.uint8), np.frombuffer(second.part_buffer(36), np.uint8)
    assert one.ctypes.data == other.ctypes.data


# ---- restored memory -------------------------------------------------------------------------------------------------
# A restore fills the memory of a tensor where it lies, of any element type and however its strides are said.

TYPES = [getattr(torch, name) for name in sorted(ITEMSIZE) if hasattr(torch, name)]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 1, 4)], ids=str)
def test_bytes_that_are_written_are_the_tensor_s(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    memory = memory_of(tensor)
    assert memory.nbytes == tensor.nbytes
    memory[:] = b"\1" * memory.nbytes
    assert set(tensor.reshape(-1).view(torch.uint8).tolist()) == {1}


@pytest.mark.parametrize(("shape", "strides"), [((1,), (5,)), ((1, 1), (5, 7)), ((1, 3), (9, 1))])
def test_strides_of_dimensions_of_one_element_do_not_matter(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    tensor = torch.zeros(40).as_strided(shape, strides, 11)
    memory_of(tensor)[:] = torch.arange(1.0, tensor.numel() + 1).numpy().tobytes()
    assert tensor.reshape(-1).tolist() == list(range(1, tensor.numel() + 1))
