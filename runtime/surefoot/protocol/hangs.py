"""Finds the outlier in a hang: the rank that differs from all others.

Pure. In a hang nearly all ranks wait in one collective for a rank that does not come; whose timer expires first proves
nothing. Agents describe each rank's collective, from PyTorch's flight recorder, and its stack; the operator compares
them over all ranks. Collectives are compared first: ranks that wait in the same line of the program have equal stacks
even if each waits for something else.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from surefoot.protocol.text import join_names

_LIKE_TENSORS = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "_all_gather_base", "_reduce_scatter_base")
"""Calls in which every rank passes equally large tensors; in others, ranks may pass different ones."""
_DEFAULT_GROUP = "default_pg"
"""PyTorch's name for the process group of all ranks."""
_MAX_NAMED_RANKS = 8
"""Ranks that a text lists by number; further ones are counted."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that ranks wait in, or finished last, in one process group."""

    ranks: tuple[int, ...]
    """Ranks of one worker whose call is the same."""
    group: str
    """Name of the process group, equal on all its ranks."""
    number: int
    """Sequence number within the group, equal on all its ranks for the same call."""
    call: str
    """PyTorch's name of the operation, as `all_reduce`."""
    tensors: str
    """Types and sizes of the tensors that the rank passed; empty: unknown."""
    state: Literal["finished", "scheduled", "started"]
    """scheduled: called but not yet running on the device; started: running there."""
    is_pairwise: bool = False
    """A send or receive between two ranks: its sequence number cannot be compared with other pairs'."""

    @property
    def is_waiting(self) -> bool:
        """Whether the ranks are still in this call."""
        return self.state != "finished"

    def __str__(self) -> str:
        tensors = f" ({self.tensors})" if self.tensors else ""
        return f"{self.call} #{self.number} of {self.group}{tensors}"


@dataclass(frozen=True, slots=True)
class CollectiveOutlier:
    """Conclusion from comparing the collectives of all ranks."""

    rank: int | None
    """The rank that differs from all others; None: no single one can be named, and `text` gives the reason."""
    text: str
    """The difference, to be read after the rank's name; a whole sentence if `rank` is None."""
    is_program_fault: bool
    """The ranks took different paths in the code: a fault of the program, not of a node."""


CallsByRank = Mapping[int, tuple[Collective, ...]]
"""The collectives of each rank."""


def find_collective_outlier(collectives: Iterable[Collective]) -> CollectiveOutlier | None:
    """Names the one rank that provably blocks all others.

    Returns:
        The only rank that waits in no collective and has not entered one in which others wait; or the only rank that
        waits in another collective than all others (at least two). None if nothing is proven.
    """
    calls_by_rank: dict[int, tuple[Collective, ...]] = {}
    for collective in collectives:
        for rank in collective.ranks:
            calls_by_rank[rank] = (*calls_by_rank.get(rank, ()), collective)
    idle_ranks = [rank for rank, calls in calls_by_rank.items() if not any(c.is_waiting for c in calls)]
    if len(idle_ranks) == 1 and len(calls_by_rank) > 1:
        return _find_not_entered(calls_by_rank, idle_ranks[0])
    # several idle ranks, or a single rank: no one can be named by comparison
    if idle_ranks or len(calls_by_rank) < 2:
        return None
    return (
        _find_different_calls(calls_by_rank)
        or _find_in_other_collective(calls_by_rank)
        or _find_not_started(calls_by_rank)
    )


def _find_not_entered(calls_by_rank: CallsByRank, rank: int) -> CollectiveOutlier | None:
    """Names the only rank that waits in no collective, if others wait for it.

    If this rank alone reports nothing of the group of all ranks, its recorder has lost the call: then nothing is proven.
    """
    last_by_group = {c.group: c for c in calls_by_rank[rank] if not c.is_pairwise}
    if _DEFAULT_GROUP not in last_by_group and any(
        c.group == _DEFAULT_GROUP for calls in calls_by_rank.values() for c in calls
    ):
        return None
    awaited = [
        c
        for other, calls in calls_by_rank.items()
        for c in calls
        if other != rank
        and c.is_waiting
        and not c.is_pairwise
        and c.group in last_by_group
        and last_by_group[c.group].number < c.number
    ]
    if not awaited:
        return None
    call = max(awaited, key=lambda c: (c.number, c.group))
    return CollectiveOutlier(
        rank, f"has not entered {call}, in which others wait; its last was {last_by_group[call.group]}", False
    )


