"""Every rule is needed, and the oracle sees: with one rule broken, some seed shows a violation."""

import pytest

from simulator.mutations import MUTATIONS, Mutation, broken
from simulator.world import simulate

MOST_SEEDS = 120


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_broken_rule_is_found(mutation: Mutation) -> None:
    with broken(mutation):
        for seed in range(MOST_SEEDS):
            if simulate(seed, mutation.settings, mutation.rules, mutation.decisions).violation is not None:
                return
    pytest.fail(f"{mutation.name}: {MOST_SEEDS} seeds showed no violation")
