"""Frames the verified segments that members of an exchange send each other.

`Outbox` collects what this rank's reads have placed, in one buffer while the other is being sent; a thread that finds
no room waits. `Arrivals` trusts nothing that came: each segment is checked against the digests of the save that it is
of before it is placed. Used by `exchange`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.errors import Corrupt
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.restore.fetch import SavedPart
from surefoot.restore.placer import AnyPlacer
from surefoot.restore.segments import RangeRead, Segment
from surefoot.tiers import verified

ROUND_BYTES = 4 * 1024 * 1024
"""One member's buffer: it holds any segment, since none is longer than a chunk."""

_FRAME = struct.Struct("<III")
"""Number of the read, number of the segment in it, bytes that follow."""


@dataclass(frozen=True, slots=True)
class SealedFrame:
    """Holds bytes ready to send.

    `finished`: they are the last; `failed`: the rest will never come.
    """

    data: memoryview
    finished: bool
    failed: bool


class Outbox:
    """Buffers outgoing segments in two buffers of `size` bytes.

    Reading threads call `put`, the exchanging one `take`.
    """

    def __init__(self, size: int = ROUND_BYTES) -> None:
        self._filling, self._sending = memoryview(bytearray(size)), memoryview(bytearray(size))
        self._used = 0
        self._full = self._finished = self._failed = self._closed = False
        self._changed = threading.Condition()

    def put(self, read: int, segment: int, data: memoryview) -> None:
        """Copies a segment in; waits for room until the outbox is closed."""
        whole = _FRAME.size + data.nbytes
        if whole > len(self._filling):
            raise ValueError(f"a segment of {data.nbytes} bytes does not fit into a buffer of {len(self._filling)}")
        with self._changed:
            while self._used + whole > len(self._filling) and not self._closed:
                self._full = True
                self._changed.notify_all()
                self._changed.wait()
            if self._closed:
                return
            _FRAME.pack_into(self._filling, self._used, read, segment, data.nbytes)
            self._filling[self._used + _FRAME.size : self._used + whole] = data.cast("B")
            self._used += whole

    def take(self) -> SealedFrame:
        """Waits for a full or last buffer and swaps the two.

        The buffer taken before is filled again from now on.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._full or self._finished)
            self._filling, self._sending = self._sending, self._filling
            taken = SealedFrame(self._sending[: self._used], self._finished, self._failed)
            self._used, self._full = 0, False
            self._changed.notify_all()
        return taken

    def finish(self, failed: bool) -> None:
        """Ends the sending: all reads are made, or they failed."""
        with self._changed:
            self._finished, self._failed = True, failed
            self._changed.notify_all()

    def close(self) -> None:
        """Drops what is put from now on: nobody takes it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Telling:
    """Places verified segments and queues them for the peers.

    Segments without a number are placed only.
    """

    def __init__(self, placer: AnyPlacer, outbox: Outbox, numbers: Mapping[Segment, tuple[int, int]]) -> None:
        self._placer, self._outbox, self._numbers = placer, outbox, numbers

    def place(self, segment: Segment, data: memoryview) -> None:
        self._placer.place(segment, data)
        number = self._numbers.get(segment)
        if number is not None:
            self._outbox.put(*number, data)


class Arrivals:
    """Verifies and places peers' segments and tracks missing ones; for one thread."""

    def __init__(
        self,
        ranges: Sequence[RangeRead],
        owners: Sequence[int],
        parts: Mapping[int, SavedPart],
        manifests: Mapping[int, RankManifest],
        placers: Sequence[AnyPlacer],
    ) -> None:
        self._ranges, self._owners = ranges, owners
        self._parts, self._manifests, self._placers = parts, manifests, placers
        self._left = [set(range(len(r.segments))) for r in ranges]
        self.received_bytes = 0
        self.damaged = 0
        """Frames that were not what they said."""

    def accept(self, member: int, data: memoryview) -> None:
        """Places the good segments of a member's buffer; the rest stay missing."""
        position = 0
        while position + _FRAME.size <= data.nbytes:
            read, segment, length = _FRAME.unpack_from(data, position)
            begin = position + _FRAME.size
            position = begin + length
            if position > data.nbytes or not self._place(member, (read, segment), data[begin:position]):
                self.damaged += 1

    def made(self, member: int) -> None:
        """Marks all that this rank itself had to read as placed."""
        for left, owner in zip(self._left, self._owners, strict=True):
            if owner == member:
                left.clear()

    def missing(self) -> list[RangeRead]:
        """Reads of which not every segment is placed."""
        return [r for r, left in zip(self._ranges, self._left, strict=True) if left]

    def _place(self, member: int, number: tuple[int, int], data: memoryview) -> bool:
        read, index = number
        if read >= len(self._ranges) or self._owners[read] != member or index not in self._left[read]:
            return False
        planned = self._ranges[read]
        segment, part = planned.segments[index], self._parts[planned.rank]
        if data.nbytes != part.stream.edges[segment.blocks.stop] - segment.start:
            return False
        what = (f"member {member} of the exchange", planned.chunk, segment.blocks)
        try:
            verified.check_blocks(data, self._manifests[planned.rank], part.stream, part.table, what)
        except Corrupt:
            return False
        self._placers[segment.wanted].place(segment, data)
        self._left[read].discard(index)
        self.received_bytes += data.nbytes
        return True
