"""Programs that train what they did not give to the Checkpointer: reported once by name, or refused; others are not accused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from support.fakes.fake_link import FakeLink
from surefoot import Checkpointer, ElasticLoader
from surefoot.errors import ConfigurationError

DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_JOB_UID", "job")


def parts(kind: Any = torch.optim.AdamW) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    return model, kind(model.parameters(), lr=0.01)


class Loop:
    """A program's objects and its link."""

    def __init__(self, kind: Any = torch.optim.AdamW) -> None:
        self.model, self.optimizer = parts(kind)
        self.loader: Any = ElasticLoader(DATA, 8, seed=1)
        self.link = FakeLink()

    def protect(self, **objects: Any) -> Checkpointer:
        given = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader} | objects
        self.checkpointer = Checkpointer(**given, link=self.link)
        self.checkpointer.restore()
        return self.checkpointer

    def train(self, batch: Any, model: Any = None, optimizer: Any = None) -> torch.Tensor:
        model, optimizer = model or self.model, optimizer or self.optimizer
        loss = model(batch.data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def reports(self) -> list[str]:
        return [text for reason, text in self.link.said if reason == "TrainingNotSaved"]


def ordinary(loop: Loop) -> Iterator[Any]:
    loop.protect()
    for _, batch in zip(range(8), loop.loader, strict=False):
        yield loop.train(batch)


def another_optimizer(loop: Loop) -> Iterator[Any]:
    loop.protect()
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9)
    for _, batch in zip(range(4), loop.loader, strict=False):
        yield loop.train(batch, optimizer=optimizer)


def forgotten_optimizer(loop: Loop) -> Iterator[Any]:
    critic, second = parts()
    loop.protect(critic=critic)
    for _, batch in zip(range(4), loop.loader, strict=False):
        loop.train(batch, critic, second)
        yield loop.train(batch)


def another_model(loop: Loop) -> Iterator[Any]:
    loop.protect()
    model, optimizer = parts()
    for _, batch in zip(range(4), loop.loader, strict=False):
        yield loop.train(batch, model, optimizer)


def no_optimizer(loop: Loop) -> Iterator[Any]:
    loop.protect()
    for _, _batch in zip(range(4), loop.loader, strict=False):
        yield 1.0


def no_loader(loop: Loop) -> Iterator[Any]:
    loop.protect(loader=None)
    for _, batch in zip(range(4), loop.loader, strict=False):
        yield loop.train(batch)


def loader_replaced_later(loop: Loop) -> Iterator[Any]:
    loop.protect()
    for epoch in range(2):
        for _, batch in zip(range(4), loop.loader, strict=False):
            yield loop.train(batch)
        loop.loader = ElasticLoader(DATA, 8, seed=epoch)


def micro_batches(loop: Loop) -> Iterator[Any]:
    loop.protect()
    for number, batch in zip(range(1, 13), loop.loader, strict=False):
        loss = loop.model(batch.data).square().mean()
        loss.backward()
        if number % 3 == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (
            another_optimizer,
            r"an optimizer \(SGD\) steps parameters of model and was not .* given optimizer \(AdamW\) for",
        ),
        (forgotten_optimizer, r"an optimizer \(AdamW\) steps parameters of critic and was not given"),
        (another_model, r"an optimizer \(AdamW\) trains parameters that belong to no object given"),
        (no_optimizer, r"called 2 times without a step of an optimizer, and parameters of optimizer \(AdamW\) did not"),
        (no_loader, r"the batches come from a loader that Checkpointer was not given"),
        (loader_replaced_later, r"came from another loader of the same data set"),
        (micro_batches, r"after each of 3 micro-batches.*batches_per_step=3"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_trained_and_not_given_is_reported_once(
    program: Callable[[Loop], Iterator[Any]], sentence: str
) -> None:
    loop = Loop()
    for loss in program(loop):
        loop.checkpointer.step(loss)
    (text,) = loop.reports()
    assert re.search(sentence, text), text
    loop.checkpointer.close()


def test_a_loader_made_anew_is_refused_at_the_first_step() -> None:
    loop = Loop()
    checkpointer = loop.protect()
    loader = ElasticLoader(DATA, 8, seed=0, by_epoch=True)
    batch = next(iter(loader))
    with pytest.raises(ConfigurationError, match=r"another loader of the same data set .*by_epoch=True"):
        checkpointer.step(loop.train(batch))
    checkpointer.close(save=False)


# ---- programs that are right -----------------------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, as published ones do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer = base

    def first_step(self) -> None:
        self.base_optimizer.step()


def wrapped(loop: Loop) -> Iterator[Any]:
    """SAM: its own `step` is never called."""
    loop.optimizer = Lookahead(torch.optim.SGD(loop.model.parameters(), lr=0.1))
    loop.protect()
    for _, batch in zip(range(6), loop.loader, strict=False):
        loop.model(batch.data).sum().backward()
        loop.optimizer.first_step()
        yield 1.0


def scaler_skips(loop: Loop) -> Iterator[Any]:
    """A GradScaler finds infinite gradients in the first steps, and then now and then."""
    scaler = torch.amp.GradScaler("cpu")
    loop.protect()
    for number, batch in zip(range(12), loop.loader, strict=False):
        loss = loop.model(batch.data).square().mean()
        loop.optimizer.zero_grad(set_to_none=number % 2 == 0)
        scaler.scale(loss).backward()
        if number < 5 or number == 7:
            next(loop.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(loop.optimizer)
        scaler.update()
        yield loss


def accumulation(loop: Loop) -> Iterator[Any]:
    loop.loader = ElasticLoader(DATA, 8, seed=1, batches_per_step=2)
    loop.protect()
    for number, batch in zip(range(12), loop.loader, strict=False):
        loss = loop.model(batch.data).square().mean()
        loss.backward()
        if number % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            yield loss


def warm_up_without_training(loop: Loop) -> Iterator[Any]:
    """Fills a replay buffer: steps without a loss."""
    loop.protect(loader=None)
    for _ in range(6):
        yield None


def evaluates(loop: Loop) -> Iterator[Any]:
    """Between all steps, with a loader of its own, and trains twice on each batch."""
    loop.protect()
    for _, batch in zip(range(3), loop.loader, strict=False):
        for _ in range(2):
            yield loop.train(batch)
            for _ in ElasticLoader(DATA[:16], 8, by_epoch=True):
                pass


def own_state(loop: Loop) -> Iterator[Any]:
    """A loader within an object that saves it."""
    inner = loop.loader

    class Progress:
        def state_dict(self) -> Any:
            return {"loader": inner.state_dict()}

        def load_state_dict(self, state: Any) -> None:
            inner.load_state_dict(state["loader"])

    loop.protect(loader=None, progress=Progress())
    for _, batch in zip(range(4), inner, strict=False):
        yield loop.train(batch)


def stateless(loop: Loop) -> Iterator[Any]:
    """An optimizer that has nothing to save."""
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.protect(optimizer=None)
    for _, batch in zip(range(4), loop.loader, strict=False):
        yield loop.train(batch, optimizer=optimizer)


@pytest.mark.parametrize(
    "program",
    [ordinary, wrapped, scaler_skips, accumulation, warm_up_without_training, evaluates, own_state, stateless],
    ids=lambda program: program.__name__,
)
def test_a_program_that_is_right_is_accused_of_nothing(program: Callable[[Loop], Iterator[Any]]) -> None:
    loop = Loop()
    for loss in program(loop):
        loop.checkpointer.step(loss)
    assert loop.reports() == []
    loop.checkpointer.close()
