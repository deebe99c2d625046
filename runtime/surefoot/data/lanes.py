"""Deals shards to lanes, and reads each lane's samples in order, mixed, packed or grouped.

Its cursor is a few integers and never a sample, so its state stays small and nothing read ahead has to be saved.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from surefoot.data.data_source import BadSample, DataError, DataSource
from surefoot.data.length_grouping import Grouping
from surefoot.data.sample_order import rank_range, sample_seed, samples_at

_log = logging.getLogger(__name__)


# ---- extents of shards -----------------------------------------------------------------------------------------------
# `Dealing` deals extents of shards to lanes, for each pass. Pure. A lane is an endless reader of its part of the data.
# Lane numbers belong to the order, not to the world: ranks come and go, and the present ones continue each lane at its
# cursor. Iterators owned by ranks would lose what a lost rank had not read. MosaicML's streaming fixes its number of
# canonical nodes for the same reason.


class ShardRange(NamedTuple):
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
UnconsumedRanges = Mapping[int, Sequence[ShardRange]]
"""pass → its unread extents. A pass that is not named is whole, and comes after those that are."""


@lru_cache(maxsize=8)
def _turn_order(seed: int, shards: int, turn: int, shuffled: bool) -> tuple[int, ...]:
    if not shuffled:
        return tuple(range(shards))
    return tuple(samples_at(seed, shards, turn * shards, shards))


@lru_cache(maxsize=8)
def _bounds(lengths: Lengths, order: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *accumulate(lengths[shard] or 0 for shard in order))


class LaneAssignment:
    """`Dealing` divides every pass of one source among `lanes` lanes.

    `left` holds the extents that earlier worlds left of the passes they began. Where all lengths are known, lanes'
    shares of a whole pass differ by one sample at most; else lanes take whole shards in turn. Left extents are divided
    evenly only while they are few.
    """

    def __init__(
        self, lengths: Lengths, seed: int, lanes: int, *, shuffled: bool = True, left: UnconsumedRanges | None = None
    ):
        self.lengths, self.seed, self.lanes, self.shuffled = lengths, seed, lanes, shuffled
        self.unconsumed: UnconsumedRanges = left or {}
        self.known = None not in lengths
        self.first = min(self.unconsumed, default=0)
        self._memo: dict[tuple[int, int], tuple[ShardRange, ...]] = {}

    def ranges(self, turn: int, lane: int) -> Sequence[ShardRange]:
        """Returns the extents that `lane` reads in pass `turn`, in reading order."""
        key = (turn, lane)
        if key not in self._memo:
            if len(self._memo) > 4 * self.lanes:
                self._memo.clear()
            self._memo[key] = tuple(
                self._ranges_of_unconsumed(turn, lane)
                if turn in self.unconsumed
                else self._ranges_of_full_epoch(turn, lane)
            )
        return self._memo[key]

    def remaining(self, turn: int, lane: int, cursor: Cursor) -> list[ShardRange]:
        """Returns what the lane has left of pass `turn` at `cursor`."""
        if cursor.turn > turn:
            return []
        mine = self.ranges(turn, lane)
        if cursor.turn < turn:
            return list(mine)
        behind = list(mine[cursor.number + 1 :])
        if cursor.number >= len(mine):
            return behind
        current = mine[cursor.number]
        if cursor.start >= 0:
            current = current._replace(start=cursor.start, emitted=cursor.emitted, used=cursor.used)
        return behind if current.stop is not None and current.start >= current.stop else [current, *behind]

    def epochs(self, lane: int, cursor: Cursor) -> float:
        """Returns how many passes the lane has completed at `cursor`.

        The present pass' share is included; its extents count alike, whatever their size.
        """
        mine = self.ranges(cursor.turn, lane)
        if cursor.number >= len(mine):
            return cursor.turn + bool(mine)
        part, current = 0.0, mine[cursor.number]
        if cursor.start >= 0 and current.stop is not None and current.stop > current.start:
            part = (cursor.start - current.start + cursor.emitted) / (current.stop - current.start)
        return cursor.turn + (cursor.number + min(1.0, part)) / len(mine)

    def _ranges_of_full_epoch(self, turn: int, lane: int) -> list[ShardRange]:
        order = _turn_order(self.seed, len(self.lengths), turn, self.shuffled)
        if not self.known:
            return [
                ShardRange(order[place], 0, self.lengths[order[place]]) for place in range(lane, len(order), self.lanes)
            ]
        bounds = _bounds(self.lengths, order)
        begin, end = rank_range(bounds[-1], self.lanes, lane)
        found = []
        place = bisect_right(bounds, begin) - 1
        while place < len(order) and bounds[place] < end:
            first, last = max(begin, bounds[place]), min(end, bounds[place + 1])
            if first < last:
                found.append(ShardRange(order[place], first - bounds[place], last - bounds[place]))
            place += 1
        return found

    def _ranges_of_unconsumed(self, turn: int, lane: int) -> list[ShardRange]:
        """Cuts extents only while they are few: else each change of the world would leave more pieces."""
        extents = [e for e in self.unconsumed[turn] if e.stop is None or e.stop > e.start]
        if self.known and len(extents) < 4 * self.lanes:
            return _cut(extents, self.lanes, lane)
        return extents[lane :: self.lanes]


def make_assignments(
    lengths: Sequence[Lengths], order: tuple[int, bool], lanes: int, left: Sequence[UnconsumedRanges]
) -> list[LaneAssignment]:
    """`dealings` makes the dealing of each source.

    `order`: the stream's seed, and whether it shuffles; each source but the first has a seed of its own.
    """
    seed, shuffled = order
    return [
        LaneAssignment(one, seed if number == 0 else sample_seed(seed, number), lanes, shuffled=shuffled, left=rest)
        for number, (one, rest) in enumerate(zip(lengths, left, strict=True))
    ]


def _cut(extents: Sequence[ShardRange], lanes: int, lane: int) -> list[ShardRange]:
    """Returns the lane's even share; a window in progress stays whole, in the share that has its begin."""
    bounds = [0, *accumulate((e.stop or 0) - e.start for e in extents)]
    begin, end = rank_range(bounds[-1], lanes, lane)
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


