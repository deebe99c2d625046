"""The state of an elastic stream: cursors of lanes, what older worlds left, and how another world takes them over. Pure."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data.extents import Cursor, Dealing, Extent, Left, Lengths, left_of
from surefoot.data.lanes import LaneCursor
from surefoot.data.order import share
from surefoot.errors import StateMismatch

_WIDTH = len(Extent._fields)


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Which lanes a step reads: `per_lane` samples from each of `slots` lanes, of another stripe each step.

    Every worker process reads stripes of its own, so that no sample is decoded twice.
    """

    slots: int
    per_lane: int
    stripes: int

    @property
    def lanes(self) -> int:
        """In all."""
        return self.slots * self.stripes

    @property
    def batch(self) -> int:
        """Samples a step."""
        return self.slots * self.per_lane

    def own(self, rank: int, world: int) -> tuple[int, ...]:
        """The slots of a rank."""
        return tuple(range(*share(self.slots, world, rank)))

    def lanes_of(self, slots: Iterable[int]) -> list[int]:
        """All lanes of these slots."""
        return [self.lane(stripe, slot) for stripe in range(self.stripes) for slot in slots]

    def lane(self, step: int, slot: int) -> int:
        """The lane that `slot` reads at `step`."""
        return step % self.stripes * self.slots + slot

    def span(self, lane: int, items: int) -> tuple[int, int]:
        """Positions [start, stop) of the run that a lane's visit was which ended behind `items` samples of it."""
        stripe, slot = divmod(lane, self.slots)
        step = (items // self.per_lane - 1) * self.stripes + stripe
        start = step * self.batch + slot * self.per_lane
        return start, start + self.per_lane


def joined_spans(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours become one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def lanes_as_plain(cursors: Mapping[int, LaneCursor]) -> list[list[int]]:
    """One list a lane, its number first."""
    return [[lane, *cursor.plain()] for lane, cursor in sorted(cursors.items())]


def lanes_of_plain(plain: Sequence[Sequence[int]]) -> dict[int, LaneCursor]:
    """What `lanes_as_plain` gave."""
    return {numbers[0]: LaneCursor.of_plain(numbers[1:]) for numbers in plain}


def left_as_plain(left: Left, lengths: Lengths) -> dict[str, Any]:
    """pass → [whole shards as bits, other extents as numbers]."""
    found = {}
    for turn, extents in left.items():
        bits = bytearray(-(-len(lengths) // 8))
        others: list[int] = []
        for extent in extents:
            if extent == Extent(extent.shard, 0, lengths[extent.shard]):
                bits[extent.shard // 8] |= 1 << extent.shard % 8
            else:
                others += [extent.shard, extent.start, -1 if extent.stop is None else extent.stop, *extent[3:]]
        found[str(turn)] = [b64encode(bytes(bits)).decode(), others]
    return found


def left_of_plain(plain: Mapping[str, Any], lengths: Lengths) -> dict[int, list[Extent]]:
    """What `left_as_plain` gave; extents that were begun come first."""
    found = {}
    for turn, (text, others) in plain.items():
        bits = b64decode(text)
        extents = [
            Extent(others[at], others[at + 1], None if others[at + 2] < 0 else others[at + 2], *others[at + 3 : at + 5])
            for at in range(0, len(others), _WIDTH)
        ]
        whole = [s for s in range(len(lengths)) if bits[s // 8] >> s % 8 & 1]
        found[int(turn)] = extents + [Extent(shard, 0, lengths[shard]) for shard in whole]
    return found


def taken_over(states: Sequence[Mapping[str, Any]]) -> dict[int, LaneCursor]:
    """The cursors of all lanes, from what each rank of the older world had of its own."""
    cursors: dict[int, LaneCursor] = {}
    for rank, state in enumerate(states):
        mine = lanes_of_plain(state["lanes"])
        if twice := sorted(cursors.keys() & mine.keys()):
            raise StateMismatch(
                f"lane {twice[0]} is in the states of two ranks, of which rank {rank} is one: they are not of one checkpoint"
            )
        cursors |= mine
    return cursors


def left_behind(dealing: Dealing, cursors: Mapping[int, LaneCursor], source: int) -> dict[int, list[Extent]]:
    """What is left of one source, where each lane stands as its cursor says; one without a cursor has not begun."""
    begin = Cursor(turn=dealing.first)
    standing = [cursors[lane].sources[source] if lane in cursors else begin for lane in range(dealing.lanes)]
    left = left_of(dealing, standing)
    for turn in dealing.left:
        if turn > max(left):
            left[turn] = list(dealing.left[turn])
    return left
