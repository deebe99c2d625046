"""Calls that cannot be meant: each is refused with the way out, before anything is lost."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from support.fakes.fake_link import FakeLink
from surefoot import Checkpointer
from surefoot.errors import ConfigurationError


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_JOB_UID", "job")


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))


def protect(**objects: Any) -> Checkpointer:
    return Checkpointer(**{"model": model()} | objects, link=FakeLink())


def buffer(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("adjacency", tensor)
    return module


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"keep": 0}, "keep=0: it must be at least 1"),
        ({"interval_steps": 0}, "interval_steps=0: it must be at least 1"),
        ({"best": {"loss": 1.0}}, "best is a dict .*give plain values in one dict, values={'best': …}"),
        ({"epochs_done": 3}, "epochs_done is a int .*give plain values in one dict, values={'epochs_done': …}"),
        ({"lock": object()}, "lock is a object .*give an object of a class of yours"),
        ({"values": [1.0]}, "values= is a list: give a dict of names and values"),
        ({"models": [model(), model()]}, r"models=torch\.nn\.ModuleList\(modules\)"),
        ({"schedules": (torch.optim.SGD(model().parameters()),)}, "schedules1=…, schedules2=…"),
        ({"latent": torch.nn.Parameter(torch.zeros(3))}, r"latent=torch\.nn\.ParameterList\(\[parameter\]\)"),
        ({"mean": torch.zeros(3)}, "register it as a buffer of a module"),
        ({"model": model().state_dict()}, r"it seems to be a state_dict\(\) itself; give the object that it is of"),
        ({"loader": iter([])}, "a loader needs them to continue where it was; surefoot.ElasticLoader has them"),
        ({"model": torch.nn.LazyLinear(3)}, "model's parameter weight has no shape yet.*call the model on one batch"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_the_way_out(objects: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        protect(**objects)


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_names_the_module_that_was_scripted() -> None:
    with pytest.raises(ConfigurationError, match="model is a scripted module: give Checkpointer the module"):
        protect(model=torch.jit.trace(model(), torch.ones(1, 4)))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo cpu"),
        (lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_buffer_that_cannot_be_saved_names_persistent(make: Any, kind: str) -> None:
    with pytest.raises(Exception, match=rf"model/adjacency is a {kind} tensor: (?s:.*)not persistent"):
        protect(model=buffer(make())).step()


def test_a_loose_parameter_of_an_optimizer_names_a_list() -> None:
    module, loose = model(), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([*module.parameters(), loose])
    with pytest.raises(ConfigurationError, match=r"belongs to no model .*shape \(3,\).*ParameterList\(\[parameter\]\)"):
        protect(model=module, optimizer=optimizer)


def test_numbers_of_steps_are_not_taken_as_the_loss() -> None:
    checkpointer = protect()
    checkpointer.restore()
    checkpointer.step(5)
    with pytest.raises(ConfigurationError, match=r"step\(6\) was called after step\(5\): it takes the loss"):
        checkpointer.step(6)
    for loss in (6.0, 7, 7, 3, 9.0, 10, True, None):
        checkpointer.step(loss)


def test_an_unusable_loss_is_one_error() -> None:
    checkpointer = protect()
    checkpointer.restore()
    with pytest.raises(ConfigurationError) as raised:
        checkpointer.step("0.1")  # type: ignore[arg-type]
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile])
def test_wrappers_of_one_process_are_not_part_of_names(wrap: Any) -> None:
    plain, wrapped = FakeLink(), FakeLink()
    for link, subject in ((plain, model()), (wrapped, wrap(model()))):
        checkpointer = Checkpointer(model=subject, link=link)
        checkpointer.restore()
        checkpointer.step()
        assert checkpointer.save_now()
    assert plain.saves[0][0].layout == wrapped.saves[0][0].layout


class History:
    """Losses of all steps, as scripts collect them."""

    def __init__(self, count: int) -> None:
        self.losses = [0.5] * count

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def test_a_long_history_costs_little() -> None:
    checkpointer = protect(history=History(300_000))
    checkpointer.restore()
    begun = time.process_time()
    for _ in range(4):
        checkpointer.step()
    assert time.process_time() - begun < 5.0, "each element was visited several times: 40 s"