def _find_different_calls(calls_by_rank: CallsByRank) -> CollectiveOutlier | None:
    """Finds ranks that made different calls under the same sequence number of one group."""
    ranks_by_kind: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank, calls in calls_by_rank.items():
        for call in calls:
            if call.is_waiting and not call.is_pairwise:
                ranks_by_kind.setdefault((call.group, call.number), {}).setdefault(_comparable_call(call), []).append(
                    rank
                )
    disagreements = [
        (call_key, ranks_by_call) for call_key, ranks_by_call in ranks_by_kind.items() if len(ranks_by_call) > 1
    ]
    # disagreement in several groups does not identify the first one
    if len(disagreements) != 1:
        return None
    ((group, number), ranks_by_call), *_ = disagreements
    smallest, *larger = sorted(ranks_by_call.items(), key=lambda item: (len(item[1]), item[1]))
    if len(larger) == 1 and len(smallest[1]) == 1 < len(larger[0][1]):
        ((kind, (rank,)), (other_kind, _)) = smallest, larger[0]
        text = f"is at {kind} #{number} of {group}, where all others are at {other_kind} #{number}"
        return CollectiveOutlier(rank, text, True)
    calls_text = "; ".join(
        f"{_format_ranks(ranks)} at {kind}" for kind, ranks in sorted(ranks_by_call.items(), key=lambda item: item[1])
    )
    return CollectiveOutlier(None, f"ranks made different calls as number {number} of {group}: {calls_text}", True)


def _find_in_other_collective(calls_by_rank: CallsByRank) -> CollectiveOutlier | None:
    """Names the only rank that waits in other collectives than all others, if those wait in the same ones."""
    waits_by_rank = {
        rank: frozenset(_collective_key(c) for c in calls if c.is_waiting) for rank, calls in calls_by_rank.items()
    }
    set_counts = Counter(waits_by_rank.values()).most_common()
    if len(set_counts) != 2 or set_counts[1][1] != 1 or set_counts[0][1] < 2:
        return None
    rank = next(rank for rank, waiting_calls in waits_by_rank.items() if waiting_calls == set_counts[1][0])
    other_rank = next(rank for rank, waiting_calls in waits_by_rank.items() if waiting_calls == set_counts[0][0])
    # the same kind of call in the same group is a delay; anything else is another path in the program
    outlier_call, call = _newest_waiting(calls_by_rank[rank]), _newest_waiting(calls_by_rank[other_rank])
    same_group = outlier_call.group == call.group and outlier_call.is_pairwise == call.is_pairwise
    if same_group and not call.is_pairwise and outlier_call.number > call.number:
        return None  # normal in a broadcast: its root continues before the others have received
    return CollectiveOutlier(rank, f"waits in {outlier_call}, all others in {call}", is_program_fault=not same_group)


def _find_not_started(calls_by_rank: CallsByRank) -> CollectiveOutlier | None:
    """Names the only rank whose device has not started the collective in which all other devices wait."""
    calls = [c for rank_calls in calls_by_rank.values() for c in rank_calls if c.is_waiting and not c.is_pairwise]
    started = {(c.group, c.number) for c in calls if c.state == "started"}
    not_started = [
        (rank, c)
        for rank, rank_calls in calls_by_rank.items()
        for c in rank_calls
        if c.state == "scheduled" and (c.group, c.number) in started
    ]
    if len(not_started) != 1 or len(calls_by_rank) < 3:
        return None
    ((rank, call),) = not_started
    return CollectiveOutlier(rank, f"has not started {call} on its device, where all others wait in it", False)


def _comparable_call(collective: Collective) -> str:
    """Returns the part of a call that must be equal on all ranks of its group."""
    return (
        f"{collective.call} ({collective.tensors})"
        if collective.tensors and collective.call in _LIKE_TENSORS
        else collective.call
    )


def _collective_key(collective: Collective) -> Collective:
    """Returns the call without its differences between ranks: equal if the ranks wait for the same thing."""
    compares_tensors = collective.call in _LIKE_TENSORS
    return replace(
        collective,
        ranks=(),
        state="scheduled",
        tensors=collective.tensors if compares_tensors else "",
        number=0 if collective.is_pairwise else collective.number,
    )


def _newest_waiting(calls: Iterable[Collective]) -> Collective:
    return max(
        (c for c in calls if c.is_waiting), key=lambda c: (not c.is_pairwise, 0 if c.is_pairwise else c.number, c.group)
    )


def _format_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {join_names(ranks, _MAX_NAMED_RANKS)}"


# ---- stack locations -------------------------------------------------------------------------------------------------
# Compares the innermost stack frames of all ranks, where collectives alone do not identify the outlier. Agents describe
# their own ranks, the operator compares those of all.

