"""Reads one lane: the samples of its extents in order, shuffled in windows, mixed by weight, packed to a length.

Every sample comes with the cursor behind it, so what a lane's state needs is a few integers and never a sample. A shuffle
buffer is a window of positions whose order follows from where it begins: whoever takes a lane over reads it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from surefoot.data.extents import Cursor, Dealing, Extent
from surefoot.data.order import sample_seed, samples_at
from surefoot.data.source import BadSample, DataError, DataSource

_log = logging.getLogger(__name__)


_MOST_EMPTY = 10_000


class LaneCursor(NamedTuple):
    """Where a lane stands: items handed out, samples drawn, samples left out as bad, and its cursor in each source."""

    items: int = 0
    drawn: int = 0
    bad: int = 0
    sources: tuple[Cursor, ...] = ()

    def plain(self) -> list[int]:
        """Integers alone."""
        return [self.items, self.drawn, self.bad, *(number for cursor in self.sources for number in cursor)]

    @classmethod
    def of_plain(cls, numbers: Sequence[int]) -> LaneCursor:
        """What `plain` gave."""
        size = len(Cursor._fields)
        behind = numbers[3:]
        found = tuple(Cursor(*behind[at : at + size]) for at in range(0, len(behind), size))
        return cls(numbers[0], numbers[1], numbers[2], found)


class Drawn(NamedTuple):
    """One sample; the cursors at which it is the next one, and behind it; and how many before it were left out."""

    sample: Any
    at: Cursor
    behind: Cursor
    bad: int


Prepare = Callable[[Any, int], Any]
"""From a sample and a seed that belongs to it alone to what the program wants of it. What it raises makes the sample bad."""


class SourceReader:
    """One lane in one source."""

    def __init__(
        self, source: DataSource, dealing: Dealing, lane: int, window: int = 1, prepare: Prepare | None = None
    ) -> None:
        self._source, self._dealing, self._lane, self._window = source, dealing, lane, window
        self._prepare = prepare
        self.cursor = Cursor(turn=dealing.first)
        """Of the next sample."""
        self._open: tuple[int, int, Iterator[Any]] | None = None
        """Shard, next sample, and what gives it."""
        self._block: tuple[tuple[int, int, int, int], list[Any], Sequence[int]] | None = None
        """Pass, shard, start and size of a window, its samples, and the order in which they come."""
        self._shards: list[str] | None = None

    def draw(self, most_bad: int) -> Drawn:
        """The next good sample. Raises DataError where more than `most_bad` before it are bad, or where there is none."""
        bad, ended = 0, 0
        while True:
            found = self._next_alone() if self._window == 1 else self._next()
            if found is None:
                ended += self.cursor.turn - 1 not in self._dealing.left  # of what was left a lane may have no part
                if ended > 2:
                    raise DataError(f"lane {self._lane} found no good sample in a whole pass over {self._kind()}")
                continue
            sample, shard, index, at = found
            try:
                if isinstance(sample, BadSample):
                    raise sample.error
                if self._prepare is not None:
                    sample = self._prepare(sample, sample_seed(self._key(at.turn, shard), index))
            except Exception as error:
                bad += 1
                if bad > most_bad:
                    raise DataError(
                        f"sample {index} of {self.name(shard)} is bad ({type(error).__name__}: {error}): mend it, or let"
                        " skip_bad= of them be left out"
                    ) from error
                _log.warning(
                    "sample %d of %s is left out: %s: %s", index, self.name(shard), type(error).__name__, error
                )
                continue
            return Drawn(sample, at, self.cursor, bad)

    def name(self, shard: int) -> str:
        """Of a shard."""
        if self._shards is None:
            self._shards = [one.name for one in self._source.shards()]
        return self._shards[shard]

    def _kind(self) -> str:
        return type(self._source).__name__

    def _key(self, turn: int, shard: int) -> int:
        return self._dealing.seed ^ (turn << 24) ^ shard

    def _next(self) -> tuple[Any, int, int, Cursor] | None:
        """Sample, shard, its number there, and the cursor at it; None where a pass ended. Moves on either way."""
        while True:
            at = self.cursor
            mine = self._dealing.extents(at.turn, self._lane)
            if at.number >= len(mine):
                self.cursor = Cursor(turn=at.turn + 1)
                return None
            extent = mine[at.number]
            if at.start < 0:
                at = Cursor(at.turn, at.number, extent.start, extent.emitted, extent.used)
            samples, order = self._window_at(at.turn, extent, at.start)
            if at.emitted < len(samples):
                place = order[at.emitted]
                self.cursor = Cursor(at.turn, at.number, at.start, at.emitted + 1, 0)
                return samples[place], extent.shard, at.start + place, at
            behind = at.start + len(samples)
            over = len(samples) < self._window or behind == extent.stop
            self.cursor = Cursor(at.turn, at.number + 1) if over else Cursor(at.turn, at.number, behind)

    def _next_alone(self) -> tuple[Any, int, int, Cursor] | None:
        """As `_next` with a window of one sample, of which nothing is ever read again: most of a cheap sample's time."""
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

    def _window_at(self, turn: int, extent: Extent, start: int) -> tuple[list[Any], Sequence[int]]:
        size = self._window if extent.stop is None else min(self._window, extent.stop - start)
        key = (turn, extent.shard, start, size)
        if self._block is None or self._block[0] != key:
            samples = self._read(extent, start, size)
            if len(samples) < size:
                self._refuse_short(extent, start + len(samples))
            order: Sequence[int] = range(len(samples))
            if self._window > 1 and samples:
                seed = sample_seed(self._key(turn, extent.shard), start)
                order = samples_at(seed, len(samples), 0, len(samples))
            self._block = key, samples, order
        return self._block[1], self._block[2]

    def _read(self, extent: Extent, start: int, size: int) -> list[Any]:
        if self._open is None or self._open[:2] != (extent.shard, start):
            self._open = extent.shard, start, self._source.open(extent.shard, start)
        samples = list(islice(self._open[2], size))
        self._open = extent.shard, start + len(samples), self._open[2]
        return samples


