"""Decides which boxes one rank saves: its own, and its shares.

Pure. Asked twice: by a rank of itself, when it plans a save, and by a reader of any rank, to know where a box was
saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.geometry.box import Box
from surefoot.geometry.grids import Grid
from surefoot.geometry.shares import Shares, ShareShape

Sharing = Literal["split", "lowest"]
"""How ranks that hold the same box share its saving: in parts, or all of it by the first of them."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """Describes one box that a rank holds of a tensor.

    `same`: all that hold it; None: others save it, and it is only read.
    """

    name: str
    box: Box
    itemsize: int
    same: Grid | None
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class Sharers:
    """Names the holdings that one group of ranks shares.

    By their numbers, with the shares.
    """

    numbers: tuple[int, ...]
    shares: Shares


def saved_boxes(
    holdings: Sequence[HeldBox], rank: int, groups: Mapping[Grid, Sharers] | None = None
) -> list[tuple[int, Box]]:
    """Computes what a rank saves of its holdings.

    Pairs of a holding's number and a box in the tensor's coordinates. `groups`: what `shared` says of these holdings,
    if the caller has asked it before.
    """
    found = []
    for number, held in enumerate(holdings):
        if held.same is None or held.box.volume == 0:
            continue
        if held.same.count == 1 or (held.sharing == "lowest" and held.same.at(0) == rank):
            found.append((number, held.box))
    for group, sharers in (shared(holdings) if groups is None else groups).items():
        member = group.number(rank)
        if member is None:
            raise ValueError(f"rank {rank} is not one of {group}, which are said to hold what it holds")
        for place, box in sharers.shares.of(member):
            number = sharers.numbers[place]
            found.append((number, _moved(box, holdings[number].box.offsets)))
    return found


def shared(holdings: Sequence[HeldBox]) -> dict[Grid, Sharers]:
    """Computes what each group of ranks shares.

    In an order that all its members come to.
    """
    together: dict[Grid, list[int]] = defaultdict(list)
    reserved: dict[Grid, int] = defaultdict(int)
    for number, held in enumerate(holdings):
        if held.same is None or held.same.count == 1 or held.box.volume == 0:
            continue
        if held.sharing == "split":
            together[held.same].append(number)
        else:
            reserved[held.same] += held.box.volume * held.itemsize
    found = {}
    for group, numbers in together.items():
        numbers.sort(key=lambda n: (holdings[n].name, holdings[n].box.offsets))
        shapes = [ShareShape(holdings[n].box.lengths, holdings[n].itemsize) for n in numbers]
        found[group] = Sharers(tuple(numbers), Shares(shapes, group.count, reserved[group]))
    return found


def _moved(box: Box, by: tuple[int, ...]) -> Box:
    return Box(tuple(o + c for o, c in zip(box.offsets, by, strict=True)), box.lengths)
