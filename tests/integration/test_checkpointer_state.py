"""What a Checkpointer says of a program whose state cannot come back, and of one that differs from its checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from support.fakes.fake_link import FakeLink, attached
from surefoot import Checkpointer, StateMismatch, StateNotRestorable
from surefoot.errors import ConfigurationError
from surefoot.tools import importing


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

    monkeypatch.setattr(link, "request_arena", refuse)
    with caplog.at_level(logging.WARNING), Checkpointer(**objects, link=link) as checkpointer:
        checkpointer.restore()
        train(checkpointer, objects, 1)
    assert f"the first save could not be prepared: {said}" in caplog.text
    assert ("no staging memory" in caplog.text) == isinstance(error, MemoryError)


# ---- a program that differs from its checkpoint -----------------------------------------------------------------------


def trained(folder: Path, steps: int = 2, **more: Any) -> dict[str, Any]:
    objects = program(1)
    with Checkpointer(**objects, **more, folder=str(folder), interval_steps=1) as checkpointer:
        checkpointer.restore()
        train(checkpointer, objects, steps)
    return objects


def test_an_object_may_be_added_or_dropped_where_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, old=Kept(5))
    objects, ema = program(2), Kept(7)
    checkpointer = Checkpointer(**objects, ema=ema, folder=str(tmp_path), interval_steps=1)
    with pytest.raises(StateMismatch, match=r"has no 'ema'.*restore\(optional=\('ema',\)\)"):
        checkpointer.restore()
    with pytest.raises(StateMismatch, match=r"has 'old', which was not given .*restore\(optional=\('old',\)\)"):
        checkpointer.restore(optional=("ema",))
    assert checkpointer.restore(optional=("ema", "old")) == 2
    assert "ema is not in the checkpoint" in caplog.text
    assert "the checkpoint has 'old', which was not given to Checkpointer: it is left out" in caplog.text
    train(checkpointer, objects, 1)
    checkpointer.close()
    assert ema.value == 7


@pytest.mark.parametrize("how", [{"optional": ("model/1.*",)}, {"strict": False}])
def test_a_head_may_be_another_and_begins_without_optimizer_state(how: dict[str, Any], tmp_path: Path) -> None:
    old, objects = trained(tmp_path), program(2, out=5)
    head = objects["model"][1].weight.detach().clone()
    with Checkpointer(**objects, folder=str(tmp_path), interval_steps=1) as checkpointer:
        with pytest.raises(StateMismatch, match=r"model/1\.weight|1\.weight"):
            checkpointer.restore()
        assert checkpointer.restore(**how) == 2
        assert torch.equal(objects["model"][0].weight, old["model"][0].weight)
        assert torch.equal(objects["model"][1].weight, head)
        assert len(objects["optimizer"].state) == 2
        train(checkpointer, objects, 1)


def test_precision_changes_where_that_is_asked(tmp_path: Path) -> None:
    old = trained(tmp_path)
    objects = program(2)
    objects["model"].bfloat16()
    checkpointer = Checkpointer(**objects, folder=str(tmp_path), interval_steps=1)
    with pytest.raises(StateMismatch, match=r"is bfloat16 here and float32 in the checkpoint: convert_dtypes=True"):
        checkpointer.restore()
    assert checkpointer.restore(convert_dtypes=True) == 2
    state = objects["optimizer"].state[objects["model"][0].weight]
    before = old["optimizer"].state[old["model"][0].weight]
    assert torch.equal(objects["model"][0].weight, old["model"][0].weight.bfloat16())
    assert torch.equal(state["exp_avg"], before["exp_avg"].bfloat16())
    assert (state["step"].dtype, float(state["step"])) == (torch.float32, 2.0)
    other = program(3, out=7)["model"].bfloat16()
    assert checkpointer.load_weights(other, strict=False, convert_dtypes=True) == 2
    assert torch.equal(other[0].weight, old["model"][0].weight.bfloat16())
    with pytest.raises(StateMismatch, match="has shape"):
        checkpointer.load_weights(other, convert_dtypes=True)
    checkpointer.close()


def test_weights_alone_are_trained_on_with_an_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = program(1)["model"].state_dict()
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.setenv("SUREFOOT_PERSISTENT_URI", (tmp_path / "kept").as_uri())
    given = ["--job", "one", "--step", "4", "--from", str(tmp_path / "model.safetensors"), "--as", "safetensors"]
    assert importing.main(given) == 0
    objects = program(2)
    with Checkpointer(**objects, folder=str(tmp_path / "kept"), job_uid="one", interval_steps=1) as checkpointer:
        assert checkpointer.restore() == 4
        assert all(torch.equal(weights[n], p) for n, p in objects["model"].state_dict().items())
        train(checkpointer, objects, 1)
        assert objects["optimizer"].state
        assert [c.step for c in checkpointer.list()][-1] >= 4


# ---- what is named, and when ---------------------------------------------------------------------------------------------


def test_a_mistyped_option_is_told_from_an_object() -> None:
    wrong: dict[str, Any] = {"intervall_steps": 5}
    with pytest.raises(ConfigurationError, match=r"no option 'intervall_steps': did you mean interval_steps\?"):
        Checkpointer(**program(), **wrong, link=FakeLink())
    with pytest.raises(ConfigurationError, match="loader is a list"):
        Checkpointer(**program(), loader=[1], link=FakeLink())  # type: ignore[arg-type]  # what mypy says too
    with pytest.raises(ConfigurationError, match="'a/b' cannot name an object"):
        Checkpointer(**program(), **{"a/b": Kept()}, link=FakeLink())


def test_training_without_a_restore_beside_older_steps_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    objects = program(2)
    with (
        pytest.raises(ConfigurationError, match=r"step\(\) was called and restore\(\) was not, and this job has .*2"),
        Checkpointer(**objects, folder=str(tmp_path), interval_steps=1) as checkpointer,
    ):
        train(checkpointer, objects, 1)


def test_what_accelerate_prepared_is_taken_or_refused_at_once() -> None:
    accelerate = pytest.importorskip("accelerate")
    objects, accelerator = program(), accelerate.Accelerator(cpu=True)
    data = torch.utils.data.DataLoader([torch.zeros(3)])  # type: ignore[arg-type]  # a list is a dataset
    scheduler = torch.optim.lr_scheduler.StepLR(objects["optimizer"], 1)
    model, optimizer, loader, schedule = accelerator.prepare(objects["model"], objects["optimizer"], data, scheduler)
    with pytest.raises(ConfigurationError, match="loader was prepared by Accelerate and keeps no state"):
        Checkpointer(model=model, loader=loader, link=FakeLink())
    link = FakeLink()
    with Checkpointer(model=model, optimizer=optimizer, scheduler=schedule, link=link) as checkpointer:
        checkpointer.restore()
        train(checkpointer, {"model": model, "optimizer": optimizer}, 2)
    assert [message.step for message, _, _ in link.saves] == [2]


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
