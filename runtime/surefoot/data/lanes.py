"""`Lane` reads one lane: samples in order, mixed, packed or grouped.

Its cursor is a few integers and never a sample, so its state stays small and nothing read ahead has to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from surefoot.data.data_source import DataError
from surefoot.data.extents import Cursor
from surefoot.data.sample_order import sample_seed
from surefoot.data.source_reading import Drawn, SourceReader

_MOST_EMPTY = 10_000


class LaneCursor(NamedTuple):
    """`LaneCursor` holds a lane's counts and its cursor in each source.

    `items` handed out (samples, packed rows or groups), samples (or groups) `drawn`, and samples left out as `bad`.
    """

    items: int = 0
    drawn: int = 0
    bad: int = 0
    sources: tuple[Cursor, ...] = ()

    def plain(self) -> list[int]:
        """Returns the cursor as integers alone."""
        return [self.items, self.drawn, self.bad, *(number for cursor in self.sources for number in cursor)]

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
        self._rest: tuple[int, Drawn, Any] | None = None
        """Source, sample, and what of its tokens no row has had yet."""

    def seek(self, cursor: LaneCursor) -> None:
        """Continues reading at `cursor`."""
        self._items, self._drawn, self._bad = cursor.items, cursor.drawn, cursor.bad
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
    def ahead(self) -> int:
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

    def take(self, count: int) -> list[Any]:
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

    def _draw(self, most_bad: int) -> tuple[int, Drawn]:
        source = self._source()
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
