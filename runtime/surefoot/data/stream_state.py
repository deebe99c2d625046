"""Stream state: lanes' cursors and what older worlds left. Pure."""

from __future__ import annotations

import zlib
from array import array
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data.data_source import DataShard, changed_shard
from surefoot.data.lanes import (
    Cursor,
    Lane,
    LaneAssignment,
    LaneCursor,
    Lengths,
    ShardRange,
    UnconsumedRanges,
    unconsumed_ranges,
)
from surefoot.data.sample_order import rank_range
from surefoot.errors import StateMismatch

_WIDTH = len(ShardRange._fields)


@dataclass(frozen=True, slots=True)
class StreamShape:
    """`StreamShape` says which lanes a step reads, and how much of each.

    `per_lane` items (samples, rows or groups) of each of `slots` lanes, of another stripe each step. Every worker
    process reads stripes of its own, so that no sample is decoded twice.
    """

    slots: int
    items_per_lane: int
    lane_groups: int

    @property
    def lanes(self) -> int:
        """The number of lanes in all stripes together."""
        return self.slots * self.lane_groups

    @property
    def batch(self) -> int:
        """Items a step, on all ranks together."""
        return self.slots * self.items_per_lane

    def slots_of_rank(self, rank: int, world: int) -> tuple[int, ...]:
        """Returns the slots of a rank."""
        return tuple(range(*rank_range(self.slots, world, rank)))

    def lanes_of(self, slots: Iterable[int]) -> list[int]:
        """Returns all lanes of these slots, in every stripe."""
        return [self.lane(stripe, slot) for stripe in range(self.lane_groups) for slot in slots]

    def lane(self, step: int, slot: int) -> int:
        """Returns the lane that `slot` reads at `step`."""
        return step % self.lane_groups * self.slots + slot

    def span(self, lane: int, items: int) -> tuple[int, int]:
        """Returns the positions `[start, stop)` of a lane's last `per_lane` items.

        `items` counts what the lane had handed out behind them.
        """
        stripe, slot = divmod(lane, self.slots)
        step = (items // self.items_per_lane - 1) * self.lane_groups + stripe
        start = step * self.batch + slot * self.items_per_lane
        return start, start + self.items_per_lane


def joined_spans(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the spans sorted, with neighbours joined."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def check_state(
    state: Mapping[str, Any],
    order: Mapping[str, Any],
    identities: Sequence[str],
    kinds: Sequence[str],
    sources: Sequence[Sequence[DataShard]],
) -> None:
    """Refuses a state of another order or of changed sources.

    Samples would be lost or repeated, and no error would say so.

    Raises:
        StateMismatch: names the argument or the shard that differs.
    """
    for name, mine in order.items():
        had = state["order"].get(name)
        if had != mine:
            raise StateMismatch(
                f"the stream's {name} is {mine} and was {had} in the checkpoint: samples would be lost or repeated;"
                " build the stream as before, or start anew"
            )
    for number, shards in enumerate(sources):
        if number >= len(state["sources"]) or state["sources"][number] != identities[number]:
            checks = state.get("checks")
            told = b64decode(checks[number]) if checks and number < len(checks) else b""
            changed = changed_shard(shards, told)
            which = (
                f"shard {changed} of it is another" if changed else "its shards are others, or another number of them"
            )
            raise StateMismatch(
                f"source {number} ({kinds[number]}) is not what the checkpoint was made with:"
                f" {which}. Bring the old data back, or begin another job with what is there now"
            )


def lanes_as_plain(cursors: Mapping[int, LaneCursor]) -> list[list[int]]:
    """Returns one list of integers a lane, its number first."""
    return [[lane, *cursor.plain()] for lane, cursor in sorted(cursors.items())]


def lanes_of_plain(plain: Iterable[Sequence[int]]) -> dict[int, LaneCursor]:
    """Builds the cursors of what `lanes_as_plain` returned."""
    return {numbers[0]: LaneCursor.of_plain(numbers[1:]) for numbers in plain}


def encode_unconsumed(left: Sequence[UnconsumedRanges], lengths: Sequence[Lengths]) -> list[dict[str, Any]]:
    """Returns, of each source, what older worlds left, as plain values."""
    return [encode_ranges(one, of) for one, of in zip(left, lengths, strict=True)]


def decode_unconsumed(states: Sequence[Mapping[str, Any]], lengths: Sequence[Lengths]) -> list[UnconsumedRanges]:
    """Builds what older worlds left from the state that tells it.

    Raises:
        StateMismatch: none of them does, so a rank's state came without the first one's part of it.
    """
    told = next((state["left"] for state in states if state["left"] is not None), None)
    if told is None:
        raise StateMismatch(
            "what older worlds left of a pass is in the state of the stream's rank 0 alone, and was not given with this"
            " one's: build the streams with the rank= and num_replicas= that they were saved with"
        )
    return [decode_ranges(one, of) for one, of in zip(told, lengths, strict=True)]


def encode_ranges(left: UnconsumedRanges, lengths: Lengths) -> dict[str, Any]:
    """Returns, by pass, whole shards as bits, other extents as numbers.

    Packed: a pass hardly begun has as many extents as the source has shards, and a world of a thousand ranks leaves two pieces
    of each of its own; numbers in words would make the state large.
    """
    found = {}
    for turn, extents in left.items():
        bits = bytearray(-(-len(lengths) // 8))
        others: list[int] = []
        before = 0
        for extent in extents:
            if extent == ShardRange(extent.shard, 0, lengths[extent.shard]):
                bits[extent.shard // 8] |= 1 << extent.shard % 8
            else:
                size = -1 if extent.stop is None else extent.stop - extent.start
                others += [extent.shard - before, extent.start, size, *extent[3:]]
                before = extent.shard
        found[str(turn)] = b64encode(zlib.compress(bytes(bits) + packed(others), 9)).decode()
    return found


def decode_ranges(plain: Mapping[str, Any], lengths: Lengths) -> dict[int, list[ShardRange]]:
    """Builds the extents of what `left_as_plain` returned, whole shards last."""
    found = {}
    for turn, told in plain.items():
        extents = list[ShardRange]()
        body = zlib.decompress(b64decode(told))
        bits, numbers = body[: -(-len(lengths) // 8)], unpacked(body[-(-len(lengths) // 8) :])
        shard = 0
        for at in range(0, len(numbers), _WIDTH):
            step, start, size, emitted, used = numbers[at : at + _WIDTH]
            shard += step
            extents.append(ShardRange(shard, start, None if size < 0 else start + size, emitted, used))
        whole = [s for s in range(len(lengths)) if bits[s // 8] >> s % 8 & 1]
        found[int(turn)] = extents + [ShardRange(shard, 0, lengths[shard]) for shard in whole]
    return found


def packed(numbers: Iterable[int]) -> bytes:
    """Returns integers seven bits a byte, the sign lowest."""
    found = bytearray()
    for number in numbers:
        rest = number << 1 if number >= 0 else (-number << 1) - 1
        while rest > 127:
            found.append(rest & 127 | 128)
            rest >>= 7
        found.append(rest)
    return bytes(found)


def unpacked(body: bytes) -> list[int]:
    """Returns the integers that `packed` was given."""
    found, number, shift = list[int](), 0, 0
    for byte in body:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(-(number + 1 >> 1) if number & 1 else number >> 1)
            number, shift = 0, 0
    return found


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[int, LaneCursor]:
    """Returns the cursors of all lanes from the older world's states.

    Raises:
        StateMismatch: two ranks have the same lane, so the states are of different checkpoints.
    """
    cursors: dict[int, LaneCursor] = {}
    for rank, state in enumerate(states):
        mine = lanes_of_plain(state["lanes"])
        if twice := sorted(cursors.keys() & mine.keys()):
            raise StateMismatch(
                f"lane {twice[0]} is in the states of two ranks, of which rank {rank} is one: they are not of one checkpoint"
            )
        cursors |= mine
    return cursors


def unconsumed_by_pass(
    dealing: LaneAssignment, cursors: Mapping[int, LaneCursor], source: int
) -> dict[int, list[ShardRange]]:
    """Returns, by pass, what all lanes left of one source.

    A lane without a cursor has not begun.
    """
    begin = Cursor(turn=dealing.first)
    standing = [cursors[lane].sources[source] if lane in cursors else begin for lane in range(dealing.lanes)]
    left = unconsumed_ranges(dealing, standing)
    for turn in dealing.unconsumed:
        if turn > max(left):
            left[turn] = list(dealing.unconsumed[turn])
    return left


# ---- stripes of lanes ------------------------------------------------------------------------------------------------
# `Stripe` reads the lanes of one stripe, several steps at a time. Most lanes give one sample a step. To find a bare
# sample's place and to write the cursor behind it down costs many times what reading a line does. So each lane reads
# some samples in a run, and the batches of several steps are cut out of all lanes' runs at once. Order and cursors are
# those of samples drawn one by one.

_AHEAD_SAMPLES = 64
_AHEAD_BYTES = 64 << 10
"""What a lane reads in one run, at most, where a step takes less: whoever has 64 lanes keeps so much of each."""
_FEW = 8
"""Elements of a sample that are looked at to tell its size."""


class LaneRun:
    """`LanesRead` holds a stripe's cursors behind a run of several steps.

    The steps of a run share it, so that a message with several of them has it once.

    Args:
        numbers: each lane's number and plain cursor behind all that it has read, one behind the other.
        ahead: of each lane, how many samples of that no step had taken before this run.
        moving: which number of a lane counts samples within a window or extent.
        bad: of lanes that left samples out, how many.
    """

    __slots__ = ("ahead", "bad_samples", "moving", "numbers", "width")

    def __init__(self, numbers: array[int], ahead: array[int], moving: int, bad: Mapping[int, int]) -> None:
        self.numbers, self.ahead, self.moving, self.bad_samples = numbers, ahead, moving, bad
        self.width = len(numbers) // len(ahead)

    def __reduce__(self) -> tuple[Callable[..., LaneRun], tuple[Any, ...]]:
        # as bytes: a list of lists, or an array, takes a worker many times as long
        return _unpickled, (self.numbers.tobytes(), self.ahead.tobytes(), self.moving, self.bad_samples)


class LaneCursors:
    """`LanesBehind` holds the cursors of a stripe's lanes behind one step.

    They are written down when somebody asks, as the state is wanted at few steps.

    Args:
        read: behind the run that the step belongs to.
        taken: how many samples this step and the ones before it in the run took of each lane.
    """

    __slots__ = ("_read", "_taken")

    def __init__(self, read: LaneRun, taken: int) -> None:
        self._read, self._taken = read, taken

    def __len__(self) -> int:
        return len(self._read.ahead)

    def __reduce__(self) -> tuple[Callable[..., LaneCursors], tuple[Any, ...]]:
        return LaneCursors, (self._read, self._taken)

    @property
    def bad(self) -> Mapping[int, int]:
        """Of lanes that left samples out, how many."""
        return self._read.bad_samples

    def plain(self) -> list[list[int]]:
        """Returns each lane's number and cursor, as plain numbers."""
        return [self._row(place) for place in range(len(self))]

    @property
    def first(self) -> int:
        """The number of the first lane; the others follow it."""
        return self._read.numbers[0]

    def span(self, shape: StreamShape) -> tuple[int, int]:
        """Returns the positions `[start, stop)` of the step's items in the global order."""
        begin, end = shape.span(*self._batches_yielded(0))
        last = len(self) - 1
        return begin, shape.span(*self._batches_yielded(last))[1] if last else end

    def _batches_yielded(self, place: int) -> tuple[int, int]:
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


def _unpickled(numbers: bytes, ahead: bytes, moving: int, bad: Mapping[int, int]) -> LaneRun:
    return LaneRun(_array_of(numbers), _array_of(ahead), moving, bad)


def _array_of(content: bytes) -> array[int]:
    found = array("q")
    found.frombytes(content)
    return found


class LaneGroup:
    """`Stripe` gives its lanes' items, step by step.

    Args:
        lanes: by number, in their order.
        per_lane: items of each a step.
        most_bad: how many bad samples one lane may leave out at a time.
    """

    def __init__(self, lanes: Mapping[int, Lane], per_lane: int, most_bad: int) -> None:
        self._lanes, self._per_lane, self._most_bad = lanes, per_lane, most_bad
        self._moving = 4 + next(iter(lanes.values())).moving
        self._ready: deque[tuple[list[Any], LaneCursors]] = deque()
        self._steps = 1
        """How many are read at a time; one, until the size of a sample is known."""

    def step(self) -> tuple[list[Any], LaneCursors]:
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
        runs = [lane.take_samples(steps * each) for lane in lanes]
        cut: Iterable[list[Any]]
        if each == 1:
            cut = map(list, zip(*runs, strict=True))
        else:
            cut = ([item for run in runs for item in run[at : at + each]] for at in range(0, steps * each, each))
        self._ready.extend(zip(cut, told, strict=True))
        self._steps = max(1, min(_AHEAD_SAMPLES, _AHEAD_BYTES // max(1, _size_of(runs[0][-1]))) // each)

    def _behind(self, steps: int) -> list[LaneCursors]:
        """Returns the cursors behind each of the steps that are about to be taken; of 0, those that are now."""
        numbers = array("q")
        for number, lane in self._lanes.items():
            numbers.extend(lane.row(number))
        ahead = array("q", [lane.buffered_samples for lane in self._lanes.values()])
        width = len(numbers) // len(ahead)
        left_out = numbers[3::width]
        bad = dict(zip(numbers[::width], left_out, strict=True)) if any(left_out) else {}
        read = LaneRun(numbers, ahead, self._moving, bad)
        taken = range(self._per_lane, (steps + 1) * self._per_lane, self._per_lane) if steps else [0]
        return [LaneCursors(read, so_many) for so_many in taken]


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
