"""Tests of `agent.trainers.hang_diagnosis`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from surefoot.agent.trainers import hang_diagnosis
from surefoot.agent.trainers.hang_diagnosis import (
    MAX_COLLECTIVES_CHARACTERS,
    MAX_STACKS_CHARACTERS,
    Answers,
    CollectiveQuery,
    Frame,
    collectives_of,
    parse_main_thread,
    summarize_collectives,
    summarize_stacks,
)
from surefoot.ipc.stacks import CapturedStack
from surefoot.ipc.trainer_messages import CollectivesReport, RequestCollectives
from surefoot.protocol.hangs import Collective

# ---- collective inquiry ----------------------------------------------------------------------------------------------
# How an agent asks its ranks for their collectives, and what it makes of answers that lack.

WAITS = Collective((0,), "default_pg", 812, "all_reduce", "Float[4]", "scheduled")
DONE = replace(WAITS, number=811, state="finished")


def told(rank: int, one: Collective, request: int = 1, seconds: float = 12.4) -> CollectivesReport:
    return CollectivesReport(request, (replace(one, ranks=(rank,)),), (seconds,))


@dataclass
class Ranks:
    """Trainers that answer at once, unless they are mute."""

    mute: frozenset[int] = frozenset()
    attached: frozenset[int] = frozenset((0, 1, 2))
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inquiry = CollectiveQuery(self.tell, lambda _: self.attached)

    def tell(self, epoch: int, rank: int, message: RequestCollectives) -> None:
        self.asked.append(rank)
        self.inquiry.add_reply(rank, told(rank, WAITS, message.request - 1))  # to an earlier question
        if rank not in self.mute:
            self.inquiry.add_reply(rank, told(rank, WAITS, message.request))

    def ask(self) -> Answers:
        return asyncio.run(self.inquiry.query_ranks(5, (2, 0, 1)))


def test_all_that_answer_are_heard_and_grouped() -> None:
    answers = Ranks().ask()
    assert list(answers) == [0, 1, 2]
    assert collectives_of(answers) == (replace(WAITS, ranks=(0, 1, 2)),)


def test_a_rank_that_does_not_answer_costs_the_limit_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_diagnosis, "CAPTURE_TIMEOUT_SECONDS", 0.01)
    answers = Ranks(mute=frozenset((1,))).ask()
    assert "keeps the GIL" in answers[1].reason
    assert collectives_of(answers) == (), "which proves nothing"
    assert summarize_collectives(answers).splitlines()[0].startswith("rank 1: collective unknown: no answer within")


def test_who_is_on_no_line_is_not_waited_for() -> None:
    ranks = Ranks(attached=frozenset((0, 2)))
    answers = ranks.ask()
    assert sorted(ranks.asked) == [0, 2]
    assert answers[1].reason == "it cannot be asked, since it has created no Checkpointer"
    assert Ranks(attached=frozenset()).ask()[0].reason == answers[1].reason


def test_the_summary_groups_ranks_and_the_smallest_comes_first() -> None:
    answers = {0: told(0, WAITS), 1: told(1, WAITS, seconds=11.0), 2: told(2, DONE)}
    assert summarize_collectives(answers) == (
        "rank 2: in no collective, the last: all_reduce #811 of default_pg (Float[4]), called 12 s ago\n"
        "ranks 0, 1: waits in all_reduce #812 of default_pg (Float[4]), called 11 s ago"
    )
    many = {rank: told(rank, replace(WAITS, number=rank, tensors="x" * 60)) for rank in range(200)}
    assert len(summarize_collectives(many)) <= MAX_COLLECTIVES_CHARACTERS
    assert summarize_collectives({}) == ""


def test_ranks_in_unlike_collectives_are_told_apart() -> None:
    found = collectives_of({0: told(0, WAITS), 1: told(1, DONE), 2: told(2, WAITS)})
    assert {one.ranks for one in found} == {(0, 2), (1,)}


# ---- stack summary ---------------------------------------------------------------------------------------------------
# Where ranks stand, from what faulthandler wrote.

WAITS_STACK_SUMMARY = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f00 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3001 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 40 in main
  File "/home/me/train.py", line 70 in <module>
"""
SLEEPS = """Current thread 0x00007f00 (most recent call first):
  File "/home/me/train.py", line 28 in load
  File "/home/me/train.py", line 39 in main
  File "/home/me/train.py", line 70 in <module>
"""


def test_the_main_thread_is_the_last_one() -> None:
    assert parse_main_thread(WAITS_STACK_SUMMARY)[0].function == "all_reduce"
    assert parse_main_thread(SLEEPS) == (
        Frame("/home/me/train.py", 28, "load"),
        Frame("/home/me/train.py", 39, "main"),
        Frame("/home/me/train.py", 70, "<module>"),
    )


def test_ranks_that_stand_alike_are_one_group_and_the_smallest_comes_first() -> None:
    told = summarize_stacks(
        [
            CapturedStack(0, WAITS_STACK_SUMMARY),
            CapturedStack(1, WAITS_STACK_SUMMARY),
            CapturedStack(2, SLEEPS),
            CapturedStack(3, WAITS_STACK_SUMMARY),
        ]
    )
    assert told == (
        "rank 2: in load (me/train.py:28)\n"
        "ranks 0, 1, 3: in all_reduce (distributed/distributed_c10d.py:3001), called by main (me/train.py:40)"
    )


def test_a_rank_without_a_stack_says_why() -> None:
    assert summarize_stacks([CapturedStack(5, "", "its process is stopped")]) == "rank 5: its process is stopped"
    assert summarize_stacks([CapturedStack(5, "nonsense")]) == "rank 5: it runs no Python code"


def test_it_stays_short_whatever_a_program_calls_its_functions() -> None:
    long = 'Current thread 0x1 (most recent call first):\n  File "/a.py", line {} in ' + "f" * 5000 + "\n"
    told = summarize_stacks([CapturedStack(rank, long.format(rank)) for rank in range(1000)])
    assert len(told) <= MAX_STACKS_CHARACTERS
    assert len(summarize_stacks([CapturedStack(rank, SLEEPS) for rank in range(1000)])) < 200
