"""Reads each byte that several ranks need once per group, and exchanges it between them.

ByteCheckpoint (NSDI'25) removes redundant reads like this; here every wait has a timeout and peers' data is verified.
All members make the same calls in the same order: proposals, then rounds of headers and data until every member has
announced its end, then a last header. After any failure (a member is lost, stalls, plans other reads or sends damaged
data) each member reads its missing parts directly. Called by `reader`; `checkpointer.restoring` connects the members.
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
from surefoot.restore.read_plan import RangeRead, ReadProposal, Segment, WantedBox, derive_agreement, digest_plan
from surefoot.tiers import tier

log = logging.getLogger(__name__)


# ---- frames ----------------------------------------------------------------------------------------------------------
# Frames for the verified segments that members of an exchange send each other. `Outbox` collects this rank's segments
# in one buffer while the other is being sent; a thread that finds no room waits. `SegmentReceiver` trusts no peer: it
# checks each segment against the digests of its save before placing it.

ROUND_BYTES = 4 * 1024 * 1024
"""Size of a member's buffer. Any segment fits, as none is longer than a chunk."""

_FRAME = struct.Struct("<III")
"""Index of the read, index of the segment in it, number of bytes that follow."""


@dataclass(frozen=True, slots=True)
class ReadyFrame:
    """Data that is ready to be sent."""

    data: memoryview
    is_last: bool
    """No data follows."""
    is_failed: bool
    """The reads failed, so the remaining data will not follow."""


class Outbox:
    """Collects outgoing segments in two buffers of `size` bytes.

    Reading threads call `put`, the exchanging thread `next_full_buffer`.
    """

    def __init__(self, size: int = ROUND_BYTES) -> None:
        self._filling, self._sending = memoryview(bytearray(size)), memoryview(bytearray(size))
        self._used = 0
        self._full = self._finished = self._failed = self._closed = False
        self._changed = threading.Condition()

    def queue_segment(self, read: int, segment: int, data: memoryview) -> None:
        """Copies a segment into the buffer; waits for room, unless the outbox is closed."""
        frame_bytes = _FRAME.size + data.nbytes
        if frame_bytes > len(self._filling):
            raise ValueError(f"a segment of {data.nbytes} bytes does not fit into a buffer of {len(self._filling)}")
        with self._changed:
            while self._used + frame_bytes > len(self._filling) and not self._closed:
                self._full = True
                self._changed.notify_all()
                self._changed.wait()
            if self._closed:
                return
            _FRAME.pack_into(self._filling, self._used, read, segment, data.nbytes)
            self._filling[self._used + _FRAME.size : self._used + frame_bytes] = data.cast("B")
            self._used += frame_bytes

    def next_full_buffer(self) -> ReadyFrame:
        """Waits for a full or the last buffer and returns it; the one returned before is filled from now on."""
        with self._changed:
            self._changed.wait_for(lambda: self._full or self._finished)
            self._filling, self._sending = self._sending, self._filling
            frame = ReadyFrame(self._sending[: self._used], self._finished, self._failed)
            self._used, self._full = 0, False
            self._changed.notify_all()
        return frame

    def mark_finished(self, failed: bool) -> None:
        """Marks the end of the data: all reads are done, or they failed."""
        with self._changed:
            self._finished, self._failed = True, failed
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waits and discards later segments, because the exchange is over."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class SegmentSender:
    """Places this rank's verified segments and queues those with a number for the peers."""

    def __init__(self, placer: AnyPlacer, outbox: Outbox, segment_numbers: Mapping[Segment, tuple[int, int]]) -> None:
        self._placer, self._outbox, self._numbers = placer, outbox, segment_numbers

    def place(self, segment: Segment, data: memoryview) -> None:
        self._placer.place(segment, data)
        number = self._numbers.get(segment)
        if number is not None:
            self._outbox.queue_segment(*number, data)


