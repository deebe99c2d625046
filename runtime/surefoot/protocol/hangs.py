"""Describes each rank's collective, and finds who is not in it.

Pure; agents say it of their own ranks, from PyTorch's flight recorder, and the operator compares those of all. Stacks of
ranks that wait in one line of the program look alike, whatever each of them waits for there.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from surefoot.protocol.text import join_names

_LIKE_TENSORS = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "_all_gather_base", "_reduce_scatter_base")
"""Calls to which every rank gives as much; of others a program may give unlike parts."""
_DEFAULT_GROUP = "default_pg"
"""PyTorch's name of the group of all ranks."""
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Collective:
    """What ranks wait for in one process group, or finished last."""

    ranks: tuple[int, ...]
    group: str
    """By the name that all its ranks know it by."""
    number: int
    """Counted within the group; equal on all its ranks for one and the same call."""
    call: str
    tensors: str
    """Types and sizes of what the rank gave."""
    state: Literal["finished", "scheduled", "started"]
    pairwise: bool = False
    """A send or receive, which concerns two ranks: numbers of unlike ranks say nothing."""

    @property
    def waits(self) -> bool:
        return self.state != "finished"

    def __str__(self) -> str:
        given = f" ({self.tensors})" if self.tensors else ""
        return f"{self.call} #{self.number} of {self.group}{given}"


@dataclass(frozen=True, slots=True)
class CollectiveOutlier:
    """Who is not where all others wait.

    `rank` None: nobody can be named, and `text` says why.
    """

    rank: int | None
    text: str
    program: bool
    """The ranks' code paths differ: a fault of the program, and of no node."""


Own = Mapping[int, tuple[Collective, ...]]


def find_outlier(told: Iterable[Collective]) -> CollectiveOutlier | None:
    """Names the one rank that provably holds all others up.

    Returns:
        The only rank that waits in none and has not entered one that others wait in; or the only one that waits in another
        than at least two others do. None where nothing is proven.
    """
    own: dict[int, tuple[Collective, ...]] = {}
    for one in told:
        for rank in one.ranks:
            own[rank] = (*own.get(rank, ()), one)
    free = [rank for rank, calls in own.items() if not any(c.waits for c in calls)]
    if len(free) == 1 and len(own) > 1:
        return _not_entered(own, free[0])
    if free or len(own) < 2:
        return None
    return _unlike(own) or _elsewhere(own) or _not_started(own)


def _not_entered(own: Own, rank: int) -> CollectiveOutlier | None:
    """The only rank that waits for nobody, if it is awaited.

    Not where it alone tells nothing of the group of all ranks: its recorder has lost what it waits in.
    """
    last = {c.group: c for c in own[rank] if not c.pairwise}
    if _DEFAULT_GROUP not in last and any(c.group == _DEFAULT_GROUP for calls in own.values() for c in calls):
        return None
    awaited = [
        c
        for other, calls in own.items()
        for c in calls
        if other != rank and c.waits and not c.pairwise and c.group in last and last[c.group].number < c.number
    ]
    if not awaited:
        return None
    call = max(awaited, key=lambda c: (c.number, c.group))
    return CollectiveOutlier(
        rank, f"has not entered {call}, in which others wait; its last was {last[call.group]}", False
    )


def _unlike(own: Own) -> CollectiveOutlier | None:
    """Ranks that made unlike calls under one number of one group."""
    kinds: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank, calls in own.items():
        for c in calls:
            if c.waits and not c.pairwise:
                kinds.setdefault((c.group, c.number), {}).setdefault(_kind(c), []).append(rank)
    found = [(place, by) for place, by in kinds.items() if len(by) > 1]
    if len(found) != 1:
        return None
    ((group, number), by), *_ = found
    few, *more = sorted(by.items(), key=lambda one: (len(one[1]), one[1]))
    if len(more) == 1 and len(few[1]) == 1 < len(more[0][1]):
        ((kind, (rank,)), (others, _)) = few, more[0]
        text = f"is at {kind} #{number} of {group}, where all others are at {others} #{number}"
        return CollectiveOutlier(rank, text, True)
    who = "; ".join(f"{_ranks(ranks)} at {kind}" for kind, ranks in sorted(by.items(), key=lambda one: one[1]))
    return CollectiveOutlier(None, f"under number {number} of {group} ranks made unlike calls: {who}", True)


def _elsewhere(own: Own) -> CollectiveOutlier | None:
    """The only rank that waits in other collectives than all others, which wait in the same."""
    waits = {rank: frozenset(_collective_key(c) for c in calls if c.waits) for rank, calls in own.items()}
    groups = Counter(waits.values()).most_common()
    if len(groups) != 2 or groups[1][1] != 1 or groups[0][1] < 2:
        return None
    rank = next(rank for rank, places in waits.items() if places == groups[1][0])
    other = next(rank for rank, places in waits.items() if places == groups[0][0])
    own_call, call = _newest(own[rank]), _newest(own[other])
    behind = own_call.group == call.group and own_call.pairwise == call.pairwise
    if behind and not call.pairwise and own_call.number > call.number:
        return None  # the root of a broadcast leaves it before the others
    return CollectiveOutlier(rank, f"waits in {own_call}, all others in {call}", program=not behind)


