"""How old the passes over the data may be that a rank tells: by what it costs to reckon them."""

from __future__ import annotations

import pytest

from surefoot.checkpointer import usage_checks
from surefoot.checkpointer.usage_checks import StateGuard


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

    def passes(self) -> list[float]:
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
        found.append(guard.passes(clock.now))
    assert found == told
    clock.now = 101.01
    assert guard.passes(clock.now) == told[-1] + 1