class SegmentReceiver:
    """Verifies and places the peers' segments, and tracks which are missing; for one thread."""

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
        self._missing_segments = [set(range(len(r.segments))) for r in ranges]
        self.received_bytes = 0
        self.damaged_count = 0
        """Number of frames that were invalid or failed the digest check."""

    def place_segments(self, member: int, data: memoryview) -> None:
        """Places the intact segments of a member's buffer; the others stay missing."""
        position = 0
        while position + _FRAME.size <= data.nbytes:
            read, segment, length = _FRAME.unpack_from(data, position)
            start = position + _FRAME.size
            position = start + length
            if position > data.nbytes or not self._place(member, (read, segment), data[start:position]):
                self.damaged_count += 1

    def mark_own_reads(self, member: int) -> None:
        """Marks the reads of this rank as complete."""
        for missing_segments, owner in zip(self._missing_segments, self._owners, strict=True):
            if owner == member:
                missing_segments.clear()

    def missing_reads(self) -> list[RangeRead]:
        """Returns the reads that are incomplete."""
        return [r for r, segments in zip(self._ranges, self._missing_segments, strict=True) if segments]

    def _place(self, member: int, number: tuple[int, int], data: memoryview) -> bool:
        """Places a member's segment; False if it is not that member's, not missing or damaged."""
        read, index = number
        if read >= len(self._ranges) or self._owners[read] != member or index not in self._missing_segments[read]:
            return False
        planned = self._ranges[read]
        segment, part = planned.segments[index], self._parts[planned.rank]
        if data.nbytes != part.stream.edges[segment.blocks.stop] - segment.start:
            return False
        origin = (f"member {member} of the exchange", planned.chunk, segment.blocks)
        try:
            tier.check_blocks(data, self._manifests[planned.rank], part.stream, part.digest_table, origin)
        except Corrupt:
            return False
        self._placers[segment.box_index].place(segment, data)
        self._missing_segments[read].discard(index)
        self.received_bytes += data.nbytes
        return True


# ---- exchange --------------------------------------------------------------------------------------------------------

PEER = "peer"
"""Kind of source of bytes that another member read."""

MIN_BYTES_PER_SECOND = 25e6
"""Minimum rate of an exchange: one that is slower, after `wait_seconds`, is cancelled."""

_HEADER = struct.Struct("<III")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size
_GOING, _FINISHED, _FAILED = range(3)
_KINDS = ("staging", "memory", "persistent")


class ExchangeFailed(SurefootError):
    """The exchange failed, so each member reads its missing parts directly."""


