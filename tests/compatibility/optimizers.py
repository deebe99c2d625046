"""torch's optimizers and their options, torchao's of few bits, heavyball's, and what scripts do to their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compatibility.case import Case, Context, Training
from compatibility.small import Making, advancing, data, net

RATE = 1e-2
PLAIN = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


def _all(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    weights = [p for n, p in named if n.endswith("weight")]
    biases = [p for n, p in named if n.endswith("bias")]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases[:1], "weight_decay": 0.0, "lr": 3e-3},
        {"params": biases[1:], "betas": (0.8, 0.9), "name": "head"},
    ]


def _making(name: str) -> Making:
    return lambda model: getattr(torch.optim, name)(_all(model), lr=RATE)


VARIANTS: dict[str, Making] = {
    "SGD, momentum and nesterov": lambda m: torch.optim.SGD(_all(m), RATE, momentum=0.9, nesterov=True),
    "Adam, foreach": lambda m: torch.optim.Adam(_all(m), RATE, foreach=True),
    "AdamW, fused": lambda m: torch.optim.AdamW(_all(m), RATE, fused=True),
    "AdamW, amsgrad and a tensor as rate": lambda m: torch.optim.AdamW(_all(m), torch.tensor(RATE), amsgrad=True),
    "AdamW, three groups": lambda m: torch.optim.AdamW(_groups(m), RATE),
    "RMSprop, centered with momentum": lambda m: torch.optim.RMSprop(_all(m), RATE, momentum=0.9, centered=True),
    "LBFGS": lambda m: torch.optim.LBFGS(_all(m), lr=0.1, max_iter=4, history_size=3),
    "Muon, of matrices": lambda m: torch.optim.Muon([p for p in _all(m) if p.ndim == 2], lr=RATE),
}


def _case(name: str, making: Making, quick: bool = False, **of_net: Any) -> Case:
    def build(context: Context) -> Training:
        model = net(**of_net)
        optimizer = making(model)
        return Training({"model": model, "optimizer": optimizer}, advancing(model, optimizer))

    return Case("optimizer", name, build, quick=quick)


def _uncompiled(name: str, load: Callable[[], Any], **of_net: Any) -> Case:
    """Of a library that compiles its step, which needs a compiler on the machine: the same arithmetic without."""

    def making(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = load()(_all(model), lr=RATE)
        return made

    return _case(name, making, **of_net)


def _torchao(name: str) -> Case:
    def load() -> Any:
        import torchao.optim

        torch.compile = lambda function, **_: function  # type: ignore[assignment]  # in this process alone
        return getattr(torchao.optim, name)

    # states below 4096 elements stay as they are; these do not
    return _uncompiled(f"torchao {name}", load, width=512, dtype=torch.float32)


def _heavyball(name: str) -> Case:
    def load() -> Any:
        import heavyball
        import heavyball.utils

        heavyball.utils.compile_mode = None
        return getattr(heavyball, name)

    return _uncompiled(f"heavyball {name}", load, dtype=torch.float32)


class _Odd(torch.optim.SGD):
    """State as nobody's but somebody's optimizer keeps it."""

    def __init__(self, parameters: Any, lr: float, odd: str) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.odd = odd

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as such code is written
        super().step(closure)
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                self._note(parameter, self.state[parameter], number)

    def _note(self, parameter: torch.Tensor, state: dict[str, Any], number: int) -> None:
        with torch.no_grad():
            if self.odd in ("master", "a/b"):
                state[self.odd] = state.get(self.odd, torch.zeros_like(parameter)) + parameter
                parameter += 1e-3 * state[self.odd]
            elif self.odd == "list":
                state["history"] = [*state.get("history", []), parameter.detach().clone()][-2:]
                parameter -= 1e-3 * state["history"][0]
            elif self.odd == "nested":
                state.setdefault("factors", {"row": torch.zeros(()), "of": {"column": torch.zeros(2)}})
                state["factors"]["row"] += parameter.mean().float()
                parameter += 1e-3 * state["factors"]["row"]
            elif self.odd == "global":
                self.state["global_step"] = self.state.get("global_step", torch.zeros(())) + 1  # type: ignore[index]
                parameter *= 1 - 1e-4 * float(self.state["global_step"])  # type: ignore[index]


def _odd(title: str, odd: str) -> Case:
    return _case(f"own: {title}", lambda model: _Odd(_all(model), RATE, odd), quick=True)


def _sparse(context: Context) -> Training:
    model = nn.EmbeddingBag(40, 3, sparse=True, mode="sum").double()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=RATE)

    def advance(step: int) -> float:
        optimizer.zero_grad()
        indexes = torch.randint(0, 40, (8, 4), generator=torch.Generator().manual_seed(step))
        loss = (model(indexes) - data(step)[1]).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Training({"model": model, "optimizer": optimizer}, advance)


def _unfrozen(context: Context) -> Training:
    """Gradual unfreezing: the first layer joins behind step 1, in a group of its own."""
    model: Any = net()
    first = list(model[0].parameters())
    for parameter in first:
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], RATE)
    step_once = advancing(model, optimizer)

    def unfreeze() -> None:
        for parameter in first:
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": first, "lr": RATE / 2})

    if context.seed:  # the life behind the kill is begun as such scripts resume: with all groups there
        unfreeze()

    def advance(step: int) -> float:
        if step == 2 and not context.seed:
            unfreeze()
        return step_once(step)

    return Training({"model": model, "optimizer": optimizer}, advance)


def _replaced(context: Context) -> Training:
    """A new head behind step 1, with a new optimizer's groups: what was named is changed in place."""
    model: Any = net()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)

    def advance(step: int) -> float:
        if step == 2:
            old = list(model[5].parameters())
            torch.manual_seed(5)
            model[5] = nn.Linear(16, 3).double()
            for parameter in old:
                optimizer.state.pop(parameter, None)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        return advancing(model, optimizer)(step)

    return Training({"model": model, "optimizer": optimizer}, advance)


CASES = (
    *(_case(name, _making(name), quick=name in ("Adam", "AdamW", "SGD", "Adafactor")) for name in PLAIN),
    *(_case(name, making, quick=name in ("LBFGS", "AdamW, three groups")) for name, making in VARIANTS.items()),
    Case("optimizer", "SparseAdam", _sparse),
    *(_torchao(name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    *(_heavyball(name) for name in ("SOAP", "PSGDKron", "AdamW", "Muon", "SFAdamW", "LaProp")),
    _odd("a state named master", "master"),
    _odd("a state named with a slash", "a/b"),
    _odd("a list of tensors", "list"),
    _odd("nested state", "nested"),
    _odd("state under a key that is no parameter", "global"),
    Case("optimizer", "a group added while training", _unfrozen, quick=True),
    Case("optimizer", "a layer replaced while training", _replaced, quick=True),
)