def unconsumed_ranges(dealing: LaneAssignment, cursors: Sequence[Cursor]) -> dict[int, list[ShardRange]]:
    """Returns what all lanes together have not consumed, by pass.

    Covers the passes from the earliest to the latest that a lane is in.

    Args:
        dealing: what the lanes read from.
        cursors: one for each lane, in the order of their numbers.
    """
    first, last = min(c.turn for c in cursors), max(c.turn for c in cursors)
    found: dict[int, list[ShardRange]] = {}
    for turn in range(first, last + 1):
        pieces = [e for lane, c in enumerate(cursors) for e in dealing.remaining(turn, lane, c)]
        found[turn] = _joined(pieces, dealing.lengths)
    return found


def _joined(extents: list[ShardRange], lengths: Lengths) -> list[ShardRange]:
    """Joins neighbours; orders extents in progress first, whole shards last, as the saved state does."""
    begun = [e for e in extents if e.emitted or e.used]
    joined: list[ShardRange] = []
    for extent in sorted((e for e in extents if not (e.emitted or e.used)), key=lambda e: (e.shard, e.start)):
        if joined and joined[-1].shard == extent.shard and joined[-1].stop == extent.start:
            joined[-1] = joined[-1]._replace(stop=extent.stop)
        else:
            joined.append(extent)
    whole = [e for e in joined if e == ShardRange(e.shard, 0, lengths[e.shard])]
    parts = [e for e in joined if e != ShardRange(e.shard, 0, lengths[e.shard])]
    return [*sorted(begun, key=lambda e: e[:2]), *parts, *whole]


# ---- source reading --------------------------------------------------------------------------------------------------
# `SourceReader` reads one lane's samples of one source, shuffled in windows. A window is a range of positions whose
# order follows from where it begins, as MosaicML's block shuffles: whoever takes a lane over reads it again. A buffer
# of samples, as webdataset shuffles with, would be lost or would have to be saved.


class ReadSample(NamedTuple):
    """`Drawn` is one sample with the cursors at it and behind it.

    `bad` counts the samples left out before it.
    """

    sample: Any
    at: Cursor
    next_cursor: Cursor
    bad_samples: int


