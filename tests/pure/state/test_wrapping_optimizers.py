"""An optimizer around another is saved with the inner one's state, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.same_state import assert_same
from support.saved_streams import restored, saved
from surefoot.errors import ConfigurationError, StateNotRestorable
from surefoot.state import Program

Optimizer = torch.optim.Optimizer


class Lookahead(Optimizer):
    """timm's shape: Optimizer's constructor is not called, the state is the inner optimizer's."""

    def __init__(self, base: Optimizer) -> None:
        self._base_optimizer, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state: Any = {}
        self.step_count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._base_optimizer.step()
        self.step_count += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            slow = self._base_optimizer.state[parameter].setdefault("slow", parameter.detach().clone())
            if self.step_count % 2 == 0:
                parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))

    def state_dict(self) -> dict[str, Any]:
        return self._base_optimizer.state_dict()


class WithoutState(Lookahead):
    """The shape of lookahead_pytorch: there is no `state`."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        del self.state


class Sharpness(Optimizer):
    """SAM's shape: own state, and a base optimizer with another one."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {"rho": 0.1})
        self.base_optimizer, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["old_p"] = parameter.detach().clone()
        self.base_optimizer.step()


class Both(Sharpness):
    """Writes the inner state into its own state_dict, as pytorch_optimizer's Lookahead does; keeps it in a list."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        del self.base_optimizer
        self.inner = [base]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner[0].step()
        self.scaler.scale(torch.ones(1))
        self.scaler.update(self.scaler.get_scale() / 2)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base_optimizer": self.inner[0].state_dict()}


class Lost(Sharpness):
    """Its slow weights are in a list, where no state_dict has them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.slow = [[p.detach() + 1.0 for p in group["params"]] for group in self.param_groups]


class Derived(Optimizer):
    """Its state_dict has a tensor that neither state nor an attribute has."""

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        return {**packed, "state": {**packed["state"], "hidden": torch.arange(7.0)}}


def training(kind: Any, seed: int, steps: int = 3) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = kind(inner)
    objects = {"model": model, "inner": inner, "optimizer": optimizer}
    stepped(objects, steps)
    return objects


def stepped(objects: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        for number, parameter in enumerate(objects["model"].parameters()):
            parameter.grad = torch.full_like(parameter, 0.5 + number + step)
        objects["optimizer"].step()


def program(objects: dict[str, Any]) -> Program:
    return Program({"model": objects["model"], "optimizer": objects["optimizer"]}, (0, 1), seed=1)


@pytest.mark.parametrize("kind", [Lookahead, WithoutState, Sharpness, Both])
def test_an_optimizer_around_another_continues_exactly(kind: Any) -> None:
    old, new = training(kind, 1, 0), training(kind, 2, 0)
    running, fresh = program(old), program(new)
    stepped(old, 3)
    restored(fresh, [saved(running, 0, 3)], 0, 1, 3)
    stepped(old, 2)
    stepped(new, 2)
    assert_same(*({"model": o["model"], "optimizer": o["inner"], "scheduler": torch.nn.Identity()} for o in (old, new)))
    assert getattr(old["optimizer"], "step_count", 0) == getattr(new["optimizer"], "step_count", 0)
    if kind is Both:
        assert new["optimizer"].scaler.get_scale() == old["optimizer"].scaler.get_scale()


def test_an_inner_optimizer_that_is_given_too_is_saved_once() -> None:
    objects = training(Sharpness, 1)
    names = [e.name for e in Program(objects, (0, 1)).entries()]
    assert len(names) == len(set(names))
    assert not [n for n in names if n.startswith("optimizer.")]


def test_state_that_no_optimizer_has_is_refused_by_name() -> None:
    with pytest.raises(StateNotRestorable, match="optimizer/slow/~0/~0 is a tensor of a Lost around another"):
        program(training(Lost, 1)).values(1)
    hidden = nn.Linear(2, 1)
    optimizer = Derived(hidden.parameters(), {})
    with pytest.raises(
        StateNotRestorable, match=r"state/hidden of optimizer is a tensor that Derived\.state_dict\(\) has"
    ):
        Program({"model": hidden, "optimizer": optimizer}, (0, 1)).values(1)


def test_an_optimizer_without_state_is_refused_in_a_plain_sentence() -> None:
    optimizer = training(Sharpness, 1)["optimizer"]
    del optimizer.state, optimizer.base_optimizer
    with pytest.raises(ConfigurationError, match=r"optimizer is a Sharpness without \.state"):
        Program({"optimizer": optimizer}, (0, 1))


def test_hooks_after_a_load_run_after_a_restore() -> None:
    old, new = training(lambda inner: inner, 1), training(lambda inner: inner, 2, 0)
    calls: list[Any] = []
    new["optimizer"].register_load_state_dict_post_hook(lambda o: calls.append(len(o.state)))
    restored(program(new), [saved(program(old), 0, 3)], 0, 1, 3)
    assert calls == [2]
