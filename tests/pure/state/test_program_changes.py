"""A program that changes its tensors while it trains is saved as it is; what a fresh start could not restore is named then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from support.same_state import assert_same
from support.saved_streams import merged, restored, saved
from surefoot.errors import StateMismatch
from surefoot.state import Program

Objects = dict[str, Any]


class Net(nn.Module):
    """Two layers, and buffers that grow, appear late, vanish, and are resized in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
        self.register_buffer("bank", torch.empty(0, 4))
        self.register_buffer("late", None)
        self.register_buffer("observed", torch.ones(1))
        self.register_buffer("warm", torch.ones(2))


def built(seed: int) -> Objects:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


def stepped(objects: Objects) -> None:
    for parameter in objects["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    objects["optimizer"].step()


def program(objects: Objects) -> Program:
    made = Program(objects, (0, 1), (), seed=1)
    made.mark_built()
    return made


def lower_precision(objects: Objects) -> None:
    objects["model"].bfloat16()
    objects["optimizer"].state.clear()


def exchange_data(objects: Objects) -> None:
    objects["model"].layers[0].weight.data = torch.randn(6, 4)
    objects["optimizer"].state.clear()


def prune_layer(objects: Objects) -> None:
    prune.l1_unstructured(objects["model"].layers[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]


def add_block(objects: Objects) -> None:
    objects["model"].layers.append(nn.Linear(1, 1))
    objects["optimizer"].add_param_group({"params": list(objects["model"].layers[-1].parameters())})


def change_buffers(objects: Objects) -> None:
    model = objects["model"]
    model.bank = torch.cat([model.bank, torch.randn(3, 4)])
    model.late = torch.arange(3)
    model.observed.resize_(5).copy_(torch.randn(5))
    model.warm = None
    model.layers[0].register_buffer("first_seen", torch.randn(2))


CHANGES: dict[Callable[[Objects], None], str] = {
    lower_precision: "model/layers.0.weight is bfloat16 and was float32",
    exchange_data: "model/layers.0.weight has shape (6, 4) and had (4, 4)",
    prune_layer: "model/layers.0.weight is gone",
    add_block: "optimizer has 2 param groups and had 1; model/layers.2.weight is new; model/layers.2.bias is new",
    change_buffers: "",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_saved_as_it_is_and_named_unless_a_fresh_start_restores_it(
    change: Callable[[Objects], None],
) -> None:
    old, new = built(1), built(2)
    running, fresh = program(old), program(new)
    stepped(old)
    saved(running, 0, 1)
    assert running.take_warnings() == []
    change(old)
    stepped(old)
    stream = saved(running, 0, 2)
    warnings = running.take_warnings()
    assert [CHANGES[change] in text for text in warnings] == ([True] if CHANGES[change] else [])
    saved(running, 0, 3)
    assert running.take_warnings() == []
    if warnings:
        with pytest.raises(StateMismatch, match=r"model/layers|groups"):
            restored(fresh, [stream], 0, 1, 2)
        change(new)  # after the Checkpointer was made, as a program does that asked latest() first
    restored(fresh, [stream], 0, 1, 2)
    assert_same(old, new)
    assert merged([saved(fresh, 0, 2)]).keys() == merged([stream]).keys()
    third = built(3)
    again = program(third)
    if warnings:
        change(third)
    restored(again, [saved(fresh, 0, 2)], 0, 1, 2)
    assert_same(old, third)


def test_a_buffer_that_the_program_builds_otherwise_is_still_refused() -> None:
    old, new = built(1), built(2)
    new["model"].bank = torch.empty(2, 4)
    with pytest.raises(StateMismatch, match=r"model/bank has shape \(2, 4\) here and \(0, 4\)"):
        restored(program(new), [saved(program(old), 0, 1)], 0, 1, 1)


def test_buffers_keep_their_identity_where_they_are_resized() -> None:
    old, new = built(1), built(2)
    running, fresh = program(old), program(new)
    change_buffers(old)
    observed = new["model"].observed
    restored(fresh, [saved(running, 0, 1)], 0, 1, 1)
    assert new["model"].observed is observed
    assert observed.shape == (5,)


class Expanded(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), value).expand(4))
        self.weight = nn.Parameter(torch.full((1, 3), value).expand(2, 3))


def test_expanded_tensors_are_restored() -> None:
    old, new = Expanded(1.0), Expanded(2.0)
    restored(program({"model": new}), [saved(program({"model": old}), 0, 1)], 0, 1, 1)
    assert torch.equal(old.scale, new.scale)
    assert torch.equal(old.weight, new.weight)


def test_values_that_differ_do_not_fit_into_an_expanded_tensor() -> None:
    old, new = Expanded(1.0), Expanded(2.0)
    old.scale = torch.arange(4.0)
    with pytest.raises(StateMismatch, match=r"model/scale is an expanded tensor here.*\.clone\(\)"):
        restored(program({"model": new}), [saved(program({"model": old}), 0, 1)], 0, 1, 1)