INNERMOST_FRAMES = 5
"""Number of stack frames, the innermost first, that decide whether a stack waits for other ranks."""

_BACKWARD = "_engine_run_backward"
_COLLECTIVES = (_BACKWARD, "synchronize")
"""Functions outside torch.distributed in which a rank waits for others."""

_LOADERS = ("/torch/utils/data/", "/surefoot/data/")
"""Parts of file paths that only data loaders have."""


@dataclass(frozen=True, slots=True)
class RankStack:
    """Ranks of one worker whose main threads have the same stack."""

    ranks: tuple[int, ...]
    """Global ranks of these trainers."""
    stack_digest: str
    """Digest of all frames: equal on every node that runs the same program at the same place."""
    text: str
    """The innermost frame, and the innermost one in the user's own code."""
    is_waiting: bool
    """Whether the stack is in a call that waits for other ranks."""


def find_stack_outlier(stacks: Iterable[RankStack]) -> tuple[int, str] | None:
    """Names the one rank whose stack differs from all others'.

    Returns:
        The rank and its stack's text: the only rank that waits for no other, or the only one with another stack than
        all others (at least two, with equal stacks). None if no rank differs, or more than one does.
    """
    stack_by_rank = {rank: stack for stack in stacks for rank in stack.ranks}
    busy_ranks = [rank for rank, stack in stack_by_rank.items() if not stack.is_waiting]
    if len(busy_ranks) == 1 and len(stack_by_rank) > 1:
        return busy_ranks[0], stack_by_rank[busy_ranks[0]].text
    ranks_by_stack: dict[str, list[int]] = {}
    for rank, stack in stack_by_rank.items():
        ranks_by_stack.setdefault(stack.stack_digest, []).append(rank)
    groups = sorted(ranks_by_stack.values(), key=len)
    if len(groups) == 2 and len(groups[0]) == 1 < len(groups[1]):
        outlier = groups[0][0]
        return outlier, stack_by_rank[outlier].text
    return None


def waits_for_ranks(frames: Sequence[tuple[str, str]]) -> bool:
    """Whether a stack is in a collective, or in the backward pass that runs collectives.

    Args:
        frames: File and function of each frame, the innermost first.
    """
    return any(
        "/torch/distributed/" in file or function in _COLLECTIVES for file, function in frames[:INNERMOST_FRAMES]
    )


def runs_backward(frames: Sequence[tuple[str, str]]) -> bool:
    """Whether a stack is in a backward pass, which alternates between computing and waiting."""
    return any(function == _BACKWARD for _, function in frames[:INNERMOST_FRAMES])


def loads_data(frames: Iterable[tuple[str, str]]) -> bool:
    """Whether any frame of a stack belongs to a data loader, PyTorch's or Surefoot's."""
    return any(part in file for file, _ in frames for part in _LOADERS)


# ---- learned step limit ----------------------------------------------------------------------------------------------
# Derives from a job's own steps how long one may take before a hang is suspected. A fixed limit would be too short for
# steps of minutes and would waste an hour where steps take a second. Agents apply it to their trainers, the operator to
# the job.

MIN_LEARNED_STEPS = 10
"""Steps needed before the limit is learned: the first ones compile, allocate and warm caches."""
MAX_LEARNED_STEPS = 31
"""Newest steps that the limit is learned from."""

_MIN_MEDIAN_MULTIPLE = 20.0
"""The limit in medians of the steps, at least."""
_MIN_LONGEST_MULTIPLE = 3.0
"""The limit in times of the longest step, at least."""
_MIN_CEILING_RATIO = 0.2
"""The limit as a share of the ceiling, at least."""


def hang_suspicion_seconds(step_seconds: Sequence[float], ceiling_seconds: float) -> float:
    """Returns how many seconds without a step make a hang suspect.

    Args:
        step_seconds: Durations of recent steps, in seconds.
        ceiling_seconds: healthPolicy.stepTimeoutSeconds: a hang is then declared without further evidence.

    Returns:
        The largest of 20 median steps, 3 longest steps and a fifth of the ceiling, but never more than the ceiling; the
        ceiling itself while there are fewer than ten steps.
    """
    if len(step_seconds) < MIN_LEARNED_STEPS:
        return ceiling_seconds
    learned = max(
        _MIN_MEDIAN_MULTIPLE * statistics.median(step_seconds),
        _MIN_LONGEST_MULTIPLE * max(step_seconds),
        _MIN_CEILING_RATIO * ceiling_seconds,
    )
    return min(ceiling_seconds, learned)
