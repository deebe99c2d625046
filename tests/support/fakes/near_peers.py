"""Members of an exchange as threads of one process: the line is memory, with faults that a test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from surefoot.restore.exchange import ExchangeFailed

Spoil = Callable[[int, int, memoryview], None]
"""(member that receives, member that sent, what arrives): may change the bytes, or raise ExchangeFailed."""


@dataclass
class Room:
    """What `count` members meet in. A member that leaves breaks the meeting for all."""

    count: int
    wait_seconds: float = 5.0
    spoil: Spoil = lambda *_: None
    said: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._meeting = threading.Barrier(self.count)
        self.sent: list[bytes] = [b""] * self.count

    def meet(self) -> None:
        try:
            self._meeting.wait(self.wait_seconds)
        except threading.BrokenBarrierError as broken:
            raise ExchangeFailed("a member left") from broken

    def leave(self) -> None:
        self._meeting.abort()

    def member(self, me: int) -> NearPeers:
        return NearPeers(self, me)


class NearPeers:
    def __init__(self, room: Room, me: int) -> None:
        self.room, self.own_index = room, me
        self.members = tuple(range(room.count))
        self.timeout_seconds = room.wait_seconds

    def exchange_proposals(self, mine: str) -> list[str]:
        self.room.said[self.own_index] = mine
        self.room.meet()
        return [self.room.said[m] for m in self.members]

    def exchange_buffers(self, sent: memoryview, into: Sequence[memoryview]) -> Callable[[], None]:
        room = self.room
        room.sent[self.own_index] = bytes(sent)
        room.meet()
        for source, buffer in enumerate(into):
            if source != self.own_index:
                buffer[:] = room.sent[source]
                room.spoil(self.own_index, source, buffer)
        room.meet()
        return lambda: None

    def close(self) -> None:
        self.room.leave()
