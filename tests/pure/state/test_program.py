"""Program state goes into rank streams and back at another world size, bit for bit and in place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.same_state import assert_same
from support.saved_streams import merged, restored, saved
from surefoot.errors import ConfigurationError, StateMismatch
from surefoot.state import Program
from surefoot.state.modules import named_parameters


class Net(nn.Module):
    """Odd sizes, tied weights, a buffer, one that is not saved, and a bfloat16 matrix."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 5)
        self.again = nn.Linear(5, width)
        self.again.weight = self.first.weight
        self.lean = nn.Parameter(torch.randn(3, 11).bfloat16())
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.again(self.second(self.norm(self.first(x)))) + self.lean.float().sum()
        return out


def trained(seed: int, steps: int = 3) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def program(objects: dict[str, Any], rank: int = 0, world: int = 1, local: tuple[str, ...] = ()) -> Program:
    return Program(objects, (rank, world), local, seed=11)


def streams_of(objects: dict[str, Any], world: int, local: tuple[str, ...] = ()) -> list[Any]:
    return [saved(program(objects, rank, world, local), rank, 3) for rank in range(world)]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2), (2, 3), (1, 4)])
def test_replicated_state_returns_bit_exact_at_any_world_size(before: int, after: int) -> None:
    old = trained(1)
    streams = streams_of(old, before)
    for rank in range(after):
        new = trained(2, steps=0)
        restored(program(new, rank, after), streams, rank, after, 3)
        assert_same(old, new)


def test_training_goes_on_as_if_nothing_had_been() -> None:
    old, new = trained(1), trained(2, steps=0)
    restored(program(new), streams_of(old, 2), 0, 1, 3)
    torch.manual_seed(5)
    x = torch.randn(4, 5)
    for objects in (old, new):
        objects["model"](x).square().mean().backward()
        objects["optimizer"].step()
        objects["scheduler"].step()
    assert_same(old, new)


def test_ranks_share_the_saving_of_replicas_and_cover_them_once() -> None:
    streams = streams_of(trained(1), 3)
    assert all(stream.layout.stream_bytes > 0 for stream in streams)
    assert set(merged(streams)) == set(merged(streams_of(trained(1), 1)))


def test_buffers_are_saved_by_the_lowest_rank_tied_weights_once_and_scratch_never() -> None:
    pieces = [{t.name for t in stream.layout.tensors if t.pieces} for stream in streams_of(trained(1), 3)]
    assert "model/norm.running_mean" in pieces[0]
    assert not any("running" in name for names in pieces[1:] for name in names)
    every = set().union(*pieces)
    assert "model/first.weight" in every
    assert "model/again.weight" not in every
    assert "model/scratch" not in every


def test_restoring_writes_into_the_live_tensors() -> None:
    new = trained(2, steps=2)
    addresses = {name: p.data_ptr() for name, p in new["model"].named_parameters()}
    restored(program(new), streams_of(trained(1), 1), 0, 1, 3)
    assert addresses == {name: p.data_ptr() for name, p in new["model"].named_parameters()}


