"""How an agent asks its ranks for their collectives, and what it makes of answers that lack."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from surefoot.agent.trainers import hang_diagnosis
from surefoot.agent.trainers.hang_diagnosis import (
    MAX_COLLECTIVES_CHARACTERS,
    Answers,
    CollectiveInquiry,
    collectives_of,
    summarize_collectives,
)
from surefoot.ipc.trainer_messages import CollectivesTold, TellCollectives
from surefoot.protocol.hangs import Collective

WAITS = Collective((0,), "default_pg", 812, "all_reduce", "Float[4]", "scheduled")
DONE = replace(WAITS, number=811, state="finished")


def told(rank: int, one: Collective, request: int = 1, seconds: float = 12.4) -> CollectivesTold:
    return CollectivesTold(request, (replace(one, ranks=(rank,)),), (seconds,))


@dataclass
class Ranks:
    """Trainers that answer at once, unless they are mute."""

    mute: frozenset[int] = frozenset()
    attached: frozenset[int] = frozenset((0, 1, 2))
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inquiry = CollectiveInquiry(self.tell, lambda _: self.attached)

    def tell(self, epoch: int, rank: int, message: TellCollectives) -> None:
        self.asked.append(rank)
        self.inquiry.heard(rank, told(rank, WAITS, message.request - 1))  # to an earlier question
        if rank not in self.mute:
            self.inquiry.heard(rank, told(rank, WAITS, message.request))

    def ask(self) -> Answers:
        return asyncio.run(self.inquiry.ask(5, (2, 0, 1)))


def test_all_that_answer_are_heard_and_grouped() -> None:
    answers = Ranks().ask()
    assert list(answers) == [0, 1, 2]
    assert collectives_of(answers) == (replace(WAITS, ranks=(0, 1, 2)),)


def test_a_rank_that_does_not_answer_costs_the_limit_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_diagnosis, "TAKE_SECONDS", 0.01)
    answers = Ranks(mute=frozenset((1,))).ask()
    assert "it holds the GIL" in answers[1].why
    assert collectives_of(answers) == (), "which proves nothing"
    assert (
        summarize_collectives(answers).splitlines()[0].startswith("rank 1: collective unknown: it did not say within")
    )


def test_who_is_on_no_line_is_not_waited_for() -> None:
    ranks = Ranks(attached=frozenset((0, 2)))
    answers = ranks.ask()
    assert sorted(ranks.asked) == [0, 2]
    assert answers[1].why == "it cannot say: it has made no Checkpointer"
    assert Ranks(attached=frozenset()).ask()[0].why == answers[1].why


def test_the_summary_groups_ranks_and_the_smallest_comes_first() -> None:
    answers = {0: told(0, WAITS), 1: told(1, WAITS, seconds=11.0), 2: told(2, DONE)}
    assert summarize_collectives(answers) == (
        "rank 2: in no collective, the last: all_reduce #811 of default_pg (Float[4]), made 12 s ago\n"
        "ranks 0, 1: waits in all_reduce #812 of default_pg (Float[4]), made 11 s ago"
    )
    many = {rank: told(rank, replace(WAITS, number=rank, tensors="x" * 60)) for rank in range(200)}
    assert len(summarize_collectives(many)) <= MAX_COLLECTIVES_CHARACTERS
    assert summarize_collectives({}) == ""


def test_ranks_in_unlike_collectives_are_told_apart() -> None:
    found = collectives_of({0: told(0, WAITS), 1: told(1, DONE), 2: told(2, WAITS)})
    assert {one.ranks for one in found} == {(0, 2), (1,)}
