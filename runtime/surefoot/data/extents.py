"""`Dealing` deals extents of shards to lanes, for each pass. Pure.

A lane is an endless reader of its part of the data. Lane numbers belong to the order, not to the world: ranks come and
go, and the present ones continue each lane at its cursor. Iterators owned by ranks would lose what a lost rank had not
read. MosaicML's streaming fixes its number of canonical nodes for the same reason.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from surefoot.data.sample_order import sample_seed, samples_at, share


class Extent(NamedTuple):
    """An extent is the samples `[start, stop)` of one shard.

    `stop` is None for the shard's end where its length is unknown. Of the first shuffle window behind `start`,
    `emitted` samples are consumed, in the window's own order; of the sample after those, `used` elements (tokens) are.
    """

    shard: int
    start: int
    stop: int | None
    emitted: int = 0
    used: int = 0


class Cursor(NamedTuple):
    """A cursor is a lane's position in one source.

    Pass `turn`, extent `number` of that pass, the shuffle window that begins at sample `start` (−1: the extent has not
    begun), `emitted` samples of that window, and `used` tokens of the sample after those.
    """

    turn: int = 0
    number: int = 0
    start: int = -1
    emitted: int = 0
    used: int = 0


Lengths = tuple[int | None, ...]
"""Samples of each shard; None where they are not known before the shard is read."""
Left = Mapping[int, Sequence[Extent]]
"""pass → its unread extents. A pass that is not named is whole, and comes after those that are."""


@lru_cache(maxsize=8)
def _turn_order(seed: int, shards: int, turn: int, shuffled: bool) -> tuple[int, ...]:
    if not shuffled:
        return tuple(range(shards))
    return tuple(samples_at(seed, shards, turn * shards, shards))


@lru_cache(maxsize=8)
def _bounds(lengths: Lengths, order: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *accumulate(lengths[shard] or 0 for shard in order))


class Dealing:
    """`Dealing` divides every pass of one source among `lanes` lanes.

    `left` holds the extents that earlier worlds left of the passes they began. Where all lengths are known, lanes'
    shares of a whole pass differ by one sample at most; else lanes take whole shards in turn. Left extents are divided
    evenly only while they are few.
    """

    def __init__(self, lengths: Lengths, seed: int, lanes: int, *, shuffled: bool = True, left: Left | None = None):
        self.lengths, self.seed, self.lanes, self.shuffled = lengths, seed, lanes, shuffled
        self.left: Left = left or {}
        self.known = None not in lengths
        self.first = min(self.left, default=0)
        self._memo: dict[tuple[int, int], tuple[Extent, ...]] = {}

    def extents(self, turn: int, lane: int) -> Sequence[Extent]:
        """Returns the extents that `lane` reads in pass `turn`, in reading order."""
        key = (turn, lane)
        if key not in self._memo:
            if len(self._memo) > 4 * self.lanes:
                self._memo.clear()
            self._memo[key] = tuple(self._of_left(turn, lane) if turn in self.left else self._of_whole(turn, lane))
        return self._memo[key]

    def remaining(self, turn: int, lane: int, cursor: Cursor) -> list[Extent]:
        """Returns what the lane has left of pass `turn` at `cursor`."""
        if cursor.turn > turn:
            return []
        mine = self.extents(turn, lane)
        if cursor.turn < turn:
            return list(mine)
        behind = list(mine[cursor.number + 1 :])
        if cursor.number >= len(mine):
            return behind
        current = mine[cursor.number]
        if cursor.start >= 0:
            current = current._replace(start=cursor.start, emitted=cursor.emitted, used=cursor.used)
        return behind if current.stop is not None and current.start >= current.stop else [current, *behind]

    def passes(self, lane: int, cursor: Cursor) -> float:
        """Returns how many passes the lane has completed at `cursor`.

        The present pass' share is included; its extents count alike, whatever their size.
        """
        mine = self.extents(cursor.turn, lane)
        if cursor.number >= len(mine):
            return cursor.turn + bool(mine)
        part, current = 0.0, mine[cursor.number]
        if cursor.start >= 0 and current.stop is not None and current.stop > current.start:
            part = (cursor.start - current.start + cursor.emitted) / (current.stop - current.start)
        return cursor.turn + (cursor.number + min(1.0, part)) / len(mine)

    def _of_whole(self, turn: int, lane: int) -> list[Extent]:
        order = _turn_order(self.seed, len(self.lengths), turn, self.shuffled)
        if not self.known:
            return [
                Extent(order[place], 0, self.lengths[order[place]]) for place in range(lane, len(order), self.lanes)
            ]
        bounds = _bounds(self.lengths, order)
        begin, end = share(bounds[-1], self.lanes, lane)
        found = []
        place = bisect_right(bounds, begin) - 1
        while place < len(order) and bounds[place] < end:
            first, last = max(begin, bounds[place]), min(end, bounds[place + 1])
            if first < last:
                found.append(Extent(order[place], first - bounds[place], last - bounds[place]))
            place += 1
        return found

    def _of_left(self, turn: int, lane: int) -> list[Extent]:
        """Cuts extents only while they are few: else each change of the world would leave more pieces."""
        extents = [e for e in self.left[turn] if e.stop is None or e.stop > e.start]
        if self.known and len(extents) < 4 * self.lanes:
            return _cut(extents, self.lanes, lane)
        return extents[lane :: self.lanes]


def dealings(lengths: Sequence[Lengths], order: tuple[int, bool], lanes: int, left: Sequence[Left]) -> list[Dealing]:
    """`dealings` makes the dealing of each source.

    `order`: the stream's seed, and whether it shuffles; each source but the first has a seed of its own.
    """
    seed, shuffled = order
    return [
        Dealing(one, seed if number == 0 else sample_seed(seed, number), lanes, shuffled=shuffled, left=rest)
        for number, (one, rest) in enumerate(zip(lengths, left, strict=True))
    ]


def _cut(extents: Sequence[Extent], lanes: int, lane: int) -> list[Extent]:
    """Returns the lane's even share; a window in progress stays whole, in the share that has its begin."""
    bounds = [0, *accumulate((e.stop or 0) - e.start for e in extents)]
    begin, end = share(bounds[-1], lanes, lane)
    found = []
    for at, extent in zip(bounds, extents, strict=False):
        size = (extent.stop or 0) - extent.start
        if extent.emitted or extent.used:
            if begin <= at < end:
                found.append(extent)
            continue
        first, last = max(begin - at, 0), min(end - at, size)
        if first < last:
            found.append(extent._replace(start=extent.start + first, stop=extent.start + last))
    return found


