"""Tests of `restore.copy_choice`."""

from __future__ import annotations

import pytest

from surefoot.errors import Corrupt, ObjectRefused, TierError, TierUnavailable
from surefoot.protocol.checkpoints.save_state import join_sources
from surefoot.restore.copy_choice import REJECTION_TIMEOUT_SECONDS, RejectedObjects
from surefoot.restore.reader import ReadSummary

# ---- refused objects -------------------------------------------------------------------------------------------------
# One object that its tier refuses counts as damaged after a while, if the tier answers for others; silence never does.

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
    refused = RejectedObjects(clock)
    assert refused.judge_rejection("p0000", REFUSED, answers) is REFUSED
    clock.now += REJECTION_TIMEOUT_SECONDS - 0.1
    assert refused.judge_rejection("p0000", REFUSED, answers) is REFUSED
    clock.now += 0.2
    verdict = refused.judge_rejection("p0000", REFUSED, answers)
    assert isinstance(verdict, Corrupt)
    assert "job/27-1/rank-0/p0000: Is a directory" in str(verdict)
    assert refused.judge_rejection("p0001", REFUSED, answers) is REFUSED, "each object for itself"


@pytest.mark.parametrize("problem", [TierUnavailable("no answer"), TierError("of another kind")])
def test_silence_is_waited_for_without_a_verdict(problem: TierError) -> None:
    clock = Clock()
    refused = RejectedObjects(clock)
    for _ in range(100):
        assert refused.judge_rejection("p0000", problem, answers) is problem
        clock.now += REJECTION_TIMEOUT_SECONDS


def test_time_counts_only_while_the_tier_answers_for_others() -> None:
    clock = Clock()
    refused = RejectedObjects(clock)
    for ask in (answers, silent) * 20:
        assert refused.judge_rejection("p0000", REFUSED, ask) is REFUSED
        clock.now += REJECTION_TIMEOUT_SECONDS - 0.1


def test_an_answer_ends_the_time_of_a_refusal() -> None:
    """Two errors of a server that answered in between are no refusal of so long."""
    clock = Clock()
    refused = RejectedObjects(clock)
    assert refused.judge_rejection("p0000", REFUSED, answers) is REFUSED
    refused.record_answer("p0000")
    clock.now += 2 * REJECTION_TIMEOUT_SECONDS
    assert refused.judge_rejection("p0000", REFUSED, answers) is REFUSED


# ---- sources ---------------------------------------------------------------------------------------------------------
# Where a restore came from, in one word: never a better one than the truth.


@pytest.mark.parametrize(
    ("sources", "word"),
    [
        ([], None),
        (["none", "none"], None),
        (["staging", "staging", "none"], "staging"),
        (["staging", "memory"], "staging+memory"),
        (["staging+memory", "staging"], "staging+memory"),
        (["staging+memory", "memory"], "staging+memory"),
        (["memory", "memory"], "memory"),
        (["persistent"], "persistent"),
        (["persistent", "staging"], "mixed"),
        (["staging+memory", "mixed"], "mixed"),
    ],
)
def test_sources_of_several_become_one_word(sources: list[str], word: str | None) -> None:
    assert join_sources(sources) == word


@pytest.mark.parametrize(
    ("by_kind", "word"),
    [
        ({"staging": 12_341_888, "memory": 128}, "staging"),  # FSDP: only the optimizer's counters are everybody's
        ({"staging": 300, "memory": 600}, "staging+memory"),  # DDP: a share of each rank's
        ({"staging": 12_341_888, "persistent": 128}, "mixed"),
        ({"memory": 900, "persistent": 1}, "mixed"),
        ({"memory": 900, "peer": 900}, "memory"),
        ({}, "none"),
    ],
)
def test_a_source_of_next_to_nothing_is_not_named_but_the_persistent_tier_is(
    by_kind: dict[str, int], word: str
) -> None:
    assert ReadSummary(1, by_kind, 0).source == word
