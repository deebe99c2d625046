"""A tensor that a restore finds is filled where it lies: graphs, schedules and kernels hold it by its address."""

from __future__ import annotations

import pytest
import torch

from support.saved_streams import restored as restored_program
from support.saved_streams import saved
from surefoot.state import Program
from surefoot.state.entries import SavedTensor
from surefoot.state.optimizers import BuiltOptimizer, built
from surefoot.state.tensor_building import TensorPlaceholder

NAME = "optimizer/~groups/0/lr"


def restored(live: torch.Tensor, facts: dict[str, str] | None) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros(2))
    here = BuiltOptimizer("optimizer", 0, [], [{"params": [parameter], "lr": live}], True, tensors={NAME: live})
    saved = {NAME: SavedTensor("float32", ())}
    return built(here, {"groups": [{"lr": TensorPlaceholder(NAME, facts)}], "plain": {}}, saved).groups[NAME]


@pytest.mark.parametrize("facts", [None, {"device": "cuda"}, {"device": "meta"}])
def test_a_learning_rate_is_filled_in_place_on_whatever_device_it_was_saved(facts: dict[str, str] | None) -> None:
    live = torch.tensor(0.1)
    assert restored(live, facts) is live


def test_a_tensor_of_another_shape_is_built() -> None:
    assert restored(torch.zeros(3), {"device": "meta"}).shape == ()


def test_nested_and_loose_state_is_filled_where_it_lies() -> None:
    def program(value: float) -> tuple[torch.nn.Linear, torch.optim.SGD, list[torch.Tensor]]:
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        made = [torch.full((3,), value), torch.full((2, 2), value + 1)]
        optimizer.state[net.weight] = {"nested": {"factors": [made[0]]}}
        optimizer.state["shared"] = {"history": made[1]}  # type: ignore[index]  # an optimizer may keep what belongs to no parameter
        return net, optimizer, made

    net, optimizer, _ = program(5.0)
    other, another, live = program(0.0)
    stream = saved(Program({"model": net, "optimizer": optimizer}, (0, 1), (), seed=1), 0, 3)
    restored_program(Program({"model": other, "optimizer": another}, (0, 1), (), seed=1), [stream], 0, 1, 3)
    found = [another.state[other.weight]["nested"]["factors"][0], another.state["shared"]["history"]]  # type: ignore[index]
    assert [a is b for a, b in zip(found, live, strict=True)] == [True, True]
    assert [float(t.mean()) for t in live] == [5.0, 6.0]