def left_of(dealing: Dealing, cursors: Sequence[Cursor]) -> dict[int, list[Extent]]:
    """Returns what all lanes together have not consumed, by pass.

    Covers the passes from the earliest to the latest that a lane is in.

    Args:
        dealing: what the lanes read from.
        cursors: one for each lane, in the order of their numbers.
    """
    first, last = min(c.turn for c in cursors), max(c.turn for c in cursors)
    found: dict[int, list[Extent]] = {}
    for turn in range(first, last + 1):
        pieces = [e for lane, c in enumerate(cursors) for e in dealing.remaining(turn, lane, c)]
        found[turn] = _joined(pieces, dealing.lengths)
    return found


def _joined(extents: list[Extent], lengths: Lengths) -> list[Extent]:
    """Joins neighbours; orders extents in progress first, whole shards last, as the saved state does."""
    begun = [e for e in extents if e.emitted or e.used]
    joined: list[Extent] = []
    for extent in sorted((e for e in extents if not (e.emitted or e.used)), key=lambda e: (e.shard, e.start)):
        if joined and joined[-1].shard == extent.shard and joined[-1].stop == extent.start:
            joined[-1] = joined[-1]._replace(stop=extent.stop)
        else:
            joined.append(extent)
    whole = [e for e in joined if e == Extent(e.shard, 0, lengths[e.shard])]
    parts = [e for e in joined if e != Extent(e.shard, 0, lengths[e.shard])]
    return [*sorted(begun, key=lambda e: e[:2]), *parts, *whole]
