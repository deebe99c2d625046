"""Programs that change weights between `step()` and the optimizer's next step: no save holds what they changed."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from support.copy_gate import CopyGate
from support.fakes.fake_link import FakeLink, attached
from support.saved_streams import Stream, merged
from surefoot import Checkpointer
from surefoot.protocol.checkpoints.records import Layout

WIDTH = 130  # of float32: just not small enough to be copied at once
LAYERS = 4


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_JOB_UID", "job")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyGate]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    yield CopyGate(monkeypatch)
    torch.set_num_threads(threads)


# ---- what programs do with their weights; each is entered behind `step()` and left before the next one ----------------


@contextlib.contextmanager
def ema_by_data(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    """timm's and diffusers' way."""
    kept = [p.detach().clone() for p in model.parameters()]
    for p, average in zip(model.parameters(), averaged.module.parameters(), strict=True):
        p.data.copy_(average.data)
    yield
    for p, was in zip(model.parameters(), kept, strict=True):
        p.data.copy_(was)


class StoreAndRestore:
    """torch-ema's `store`, `copy_to` and `restore`."""

    def store(self, parameters: Any) -> None:
        self.collected = [p.clone() for p in parameters]

    def copy_to(self, shadow: Any, parameters: Any) -> None:
        for s, p in zip(shadow, parameters, strict=True):
            if p.requires_grad:
                p.data.copy_(s.data)

    def restore(self, parameters: Any) -> None:
        for c, p in zip(self.collected, parameters, strict=True):
            p.data.copy_(c.data)


