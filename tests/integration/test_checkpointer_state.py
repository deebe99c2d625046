"""What a Checkpointer says of a program whose state cannot come back, and of one that differs from its checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.fake_link import FakeLink, attached
from surefoot import Checkpointer, StateNotRestorable


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_JOB_UID", "job")


class Kept:
    """An object whose state is one value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def program(seed: int = 0, out: int = 2) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, out))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(checkpointer: Checkpointer, objects: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        objects["model"](torch.randn(2, 3)).square().mean().backward()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()
        checkpointer.step()


def test_state_that_can_never_come_back_ends_the_job_at_its_first_step() -> None:
    link, objects = FakeLink(attached(100)), program()
    checkpointer = Checkpointer(**objects, ema=Kept(object()), link=link)
    checkpointer.restore()
    with pytest.raises(
        StateNotRestorable, match=r"parts\.ema\.value is a builtins\.object, .*leave it out of state_dict"
    ):
        train(checkpointer, objects, 1)
    assert link.saves == []


def test_state_that_becomes_so_later_ends_it_at_the_save_that_meets_it() -> None:
    link, objects, ema = FakeLink(attached(2)), program(), Kept(1)
    checkpointer = Checkpointer(**objects, ema=ema, link=link)
    checkpointer.restore()
    train(checkpointer, objects, 3)
    ema.value = [object()]
    with pytest.raises(StateNotRestorable, match=r"parts\.ema\.value\[0\]"):
        train(checkpointer, objects, 1)
    ema.value = 2
    checkpointer.close()
    assert [message.step for message, _, _ in link.saves] == [2, 4]


@pytest.mark.parametrize(
    ("error", "said"),
    [(MemoryError("none left"), "no staging memory: none left"), (RuntimeError("a bug"), "RuntimeError: a bug")],
)
def test_only_memory_that_is_not_there_is_called_so(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, link = program(), FakeLink(attached(100))

    def refuse(_: int) -> Any:
        raise error

    monkeypatch.setattr(link, "arena", refuse)
    with caplog.at_level(logging.WARNING), Checkpointer(**objects, link=link) as checkpointer:
        checkpointer.restore()
        train(checkpointer, objects, 1)
    assert f"the first save could not be prepared: {said}" in caplog.text
    assert ("no staging memory" in caplog.text) == isinstance(error, MemoryError)


@pytest.mark.parametrize("name", ["SOAP", "PSGDKron", "Muon", "SFAdamW", "LaProp", "AdamW"])
def test_every_optimizer_of_heavyball_goes_on_to_the_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heavyball = pytest.importorskip("heavyball")
    monkeypatch.setattr(heavyball.utils, "compile_mode", None)

    def run(seed: int, steps: int, folder: Path) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = getattr(heavyball, name)(list(model.parameters()), lr=1e-2)
        torch.manual_seed(7)
        with Checkpointer(model=model, optimizer=optimizer, folder=str(folder), interval_steps=3) as checkpointer:
            for step in range(checkpointer.restore(), steps):
                generator = torch.Generator().manual_seed(step)
                model(torch.randn(5, 3, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
        return [p.detach() for p in model.parameters()]

    undisturbed = run(1, 6, tmp_path / "whole")
    run(1, 3, tmp_path / "cut")
    again = run(2, 6, tmp_path / "cut")
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, again, strict=True))
