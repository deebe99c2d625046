"""A restore fills the memory of a tensor where it lies, of any element type and however its strides are said."""

from __future__ import annotations

import pytest
import torch

from surefoot.checkpointer.restoring import memory_of
from surefoot.format.layouts import ITEMSIZE

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
