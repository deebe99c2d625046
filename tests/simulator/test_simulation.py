"""The real decisions under an own clock and a seed: whatever fails, what must hold holds, and the job completes."""

import pytest

from simulator.settings import Settings
from simulator.world import simulate

BLOCKS = 20
SEEDS_PER_BLOCK = 10


@pytest.mark.parametrize("block", range(BLOCKS))
def test_jobs_survive_whatever_a_seed_brings(block: int) -> None:
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        outcome = simulate(seed)
        assert outcome.violation is None, (
            f"seed {seed}: {outcome.violation}; replay: PYTHONPATH=tests python -m simulator --replay {seed}"
        )


def test_a_seed_replays_exactly() -> None:
    first, second = simulate(7, tracing=True), simulate(7, tracing=True)

    assert first == second
    assert first.trace


def test_an_upload_that_failed_is_asked_for_again() -> None:
    away = Settings(faults=3, kinds=("persistent tier is away",), steps=40, fault_span_seconds=4.0)

    outcomes = [simulate(seed, away) for seed in range(5)]

    assert [(o.violation, o.phase) for o in outcomes] == [(None, "Complete")] * 5
