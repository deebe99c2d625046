"""A program that restores another one's checkpoint: refused by name, or reported once, where no tensor shows the difference."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import surefoot
from surefoot.errors import ConfigurationError, StateMismatch

DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


class Life:
    """One start of a program in a folder."""

    def __init__(
        self, folder: Any, *, kind: Any = torch.optim.AdamW, dataset: Any = DATA, batch: int = 8, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = kind(self.model.parameters(), **{"lr": 0.01} | options)
        self.loader = surefoot.ElasticLoader(dataset, batch, seed=1)
        self.checkpointer = surefoot.Checkpointer(
            model=self.model, optimizer=self.optimizer, loader=self.loader, folder=str(folder), interval_steps=2
        )

    def train(self, steps: int) -> None:
        for _, batch in zip(range(steps), self.loader, strict=False):
            data = batch.data[0] if isinstance(batch.data, list) else batch.data
            loss = self.model(data).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.checkpointer.step(loss)
        self.checkpointer.close()


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SUREFOOT_JOB_UID", "SUREFOOT_PERSISTENT_URI"):
        monkeypatch.delenv(name, raising=False)


def begun(folder: Any, **options: Any) -> None:
    life = Life(folder, **options)
    life.checkpointer.restore()
    life.train(4)


def reports(life: Life, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    assert life.checkpointer.restore() == 4
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    life.train(2)
    return texts


def test_another_kind_of_optimizer_is_refused_by_name(tmp_path: Any) -> None:
    begun(tmp_path)
    life = Life(tmp_path, kind=torch.optim.SGD, momentum=0.9)
    with pytest.raises(StateMismatch, match="optimizer is SGD here and AdamW in the checkpoint"):
        life.checkpointer.restore()
    assert life.checkpointer.restore(optional=("optimizer",)) == 4
    assert life.optimizer.param_groups[0]["lr"] == 0.01
    assert not life.optimizer.state


def test_options_that_the_checkpoint_replaces_are_reported_once(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    begun(tmp_path)
    life = Life(tmp_path, lr=0.5, weight_decay=0.3)
    (text,) = reports(life, caplog)
    assert "optimizer is built with lr=0.5, weight_decay=0.3 and was built with lr=0.01, weight_decay=0.01" in text
    assert life.optimizer.param_groups[0]["lr"] == 0.01
    again = Life(tmp_path, lr=0.5, weight_decay=0.3)
    again.checkpointer.restore()
    assert "is built with" not in caplog.text.partition(text)[2].replace(text, "")


def test_options_that_change_in_training_are_not_reported(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(tmp_path)
    life.checkpointer.restore()
    life.optimizer.param_groups[0]["lr"] = 0.002  # as a schedule does
    life.train(4)
    life = Life(tmp_path)
    assert reports(life, caplog) == []
    assert life.optimizer.param_groups[0]["lr"] == 0.002


def test_another_global_batch_is_reported(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path)
    (text,) = reports(Life(tmp_path, batch=16), caplog)
    assert "global batch has 16 samples and had 8 in the checkpoint: it continues at sample 32" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda data: data,
        list,
        lambda data: data.numpy(),
        TensorDataset,
        lambda data: Subset(TensorDataset(data), range(64)),
        lambda data: ConcatDataset([TensorDataset(data[:10]), TensorDataset(data[10:])]),
    ],
)
def test_other_samples_of_equal_number_are_reported_and_equal_ones_are_not(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    begun(tmp_path, dataset=make(DATA))
    assert reports(Life(tmp_path, dataset=make(DATA.clone())), caplog) == []
    life = Life(tmp_path, dataset=make(DATA + 1))
    assert life.checkpointer.restore() == 6
    assert "data set has as many samples as in the checkpoint, and other ones" in caplog.text


class Files(torch.utils.data.Dataset[torch.Tensor]):
    """Counts reads, as one of files on a disk."""

    def __init__(self, added: float = 0.0) -> None:
        self.added, self.reads = added, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return DATA[index] + self.added


def test_samples_outside_of_memory_are_not_read_for_a_comparison(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Files()
    life = Life(tmp_path, dataset=dataset)
    life.loader.state_dict()
    assert dataset.reads == 0
    life.checkpointer.restore()
    life.train(4)
    assert reports(Life(tmp_path, dataset=Files(1.0)), caplog) == []


# ---- epochs ----------------------------------------------------------------------------------------------------------


def epoch_life(folder: Any) -> tuple[surefoot.ElasticLoader, surefoot.Checkpointer]:
    loader = surefoot.ElasticLoader(DATA, 16, by_epoch=True)
    model = torch.nn.Linear(4, 1)
    checkpointer = surefoot.Checkpointer(model=model, loader=loader, folder=str(folder), interval_steps=1)
    checkpointer.restore()
    return loader, checkpointer


def test_a_restart_in_epochs_of_the_loader_trains_each_epoch_once(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    positions = []
    for stop in (6, 99):
        loader, checkpointer = epoch_life(tmp_path)
        for epoch in loader.epochs(3):
            for batch in loader:
                positions.append((epoch, batch.start))
                checkpointer.step()
                if len(positions) == stop:
                    break
            if len(positions) == stop:
                break
        checkpointer.close()
    assert positions == [(position // 64, position) for position in range(0, 192, 16)]
    assert "has not asked for loader.epoch" not in caplog.text


def test_a_restart_in_a_plain_range_of_epochs_is_reported(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        loader, checkpointer = epoch_life(tmp_path)
        for _epoch in range(2):
            for _batch in loader:
                checkpointer.step()
        checkpointer.close()
    assert "training continues in epoch 2, counted from 0" in caplog.text
    assert "for epoch in loader.epochs(epochs)" in caplog.text


def test_epochs_of_an_endless_loader_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="epochs\\(\\) needs by_epoch=True"):
        surefoot.ElasticLoader(DATA, 16).epochs(3)


def test_a_batch_unpacks_unless_it_needs_a_weight() -> None:
    pairs = [(row, number) for number, row in enumerate(DATA)]
    inputs, numbers = next(iter(surefoot.ElasticLoader(pairs, 8)))
    assert (inputs.shape, len(numbers)) == ((8, 4), 8)
    with pytest.raises(ConfigurationError, match=r"batch of weight 1\.2 was unpacked"):
        inputs, numbers = next(iter(surefoot.ElasticLoader(pairs, 5, rank=0, num_replicas=2)))
    with pytest.raises(TypeError, match="a batch of a Tensor cannot be unpacked"):
        _first, *_ = next(iter(surefoot.ElasticLoader(DATA, 8)))


# ---- plain values ----------------------------------------------------------------------------------------------------


def test_plain_values_and_generators_come_back_without_a_class_for_them(tmp_path: Any) -> None:
    draws = []
    for life in range(2):
        values: dict[str, Any] = {"best": 9.0, "names": [], "noise": torch.Generator().manual_seed(life)}
        shuffle, own = numpy.random.default_rng(life), torch.Generator().manual_seed(life)
        checkpointer = surefoot.Checkpointer(
            model=torch.nn.Linear(2, 1), values=values, shuffle=shuffle, own=own, folder=str(tmp_path), interval_steps=1
        )
        assert checkpointer.restore() == life
        if life == 0:
            torch.rand(3, generator=values["noise"]), torch.rand(5, generator=own), shuffle.random(2)
            values |= {"best": 0.5, "names": ["a"]}
            checkpointer.step()
        assert (values["best"], values["names"]) == (0.5, ["a"])
        checkpointer.close()
        draws.append(
            (torch.rand(1, generator=values["noise"]).item(), torch.rand(1, generator=own).item(), shuffle.random())
        )
    assert draws[0] == draws[1]
