"""Stream state: lanes' cursors and what older worlds left. Pure."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data.data_source import DataShard, changed_shard
from surefoot.data.extents import Cursor, Dealing, Extent, Left, Lengths, left_of
from surefoot.data.lanes import LaneCursor
from surefoot.data.sample_order import share
from surefoot.errors import StateMismatch

_WIDTH = len(Extent._fields)


@dataclass(frozen=True, slots=True)
class StreamShape:
    """`StreamShape` says which lanes a step reads, and how much of each.

    `per_lane` items (samples, rows or groups) of each of `slots` lanes, of another stripe each step. Every worker
    process reads stripes of its own, so that no sample is decoded twice.
    """

    slots: int
    per_lane: int
    stripes: int

    @property
    def lanes(self) -> int:
        """The number of lanes in all stripes together."""
        return self.slots * self.stripes

    @property
    def batch(self) -> int:
        """Items a step, on all ranks together."""
        return self.slots * self.per_lane

    def own(self, rank: int, world: int) -> tuple[int, ...]:
        """Returns the slots of a rank."""
        return tuple(range(*share(self.slots, world, rank)))

    def lanes_of(self, slots: Iterable[int]) -> list[int]:
        """Returns all lanes of these slots, in every stripe."""
        return [self.lane(stripe, slot) for stripe in range(self.stripes) for slot in slots]

    def lane(self, step: int, slot: int) -> int:
        """Returns the lane that `slot` reads at `step`."""
        return step % self.stripes * self.slots + slot

    def span(self, lane: int, items: int) -> tuple[int, int]:
        """Returns the positions `[start, stop)` of a lane's last `per_lane` items.

        `items` counts what the lane had handed out behind them.
        """
        stripe, slot = divmod(lane, self.slots)
        step = (items // self.per_lane - 1) * self.stripes + stripe
        start = step * self.batch + slot * self.per_lane
        return start, start + self.per_lane


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


def told_left(left: Sequence[Left], lengths: Sequence[Lengths]) -> list[dict[str, Any]]:
    """Returns, of each source, what older worlds left, as plain values."""
    return [left_as_plain(one, of) for one, of in zip(left, lengths, strict=True)]


def left_told(states: Sequence[Mapping[str, Any]], lengths: Sequence[Lengths]) -> list[Left]:
    """Builds what older worlds left from the state that tells it.

    Raises:
        StateMismatch: none of them does, so a rank's state came without the first one's part of it.
    """
    told = next((state["left"] for state in states if state["left"] is not None), None)
    if told is None:
        raise StateMismatch(
            "what older worlds left of a pass is in the state of the stream's rank 0 alone, and was not given with this"
            " one's: build the streams with the rank= and world= that they were saved with"
        )
    return [left_of_plain(one, of) for one, of in zip(told, lengths, strict=True)]


def left_as_plain(left: Left, lengths: Lengths) -> dict[str, Any]:
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
            if extent == Extent(extent.shard, 0, lengths[extent.shard]):
                bits[extent.shard // 8] |= 1 << extent.shard % 8
            else:
                size = -1 if extent.stop is None else extent.stop - extent.start
                others += [extent.shard - before, extent.start, size, *extent[3:]]
                before = extent.shard
        found[str(turn)] = b64encode(zlib.compress(bytes(bits) + packed(others), 9)).decode()
    return found


def left_of_plain(plain: Mapping[str, Any], lengths: Lengths) -> dict[int, list[Extent]]:
    """Builds the extents of what `left_as_plain` returned, whole shards last."""
    found = {}
    for turn, told in plain.items():
        extents = list[Extent]()
        if isinstance(told, str):
            body = zlib.decompress(b64decode(told))
            bits, numbers = body[: -(-len(lengths) // 8)], unpacked(body[-(-len(lengths) // 8) :])
            shard = 0
            for at in range(0, len(numbers), _WIDTH):
                step, start, size, emitted, used = numbers[at : at + _WIDTH]
                shard += step
                extents.append(Extent(shard, start, None if size < 0 else start + size, emitted, used))
        else:  # as former versions saved it
            bits, others = b64decode(told[0]), told[1]
            for at in range(0, len(others), _WIDTH):
                shard, start, stop, emitted, used = others[at : at + _WIDTH]
                extents.append(Extent(shard, start, None if stop < 0 else stop, emitted, used))
        whole = [s for s in range(len(lengths)) if bits[s // 8] >> s % 8 & 1]
        found[int(turn)] = extents + [Extent(shard, 0, lengths[shard]) for shard in whole]
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


def taken_over(states: Sequence[Mapping[str, Any]]) -> dict[int, LaneCursor]:
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


def left_behind(dealing: Dealing, cursors: Mapping[int, LaneCursor], source: int) -> dict[int, list[Extent]]:
    """Returns, by pass, what all lanes left of one source.

    A lane without a cursor has not begun.
    """
    begin = Cursor(turn=dealing.first)
    standing = [cursors[lane].sources[source] if lane in cursors else begin for lane in range(dealing.lanes)]
    left = left_of(dealing, standing)
    for turn in dealing.left:
        if turn > max(left):
            left[turn] = list(dealing.left[turn])
    return left
