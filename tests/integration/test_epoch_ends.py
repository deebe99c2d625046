"""Loops of other people's scripts: what they do after an epoch's last batch comes back with that step's checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from surefoot import Checkpointer, ElasticLoader, ElasticSampler

DATA = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
EPOCHS = 4
BATCH = 8  # five steps an epoch


class Killed(Exception):
    """Ends a life as SIGKILL does: nothing more is saved."""


class Best:
    """Best accuracy so far and the epochs without a better one, as scripts keep them."""

    def __init__(self) -> None:
        self.loss, self.patience = float("inf"), 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def update(self, loss: float) -> None:
        self.patience = 0 if loss < self.loss else self.patience + 1
        self.loss = min(self.loss, loss)


class Life:
    """The objects of one process; each builds other weights."""

    def __init__(self, folder: Path, number: int, dies_after: int | None, interval: int = 1, **objects: Any) -> None:
        torch.manual_seed(number)
        self.dies_after = dies_after
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.loader = ElasticLoader(DATA, BATCH, seed=3, by_epoch=True)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.best = Best()
        self.options = {"folder": str(folder), "interval_steps": interval} | objects
        self.losses: dict[int, float] = {}

    def protect(self, **objects: Any) -> Checkpointer:
        named = {"model": self.net, "optimizer": self.optimizer, "loader": self.loader, "best": self.best}
        self.checkpointer = Checkpointer(**(named | objects | self.options))
        return self.checkpointer

    def loss_of(self, data: torch.Tensor) -> torch.Tensor:
        return (self.net(data) - data.sum(1, keepdim=True)).square().mean()

    def train(self, batch: Any) -> torch.Tensor:
        loss = self.loss_of(batch.data) * batch.weight
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def end(self, loss: torch.Tensor) -> None:
        step = self.checkpointer.step(loss)
        self.losses[step] = loss.item()
        if step == self.dies_after:
            raise Killed

    def validate(self) -> float:
        """With random numbers: the generators belong to the epoch's end too."""
        self.net.eval()
        loss = self.loss_of(DATA + 0.1 * torch.randn(40, 4, dtype=torch.float64)).item()
        self.net.train()
        return loss

    def result(self) -> list[Any]:
        weights = [p.detach().tolist() for p in self.net.parameters()]
        return [weights, self.scheduler.state_dict(), vars(self.best), self.optimizer.param_groups[0]["lr"]]


def imagenet(life: Life) -> None:
    """The shape of pytorch/examples/imagenet: train, validate, scheduler, best accuracy."""
    with life.protect(scheduler=life.scheduler) as checkpointer:
        checkpointer.restore()
        for _ in range(life.loader.epoch, EPOCHS):
            for batch in life.loader:
                life.end(life.train(batch))
            loss = life.validate()
            life.scheduler.step()
            life.best.update(loss)


