"""A module that has a say of its own in its state_dict is asked for it; what nothing takes back is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.saved_streams import restored, saved
from surefoot.errors import StateNotRestorable
from surefoot.state import Program


class Metric(nn.Module):
    """torchmetrics' shape: `state_dict` adds plain attributes, `_load_from_state_dict` takes them."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.total = torch.tensor(value)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        state[f"{prefix}total"] = self.total.clone()
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.total = state_dict.pop(f"{prefix}total", self.total)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Scaled(nn.Linear):
    """Keeps a number and a list by its own `_save_to_state_dict`."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        self.running, self.history = value, [torch.tensor([value])]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}running"], destination[f"{prefix}history"] = self.running, self.history

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.running, self.history = state_dict.pop(f"{prefix}running"), state_dict.pop(f"{prefix}history")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Untaken(Scaled):
    """Saves a tensor that its load does not take."""

    _load_from_state_dict = nn.Module._load_from_state_dict


class Whole(nn.Module):
    """Adds a counter in `state_dict`, and takes it in `load_state_dict`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.body, self.metric, self.count = nn.Linear(2, 2), Metric(value), int(value)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "count": torch.tensor(self.count)}

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        self.count = int(state_dict.pop("count"))
        return super().load_state_dict(state_dict, *args, **options)


class Derived(nn.Linear):
    """Has a copy of its weight that hooks of a load refresh."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        nn.init.constant_(self.weight, value)
        self.refresh()
        self.before: list[str] = []
        self.register_load_state_dict_pre_hook(lambda module, state, *_: self.before.extend(state))
        self.register_load_state_dict_post_hook(lambda module, _: self.refresh())

    def refresh(self) -> None:
        self.transposed = self.weight.detach().t().clone()


def renamed(value: float) -> nn.Module:
    """Its hook renames, splits, converts and removes what is saved anyway."""

    def hook(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        weight = state.pop(f"{prefix}weight")
        state[f"{prefix}q"], state[f"{prefix}k"] = weight.chunk(2)
        state[f"{prefix}exported"] = weight.bfloat16().float()
        state.pop(f"{prefix}bias")

    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, value)
    module._register_state_dict_hook(hook)
    return module


def program(part: nn.Module) -> Program:
    return Program({"model": nn.Sequential(nn.Linear(2, 2), part)}, (0, 1), seed=1)


def brought_over(old: nn.Module, new: nn.Module) -> Any:
    stream = saved(program(old), 0, 1)
    restored(program(new), [stream], 0, 1, 1)
    return stream


def test_what_a_metric_adds_to_its_state_dict_is_restored() -> None:
    old, new = Metric(3.5), Metric(1.0)
    brought_over(old, new)
    assert new.total == 3.5


def test_what_a_module_saves_by_itself_is_restored() -> None:
    old, new = Scaled(3.5), Scaled(1.0)
    brought_over(old, new)
    assert (new.running, new.history) == (3.5, [torch.tensor([3.5])])


def test_an_override_around_submodules_with_overrides_is_restored() -> None:
    old, new = Whole(3.0), Whole(1.0)
    brought_over(old, new)
    assert (new.count, float(new.metric.total)) == (3, 3.0)


def test_state_that_nothing_takes_back_is_refused_at_the_first_step() -> None:
    part = Untaken(1.0)
    part.history = torch.ones(2)  # type: ignore[assignment]
    with pytest.raises(StateNotRestorable, match=r"model\.1: state_dict\(\) has 'history'"):
        program(part).check_restorable()


def test_load_hooks_run_after_a_restore() -> None:
    old, new = Derived(3.0), Derived(1.0)
    brought_over(old, new)
    assert torch.equal(new.transposed, old.transposed)
    assert new.before == ["weight", "bias"]


@pytest.mark.parametrize("wrap", [lambda module: module, torch.compile])
def test_hooks_that_rename_or_leave_out_are_not_accused(wrap: Any) -> None:
    old, new = wrap(renamed(3.0)), wrap(renamed(1.0))
    stream = brought_over(old, new)
    assert not [t.name for t in stream.layout.tensors if "~" in t.name]
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))