class Peers(Protocol):
    """Connects the ranks of one group, including this one.

    All members make the same calls in the same order. Each call ends within the timeout or raises ExchangeFailed, at
    least on this member.
    """

    members: tuple[int, ...]
    """Ranks of the group."""
    own_index: int
    """Index of this rank among the members."""
    timeout_seconds: float
    """Timeout of each call."""

    def exchange_proposals(self, mine: str) -> list[str]:
        """Sends this member's proposal and returns all members', in their order."""
        ...

    def exchange_buffers(self, sent: memoryview, into: Sequence[memoryview]) -> Callable[[], None]:
        """Starts sending to every other member and filling `into`, which has one buffer per member.

        Both sides know the lengths; a length of 0 transfers nothing.

        Returns:
            A function that waits for the end.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CommonDestinations:
    """Indexes of the destinations that all `peers` want, in the same order."""

    destination_indexes: tuple[int, ...]
    peers: Peers


@dataclass(frozen=True, slots=True)
class PlannedReads:
    """The planned reads of some destinations."""

    wanted_boxes: tuple[WantedBox, ...]
    """Box of each destination."""
    ranges: tuple[RangeRead, ...]
    """The reads."""
    parts_by_rank: dict[int, SavedPart]
    """Layout and digests by saved rank."""
    placers: tuple[AnyPlacer, ...]
    """Placer of each destination."""


@dataclass(slots=True)
class ExchangeOutcome:
    """The result of an exchange."""

    missing_reads: list[RangeRead]
    """Reads that are incomplete, which must be made directly."""
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    """Bytes read, by kind of source."""
    peer_kinds: frozenset[str] = frozenset()
    """Kinds of sources from which the peers read."""


@dataclass(frozen=True, slots=True)
class _Header:
    """Header that each member sends before its data."""

    state: int
    used: int
    """Bytes of data that follow; in the last header, the number of incomplete reads."""
    kinds: int
    """Bit mask of the kinds of sources that the member read from."""


class Exchange:
    """Executes one group's reads once."""

    def __init__(self, copies: CopySelector, reading: PlannedReads, peers: Peers) -> None:
        self._copies, self._reading, self._peers = copies, reading, peers
        self._manifests = {rank: copies.manifest_of(rank) for rank in reading.parts_by_rank}
        self._peers_kinds = 0

    def run(self, threads: int) -> ExchangeOutcome:
        """Reads this rank's share and exchanges it; returns the outcome with the missing reads.

        Raises the error of a read of the share. A failed exchange is logged and counted, not raised, as the missing
        parts can be read directly.
        """
        # Agree with the peers on who reads what.
        ranges = self._reading.ranges
        try:
            owners = self._agree()
        except ExchangeFailed as problem:
            _report_failed_exchange(problem)
            owners = None
        if owners is None:
            return ExchangeOutcome(list(ranges))
        # Read this rank's share in threads while this thread exchanges what is read.
        outbox = Outbox()
        receiver = SegmentReceiver(ranges, owners, self._reading.parts_by_rank, self._manifests, self._reading.placers)
        fetch = self._build_fetch(owners, outbox)
        with ThreadPoolExecutor(1, thread_name_prefix="surefoot-share") as pool:
            share = pool.submit(_read_share, fetch, outbox, threads)
            try:
                self._run_rounds(outbox, receiver, fetch)
            except (ExchangeFailed, MemoryError) as problem:
                _report_failed_exchange(problem)
            finally:
                outbox.close()
            share.result()
        # The caller reads the missing parts directly.
        receiver.mark_own_reads(self._peers.own_index)
        if receiver.damaged_count:
            metrics.restore_fallbacks.labels(PEER).inc(receiver.damaged_count)
            log.warning("%d parts from peers were damaged and will be read directly", receiver.damaged_count)
        kinds = frozenset(kind for bit, kind in enumerate(_KINDS) if self._peers_kinds >> bit & 1)
        return ExchangeOutcome(receiver.missing_reads(), {**fetch.bytes_by_kind, PEER: receiver.received_bytes}, kinds)

    def _agree(self) -> tuple[int, ...] | None:
        """Exchanges proposals and returns the member that makes each read; None: every member reads alone."""
        reading = self._reading
        staged = sorted(rank for rank, part in reading.parts_by_rank.items() if part.staged_stream is not None)
        name = digest_plan(str(self._copies.checkpoint), reading.wanted_boxes, self._manifests, reading.ranges)
        proposals = [
            ReadProposal.from_text(text)
            for text in self._peers.exchange_proposals(ReadProposal(name, tuple(staged)).to_text())
        ]
        agreement = derive_agreement(proposals, [(r.rank, r.length) for r in reading.ranges])
        log.info("shared restore of ranks %s: %s", self._peers.members, agreement.reason)
        if agreement.is_inconsistent:
            raise ExchangeFailed(agreement.reason)
        return agreement.owners

    def _build_fetch(self, owners: Sequence[int], outbox: Outbox) -> Fetch:
        """Builds the fetch of this rank's share, which also queues each segment for the peers."""
        reading, own_rank = self._reading, self._peers.own_index
        own_reads = [n for n, owner in enumerate(owners) if owner == own_rank]
        segment_numbers = {s: (n, i) for n in own_reads for i, s in enumerate(reading.ranges[n].segments)}
        senders = cast(
            "Sequence[AnyPlacer]", [SegmentSender(placer, outbox, segment_numbers) for placer in reading.placers]
        )
        return Fetch(self._copies, reading.parts_by_rank, senders, [reading.ranges[n] for n in own_reads])

    def _run_rounds(self, outbox: Outbox, receiver: SegmentReceiver, fetch: Fetch) -> None:
        """Exchanges buffers until all members are finished; verifies one round's data while the next is in transit."""
        peers = self._peers
        size = sum(r.length for r in self._reading.ranges)
        deadline = time.monotonic() + peers.timeout_seconds + size / MIN_BYTES_PER_SECOND
        buffers = [self._allocate_buffers(ROUND_BYTES) for _ in range(2)]
        received: list[memoryview] = []
        try:
            for round_index in count():
                frame = outbox.next_full_buffer()
                headers = self._exchange_headers(frame, fetch)
                into = [b[: h.used] for b, h in zip(buffers[round_index % 2], headers, strict=True)]
                wait = peers.exchange_buffers(frame.data, into)
                _accept(receiver, received)
                received = []
                wait()
                received = into
                if all(header.state == _FINISHED for header in headers):
                    break
                if time.monotonic() > deadline:
                    raise ExchangeFailed(
                        f"the exchange of {size} bytes takes too long: {round_index + 1} rounds so far"
                    )
        finally:
            _accept(receiver, received)
        self._exchange_final_headers(receiver)

    def _exchange_headers(self, frame: ReadyFrame, fetch: Fetch) -> list[_Header]:
        """Announces a frame to the peers and returns all members' headers; raises ExchangeFailed if one failed."""
        state = _FAILED if frame.is_failed else _FINISHED if frame.is_last else _GOING
        kinds = (
            sum(1 << bit for bit, kind in enumerate(_KINDS) if fetch.bytes_by_kind.get(kind)) if frame.is_last else 0
        )
        headers = self._exchange_header(state, frame.data.nbytes, kinds)
        for number, header in enumerate(headers):
            if header.state == _FAILED or header.used > ROUND_BYTES:
                fault = "could not read its share" if header.state == _FAILED else f"announces {header.used} bytes"
                raise ExchangeFailed(f"rank {self._peers.members[number]} {fault}")
            self._peers_kinds |= header.kinds
        return headers

    def _exchange_header(self, state: int, used: int, kinds: int) -> list[_Header]:
        peers = self._peers
        header = _HEADER.pack(state, used, kinds)
        own_header = memoryview(bytearray(header + _CHECK.pack(crc32(header))))
        into = self._allocate_buffers(HEADER_BYTES)
        peers.exchange_buffers(own_header, into)()
        into[peers.own_index] = own_header
        headers = []
        for number, text in enumerate(into):
            # Digests cannot catch a wrong length, as it decides how many bytes are received: hence the header's own
            # CRC.
            if crc32(text[: _HEADER.size]) != _CHECK.unpack_from(text, _HEADER.size)[0]:
                raise ExchangeFailed(f"rank {peers.members[number]} sent an invalid header")
            headers.append(_Header(*_HEADER.unpack_from(text)))
        return headers

    def _allocate_buffers(self, size: int) -> list[memoryview]:
        """Allocates one buffer per member, an empty one for this rank."""
        return [
            memoryview(bytearray(0 if m == self._peers.own_index else size)) for m in range(len(self._peers.members))
        ]

    def _exchange_final_headers(self, receiver: SegmentReceiver) -> None:
        """Exchanges the numbers of incomplete reads, so that no member disconnects while another still receives."""
        receiver.mark_own_reads(self._peers.own_index)
        missing_count = len(receiver.missing_reads())
        try:
            headers = self._exchange_header(_FINISHED, missing_count, 0)
        except ExchangeFailed as problem:
            log.info("a peer disconnected without its final header, which does no harm: %s", problem)
            return
        incomplete_ranks = [rank for rank, header in zip(self._peers.members, headers, strict=True) if header.used]
        if incomplete_ranks:
            log.warning("ranks %s lack parts after the exchange, and read them directly", incomplete_ranks)


def _accept(receiver: SegmentReceiver, buffers: Sequence[memoryview]) -> None:
    for member, data in enumerate(buffers):
        receiver.place_segments(member, data)


def _read_share(fetch: Fetch, outbox: Outbox, threads: int) -> None:
    done = False
    try:
        fetch.run(threads)
        done = True
    finally:
        outbox.mark_finished(failed=not done)


def _report_failed_exchange(problem: Exception) -> None:
    metrics.restore_fallbacks.labels("exchange").inc()
    log.warning("sharing reads with other ranks failed; this rank reads its missing parts directly: %s", problem)
