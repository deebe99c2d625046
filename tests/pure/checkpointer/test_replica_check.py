"""Which tensors are compared between ranks, which of their bytes, and how differences are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.fakes.fake_link import FakeLink, attached
from surefoot.checkpointer import replica_check
from surefoot.checkpointer.replica_check import (
    ReplicaCheck,
    block_digests,
    chosen,
    decode_digests,
    differences_of,
    encode_digests,
    replica_groups,
    tensor_key,
)
from surefoot.errors import ConfigurationError
from surefoot.geometry import Box
from surefoot.geometry.sharding import Grid
from surefoot.state import Entry, Program
from surefoot.state.entries import Sharing, TensorLocation, dtype_name

WORLD = Grid.world_size(4)


def entry(name: str, tensor: torch.Tensor, same: Grid | None = WORLD, sharing: Sharing = "split") -> Entry:
    shape = tuple(tensor.shape)
    return Entry(name, tensor, dtype_name(tensor.dtype), TensorLocation(shape, Box.whole(shape), same), sharing)


def digests(tensor: torch.Tensor, check: int) -> list[int]:
    return block_digests([(7, entry("model/w", tensor))], check)


def test_only_tensors_that_other_ranks_of_the_same_group_have_are_compared() -> None:
    pair = Grid.of([1, 3])
    shared, paired = entry("model/a", torch.ones(2)), entry("model/b", torch.ones(2), pair)
    alone = entry("model/c", torch.ones(2), Grid.alone(1))
    elsewhere, own = entry("model/d", torch.ones(2), None), entry("local/1/model/e", torch.ones(2), WORLD, "local")
    buffer = entry("model/f", torch.ones(2), WORLD, "lowest")
    groups = replica_groups([shared, paired, alone, elsewhere, own, buffer], 1, {id(buffer.tensor)})
    assert groups == {WORLD: [shared], pair: [paired]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_changed_byte_anywhere_is_found_by_one_of_the_checks(dtype: torch.dtype) -> None:
    count = 5 * replica_check.BLOCK_BYTES // dtype.itemsize + 3
    checks = range(6)
    tensor = torch.zeros(count, dtype=dtype)
    before = [digests(tensor, check) for check in checks]
    for position in (0, count // 2, count - 1):
        changed = tensor.clone()
        changed.view(torch.uint8)[position * dtype.itemsize] = 1
        assert [digests(changed, check) for check in checks] != before


def test_transposed_tensors_are_compared_and_views_with_gaps_are_not() -> None:
    assert digests(torch.ones(8, 4).t(), 0) != digests(torch.zeros(8, 4).t(), 0)
    assert digests(torch.ones(8, 4)[:, ::2], 0) == digests(torch.zeros(0), 0) == [0]
    assert tensor_key(entry("w", torch.ones(4, 4))) != tensor_key(entry("w", torch.ones(4, 4).t()))


def test_of_many_tensors_each_is_compared_in_some_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_check, "MAX_TENSORS", 10)
    entries = [entry(f"model/{number}", torch.ones(1)) for number in range(37)]
    selections = [chosen(entries, check) for check in range(4)]
    assert max(map(len, selections)) <= 10
    assert {e.name for selection in selections for e in selection} == {e.name for e in entries}


def test_published_digests_come_back() -> None:
    assert decode_digests(encode_digests(5, {2**32 - 1: 7, 0: 2**32 - 1})) == (5, {2**32 - 1: 7, 0: 2**32 - 1})


def test_a_difference_of_divided_tensors_hides_those_of_buffers_and_names_parameters_first() -> None:
    entries = [
        entry("optimizer/model/w/exp_avg", torch.ones(1)),
        entry("model/w", torch.ones(1)),
        entry("model/mean", torch.ones(1), WORLD, "lowest"),
    ]
    (difference,) = differences_of(entries, (2, 1))
    assert str(difference).startswith("model/w, optimizer/model/w/exp_avg differ between ranks 1 and 2")
    assert "per_rank=('*w*',)" in str(difference)


def test_an_unknown_policy_is_refused() -> None:
    link = FakeLink(replace(attached(), world_size=2))
    with pytest.raises(ConfigurationError, match="replica_check='ignore': it is 'refuse', 'warn' or 'off'"):
        ReplicaCheck(Program({"model": torch.nn.Linear(1, 1)}, (0, 2)), {}, link, "ignore")
