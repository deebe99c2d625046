"""Every kind of tensor a program may have: element types, shapes, strides, subclasses, very many and very large ones."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.reads import reads
from support.saved_streams import merged, restored, saved
from surefoot.errors import ConfigurationError, StateNotRestorable
from surefoot.format.layouts import ITEMSIZE, LayoutFamily, Stream, TensorParts, build_layout
from surefoot.geometry import Box
from surefoot.geometry.sharding import shard_box
from surefoot.staging import prepare_copies
from surefoot.state import Program, describe_flat, dtype_from_name, save_plan


class Holder(nn.Module):
    """Buffers of any kind."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def random_bits(dtype: str, *shape: int) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, ITEMSIZE[dtype]), dtype=torch.uint8)
    return (
        raw.reshape(-1).view(dtype_from_name(dtype)).reshape(shape)
        if shape
        else raw.view(dtype_from_name(dtype)).reshape(())
    )


def returned(tensors: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor], before: int, after: int) -> Holder:
    old = Holder(tensors)
    streams = [saved(Program({"model": old}, (rank, before)), rank, 1) for rank in range(before)]
    new = Holder(fresh)
    restored(Program({"model": new}, (after - 1, after)), streams, after - 1, after, 1)
    return new


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_every_element_type_returns_to_the_bit(dtype: str) -> None:
    tensors = {
        "matrix": random_bits(dtype, 33, 70),
        "zero_dimensional": random_bits(dtype),
        "empty": random_bits(dtype, 0, 3),
        "odd": random_bits(dtype, 3, 1, 5),
    }
    fresh = {n: torch.empty(t.shape, dtype=dtype_from_name(dtype)) for n, t in tensors.items()}
    new = returned(tensors, fresh, 2, 3)
    for name, tensor in tensors.items():
        found = getattr(new, name)
        assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor)), name


def test_strided_tensors_are_saved_by_value_and_filled_where_they_lie() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "stepped": base[::2, 1::3],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "expanded": torch.arange(3.0)[:, None].expand(3, 5),
    }
    fresh = {name: torch.zeros_like(t) for name, t in tensors.items()} | {"stepped": torch.zeros(4, 6)[::2, 1::3]}
    strides = {name: t.stride() for name, t in fresh.items()}
    new = returned(tensors, fresh, 3, 2)
    for name, tensor in tensors.items():
        assert torch.equal(getattr(new, name), tensor), name
        assert getattr(new, name).stride() == strides[name]


@pytest.mark.parametrize("tensor", [torch.zeros(3).to_sparse(), torch.empty(3, device="meta")])
def test_what_has_no_dense_memory_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(StateNotRestorable, match=r"model/odd is a (sparse_coo cpu|strided meta) tensor"):
        Program({"model": Holder({"odd": tensor})}, (0, 1)).entries()


def test_a_tensor_subclass_is_saved_as_what_it_wraps() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    def quantized(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 32, bias=False))
        quantize_(model, Float8WeightOnlyConfig())
        return model

    old, new = quantized(1), quantized(2)
    streams = [saved(Program({"model": old}, (rank, 2)), rank, 1) for rank in range(2)]
    parts = {name for name in merged(streams) if name.startswith("model/0.weight:")}
    assert len(parts) >= 2, "elements and scale"
    restored(Program({"model": new}, (0, 1)), streams, 0, 1, 1)
    x = torch.randn(3, 64)
    assert torch.equal(old(x), new(x))


def test_ten_thousand_tensors_cost_little_at_every_save_after_the_first() -> None:
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.zeros(4, 3)) for i in range(10_000)})
    program = Program({"model": model}, (3, 256))
    entries = program.entries()
    plan = save_plan(entries, 3)
    assert len(plan.layout.tensors) == 10_000
    assert len({id(entry.location) for entry in entries}) == 1, "tensors of one shape share their place"
    shares = [portion.within for portion in save_plan(entries, 0).portions]
    assert len({id(within) for within in shares}) == 1 < len(shares)
    begun = time.perf_counter()
    again = program.entries()
    assert all(a is b for a, b in zip(entries, again, strict=True)), "nothing is worked out twice"
    print(f"10,000 tensors known again in {(time.perf_counter() - begun) * 1e3:.1f} ms")