def test_preparing_an_optimizer_changes_no_parameter() -> None:
    new = trained(2, steps=0)
    before = {name: p.detach().clone() for name, p in new["model"].named_parameters()}
    streams = streams_of(trained(1), 1)
    tensors = merged(streams)
    from surefoot.state import SavedTensor, read_values

    values = read_values(streams[0].values)
    index = {n: SavedTensor(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
    program(new).prepare(values, values, index)
    assert all(torch.equal(before[name], p) for name, p in new["model"].named_parameters())
    assert not new["optimizer"].state, "nor the optimizer, until all is read"


def test_generators_return_to_the_same_rank_of_the_same_world() -> None:
    streams = streams_of(trained(1), 1)
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    restored(program(trained(2, steps=0)), streams, 0, 1, 3)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn


def test_generators_of_another_world_are_derived_and_differ_by_rank() -> None:
    streams = streams_of(trained(1), 1)

    def draw(rank: int) -> tuple[float, float, float]:
        restored(program(trained(2, steps=0), rank, 2), streams, rank, 2, 3)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


class Average:
    """An object with tensors and plain values of its own, the tensors made only when it is first used."""

    def __init__(self, value: torch.Tensor | None = None) -> None:
        self.shadow, self.count, self.names = value, 3, ("a", 1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": {"w": self.shadow} if self.shadow is not None else {}, "n": self.count, "names": self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.count, self.names = state["shadow"].get("w"), state["n"], state["names"]


def test_any_object_with_state_returns_also_tensors_it_has_not_made_yet() -> None:
    old = trained(1) | {"ema": Average(torch.randn(4, 4))}
    old["ema"].count = 9
    new = trained(2, steps=0) | {"ema": Average()}
    restored(program(new), streams_of(old, 2), 0, 1, 3)
    assert torch.equal(new["ema"].shadow, old["ema"].shadow)
    assert (new["ema"].count, new["ema"].names) == (9, ("a", 1))


def test_what_is_local_returns_to_its_rank_and_only_in_a_world_of_the_same_size() -> None:
    local = ("stats",)
    streams = []
    for rank in range(2):
        objects = trained(1) | {"stats": Average(torch.full((2,), float(rank)))}
        streams.append(saved(program(objects, rank, 2, local), rank, 3))
    for rank in range(2):
        new = trained(2, steps=0) | {"stats": Average()}
        restored(program(new, rank, 2, local), streams, rank, 2, 3)
        assert torch.equal(new["stats"].shadow, torch.full((2,), float(rank)))
    new = trained(2, steps=0) | {"stats": Average(torch.full((2,), 7.0))}
    restored(program(new, 0, 1, local), streams, 0, 1, 3)
    assert torch.equal(new["stats"].shadow, torch.full((2,), 7.0))


def test_patterns_of_tensor_names_may_be_local() -> None:
    streams = streams_of(trained(1), 2, ("model/norm.running_*",))
    assert {f"local/{rank}/model/norm.running_mean" for rank in range(2)} <= set(merged(streams))


def test_extra_state_of_a_submodule_returns() -> None:
    class Scaled(nn.Linear):
        amax = 1.0
        history = torch.zeros(3)

        def get_extra_state(self) -> dict[str, Any]:
            return {"amax": self.amax, "history": self.history}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.amax, self.history = state["amax"], state["history"]

    old, new = nn.Sequential(Scaled(2, 2)), nn.Sequential(Scaled(2, 2))
    old[0].amax, old[0].history = 5.0, torch.arange(3.0)
    restored(program({"model": new}), streams_of({"model": old}, 2), 0, 1, 3)
    assert new[0].amax == 5.0
    assert torch.equal(new[0].history, torch.arange(3.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o | {"model": Net(8)}, r"belongs to no model"),
        (lambda o: {"model": Net(8)}, r"model/first.weight has shape"),
        (lambda o: {"model": Net().double()}, r"model/lean is float64 here and bfloat16"),
        (lambda o: {"model": nn.Sequential(Net())}, r"no model/0.lean"),
        (lambda o: {"model": o["model"]}, r"has 'optimizer', which was not given"),
        (lambda o: o | {"ema": Average()}, r"no 'ema'"),
    ],
)
def test_a_program_that_does_not_fit_is_refused_by_name(change: Any, message: str) -> None:
    streams = streams_of(trained(1), 1)
    if "model/" in message:
        streams = streams_of({"model": trained(1)["model"]}, 1)
    with pytest.raises((StateMismatch, ConfigurationError), match=message):
        restored(program(change(trained(2, steps=0))), streams, 0, 1, 3)


def test_an_object_without_state_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="loader is a list"):
        program({"loader": [1, 2]})


@pytest.mark.gate_only
def test_names_do_not_depend_on_wrapping() -> None:
    model = Net()
    plain = [name for name, _ in named_parameters(model)]
    assert [name for name, _ in named_parameters(torch.compile(model))] == plain
    model.first = torch.compile(model.first)  # type: ignore[assignment]  # it is called like a Linear
    assert [name for name, _ in named_parameters(model)] == plain


# ---- sharded --------------------------------------------------------------------------------------------------------


@contextmanager
def pretended_rank(rank: int, world: int) -> Iterator[None]:
    """A process group whose collectives do nothing: enough to know which rank holds what."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(whole: Net, rank: int, world: int, full: dict[str, Any] | None) -> dict[str, Any]:
    """FSDP2's shards of `whole` on one rank, with optimizer state cut from `full`'s."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = Net()
    model.load_state_dict(whole.state_dict())
    model.lean = nn.Parameter(model.lean.float())
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    for parameter in model.parameters():
        # torch keeps one mesh object for equal meshes of a process, and this process plays every rank in turn
        parameter.device_mesh._coordinate_on_dim = (rank,)  # type: ignore[attr-defined]  # a DTensor now
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if full is not None:
        names = dict(named_parameters(model))
        for name, state in full.items():
            parameter = names[name]
            assert isinstance(parameter, DTensor)
            local = {}
            for key, value in state.items():
                if value.dim() == 0:
                    local[key] = value.clone()
                    continue
                part = list(torch.chunk(value, world))
                mine = part[rank] if rank < len(part) else value[:0]
                local[key] = DTensor.from_local(
                    mine.clone(), parameter.device_mesh, parameter.placements, shape=value.shape, stride=value.stride()
                )
            optimizer.state[parameter] = local
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 5), (8, 3)])
def test_uneven_shards_return_bit_exact_at_another_world_size(before: int, after: int) -> None:
    torch.manual_seed(0)
    whole = Net()
    full = {
        name: {
            "step": torch.tensor(4.0),
            "exp_avg": torch.randn_like(p.float()),
            "exp_avg_sq": torch.rand_like(p.float()),
        }
        for name, p in named_parameters(whole)
    }
    streams = []
    for rank in range(before):
        with pretended_rank(rank, before):
            streams.append(saved(program(sharded(whole, rank, before, full), rank, before), rank, 3))
    for rank in range(after):
        with pretended_rank(rank, after):
            torch.manual_seed(99)
            new = sharded(Net(), rank, after, None)
            restored(program(new, rank, after), streams, rank, after, 3)
            for name, parameter in named_parameters(new["model"]):
                wanted = {"": dict(named_parameters(whole))[name].detach().float(), **full[name]}
                state = new["optimizer"].state[parameter]
                for key, value in wanted.items():
                    live = parameter if key == "" else state[key]
                    if value.dim() == 0:
                        assert torch.equal(live, value)
                        continue
                    parts = list(torch.chunk(value, after))
                    mine = parts[rank] if rank < len(parts) else value[:0]
                    assert torch.equal(live._local_tensor, mine), (name, key)


@pytest.mark.parametrize("decay", ["momentum", "none"])
def test_a_parameter_that_is_in_another_group_now_is_refused_though_the_counts_are_equal(decay: str) -> None:
    def grouped(first: tuple[str, ...]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Net()
        named = dict(model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n in first], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if n not in first], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9 if decay == "momentum" else 0.0)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    streams = streams_of(grouped(("first.weight", "second.weight")), 2)
    restored(program(grouped(("second.weight", "first.weight")), 0, 1), streams, 0, 1, 3)
    with pytest.raises(StateMismatch, match=r"model/norm.weight in param group 0, and it was in group 1"):
        restored(program(grouped(("norm.weight", "second.weight")), 0, 1), streams, 0, 1, 3)