@contextlib.contextmanager
def torch_ema(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    ema = StoreAndRestore()
    ema.store(model.parameters())
    ema.copy_to(averaged.module.parameters(), model.parameters())
    yield
    ema.restore(model.parameters())


@contextlib.contextmanager
def swapped_with_average(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    """Lightning's WeightAveraging: the averaged model gets the trained weights meanwhile."""

    def swap() -> None:
        for average, current in zip(averaged.module.parameters(), model.parameters(), strict=True):
            kept = average.data.clone()
            average.data.copy_(current.data)
            current.data.copy_(kept)

    swap()
    yield
    swap()


@contextlib.contextmanager
def loaded_and_loaded_back(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(averaged.module.state_dict())
    yield
    model.load_state_dict(kept)


@contextlib.contextmanager
def pointed_elsewhere(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    """Nothing is written: parameters show other memory for a while."""
    kept = [p.data for p in model.parameters()]
    for p, average in zip(model.parameters(), averaged.module.parameters(), strict=True):
        p.data = average.data
    yield
    for p, was in zip(model.parameters(), kept, strict=True):
        p.data = was


@contextlib.contextmanager
def clipped(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    """A critic's weights, as the paper of WGAN does it; they stay so."""
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)
    yield


@contextlib.contextmanager
def written_through_numpy(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    arrays = [p.detach().numpy() for p in model.parameters()]
    for array in arrays:
        array[:] = -array
    yield
    for array in arrays:
        array[:] = -array


@contextlib.contextmanager
def one_row_of_a_view(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    for p in model.parameters():
        p.data.view(-1)[: WIDTH // 2] *= -1
    yield


@contextlib.contextmanager
def by_a_kernel_that_tells_nobody(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    for p in model.parameters():
        ctypes.memset(p.data_ptr() + 8, 0, 16)
    yield


@contextlib.contextmanager
def pruned_moments(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    """The optimizer's own state."""
    optimizer: Any = model.__dict__["its_optimizer"]
    for state in optimizer.state.values():
        state["exp_avg"].data.mul_(0.5)
    yield


Form = Callable[[torch.nn.Module, AveragedModel], AbstractContextManager[None]]
FORMS: list[Form] = [
    ema_by_data, torch_ema, swapped_with_average, loaded_and_loaded_back, pointed_elsewhere, clipped,
    written_through_numpy, one_row_of_a_view, by_a_kernel_that_tells_nobody, pruned_moments,
]  # fmt: skip


# ---- a program, and what was sealed of it -------------------------------------------------------------------------------


class Training:
    """Saves each step; what the state was then is kept beside."""

    def __init__(self, gate: CopyGate, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.gate = gate
        self.model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.model.__dict__["its_optimizer"] = self.optimizer
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.averaged.update_parameters(self.model)
        self.link = FakeLink(attached(1))
        self.checkpointer = Checkpointer(model=self.model, optimizer=self.optimizer, ema=self.averaged, link=self.link)
        self.checkpointer.restore()
        self.stager = self.checkpointer._saver._stager
        self.at_step: dict[int, dict[str, torch.Tensor]] = {}

    def step(self, form: Form | None = None, copies_before: int = 0, copies_within: bool = True) -> None:
        """One step and its save; then the change, with so many copies ahead of it and the others, perhaps, within it."""
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.averaged.update_parameters(self.model)
        self.gate.arm(copies_before)
        self.at_step[self.checkpointer._step + 1] = self._state()
        self.checkpointer.step()
        self.gate.wait(self.stager)
        with contextlib.nullcontext() if form is None else form(self.model, self.averaged):
            if copies_within:
                self.gate.go_on(self.stager)
        self.gate.go_on(self.stager)

    def close(self) -> None:
        self.gate.arm(10**9)
        self.checkpointer.close()

    def sealed(self) -> list[int]:
        return [message.step for message, _, _ in self.link.saves]

    def wrong(self) -> list[int]:
        """Sealed steps that hold anything else than the step's state."""
        layouts = {m.layout: Layout.from_json(m.layout_json) for m, _, _ in self.link.saves if m.layout_json}
        found = []
        for message, data, values in self.link.saves:
            saved = merged([Stream(layouts[message.layout], data, values)])
            wanted = self.at_step[message.step]
            assert wanted.keys() <= saved.keys()
            if not all(torch.equal(saved[name], tensor) for name, tensor in wanted.items()):
                found.append(message.step)
        return found

    def told(self) -> list[str]:
        return [text for reason, text in self.link.said if reason == "SaveFailed"]

    def _state(self) -> dict[str, torch.Tensor]:
        found = {f"model/{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}
        found |= {f"ema/{name}": tensor.clone() for name, tensor in self.averaged.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer/model/{name}/{key}"] = self.optimizer.state[parameter][key].clone()
        return found


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("copies_before", [0, 1, 3])
def test_a_change_behind_the_step_costs_one_save_and_none_is_wrong(
    gate: CopyGate, form: Form, copies_before: int
) -> None:
    training = Training(gate)
    for _ in range(4):
        training.step(form, copies_before)
    training.close()
    assert training.wrong() == []
    if form is pointed_elsewhere:
        assert training.sealed() == [1, 2, 3, 4], "no byte has changed"
        return
    assert training.sealed() == [2, 3, 4], "the first is dropped, the next is right already"
    (text,) = training.told()
    changed = "optimizer/model" if form is pruned_moments else "model/"
    assert text.startswith(changed), text
    assert "step 1 was copied" in text
    assert "settle()" in text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_program_that_settles_first_loses_nothing(gate: CopyGate, form: Form) -> None:
    training = Training(gate)

    @contextlib.contextmanager
    def settled(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
        gate.arm(10**9)
        training.gate.go_on(training.stager)
        training.checkpointer.wait_for_staging()
        assert not training.stager.is_busy
        with form(model, averaged):
            yield

    for _ in range(4):
        training.step(settled, 1)
    training.close()
    assert training.sealed() == [1, 2, 3, 4]
    assert training.wrong() == []
    assert training.told() == []


def test_a_step_whose_tensors_changed_is_not_saved_later_under_its_number(gate: CopyGate) -> None:
    training = Training(gate)
    training.step(clipped)
    assert not training.checkpointer.save_now()
    training.close()
    assert training.sealed() == []
    skipped = [text for reason, text in training.link.said if reason == "SaveSkipped"]
    assert skipped[0].startswith("step 1 is not saved: its tensors have changed")


def test_settling_where_no_save_is_under_way_is_nothing(gate: CopyGate) -> None:
    training = Training(gate)
    training.checkpointer.wait_for_staging()
    training.step()
    training.checkpointer.wait_for_staging()
    training.checkpointer.wait_for_staging()
    training.close()
    training.checkpointer.wait_for_staging()
    assert training.sealed() == [1]


def test_undisturbed_saves_stay_behind_the_training(gate: CopyGate) -> None:
    training = Training(gate)
    for _ in range(3):
        training.step()
        assert training.checkpointer._saver._unsteady == set()
    training.close()
    assert training.sealed() == [1, 2, 3]
    assert training.wrong() == []


def test_of_two_hundred_swaps_none_is_in_a_checkpoint(gate: CopyGate, record_property: Any) -> None:
    """Any form, at any copy, undone before or behind the others: what is sealed is the step's, or nothing."""
    draw = random.Random(11)
    sealed = dropped = wrong = 0
    for number in range(100):
        training = Training(gate, number)
        for _ in range(2):
            training.step(draw.choice(FORMS), draw.randrange(3 * LAYERS + 1), draw.random() < 0.8)
        training.close()
        sealed += len(training.sealed())
        dropped += len(training.told())
        wrong += len(training.wrong())
    record_property("swaps", {"swaps": 200, "wrong": wrong, "sealed": sealed, "dropped": dropped})
    assert wrong == 0
    assert sealed + dropped == 200
    assert min(sealed, dropped) > 40
