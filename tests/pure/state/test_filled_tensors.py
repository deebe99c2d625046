"""A tensor that a restore finds is filled where it lies: graphs, schedules and kernels hold it by its address."""

from __future__ import annotations

import pytest
import torch

from surefoot.state.entries import Saved
from surefoot.state.incoming import BuiltOptimizer, built
from surefoot.state.trees import Mark

NAME = "optimizer/~groups/0/lr"


def restored(live: torch.Tensor, facts: dict[str, str] | None) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros(2))
    here = BuiltOptimizer("optimizer", 0, [], [{"params": [parameter], "lr": live}], True, tensors={NAME: live})
    saved = {NAME: Saved("float32", ())}
    return built(here, {"groups": [{"lr": Mark(NAME, facts)}], "plain": {}}, saved).groups[NAME]


@pytest.mark.parametrize("facts", [None, {"device": "cuda"}, {"device": "meta"}])
def test_a_learning_rate_is_filled_in_place_on_whatever_device_it_was_saved(facts: dict[str, str] | None) -> None:
    live = torch.tensor(0.1)
    assert restored(live, facts) is live


def test_a_tensor_of_another_shape_is_built() -> None:
    assert restored(torch.zeros(3), {"device": "meta"}).shape == ()
