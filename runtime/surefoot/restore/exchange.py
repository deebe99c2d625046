"""Reads each shared byte once per group, and exchanges it between ranks.

As ByteCheckpoint (NSDI'25) removes redundant reads, but every wait has a time limit, and what peers send is verified.
The order of calls is the same on every member: cards, then rounds of headers and data until all have announced their
end, then a last header. Whatever goes wrong (a member that is lost, stalls, plans other reads or sends damage) ends in
direct reads of what is missing. Called by `reader`; members are connected by `checkpointer.restoring`.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, cast
from zlib import crc32

from surefoot import metrics
from surefoot.errors import Corrupt, SurefootError
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.restore.copy_choice import CopySelector
from surefoot.restore.fetch import AnyPlacer, Fetch, SavedPart
from surefoot.restore.read_plan import RangeRead, ReadProposal, Segment, WantedBox, derive_agreement, plan_name
from surefoot.tiers import tier

log = logging.getLogger(__name__)


# ---- frames ----------------------------------------------------------------------------------------------------------
# Frames the verified segments that members of an exchange send each other. `Outbox` collects what this rank's reads
# have placed, in one buffer while the other is being sent; a thread that finds no room waits. `Arrivals` trusts nothing
# that came: each segment is checked against the digests of the save that it is of before it is placed.

ROUND_BYTES = 4 * 1024 * 1024
"""One member's buffer: it holds any segment, since none is longer than a chunk."""

_FRAME = struct.Struct("<III")
"""Number of the read, number of the segment in it, bytes that follow."""


