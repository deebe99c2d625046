"""Every rule is needed, and the oracle sees: with one rule broken, some seed shows a violation.

Those that a seed or two show are tried here; `python -m bench mutate` tries them all.
"""

from dataclasses import replace

import pytest

from simulator import mutate
from simulator.mutations import MUTATIONS, Mutation, broken
from simulator.world import simulate

MOST_SEEDS = 30

SLOW = frozenset({
    "a last checkpoint that is out of the operator's sight is trained again",
    "what nodes were left for counts no more",
    "a node is left for one failure",
    "a restoring rank takes some holders for all",
    "agents hear of holders that status does not name",
    "what a rollback goes back to is lost, and nothing else is tried",
    "who was asked to be deleted is chosen",
    "who was given up is never waited for again",
    "a new line is not told which holders there are",
    "a restart forgets which steps were odd",
    "copies on a node that is left count",
    "a halted world does not wait for its copies",
    "a world that told of no step is ended without a halt",
    "one damaged entry hides all that a holder has",
    "a listing that does not decide is waited for without limit",
    "a listing that takes long is given up and begun again",
    "a node that the cluster doubts is lost",
    "an agent without a leader takes one copy for enough",
    "the janitor does not look for the entry",
    "a checkpoint counts though a rank's part is nowhere",
    "a claim does not take back what an agent was told",
    "a drain writes as the newest epoch that its agent heard of",
    "a floor may lie off the lineage",
    "a hold binds after one acceptance",
    "a line that breaks is a worker that is lost",
    "agents do not hear when holders change",
    "an agent accepts a halt once one of its ranks has",
    "an agent says its facts once",
    "an agent takes an older epoch's assignment",
    "an epoch without a step of its own has no last checkpoint",
    "an interrupted step is saved",
    "an upload that was not wanted for a while is not asked for again",
    "drains of the old epoch are not awaited",
    "drops go on while a holder is being sealed",
    "facts of an older epoch count in the next",
    "nodes are left for a rank that fails wherever it runs",
    "nothing is ever dropped",
    "readings of an older epoch and unsealed holders count",
    "steps that others tell of are no sign of life",
    "the fence is not checked by commit",
    "the fence is not checked by drop",
    "the floor does not bind the parent",
    "what is refused ends its plan",
    "whatever an epoch saved counts, also beyond where a later one branched off",
    "whoever ever said hello may be a member",
})  # fmt: skip
"""Left to `python -m bench mutate`: many seeds pass before one shows them."""

QUICK = [m for m in MUTATIONS if not m.redundant and m.name not in SLOW]


@pytest.mark.parametrize("mutation", QUICK, ids=lambda m: m.name)
def test_a_broken_rule_is_found(mutation: Mutation) -> None:
    with broken(mutation):
        for seed in range(MOST_SEEDS):
            if simulate(seed, mutation.settings, mutation.rules, mutation.decisions).violation is not None:
                return
    pytest.fail(f"{mutation.name}: {MOST_SEEDS} seeds showed no violation")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_every_broken_rule_still_names_what_it_breaks(mutation: Mutation) -> None:
    for owner, name, value in mutation.patches:
        assert getattr(owner, name) is not value
    with broken(mutation):
        assert all(getattr(owner, name) is value for owner, name, value in mutation.patches)


def test_what_is_left_to_make_mutate_exists() -> None:
    assert {mutation.name for mutation in MUTATIONS} >= SLOW
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 60


def test_a_seed_that_fails_without_the_mutation_too_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(simulate(0), violation="said by every run", check="run")
    monkeypatch.setattr(mutate, "simulate", lambda *_: failed)
    assert not mutate.noticed(Mutation("nothing is broken"), most_seeds=3, most_seconds=60.0)["found"]
