"""`Stripe` reads the lanes of one stripe, several steps at a time.

Most lanes give one sample a step. To find a bare sample's place and to write the cursor behind it down costs many times
what reading a line does. So each lane reads some samples in a run, and the batches of several steps are cut out of all
lanes' runs at once. Order and cursors are those of samples drawn one by one.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from surefoot.data.lanes import Lane
from surefoot.data.stream_state import StreamShape

_AHEAD_SAMPLES = 64
_AHEAD_BYTES = 64 << 10
"""What a lane reads in one run, at most, where a step takes less: whoever has 64 lanes keeps so much of each."""
_FEW = 8
"""Elements of a sample that are looked at to tell its size."""


class LanesRead:
    """`LanesRead` holds a stripe's cursors behind a run of several steps.

    The steps of a run share it, so that a message with several of them has it once.

    Args:
        numbers: each lane's number and plain cursor behind all that it has read, one behind the other.
        ahead: of each lane, how many samples of that no step had taken before this run.
        moving: which number of a lane counts samples within a window or extent.
        bad: of lanes that left samples out, how many.
    """

    __slots__ = ("ahead", "bad", "moving", "numbers", "width")

    def __init__(self, numbers: array[int], ahead: array[int], moving: int, bad: Mapping[int, int]) -> None:
        self.numbers, self.ahead, self.moving, self.bad = numbers, ahead, moving, bad
        self.width = len(numbers) // len(ahead)

    def __reduce__(self) -> tuple[Callable[..., LanesRead], tuple[Any, ...]]:
        # as bytes: a list of lists, or an array, takes a worker many times as long
        return _unpickled, (self.numbers.tobytes(), self.ahead.tobytes(), self.moving, self.bad)


class LanesBehind:
    """`LanesBehind` holds the cursors of a stripe's lanes behind one step.

    They are written down when somebody asks, as the state is wanted at few steps.

    Args:
        read: behind the run that the step belongs to.
        taken: how many samples this step and the ones before it in the run took of each lane.
    """

    __slots__ = ("_read", "_taken")

    def __init__(self, read: LanesRead, taken: int) -> None:
        self._read, self._taken = read, taken

    def __len__(self) -> int:
        return len(self._read.ahead)

    def __reduce__(self) -> tuple[Callable[..., LanesBehind], tuple[Any, ...]]:
        return LanesBehind, (self._read, self._taken)

    @property
    def bad(self) -> Mapping[int, int]:
        """Of lanes that left samples out, how many."""
        return self._read.bad

    def plain(self) -> list[list[int]]:
        """Returns each lane's number and cursor, as plain numbers."""
        return [self._row(place) for place in range(len(self))]

    @property
    def first(self) -> int:
        """The number of the first lane; the others follow it."""
        return self._read.numbers[0]

    def span(self, shape: StreamShape) -> tuple[int, int]:
        """Returns the positions `[start, stop)` of the step's items in the global order."""
        begin, end = shape.span(*self._handed_out(0))
        last = len(self) - 1
        return begin, shape.span(*self._handed_out(last))[1] if last else end

    def _handed_out(self, place: int) -> tuple[int, int]:
        read = self._read
        at = place * read.width
        return read.numbers[at], read.numbers[at + 1] - read.ahead[place] + self._taken

    def _row(self, place: int) -> list[int]:
        read = self._read
        row = read.numbers[place * read.width : (place + 1) * read.width].tolist()
        if left := read.ahead[place] - self._taken:
            # bare samples of one source: each is one item, drawn from the same window or extent
            row[1] -= left
            row[2] -= left
            row[read.moving] -= left
        return row


def _unpickled(numbers: bytes, ahead: bytes, moving: int, bad: Mapping[int, int]) -> LanesRead:
    return LanesRead(_array_of(numbers), _array_of(ahead), moving, bad)


def _array_of(content: bytes) -> array[int]:
    found = array("q")
    found.frombytes(content)
    return found


class Stripe:
    """`Stripe` gives its lanes' items, step by step.

    Args:
        lanes: by number, in their order.
        per_lane: items of each a step.
        most_bad: how many bad samples one lane may leave out at a time.
    """

    def __init__(self, lanes: Mapping[int, Lane], per_lane: int, most_bad: int) -> None:
        self._lanes, self._per_lane, self._most_bad = lanes, per_lane, most_bad
        self._moving = 4 + next(iter(lanes.values())).moving
        self._ready: deque[tuple[list[Any], LanesBehind]] = deque()
        self._steps = 1
        """How many are read at a time; one, until the size of a sample is known."""

    def step(self) -> tuple[list[Any], LanesBehind]:
        """Returns the next step's items and the cursors behind them.

        Items are in the order of the lanes.

        Raises:
            DataError: as `Lane.items`; up to a run's length before the step that would have met it.
        """
        if not self._ready:
            self._read()
        return self._ready.popleft()

    def _read(self) -> None:
        lanes, each = self._lanes.values(), self._per_lane
        runs_pay = each < _AHEAD_SAMPLES
        steps = min([lane.read_ahead(self._steps * each) for lane in lanes]) // each if runs_pay else 0
        if not steps:  # a step takes a run already, a lane's window, extent or pass ends, or items are no bare samples
            items: list[Any] = []
            for lane in lanes:
                items += lane.items(each, self._most_bad)
            self._ready.append((items, self._behind(0)[0]))
            return
        told = self._behind(steps)
        runs = [lane.take(steps * each) for lane in lanes]
        cut: Iterable[list[Any]]
        if each == 1:
            cut = map(list, zip(*runs, strict=True))
        else:
            cut = ([item for run in runs for item in run[at : at + each]] for at in range(0, steps * each, each))
        self._ready.extend(zip(cut, told, strict=True))
        self._steps = max(1, min(_AHEAD_SAMPLES, _AHEAD_BYTES // max(1, _size_of(runs[0][-1]))) // each)

    def _behind(self, steps: int) -> list[LanesBehind]:
        """Returns the cursors behind each of the steps that are about to be taken; of 0, those that are now."""
        numbers = array("q")
        for number, lane in self._lanes.items():
            numbers.extend(lane.row(number))
        ahead = array("q", [lane.ahead for lane in self._lanes.values()])
        width = len(numbers) // len(ahead)
        left_out = numbers[3::width]
        bad = dict(zip(numbers[::width], left_out, strict=True)) if any(left_out) else {}
        read = LanesRead(numbers, ahead, self._moving, bad)
        taken = range(self._per_lane, (steps + 1) * self._per_lane, self._per_lane) if steps else [0]
        return [LanesBehind(read, so_many) for so_many in taken]


def _size_of(sample: Any) -> int:
    """Returns about how many bytes a sample takes; of an unknown kind, more than is read ahead."""
    if isinstance(sample, str | bytes | bytearray):
        return len(sample)
    if isinstance(sample, int | float | None):
        return 32
    if isinstance(nbytes := getattr(sample, "nbytes", None), int):
        return nbytes
    if isinstance(sample, dict | list | tuple):
        some = list(sample.values() if isinstance(sample, dict) else sample[:_FEW])[:_FEW]
        return sum(map(_size_of, some)) * len(sample) // max(1, len(some)) + 64
    return _AHEAD_BYTES + 1
