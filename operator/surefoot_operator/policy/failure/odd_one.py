"""Names the rank that differs, by stacks and by collectives.

Pure; called by `standstill`. Stacks tell a rank that stands elsewhere in the program, collectives one that stands in the
same line and waits for something else. Where they name two ranks, one of them is wrong, and nobody can say which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.protocol.standing.collectives import odd_collective
from surefoot.protocol.standing.rank_places import odd_rank
from surefoot_operator.job_snapshot import StandingSeen


@dataclass(frozen=True, slots=True)
class OddOne:
    """What tells a rank from all others.

    `rank` None: evidence without a culprit.
    """

    rank: int | None
    text: str
    """How it stands out: follows on the rank's name; a whole sentence where nobody is named."""
    program: bool = False
    """The program's ranks took unlike paths: its node has no part in it."""


def odd_one(told: Sequence[StandingSeen]) -> OddOne | None:
    """Who differs from all others; None where nobody does."""
    places = [place for one in told for place in one.places]
    calls = [call for one in told for call in one.collectives]
    by_stack = odd_rank(places)
    known = {rank for call in calls for rank in call.ranks} == {rank for place in places for rank in place.ranks}
    by_call = odd_collective(calls) if known else None
    if by_call is None:
        return None if by_stack is None else OddOne(by_stack[0], f"stands {by_stack[1]}, all others wait elsewhere")
    if by_stack is None or by_call.rank is None:
        return OddOne(by_call.rank, by_call.text, by_call.program)
    rank, place = by_stack
    if rank != by_call.rank:
        return OddOne(
            None,
            f"nobody is named: by its stack rank {rank} differs ({place}), by its collectives"
            f" rank {by_call.rank}, which {by_call.text}",
        )
    return OddOne(rank, f"stands {place}, all others wait elsewhere, and {by_call.text}", by_call.program)