def test_a_tensor_of_more_than_four_gibibytes_is_laid_out_and_read_by_parts() -> None:
    shape, world = (1 << 20, 1 << 13), 8  # 16 GiB of bfloat16
    for rank in (0, 7):
        layout = build_layout([TensorParts("w", "bfloat16", shape, (shard_box(shape, 0, world, rank),))])
        (piece,) = layout.tensors[0].pieces
        assert layout.stream_bytes == 2**34 // world
        assert all(0 < b - a <= 4 * 2**20 for a, b in pairwise((*layout.chunk_starts, layout.stream_bytes)))
        assert piece.offsets == (rank * (1 << 17), 0)
    whole = build_layout([TensorParts("w", "bfloat16", shape, (Box.whole(shape),))])
    (read,) = reads(Box((shape[0] - 32, 512), (32, 512)), whole.tensors[0].pieces, 2)
    assert read.runs[0].start > 2**33
    assert read.size_bytes == 32 * 512 * 2
    huge = torch.zeros(1, dtype=torch.uint8).expand(5 * 2**30)
    target = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (5 * 2**30,), (0,))
    with pytest.raises(ValueError, match="cannot be copied to 3 bytes"):
        prepare_copies(huge, (65536,), target[:3])


def test_a_flat_tensor_without_a_model_is_saved_by_what_it_says_it_holds() -> None:
    def built(rank: int, fill: float) -> dict[str, Any]:
        model = nn.Linear(3, 5)
        flat = nn.Parameter(torch.full((10,), fill + rank))
        ranges = [
            [("model/weight", (5, 3), 0, 10, 0)],
            [("model/weight", (5, 3), 10, 15, 0), ("model/bias", (5,), 0, 5, 5)],
        ]
        describe_flat(flat, ranges[rank])
        optimizer = torch.optim.SGD([flat], lr=0.1, momentum=0.9)
        optimizer.state[flat]["momentum_buffer"] = torch.arange(10.0) + 100 * rank + fill
        return {"model": model, "optimizer": optimizer}

    streams = [saved(Program(built(rank, 1.0), (rank, 2)), rank, 1) for rank in range(2)]
    tensors = merged(streams)
    assert tensors["optimizer/model/weight/~own"].flatten().tolist() == [1.0] * 10 + [2.0] * 5
    assert tensors["optimizer/model/bias/momentum_buffer"].tolist() == [106.0, 107.0, 108.0, 109.0, 110.0]
    new = built(1, 9.0)
    restored(Program(new, (1, 2)), streams, 1, 2, 1)
    (flat,) = new["optimizer"].param_groups[0]["params"]
    assert flat.tolist() == [2.0] * 10
    assert new["optimizer"].state[flat]["momentum_buffer"].tolist() == (torch.arange(10.0) + 101).tolist()


def test_a_range_that_does_not_fit_its_flat_tensor_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"elements 0 to 16 of model/weight \[5, 3\] do not lie"):
        describe_flat(torch.zeros(20), [("model/weight", (5, 3), 0, 16, 0)])


def test_replicas_without_the_rank_itself_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="ranks without this one"):
        Program({"model": nn.Linear(2, 2)}, (3, 4), replicas=[0, 1])


def test_what_replicas_says_of_modules_is_not_said_of_what_all_ranks_share() -> None:
    class Average:
        def state_dict(self) -> dict[str, Any]:
            return {"mean": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def entries(rank: int) -> dict[str, Any]:
        model = nn.ParameterDict({f"stage{rank // 2}": nn.Parameter(torch.ones(2))})
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        objects = {"model": model, "optimizer": optimizer, "average": Average()}
        replicas = [rank // 2 * 2, rank // 2 * 2 + 1]
        return {e.name: e.location.same for e in Program(objects, (rank, 4), replicas=replicas).entries()}

    for rank in range(4):
        found = {name: list(same.ranks()) for name, same in entries(rank).items()}
        stage = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found == {
            f"model/stage{rank // 2}": stage,
            "optimizer/~groups/0/lr": [0, 1, 2, 3],
            "average/mean": [0, 1, 2, 3],
        }


def test_what_one_rank_keeps_to_itself_is_told_by_any_layout() -> None:
    objects = {"model": nn.Linear(2, 2), "extra": nn.Linear(3, 1)}
    plans = [save_plan(Program(objects, (rank, 4), local=("extra",)).entries(), rank) for rank in range(4)]
    family = LayoutFamily(plans[2].layout, 2)
    assert [family.stream(rank).digest for rank in range(4)] == [plan.digest for plan in plans]
    assert isinstance(family.stream(1), Stream)