class ShuffleWindow(NamedTuple):
    """`ShuffleWindow` holds samples shuffled among each other, and their order.

    `ends` says where in that order each group of samples ends.
    """

    samples: list[Any]
    order: Sequence[int]
    ends: Sequence[int] = ()


Prepare = Callable[[Any, int], Any]
"""Makes of a sample, with a seed of its own, what the program trains on. An exception makes the sample a bad one."""


class SourceReader:
    """`SourceReader` reads one lane in one source."""

    def __init__(
        self,
        source: DataSource,
        dealing: LaneAssignment,
        lane: int,
        window: int = 1,
        prepare: Prepare | None = None,
        grouping: Grouping | None = None,
    ) -> None:
        self._source, self._assignment, self._lane, self._window = source, dealing, lane, window
        self._prepare, self._grouping = prepare, grouping
        self.cursor = Cursor(turn=dealing.first)
        """Of the next sample."""
        self.moving = Cursor._fields.index("start" if window == 1 else "emitted")
        """Which number of the cursor grows with each sample of a run."""
        self._open: tuple[int, int, Iterator[Any]] | None = None
        """Shard, next sample, and what gives it."""
        self._block: tuple[tuple[int, int, int, int], ShuffleWindow] | None = None
        """Pass, shard, start and size of a window, and what is in it."""
        self._shards: list[str] | None = None

    def draw(self, most_bad: int) -> ReadSample:
        """Returns the next good sample.

        Raises:
            DataError: more than `most_bad` before it are bad, or a whole pass has none.
        """
        bad, ended = 0, 0
        while True:
            found = self._next_alone() if self._window == 1 else self._next()
            if found is None:
                ended = self._ended(ended)
                continue
            sample, shard, index, at = found
            sample = self._prepared(sample, at.turn, shard, index)
            if not isinstance(sample, BadSample):
                return ReadSample(sample, at, self.cursor, bad)
            bad += 1
            self._leave_out(sample.error, shard, index, bad > most_bad)

    def group(self, most_bad: int) -> tuple[list[Any], int]:
        """Returns the next group of good samples, and how many were bad.

        Raises:
            DataError: as `draw`; or the window is cut into other groups than when some of it was trained on, because
                `transform` or `length` changed.
        """
        bad, ended = 0, 0
        while True:
            here = self._here()
            if here is None:
                ended = self._ended(ended)
                continue
            at, extent, window = here
            if at.emitted and at.emitted not in window.ends:
                raise DataError(
                    f"the window of {self.name(extent.shard)} at sample {at.start} is cut into other groups than those"
                    " that were trained on: transform= or length_fn= give other lengths; bring the old ones back"
                )
            end = window.ends[bisect_right(window.ends, at.emitted)]
            self.cursor = Cursor(at.turn, at.number, at.start, end)
            found = []
            for place in window.order[at.emitted : end]:
                sample = window.samples[place]
                if isinstance(sample, BadSample):
                    bad += 1
                    self._leave_out(sample.error, extent.shard, at.start + place, bad > most_bad)
                else:
                    found.append(sample)
            if found:
                return found, bad

    def _ended(self, ended: int) -> int:
        ended += self.cursor.turn - 1 not in self._assignment.unconsumed  # of what was left a lane may have no part
        if ended > 2:
            raise DataError(f"lane {self._lane} found no good sample in a whole pass over {self._kind()}")
        return ended

    def _prepared(self, sample: Any, turn: int, shard: int, index: int) -> Any:
        """Returns the sample as the program wants it, its length checked where there are groups; else a bad sample."""
        if isinstance(sample, BadSample):
            return sample
        try:
            if self._prepare is not None:
                sample = self._prepare(sample, sample_seed(self._key(turn, shard), index))
            if self._grouping is not None:
                self._grouping.check(sample)
        except Exception as error:  # noqa: BLE001  # the program's own; told with the sample, counted and bounded
            return BadSample(error)
        return sample

    def _leave_out(self, error: Exception, shard: int, index: int, too_many: bool) -> None:
        if too_many:
            raise DataError(
                f"sample {index} of {self.name(shard)} is bad ({type(error).__name__}: {error}): mend it, or let"
                " max_bad_samples= of them be left out"
            ) from error
        _log.warning("sample %d of %s is left out: %s: %s", index, self.name(shard), type(error).__name__, error)

    def run(self, most: int) -> list[Any]:
        """Returns up to `most` consecutive samples of one window or extent.

        One by one, finding a line costs several times what reading it does. Empty where only `draw` can continue: it
        ends extents and passes, prepares samples and judges bad ones. The order is the same through either.
        """
        turn, number, start, emitted, used = self.cursor
        mine = self._assignment.ranges(turn, self._lane)
        if self._prepare is not None or used or number >= len(mine):
            return []
        extent = mine[number]
        if start < 0:
            start, emitted, used = extent[1], extent[3], extent[4]
        if self._window > 1:
            window = self._window_at(turn, extent, start)
            found = _good([window.samples[place] for place in window.order[emitted : emitted + most]])
            self.cursor = Cursor(turn, number, start, emitted + len(found), 0 if found else used)
            return found
        start += emitted > 0
        size = most if extent.stop is None else min(most, extent.stop - start)
        if used or size < 1:
            return []
        samples = self._read(extent, start, size)
        found = _good(samples)
        if len(found) < len(samples):
            assert self._open is not None  # it was read from
            self._open = extent.shard, start + len(found), chain(samples[len(found) :], self._open[2])
        if found:
            self.cursor = Cursor(turn, number, start + len(found) - 1, 1)
        return found

    def name(self, shard: int) -> str:
        """Returns a shard's name."""
        if self._shards is None:
            self._shards = [one.name for one in self._source.shards()]
        return self._shards[shard]

    def _kind(self) -> str:
        return type(self._source).__name__

    def _key(self, turn: int, shard: int) -> int:
        return self._assignment.seed ^ (turn << 24) ^ shard

    def _next(self) -> tuple[Any, int, int, Cursor] | None:
        """Returns sample, shard, index there, and the cursor at it; None at a pass' end. Advances either way."""
        here = self._here()
        if here is None:
            return None
        at, extent, window = here
        place = window.order[at.emitted]
        self.cursor = Cursor(at.turn, at.number, at.start, at.emitted + 1, 0)
        return window.samples[place], extent.shard, at.start + place, at

    def _here(self) -> tuple[Cursor, ShardRange, ShuffleWindow] | None:
        """Returns the window with the next sample, and the cursor at it; None at a pass' end, then enters the next."""
        while True:
            at = self.cursor
            mine = self._assignment.ranges(at.turn, self._lane)
            if at.number >= len(mine):
                self.cursor = Cursor(turn=at.turn + 1)
                return None
            extent = mine[at.number]
            if at.start < 0:
                at = Cursor(at.turn, at.number, extent.start, extent.emitted, extent.used)
            window = self._window_at(at.turn, extent, at.start)
            if at.emitted < len(window.samples):
                return at, extent, window
            behind = at.start + len(window.samples)
            over = len(window.samples) < self._window or behind == extent.stop
            self.cursor = Cursor(at.turn, at.number + 1) if over else Cursor(at.turn, at.number, behind)

    def _next_alone(self) -> tuple[Any, int, int, Cursor] | None:
        """Does as `_next` with a window of one sample, which is never read again: most of a cheap sample's time."""
        turn, number, start, emitted, used = self.cursor
        while True:
            mine = self._assignment.ranges(turn, self._lane)
            if number >= len(mine):
                self.cursor = Cursor(turn=turn + 1)
                return None
            extent = mine[number]
            if start < 0:
                start, emitted, used = extent[1], extent[3], extent[4]
            if emitted:
                start, emitted, used = start + 1, 0, 0
            if start != extent.stop:
                shard = extent.shard
                if self._open is None or self._open[0] != shard or self._open[1] != start:
                    self._open = shard, start, self._source.open(shard, start)
                samples = self._open[2]
                for sample in samples:
                    self._open = shard, start + 1, samples
                    self.cursor = Cursor(turn, number, start, 1)
                    return sample, shard, start, Cursor(turn, number, start, 0, used)
                self._reject_short(extent, start)
            number, start, emitted, used = number + 1, -1, 0, 0

    def _reject_short(self, extent: ShardRange, have: int) -> None:
        if extent.stop is not None:
            raise DataError(
                f"{self.name(extent.shard)} ends at sample {have}, and {extent.stop} were counted:"
                " it was changed or cut since; bring the old one back, or begin another job with what is there now"
            )

    def _window_at(self, turn: int, extent: ShardRange, start: int) -> ShuffleWindow:
        size = self._window if extent.stop is None else min(self._window, extent.stop - start)
        key = (turn, extent.shard, start, size)
        if self._block is None or self._block[0] != key:
            samples = self._read(extent, start, size)
            if len(samples) < size:
                self._reject_short(extent, start + len(samples))
            seed = sample_seed(self._key(turn, extent.shard), start)
            if self._grouping is None:
                self._block = key, ShuffleWindow(samples, samples_at(seed, len(samples), 0, len(samples)))
            else:
                found = [self._prepared(one, turn, extent.shard, start + at) for at, one in enumerate(samples)]
                self._block = key, ShuffleWindow(found, *self._grouping.cut(found, seed))
        return self._block[1]

    def _read(self, extent: ShardRange, start: int, size: int) -> list[Any]:
        if self._open is None or self._open[:2] != (extent.shard, start):
            self._open = extent.shard, start, self._source.open(extent.shard, start)
        samples = list(islice(self._open[2], size))
        self._open = extent.shard, start + len(samples), self._open[2]
        return samples


