"""The user's object against a link that the test controls: when it saves, what it holds for, and that it never crashes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from support.fakes.fake_link import FakeLink, attached
from surefoot import Checkpointer, ElasticLoader
from surefoot.errors import ConfigurationError
from surefoot.protocol.checkpoints.records import Layout
from surefoot.state import read_values

SLOW_SECONDS = 0.5


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_JOB_UID", "job")


def parts(width: int = 300) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(checkpointer: Checkpointer, model: Any, optimizer: Any, steps: int, meddle: Any = None) -> None:
    for step in range(steps):
        loss = model(torch.randn(4, model[0].in_features)).square().mean()
        loss.backward()
        if meddle is not None:
            meddle(step)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(loss)


def test_due_steps_are_staged_with_the_state_of_that_step() -> None:
    model, optimizer = parts()
    link = FakeLink()
    weights = {}
    with Checkpointer(model=model, optimizer=optimizer, link=link) as checkpointer:
        assert checkpointer.restore() == 0
        for _ in range(5):
            train(checkpointer, model, optimizer, 1)
            weights[checkpointer._step] = model[0].weight.detach().clone()
    assert [message.step for message, _, _ in link.saves] == [2, 4, 5]
    assert (link.closed, link.offered) == (5, True)
    assert [s.progress.step for s in link.steps] == [1, 2, 3, 4, 5]
    layout = Layout.from_json(link.saves[0][0].layout_json or "")
    tensor = next(t for t in layout.tensors if t.name == "model/1.weight")
    assert tensor.pieces
    for message, stream, values in link.saves:
        assert read_values(values)["step"] == message.step
        bias = next(t for t in layout.tensors if t.name == "model/1.running_mean").pieces[0]
        assert len(stream) == layout.stream_bytes >= bias.stream_offset
    assert [message.layout_json is not None for message, _, _ in link.saves] == [True, False, False]
    assert link.late == []
    assert [s.progress.closed_steps.closed_up_to for s in link.steps if s.progress.step % 2] == [0, 2, 4], (
        "each save had ended before the next step did"
    )


def test_a_held_step_is_saved_before_it_is_waited_at() -> None:
    model, optimizer = parts()
    link = FakeLink(attached(100), hold=3)
    with Checkpointer(model=model, optimizer=optimizer, link=link) as checkpointer:
        checkpointer.restore()
        train(checkpointer, model, optimizer, 4)
    assert link.order == ["restored 0", "staged 3", "held 3", "staged 4"]


def test_full_slots_skip_the_save_and_save_less_often() -> None:
    model, optimizer = parts()
    link = FakeLink(draining=True)
    checkpointer = Checkpointer(model=model, optimizer=optimizer, link=link)
    checkpointer.restore()
    train(checkpointer, model, optimizer, 6)
    assert [message.step for message, _, _ in link.saves] == [2, 4]
    assert [s.progress.step for s in link.steps if s.skipped] == [6]
    train(checkpointer, model, optimizer, 4)
    assert [s.progress.step for s in link.steps if s.skipped] == [6, 8]
    assert link.steps[-1].progress.interval_exponent == 2
    link.busy.clear()
    link.draining = False
    train(checkpointer, model, optimizer, 6)
    checkpointer.close()
    assert [message.step for message, _, _ in link.saves] == [2, 4, 16]


def test_the_coordinators_level_rules() -> None:
    model, optimizer = parts()
    link = FakeLink(at_level=2)
    with Checkpointer(model=model, optimizer=optimizer, link=link) as checkpointer:
        checkpointer.restore()
        train(checkpointer, model, optimizer, 8)
    assert [message.step for message, _, _ in link.saves] == [8]


def test_no_staging_memory_does_not_stop_the_training() -> None:
    model, optimizer = parts()
    link = FakeLink(refuse_arena=True)
    with Checkpointer(model=model, optimizer=optimizer, link=link) as checkpointer:
        checkpointer.restore()
        train(checkpointer, model, optimizer, 4)
        assert not checkpointer.save_now()
    assert [s.progress.closed_steps.closed_up_to for s in link.steps] == [0, 1, 2, 3], (
        "no save can come of steps that are past"
    )
    assert {reason for reason, _ in link.said} == {"SaveFailed"}


def test_an_object_that_fails_to_give_its_state_does_not_stop_the_training() -> None:
    class Broken:
        calls = 0

        def state_dict(self) -> dict[str, Any]:
            self.calls += 1
            if self.calls > 3:
                raise RuntimeError("broken")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    model, optimizer = parts()
    link = FakeLink()
    with Checkpointer(model=model, optimizer=optimizer, odd=Broken(), link=link) as checkpointer:
        checkpointer.restore()
        train(checkpointer, model, optimizer, 4)
    assert any("broken" in text for _, text in link.said)
    assert len(link.steps) == 4


def test_the_loaders_position_travels_and_its_share_is_reported() -> None:
    model, optimizer = parts(4)
    loader = ElasticLoader(torch.randn(40, 4), 8, rank=0, num_replicas=1)
    link = FakeLink()
    with Checkpointer(model=model, optimizer=optimizer, loader=loader, link=link) as checkpointer:
        checkpointer.restore()
        for _, batch in zip(range(4), loader, strict=False):
            model(batch.data).sum().backward()
            optimizer.step()
            checkpointer.step()
    assert [s.samples for s in link.steps] == [((0, 8),), ((8, 16),), ((16, 24),), ((24, 32),)]
    positions = [read_values(values)["parts"]["loader"]["position"] for _, _, values in link.saves]
    assert positions == [16, 32]


def test_an_exception_in_the_script_saves_nothing_more() -> None:
    model, optimizer = parts()
    link = FakeLink(attached(100))

    def fails() -> None:
        with Checkpointer(model=model, optimizer=optimizer, link=link) as checkpointer:
            checkpointer.restore()
            train(checkpointer, model, optimizer, 3)
            raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"):
        fails()
    assert link.saves == []


def test_a_batch_taken_since_the_last_step_keeps_it_from_being_saved() -> None:
    model, optimizer = parts(4)
    loader = ElasticLoader(torch.randn(40, 4), 8, rank=0, num_replicas=1)
    link = FakeLink(attached(100))
    checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=loader, link=link)
    checkpointer.restore()
    batches = iter(loader)
    next(batches)
    checkpointer.step()
    next(batches)
    assert not checkpointer.save_now()
    checkpointer.close()
    assert link.saves == [], "with the loader behind the second batch it would be no checkpoint of step 1"
    assert [(reason, "a batch was taken" in text) for reason, text in link.said] == [("SaveSkipped", True)] * 2
    assert (link.closed, link.offered) == (1, False), "nobody can train that step again and save more of it"


def test_an_optimizer_that_has_begun_since_the_last_step_keeps_it_from_being_saved() -> None:
    model, optimizer = parts()
    link = FakeLink(attached(100))
    checkpointer = Checkpointer(model=model, optimizer=optimizer, link=link)
    checkpointer.restore()
    train(checkpointer, model, optimizer, 1)
    assert checkpointer.save_now()
    train(checkpointer, model, optimizer, 1)
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
    checkpointer.close()
    assert [message.step for message, _, _ in link.saves] == [1]
    assert [reason for reason, _ in link.said] == ["SaveSkipped"]


@pytest.mark.parametrize(("told", "saved"), [(True, [1]), (False, [])])
def test_closing_while_an_exception_is_handled_saves_what_is_known_to_stand(told: bool, saved: list[int]) -> None:
    model, optimizer = parts()
    loader = ElasticLoader(torch.randn(40, 4), 8, rank=0, num_replicas=1) if told else None
    link = FakeLink(attached(100))
    checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=loader, link=link)
    checkpointer.restore()
    try:
        train(checkpointer, model, optimizer, 1)
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        checkpointer.close()
    assert [message.step for message, _, _ in link.saves] == saved


def test_a_checkpointer_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing to save"):
        Checkpointer(link=FakeLink())


def test_the_stall_of_a_save_is_reported_with_the_step_behind_it() -> None:
    model, optimizer = parts()
    link = FakeLink()
    with Checkpointer(model=model, optimizer=optimizer, link=link) as checkpointer:
        checkpointer.restore()
        train(checkpointer, model, optimizer, 4)
    assert [s.progress.stall_seconds is not None for s in link.steps] == [False, False, True, False]


class SlowMemory(FakeLink):
    """Staging memory that comes late, as gigabytes on a busy node do."""

    def request_arena(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        threading.Event().wait(SLOW_SECONDS)
        return super().request_arena(slot_bytes)


def test_a_first_save_that_waits_for_its_preparation_says_so_as_its_stall() -> None:
    model, optimizer = parts()
    link = SlowMemory(attached(1))
    with Checkpointer(model=model, optimizer=optimizer, link=link) as checkpointer:
        checkpointer.restore()
        train(checkpointer, model, optimizer, 3)
    stalls = [s.progress.stall_seconds for s in link.steps if s.progress.stall_seconds is not None]
    assert stalls[0] > SLOW_SECONDS / 2 > stalls[1]


def test_a_loss_that_is_no_number_is_told_once_and_reported_as_it_is() -> None:
    model, optimizer = parts(8)
    link = FakeLink()
    with Checkpointer(model=model, optimizer=optimizer, link=link) as checkpointer:
        checkpointer.restore()
        for loss in (1.0, float("nan"), torch.tensor(float("inf")), 2.0, float("-inf")):
            checkpointer.step(loss)
    assert [str(s.progress.loss) for s in link.steps] == ["1.0", "nan", "inf", "2.0", "-inf"]
    assert [text.partition(":")[0] for reason, text in link.said if reason == "LossNonFinite"] == [
        "the loss of step 2 is nan",
        "the loss of step 5 is -inf",
    ]


def test_calls_after_close_are_refused() -> None:
    model, optimizer = parts(3)
    checkpointer = Checkpointer(model=model, optimizer=optimizer, link=FakeLink())
    checkpointer.restore()
    checkpointer.close()
    for call in (checkpointer.step, checkpointer.restore, checkpointer.save_now):
        with pytest.raises(
            ConfigurationError, match=rf"{call.__name__}\(\) was called after close\(\): nothing is saved"
        ):
            call()
    checkpointer.close()


@pytest.mark.parametrize("loss", [{"loss": 1.0}, torch.ones(3), "0.1"], ids=["dict", "vector", "text"])
def test_what_is_no_loss_is_refused_in_words(loss: Any) -> None:
    model, optimizer = parts(3)
    with Checkpointer(model=model, optimizer=optimizer, link=FakeLink()) as checkpointer:
        checkpointer.restore()
        with pytest.raises(ConfigurationError, match=rf"step\(\) was given a {type(loss).__name__}.* as the loss"):
            checkpointer.step(loss)


def test_a_state_restored_in_inference_mode_can_be_trained(tmp_path: Any) -> None:
    for life in range(2):
        model, optimizer = parts(3)
        checkpointer = Checkpointer(model=model, optimizer=optimizer, folder=str(tmp_path), interval_steps=1)
        with torch.inference_mode():
            assert checkpointer.restore() == 2 * life
        train(checkpointer, model, optimizer, 2)
        checkpointer.close()
