"""`SourceReader` reads one lane's samples of one source, shuffled in windows.

A window is a range of positions whose order follows from where it begins, as MosaicML's block shuffles: whoever takes a
lane over reads it again. A buffer of samples, as webdataset shuffles with, would be lost or would have to be saved.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from surefoot.data.data_source import BadSample, DataError, DataSource
from surefoot.data.extents import Cursor, Dealing, Extent
from surefoot.data.length_grouping import Grouping
from surefoot.data.sample_order import sample_seed, samples_at

_log = logging.getLogger(__name__)


class Drawn(NamedTuple):
    """`Drawn` is one sample with the cursors at it and behind it.

    `bad` counts the samples left out before it.
    """

    sample: Any
    at: Cursor
    behind: Cursor
    bad: int


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
        dealing: Dealing,
        lane: int,
        window: int = 1,
        prepare: Prepare | None = None,
        grouping: Grouping | None = None,
    ) -> None:
        self._source, self._dealing, self._lane, self._window = source, dealing, lane, window
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

    def draw(self, most_bad: int) -> Drawn:
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
                return Drawn(sample, at, self.cursor, bad)
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
                    " that were trained on: transform= or length= give other lengths; bring the old ones back"
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
        ended += self.cursor.turn - 1 not in self._dealing.left  # of what was left a lane may have no part
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
                " skip_bad= of them be left out"
            ) from error
        _log.warning("sample %d of %s is left out: %s: %s", index, self.name(shard), type(error).__name__, error)

    def run(self, most: int) -> list[Any]:
        """Returns up to `most` consecutive samples of one window or extent.

        One by one, finding a line costs several times what reading it does. Empty where only `draw` can continue: it
        ends extents and passes, prepares samples and judges bad ones. The order is the same through either.
        """
        turn, number, start, emitted, used = self.cursor
        mine = self._dealing.extents(turn, self._lane)
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
        return self._dealing.seed ^ (turn << 24) ^ shard

    def _next(self) -> tuple[Any, int, int, Cursor] | None:
        """Returns sample, shard, index there, and the cursor at it; None at a pass' end. Advances either way."""
        here = self._here()
        if here is None:
            return None
        at, extent, window = here
        place = window.order[at.emitted]
        self.cursor = Cursor(at.turn, at.number, at.start, at.emitted + 1, 0)
        return window.samples[place], extent.shard, at.start + place, at

    def _here(self) -> tuple[Cursor, Extent, ShuffleWindow] | None:
        """Returns the window with the next sample, and the cursor at it; None at a pass' end, then enters the next."""
        while True:
            at = self.cursor
            mine = self._dealing.extents(at.turn, self._lane)
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
            mine = self._dealing.extents(turn, self._lane)
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
                self._refuse_short(extent, start)
            number, start, emitted, used = number + 1, -1, 0, 0

    def _refuse_short(self, extent: Extent, have: int) -> None:
        if extent.stop is not None:
            raise DataError(
                f"{self.name(extent.shard)} ends at sample {have}, and {extent.stop} were counted:"
                " it was changed or cut since; bring the old one back, or begin another job with what is there now"
            )

    def _window_at(self, turn: int, extent: Extent, start: int) -> ShuffleWindow:
        size = self._window if extent.stop is None else min(self._window, extent.stop - start)
        key = (turn, extent.shard, start, size)
        if self._block is None or self._block[0] != key:
            samples = self._read(extent, start, size)
            if len(samples) < size:
                self._refuse_short(extent, start + len(samples))
            seed = sample_seed(self._key(turn, extent.shard), start)
            if self._grouping is None:
                self._block = key, ShuffleWindow(samples, samples_at(seed, len(samples), 0, len(samples)))
            else:
                found = [self._prepared(one, turn, extent.shard, start + at) for at, one in enumerate(samples)]
                self._block = key, ShuffleWindow(found, *self._grouping.cut(found, seed))
        return self._block[1]

    def _read(self, extent: Extent, start: int, size: int) -> list[Any]:
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