def _good(samples: list[Any]) -> list[Any]:
    """Returns the samples before the first bad one."""
    if BadSample not in map(type, samples):
        return samples
    return samples[: next(at for at, sample in enumerate(samples) if isinstance(sample, BadSample))]


# ---- lanes -----------------------------------------------------------------------------------------------------------

_MAX_EMPTY = 10_000


class LaneCursor(NamedTuple):
    """`LaneCursor` holds a lane's counts and its cursor in each source.

    `items` handed out (samples, packed rows or groups), samples (or groups) `drawn`, and samples left out as `bad`.
    """

    items: int = 0
    drawn: int = 0
    bad_samples: int = 0
    sources: tuple[Cursor, ...] = ()

    def plain(self) -> list[int]:
        """Returns the cursor as integers alone."""
        return [self.items, self.drawn, self.bad_samples, *(number for cursor in self.sources for number in cursor)]

    @classmethod
    def of_plain(cls, numbers: Sequence[int]) -> LaneCursor:
        """Builds a cursor from what `plain` returned."""
        size = len(Cursor._fields)
        behind = numbers[3:]
        found = tuple(Cursor(*behind[at : at + size]) for at in range(0, len(behind), size))
        return cls(numbers[0], numbers[1], numbers[2], found)


class Lane:
    """`Lane` reads one lane over all sources, mixed by weight.

    The source of each draw follows from the seed, the weights and the draw's number: a random generator would be one
    more state to save.

    Args:
        readers: this lane's reader of each source.
        weights: how often each source is drawn from; any scale.
        seed: the lane's own.
        pack: tokens a row, where samples are joined and cut to rows.
        grouped: whether an item is a group of samples.
    """

    def __init__(
        self,
        readers: Sequence[SourceReader],
        weights: Sequence[float],
        seed: int,
        pack: int | None = None,
        grouped: bool = False,
    ) -> None:
        self._readers, self._seed, self._pack, self._grouped = readers, seed, pack, grouped
        self._bounds = [sum(weights[: i + 1]) / sum(weights) for i in range(len(weights))]
        self._items = self._drawn = self._bad = 0
        self._bare = readers[0] if len(readers) == 1 and pack is None and not grouped else None
        """The one reader whose samples are the items."""
        self._ahead: list[Any] = []
        """Of those, what was read and not handed out."""
        self._rest: tuple[int, ReadSample, Any] | None = None
        """Source, sample, and what of its tokens no row has had yet."""

    def seek(self, cursor: LaneCursor) -> None:
        """Continues reading at `cursor`."""
        self._items, self._drawn, self._bad = cursor.items, cursor.drawn, cursor.bad_samples
        self._rest, self._ahead = None, []
        for reader, one in zip(self._readers, cursor.sources, strict=False):
            reader.cursor = one

    def items(self, count: int, most_bad: int) -> list[Any]:
        """Returns the next `count` samples, packed rows, or groups.

        Raises:
            DataError: more than `most_bad` bad samples come before a good one, a whole pass has none, or there are no
                tokens to pack.
        """
        self._items += count
        if self._grouped:
            return [self._group(most_bad) for _ in range(count)]
        if self._pack is not None:
            return [self._row(self._pack, most_bad) for _ in range(count)]
        found = self._taken(count) if self._ahead else []
        while len(found) < count:
            some = self._bare.run(count - len(found)) if self._bare is not None else ()
            self._drawn += len(some)
            found += some or (self._draw(most_bad)[1].sample,)
        return found

    @property
    def buffered_samples(self) -> int:
        """How many samples were read and not handed out."""
        return len(self._ahead)

    @property
    def moving(self) -> int:
        """Which number of the first cursor counts samples read in a run."""
        return self._readers[0].moving

    def read_ahead(self, count: int) -> int:
        """Reads until `count` samples wait, and returns how many do.

        Fewer where a window, an extent or a pass ends; none where items are no bare samples.
        """
        if len(self._ahead) < count and self._bare is not None:
            self._ahead += self._bare.run(count - len(self._ahead))
        return len(self._ahead)

    def take_samples(self, count: int) -> list[Any]:
        """Returns the next `count` samples, which wait."""
        self._items += count
        return self._taken(count)

    def _taken(self, count: int) -> list[Any]:
        found = self._ahead[:count]
        del self._ahead[:count]
        self._drawn += len(found)
        return found

    def row(self, number: int) -> list[int]:
        """Returns `number`, and the plain cursor behind all that was read."""
        if self._bare is not None:
            ahead = len(self._ahead)
            return [number, self._items + ahead, self._drawn + ahead, self._bad, *self._bare.cursor]
        return [number, *self.cursor().plain()]

    def _source(self) -> int:
        """Returns the number of the source of the next draw."""
        if len(self._readers) == 1:
            return 0
        chance = sample_seed(self._seed, self._drawn) / 2**63
        return next((i for i, bound in enumerate(self._bounds) if chance < bound), len(self._bounds) - 1)

    def _group(self, most_bad: int) -> list[Any]:
        found, bad = self._readers[self._source()].group(most_bad)
        self._drawn += 1
        self._bad += bad
        return found

    def _draw(self, most_bad: int) -> tuple[int, ReadSample]:
        source = self._source()
        drawn = self._readers[source].draw(most_bad)
        self._drawn += 1
        self._bad += drawn.bad_samples
        return source, drawn

    def _row(self, length: int, most_bad: int) -> Any:
        import numpy as np

        parts, missing, empty = [], length, 0
        while missing:
            if self._rest is None:
                source, drawn = self._draw(most_bad)
                self._rest = source, drawn, np.asarray(drawn.sample)[drawn.at.used :]
            source, drawn, tokens = self._rest
            empty = 0 if len(tokens) else empty + 1
            if empty > _MAX_EMPTY:
                raise DataError(f"{_MAX_EMPTY} samples in a row have no token: there is nothing to pack")
            parts.append(tokens[:missing])
            missing -= len(parts[-1])
            tokens = tokens[len(parts[-1]) :]
            self._rest = (source, drawn, tokens) if len(tokens) else None
        return np.concatenate(parts)

    def cursor(self) -> LaneCursor:
        """Returns the cursor behind the last item handed out.

        Nothing may have been read ahead.
        """
        assert not self._ahead, "a stripe knows how far behind its lanes' rows it is"
        cursors = [reader.cursor for reader in self._readers]
        if self._rest is None:
            return LaneCursor(self._items, self._drawn, self._bad, tuple(cursors))
        source, drawn, tokens = self._rest
        cursors[source] = drawn.at._replace(used=len(drawn.sample) - len(tokens))
        return LaneCursor(self._items, self._drawn - 1, self._bad, tuple(cursors))