@dataclass(frozen=True, slots=True)
class ReadyFrame:
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

    def next_full_buffer(self) -> ReadyFrame:
        """Waits for a full or last buffer and swaps the two.

        The buffer taken before is filled again from now on.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._full or self._finished)
            self._filling, self._sending = self._sending, self._filling
            taken = ReadyFrame(self._sending[: self._used], self._finished, self._failed)
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


class SegmentSender:
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


class SegmentReceiver:
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

    def mark_own_reads(self, member: int) -> None:
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
            tier.check_blocks(data, self._manifests[planned.rank], part.stream, part.table, what)
        except Corrupt:
            return False
        self._placers[segment.wanted].place(segment, data)
        self._left[read].discard(index)
        self.received_bytes += data.nbytes
        return True


# ---- exchange --------------------------------------------------------------------------------------------------------

PEER = "peer"
"""Where bytes came from that another member read."""

MIN_BYTES_PER_SECOND = 25e6
"""An exchange that is slower than this, after the time of one wait, is called off."""

_HEADER = struct.Struct("<III")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size
_GOING, _FINISHED, _FAILED = range(3)
_KINDS = ("staging", "memory", "persistent")


class ExchangeFailed(SurefootError):
    """An exchange failed; each member reads for itself what it lacks."""


class Peers(Protocol):
    """Connects the ranks of one group, this one among them.

    All members make the same calls in the same order. Each call ends within the time limit or raises ExchangeFailed, on
    this member at least.
    """

    members: tuple[int, ...]
    own_rank: int
    """This rank's place among the members."""
    wait_seconds: float

    def exchange_proposals(self, mine: str) -> list[str]:
        """Sends this member's card and returns all members'."""
        ...

    def exchange_buffers(self, sent: memoryview, into: Sequence[memoryview]) -> Callable[[], None]:
        """Sends to every other member and fills `into`, one buffer per member.

        The call that it returns waits for the end. Lengths are known on both sides; a length of 0 moves nothing.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CommonDestinations:
    """Destinations, by number, that all `peers` want, in the same order."""

    numbers: tuple[int, ...]
    peers: Peers


@dataclass(frozen=True, slots=True)
class PlannedReads:
    """Reads of some destinations, planned. `parts` by saved rank, `placers` by destination."""

    wanted_bytes_by_destination: tuple[WantedBox, ...]
    ranges: tuple[RangeRead, ...]
    parts: dict[int, SavedPart]
    placers: tuple[AnyPlacer, ...]


@dataclass(slots=True)
class ExchangeOutcome:
    """Reports what an exchange read, and what is missing."""

    missing: list[RangeRead]
    by_kind: dict[str, int] = field(default_factory=dict)
    peers_kinds: frozenset[str] = frozenset()
    """Where the peers had it from."""


@dataclass(frozen=True, slots=True)
class _Head:
    state: int
    used: int
    kinds: int


class Exchange:
    """Carries out one group's reads, once."""

    def __init__(self, copies: CopySelector, reading: PlannedReads, peers: Peers) -> None:
        self._copies, self._reading, self._peers = copies, reading, peers
        self._manifests = {rank: copies.manifest(rank) for rank in reading.parts}
        self._peers_kinds = 0

    def run(self, threads: int) -> ExchangeOutcome:
        """Reads this rank's share and exchanges it; returns what is missing.

        Raises what a read of the share raises. A failed exchange is logged and counted, never raised: what is missing
        is read directly.
        """
        ranges = self._reading.ranges
        try:
            owners = self._agree()
        except ExchangeFailed as problem:
            _called_off(problem)
            owners = None
        if owners is None:
            return ExchangeOutcome(list(ranges))
        outbox = Outbox()
        arrivals = SegmentReceiver(ranges, owners, self._reading.parts, self._manifests, self._reading.placers)
        fetch = self._fetch(owners, outbox)
        with ThreadPoolExecutor(1, thread_name_prefix="surefoot-share") as pool:
            share = pool.submit(_read_share, fetch, outbox, threads)
            try:
                self._rounds(outbox, arrivals, fetch)
            except (ExchangeFailed, MemoryError) as problem:
                _called_off(problem)
            finally:
                outbox.close()
            share.result()
        arrivals.mark_own_reads(self._peers.own_rank)
        if arrivals.damaged:
            metrics.restore_fallbacks.labels(PEER).inc(arrivals.damaged)
            log.warning("%d parts came damaged from peers and are read again", arrivals.damaged)
        kinds = frozenset(kind for bit, kind in enumerate(_KINDS) if self._peers_kinds >> bit & 1)
        return ExchangeOutcome(arrivals.missing(), {**fetch.by_kind, PEER: arrivals.received_bytes}, kinds)

    def _agree(self) -> tuple[int, ...] | None:
        reading = self._reading
        staged = sorted(rank for rank, part in reading.parts.items() if part.staged is not None)
        name = plan_name(
            str(self._copies.checkpoint), reading.wanted_bytes_by_destination, self._manifests, reading.ranges
        )
        cards = [
            ReadProposal.from_text(text)
            for text in self._peers.exchange_proposals(ReadProposal(name, tuple(staged)).to_text())
        ]
        found = derive_agreement(cards, [(r.rank, r.length) for r in reading.ranges])
        log.info("ranks %s: %s", self._peers.members, found.reason)
        if found.doubt:
            raise ExchangeFailed(found.reason)
        return found.owners

    def _fetch(self, owners: Sequence[int], outbox: Outbox) -> Fetch:
        reading, me = self._reading, self._peers.own_rank
        mine = [n for n, owner in enumerate(owners) if owner == me]
        numbers = {s: (n, i) for n in mine for i, s in enumerate(reading.ranges[n].segments)}
        telling = cast("Sequence[AnyPlacer]", [SegmentSender(placer, outbox, numbers) for placer in reading.placers])
        return Fetch(self._copies, reading.parts, telling, [reading.ranges[n] for n in mine])

    def _rounds(self, outbox: Outbox, arrivals: SegmentReceiver, fetch: Fetch) -> None:
        """Checks and places one round's data while the next one's is under way."""
        peers = self._peers
        size = sum(r.length for r in self._reading.ranges)
        deadline = time.monotonic() + peers.wait_seconds + size / MIN_BYTES_PER_SECOND
        buffers = [self._buffers(ROUND_BYTES) for _ in range(2)]
        brought: list[memoryview] = []
        try:
            for turn in count():
                sealed = outbox.next_full_buffer()
                heads = self._heads(sealed, fetch)
                into = [b[: h.used] for b, h in zip(buffers[turn % 2], heads, strict=True)]
                wait = peers.exchange_buffers(sealed.data, into)
                _accept(arrivals, brought)
                brought = []
                wait()
                brought = into
                if all(head.state == _FINISHED for head in heads):
                    break
                if time.monotonic() > deadline:
                    raise ExchangeFailed(f"the exchange of {size} bytes takes too long: {turn + 1} rounds so far")
        finally:
            _accept(arrivals, brought)
        self._farewell(arrivals)

    def _heads(self, sealed: ReadyFrame, fetch: Fetch) -> list[_Head]:
        state = _FAILED if sealed.failed else _FINISHED if sealed.finished else _GOING
        kinds = sum(1 << bit for bit, kind in enumerate(_KINDS) if fetch.by_kind.get(kind)) if sealed.finished else 0
        heads = self._swapped(state, sealed.data.nbytes, kinds)
        for number, head in enumerate(heads):
            if head.state == _FAILED or head.used > ROUND_BYTES:
                what = "could not read its share" if head.state == _FAILED else f"announces {head.used} bytes"
                raise ExchangeFailed(f"rank {self._peers.members[number]} {what}")
            self._peers_kinds |= head.kinds
        return heads

    def _swapped(self, state: int, used: int, kinds: int) -> list[_Head]:
        peers = self._peers
        said = _HEADER.pack(state, used, kinds)
        mine = memoryview(bytearray(said + _CHECK.pack(crc32(said))))
        into = self._buffers(HEADER_BYTES)
        peers.exchange_buffers(mine, into)()
        into[peers.own_rank] = mine
        heads = []
        for number, text in enumerate(into):
            # a wrong length is no matter for digests: what is received is as long as the header says
            if crc32(text[: _HEADER.size]) != _CHECK.unpack_from(text, _HEADER.size)[0]:
                raise ExchangeFailed(f"rank {peers.members[number]} sent something that is no header")
            heads.append(_Head(*_HEADER.unpack_from(text)))
        return heads

    def _buffers(self, size: int) -> list[memoryview]:
        """Makes one buffer for each other member."""
        return [
            memoryview(bytearray(0 if m == self._peers.own_rank else size)) for m in range(len(self._peers.members))
        ]

    def _farewell(self, arrivals: SegmentReceiver) -> None:
        """Exchanges how much each member lacks; nobody leaves while another still receives."""
        arrivals.mark_own_reads(self._peers.own_rank)
        lacking = len(arrivals.missing())
        try:
            heads = self._swapped(_FINISHED, lacking, 0)
        except ExchangeFailed as problem:
            log.info("a peer left without a last word: %s", problem)
            return
        short = [rank for rank, head in zip(self._peers.members, heads, strict=True) if head.used]
        if short:
            log.warning("ranks %s lack parts after the exchange, and read them directly", short)


def _accept(arrivals: SegmentReceiver, brought: Sequence[memoryview]) -> None:
    for member, data in enumerate(brought):
        arrivals.accept(member, data)


def _read_share(fetch: Fetch, outbox: Outbox, threads: int) -> None:
    done = False
    try:
        fetch.run(threads)
        done = True
    finally:
        outbox.finish(failed=not done)


def _called_off(problem: Exception) -> None:
    metrics.restore_fallbacks.labels("exchange").inc()
    log.warning("reads are not shared with other ranks, each reads for itself: %s", problem)
