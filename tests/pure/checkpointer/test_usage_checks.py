"""Tests of `checkpointer.usage_checks`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.checkpointer import usage_checks
from surefoot.checkpointer.usage_checks import PrefetchCheck, StateGuard, reject_shuffle_buffers
from surefoot.errors import ConfigurationError

# ---- foreign loaders -------------------------------------------------------------------------------------------------
# Other people's loaders: what is not in their state is refused before there is something to lose.


class BufferShuffledExamplesIterable:
    """As Hugging Face's is called."""

    def __init__(self, buffer_size: int) -> None:
        self.ex_iterable, self.buffer_size = object(), buffer_size


def stream(buffer_size: int) -> Any:
    inner = SimpleNamespace(ex_iterables=[SimpleNamespace(), BufferShuffledExamplesIterable(buffer_size)])
    return SimpleNamespace(base_dataloader=SimpleNamespace(dataset=SimpleNamespace(_ex_iterable=inner)))


def test_a_shuffle_buffer_however_deep_is_refused_with_its_size_and_the_ways_out() -> None:
    with pytest.raises(ConfigurationError, match=r"loader \(SimpleNamespace\) shuffles in a buffer of 10 rows"):
        reject_shuffle_buffers({"model": object(), "loader": stream(10)}, ())
    reject_shuffle_buffers({"loader": stream(10)}, ("loader",))
    reject_shuffle_buffers({"loader": stream(1)}, ())


def test_what_contains_itself_is_looked_at_all_the_same() -> None:
    loop = SimpleNamespace()
    loop.dataset = loop
    reject_shuffle_buffers({"loader": loop}, ())


def torchdatas(taken: int, **attributes: Any) -> Any:
    made = type("StatefulDataLoader", (), {"__module__": "torchdata.stateful_dataloader"})()
    made._iterator = SimpleNamespace(_num_yielded=taken)
    vars(made).update(attributes)
    return made


def test_more_batches_than_a_step_is_said_to_use_are_refused_at_the_first_step() -> None:
    with pytest.raises(ConfigurationError, match=r"2 batches were taken from loader .*loader.batches_per_step = 2"):
        StateGuard({"loader": torchdatas(2)}).mark_step()
    PrefetchCheck({"loader": torchdatas(1)}).first_step_ends()
    PrefetchCheck({"loader": torchdatas(2, batches_per_step=2)}).first_step_ends()
    with pytest.raises(ConfigurationError, match="3 batches"):
        PrefetchCheck({"loader": torchdatas(3, batches_per_step=2)}).first_step_ends()


def test_a_program_that_goes_on_had_its_first_step_before() -> None:
    standing = StateGuard({"loader": torchdatas(7)})
    standing.mark_restored(6)
    standing.mark_step()
    anew = StateGuard({"loader": torchdatas(7)})
    anew.mark_restored(0)
    with pytest.raises(ConfigurationError):
        anew.mark_step()


# ---- told passes -----------------------------------------------------------------------------------------------------
# How old the passes over the data may be that a rank tells: by what it costs to reckon them.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Loader:
    """Tells a pass more each time that it is asked, which takes so long."""

    def __init__(self, clock: Clock, cost: float) -> None:
        self.clock, self.cost, self.asked = clock, cost, 0

    def count_by_step(self) -> None: ...

    def consumed_epochs(self) -> list[float]:
        self.asked += 1
        self.clock.now += self.cost
        return [float(self.asked)]


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        pytest.param(0.0001, [1, 2, 3, 4, 5], id="of few lanes at each step"),
        pytest.param(0.0025, [1, 1, 1, 2, 2], id="a hundredth of the time"),
        pytest.param(0.5, [1, 1, 1, 1, 1], id="of very many once a second"),
    ],
)
def test_passes_are_reckoned_as_often_as_they_cost_little(
    cost: float, told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(usage_checks, "time", clock)
    guard = StateGuard({"loader": Loader(clock, cost)})
    found = []
    for step in range(5):
        clock.now = 100.0 + 0.1 * step
        found.append(guard.epochs(clock.now))
    assert found == told
    clock.now = 101.01
    assert guard.epochs(clock.now) == told[-1] + 1
