"""One object that its tier refuses counts as damaged after a while, if the tier answers for others; silence never does."""

from __future__ import annotations

import pytest

from surefoot.errors import Corrupt, ObjectRefused, TierError, TierUnavailable
from surefoot.restore.copy_choice import PATIENCE_SECONDS, RefusedObjects

REFUSED = ObjectRefused("folder /kept, reading job/27-1/rank-0/p0000: Is a directory")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def answers() -> None:
    """A neighbour that can be read."""


def silent() -> None:
    raise TierUnavailable("nobody answers")


def test_an_object_that_is_refused_beside_others_that_are_read_is_damaged_after_a_while() -> None:
    clock = Clock()
    refused = RefusedObjects(clock)
    assert refused.verdict("p0000", REFUSED, answers) is REFUSED
    clock.now += PATIENCE_SECONDS - 0.1
    assert refused.verdict("p0000", REFUSED, answers) is REFUSED
    clock.now += 0.2
    verdict = refused.verdict("p0000", REFUSED, answers)
    assert isinstance(verdict, Corrupt)
    assert "job/27-1/rank-0/p0000: Is a directory" in str(verdict)
    assert refused.verdict("p0001", REFUSED, answers) is REFUSED, "each object for itself"


@pytest.mark.parametrize("problem", [TierUnavailable("no answer"), TierError("of another kind")])
def test_silence_is_waited_for_without_a_verdict(problem: TierError) -> None:
    clock = Clock()
    refused = RefusedObjects(clock)
    for _ in range(100):
        assert refused.verdict("p0000", problem, answers) is problem
        clock.now += PATIENCE_SECONDS


def test_time_counts_only_while_the_tier_answers_for_others() -> None:
    clock = Clock()
    refused = RefusedObjects(clock)
    for ask in (answers, silent) * 20:
        assert refused.verdict("p0000", REFUSED, ask) is REFUSED
        clock.now += PATIENCE_SECONDS - 0.1


def test_an_answer_ends_the_time_of_a_refusal() -> None:
    """Two errors of a server that answered in between are no refusal of so long."""
    clock = Clock()
    refused = RefusedObjects(clock)
    assert refused.verdict("p0000", REFUSED, answers) is REFUSED
    refused.record_answer("p0000")
    clock.now += 2 * PATIENCE_SECONDS
    assert refused.verdict("p0000", REFUSED, answers) is REFUSED
