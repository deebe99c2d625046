"""Describes where ranks stand, and finds the odd one.

Pure; agents say it of their own ranks, the operator compares those of all. In a hang nearly all ranks wait in one
collective for the one that does not come; whose timer runs out first says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

INNERMOST_FRAMES = 5
"""Of a stack, by which is judged whether it waits."""

_BACKWARD = "_engine_run_backward"
_COLLECTIVES = (_BACKWARD, "synchronize")
"""Functions outside torch.distributed in which a rank waits for others."""

_LOADERS = ("/torch/utils/data/", "/surefoot/data/")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Ranks of one worker whose main threads stand at the same stack."""

    ranks: tuple[int, ...]
    stack: str
    """Digest of all its frames: equal for equal programs, on whatever node."""
    text: str
    """The innermost frame, and the innermost of the user's own code."""
    waiting: bool
    """Whether it is a call that waits for other ranks."""


def odd_rank(places: Iterable[RankPlace]) -> tuple[int, str] | None:
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
