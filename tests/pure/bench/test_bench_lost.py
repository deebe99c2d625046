"""Lost step time: stretches with saves against their neighbours without, so that a machine's drift is not taken for it."""

from __future__ import annotations

from typing import Any

import pytest
from bench.lost import lost_figures, lost_fractions


def plain(*seconds: float) -> dict[str, Any]:
    return {"interval": 0, "seconds": list(seconds), "left_seconds": 0.0}


def sparse(*seconds: float, left: float = 0.0) -> dict[str, Any]:
    return {"interval": 10, "seconds": list(seconds), "left_seconds": left}


def dense(*seconds: float) -> dict[str, Any]:
    return {"interval": 1, "seconds": list(seconds), "left_seconds": 0.9}


FIRST = dense(9.0, 9.0)


@pytest.mark.parametrize(
    ("stretches", "interval", "expected"),
    [
        pytest.param([plain(1, 1), sparse(1.5, *[1.0] * 9), plain(1, 1)], 10, [0.05], id="ten steps"),
        pytest.param([plain(1, 1), sparse(1.5, 1, 1, 1), plain(1, 1)], 10, [0.05], id="four, and six not run"),
        pytest.param([plain(1, 1), sparse(*[1.1] * 20), plain(1, 1)], 10, [0.1], id="twenty, with two saves"),
        pytest.param([plain(1, 1), dense(5.0, 1.2, 1.4), plain(1, 1)], 1, [0.3], id="the first of a row meets none"),
        pytest.param([plain(1, 1), sparse(2.0, 2.0), plain(3, 3)], 10, [0.0], id="a slowing machine loses nothing"),
        pytest.param([plain(2, 2), sparse(2, 2), plain(2, 2), sparse(1, 1), plain(1, 1)], 10, [0.0, -1 / 15], id="two"),
        pytest.param([sparse(2.0, 1.0), plain(1, 1)], 10, [0.1], id="one neighbour is enough"),
        pytest.param([sparse(2.0, 1.0), dense(1.0, 1.0)], 10, [], id="no neighbour"),
        pytest.param([plain(1, 1), sparse(1.0, 1.0, left=1.5), plain(1, 1)], 10, [], id="a save that was not over"),
        pytest.param([plain(1, 1), sparse(1.5, 1.0, left=0.5), plain(1, 1)], 10, [0.05], id="one that nearly was"),
        pytest.param([], 10, [], id="only the first saves"),
    ],
)
def test_a_stretch_is_held_against_its_neighbours(
    stretches: list[dict[str, Any]], interval: int, expected: list[float]
) -> None:
    assert lost_fractions([FIRST, *stretches], interval) == pytest.approx(expected)


def test_what_warms_up_never_counts() -> None:
    assert lost_fractions([dense(9, 9), plain(1, 1)], 1) == []
    assert lost_fractions([plain(9, 9), sparse(2.0, 1.0), plain(1, 1)], 10) == pytest.approx([0.1])


def test_one_slow_stretch_moves_the_spread_and_not_the_figure() -> None:
    row = [plain(1, 1)]
    for slow in (1.5, 1.5, 4.0):
        row += [sparse(slow, 1.0), plain(1, 1)]
    found = lost_figures([[FIRST, *row]])
    assert found["lost_step_percent_every_10"] == pytest.approx(5.0)
    assert found["lost_step_spread_percent_every_10"] == pytest.approx(25.0)
    assert "lost_step_percent_every_1" not in found
    assert found["step_seconds"] == pytest.approx(1.0)


def test_without_a_plain_stretch_there_is_no_figure() -> None:
    assert lost_figures([[FIRST]]) == {}
    assert lost_figures([]) == {}


def test_the_two_modes_stand_apart() -> None:
    row = [FIRST, plain(1, 1), dense(1.0, 1.5), plain(1, 1)]
    found = lost_figures([row], "_no_spare_core")
    assert found["lost_step_percent_every_1_no_spare_core"] == pytest.approx(50.0)
    assert found["relative_step_every_1_no_spare_core"] == pytest.approx(1.5)
    assert found["lost_step_spread_percent_every_1_no_spare_core"] is None, "one comparison says nothing about noise"