def torchvision(life: Life) -> None:
    """The shape of vision/references/classification: train_one_epoch with EMA, scheduler, two evaluations."""
    ema = AveragedModel(life.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with life.protect(scheduler=life.scheduler, ema=ema) as checkpointer:
        checkpointer.restore()

        def train_one_epoch() -> None:
            for number, batch in enumerate(life.loader):
                loss = life.train(batch)
                if number % 2 == 0:
                    ema.update_parameters(life.net)
                life.end(loss)

        for _ in range(life.loader.epoch, EPOCHS):
            train_one_epoch()
            life.scheduler.step()
            life.validate()
            ema.update_parameters(life.net)
            life.best.update(life.validate())


def timm(life: Life) -> None:
    """The shape of timm's train.py: step_update in the loop, step(epoch, metric) at its end, early stopping."""
    life.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(life.optimizer, patience=0, factor=0.5)
    with life.protect(plateau=life.scheduler) as checkpointer:
        checkpointer.restore()
        for _ in range(life.loader.epoch, EPOCHS):
            for batch in life.loader:
                life.end(life.train(batch))
                if batch.last:
                    life.best.update(life.validate())
            life.scheduler.step(life.validate())
            if life.best.patience > 3:
                break


def averaging(life: Life) -> None:
    """Stochastic weight averaging, which takes the weights of each epoch's end."""
    average = AveragedModel(life.net)
    with life.protect(average=average, scheduler=life.scheduler) as checkpointer:
        checkpointer.restore()
        for epoch in range(life.loader.epoch, EPOCHS):
            for batch in life.loader:
                life.end(life.train(batch))
            if epoch > 0:
                average.update_parameters(life.net)
            life.scheduler.step()
            checkpointer.epoch_end()
            life.validate()
    life.net = average.module


LOOPS: list[Callable[[Life], None]] = [imagenet, torchvision, timm, averaging]


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_program_killed_at_or_after_an_epochs_last_step_is_the_undisturbed_one(
    loop: Callable[[Life], None], interval: int, tmp_path: Path
) -> None:
    undisturbed = Life(tmp_path / "whole", 0, None, interval)
    loop(undisturbed)
    losses: dict[int, float] = {}
    for number, dies_after in enumerate([5, 6, 10, None]):  # the first, behind an epoch; the last ends
        life = Life(tmp_path / "killed", number, dies_after, interval)
        if number == 0:
            torch.manual_seed(0)
            life = Life(tmp_path / "killed", 0, dies_after, interval)
        if dies_after is None:
            loop(life)
        else:
            with pytest.raises(Killed):
                loop(life)
        losses |= life.losses
    assert losses == undisturbed.losses
    assert life.result() == undisturbed.result()


def test_an_error_at_an_epochs_end_saves_no_half_of_it(tmp_path: Path) -> None:
    life = Life(tmp_path, 0, None)
    checkpointer = life.protect(scheduler=life.scheduler)
    checkpointer.restore()
    for batch in life.loader:
        life.end(life.train(batch))
    try:
        life.scheduler.step()
        raise ValueError("the validation failed")
    except ValueError:
        checkpointer.close()
    newest = Life(tmp_path, 1, None).protect(scheduler=life.scheduler).latest()
    assert newest is not None
    assert newest.step < 5


def test_the_last_batch_of_an_epoch_says_so() -> None:
    loader = ElasticLoader(range(10), 4, by_epoch=True, collate_fn=list)
    assert [[batch.last for batch in loader] for _ in range(2)] == [[False, False, True], [False, True]]
    lists = [[0, 1], [2, 3, 4]]
    loader = ElasticLoader(range(10), batch_sampler=lists, by_epoch=True, collate_fn=list)
    assert [batch.last for batch in loader] == [False, True]


def test_workers_and_samplers_that_read_ahead_know_the_epochs_end(tmp_path: Path) -> None:
    sampler = ElasticSampler(DATA, BATCH, by_epoch=True, batches_per_step=1)
    ends = []
    sampler.count_by_step()
    for _ in range(2):
        for _batch in torch.utils.data.DataLoader(DATA, batch_sampler=sampler, num_workers=1):
            sampler.end_step()
            ends.append(sampler.step_ends_epoch)
    assert ends == [False, False, False, False, True] * 2


# ---- changes after step() --------------------------------------------------------------------------------------------


def endless(life: Life, after_step: Callable[[int], None], **objects: Any) -> None:
    life.loader = ElasticLoader(DATA, BATCH, seed=3)
    with life.protect(**objects) as checkpointer:
        checkpointer.restore()
        for step, batch in zip(range(1, 9), life.loader, strict=False):
            life.end(life.train(batch))
            after_step(step)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [
        text for text in texts if "changed between step() and the next batch" in text and "StateChanged" not in text
    ]


def test_what_changes_after_step_is_reported_once_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(tmp_path, 0, None, interval=2)
    ema = AveragedModel(life.net)

    def after_step(step: int) -> None:
        life.scheduler.step()
        ema.update_parameters(life.net)

    with caplog.at_level(logging.WARNING):
        endless(life, after_step, scheduler=life.scheduler, ema=ema)
    (text,) = reports(caplog)
    assert text.startswith("scheduler and ema changed between step() and the next batch: the checkpoint of step 2")


def test_a_program_that_changes_nothing_after_step_is_accused_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path, 0, None, interval=1)
    ema = AveragedModel(life.net)
    clock = Best()
    clock.state_dict = lambda: {"now": torch.rand(()).item()}  # type: ignore[method-assign]

    def after_step(step: int) -> None:
        life.validate()
        life.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)  # follows from the step's number
        kept = ema.n_averaged.clone()
        ema.n_averaged += 1
        ema.n_averaged.copy_(kept)  # exchanged and put back

    with caplog.at_level(logging.WARNING):
        endless(life, after_step, scheduler=life.scheduler, ema=ema, clock=clock)
    assert reports(caplog) == []