def _not_started(own: Own) -> CollectiveOutlier | None:
    """The only rank whose device has not begun what the devices of all others wait in."""
    calls = [c for of_rank in own.values() for c in of_rank if c.waits and not c.pairwise]
    begun = {(c.group, c.number) for c in calls if c.state == "started"}
    late = [
        (rank, c)
        for rank, of_rank in own.items()
        for c in of_rank
        if c.state == "scheduled" and (c.group, c.number) in begun
    ]
    if len(late) != 1 or len(own) < 3:
        return None
    ((rank, call),) = late
    return CollectiveOutlier(rank, f"has not begun {call} on its device, where all others wait in it", False)


def _kind(c: Collective) -> str:
    return f"{c.call} ({c.tensors})" if c.tensors and c.call in _LIKE_TENSORS else c.call


def _collective_key(c: Collective) -> Collective:
    """The same for all ranks that wait for the same."""
    like = c.call in _LIKE_TENSORS
    return replace(
        c, ranks=(), state="scheduled", tensors=c.tensors if like else "", number=0 if c.pairwise else c.number
    )


def _newest(calls: Iterable[Collective]) -> Collective:
    return max((c for c in calls if c.waits), key=lambda c: (not c.pairwise, 0 if c.pairwise else c.number, c.group))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {join_names(ranks, _MAX_NAMED)}"


# ---- stack locations -------------------------------------------------------------------------------------------------
# Describes where ranks stand, and finds the odd one. Pure; agents say it of their own ranks, the operator compares
# those of all. In a hang nearly all ranks wait in one collective for the one that does not come; whose timer runs out
# first says nothing.

INNERMOST_FRAMES = 5
"""Of a stack, by which is judged whether it waits."""

_BACKWARD = "_engine_run_backward"
_COLLECTIVES = (_BACKWARD, "synchronize")
"""Functions outside torch.distributed in which a rank waits for others."""

_LOADERS = ("/torch/utils/data/", "/surefoot/data/")


@dataclass(frozen=True, slots=True)
class RankStack:
    """Ranks of one worker whose main threads stand at the same stack."""

    ranks: tuple[int, ...]
    stack: str
    """Digest of all its frames: equal for equal programs, on whatever node."""
    text: str
    """The innermost frame, and the innermost of the user's own code."""
    waiting: bool
    """Whether it is a call that waits for other ranks."""


def find_outlier_rank(places: Iterable[RankStack]) -> tuple[int, str] | None:
    """Names the one rank that is not where all others are.

    Returns:
        The rank and where it stands: the only one that waits for nobody, or the only one in another place than at least
        two others that stand together. None where no rank differs, or more than one does.
    """
    stands = {rank: place for place in places for rank in place.ranks}
    busy = [rank for rank, place in stands.items() if not place.waiting]
    if len(busy) == 1 and len(stands) > 1:
        return busy[0], stands[busy[0]].text
    together: dict[str, list[int]] = {}
    for rank, place in stands.items():
        together.setdefault(place.stack, []).append(rank)
    groups = sorted(together.values(), key=len)
    if len(groups) == 2 and len(groups[0]) == 1 < len(groups[1]):
        alone = groups[0][0]
        return alone, stands[alone].text
    return None


def waits_for_ranks(frames: Sequence[tuple[str, str]]) -> bool:
    """Whether frames are a collective, or the backward pass that runs them.

    Args:
        frames: File and function of each, the innermost first.
    """
    return any("/torch/distributed/" in file or name in _COLLECTIVES for file, name in frames[:INNERMOST_FRAMES])


def runs_backward(frames: Sequence[tuple[str, str]]) -> bool:
    """Whether they are a backward pass, which computes and waits by turns."""
    return any(name == _BACKWARD for _, name in frames[:INNERMOST_FRAMES])


def loads_data(frames: Iterable[tuple[str, str]]) -> bool:
    """Whether they fetch data at any depth, with PyTorch's loaders or ours."""
    return any(part in file for file, _ in frames for part in _LOADERS)


# ---- learned step limit ----------------------------------------------------------------------------------------------
# Learns from a job's steps how long one may take. Pure; agents look at their trainers by it, and the operator judges by
# it. A limit for every job would be hours for one with steps of minutes, and an hour wasted for one with steps of a
# second.

FEWEST_STEPS = 10
"""Of fewer nothing is learned: the first ones compile, allocate and warm caches."""
MOST_STEPS = 31
"""Newest steps that are learned from."""

_MEDIANS = 20.0
_LONGEST = 3.0
_LEAST_SHARE = 0.2


def learned_limit_seconds(steps: Sequence[float], ceiling_seconds: float) -> float:
    """Returns after how long without a step a world is suspect.

    Args:
        steps: Recent steps, in seconds.
        ceiling_seconds: healthPolicy.stepTimeoutSeconds, after which no evidence is asked for.

    Returns:
        20 medians and 3 of the longest step, at least a fifth of the ceiling; the ceiling while fewer than ten are known.
    """
    if len(steps) < FEWEST_STEPS:
        return ceiling_seconds
    usual = max(_MEDIANS * statistics.median(steps), _LONGEST * max(steps), _LEAST_SHARE * ceiling_seconds)
    return min(ceiling_seconds, usual)