class Lane:
    """One lane over all sources: which comes next follows from the weights and the number of the draw alone."""

    def __init__(self, readers: Sequence[SourceReader], weights: Sequence[float], seed: int, pack: int | None = None):
        self._readers, self._seed, self._pack = readers, seed, pack
        self._bounds = [sum(weights[: i + 1]) / sum(weights) for i in range(len(weights))]
        self._items = self._drawn = self._bad = 0
        self._rest: tuple[int, Drawn, Any] | None = None
        """Source, sample, and what of its tokens no row has had yet."""

    def seek(self, cursor: LaneCursor) -> None:
        """Goes on from there."""
        self._items, self._drawn, self._bad = cursor.items, cursor.drawn, cursor.bad
        self._rest = None
        for reader, one in zip(self._readers, cursor.sources, strict=False):
            reader.cursor = one

    def item(self, most_bad: int) -> Any:
        """The next sample, or row of packed tokens."""
        self._items += 1
        return self._draw(most_bad)[1].sample if self._pack is None else self._row(self._pack, most_bad)

    def _draw(self, most_bad: int) -> tuple[int, Drawn]:
        source = 0
        if len(self._readers) > 1:
            chance = sample_seed(self._seed, self._drawn) / 2**63
            source = next((i for i, bound in enumerate(self._bounds) if chance < bound), len(self._bounds) - 1)
        drawn = self._readers[source].draw(most_bad)
        self._drawn += 1
        self._bad += drawn.bad
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
            if empty > _MOST_EMPTY:
                raise DataError(f"{_MOST_EMPTY} samples in a row have no token: there is nothing to pack")
            parts.append(tokens[:missing])
            missing -= len(parts[-1])
            tokens = tokens[len(parts[-1]) :]
            self._rest = (source, drawn, tokens) if len(tokens) else None
        return np.concatenate(parts)

    def cursor(self) -> LaneCursor:
        """Behind what was handed out last."""
        cursors = [reader.cursor for reader in self._readers]
        if self._rest is None:
            return LaneCursor(self._items, self._drawn, self._bad, tuple(cursors))
        source, drawn, tokens = self._rest
        cursors[source] = drawn.at._replace(used=len(drawn.sample) - len(tokens))
        return LaneCursor(self._items, self._drawn - 1, self._bad, tuple(cursors))
