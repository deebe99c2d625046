"""Groups chunks into the parts that the persistent tier stores.

Pure. `flush.uploader` follows the same grouping. A part is `PART_CHUNKS` chunks, one behind the other; the last of a
rank save has what is left. A request to a bucket costs the same for one chunk as for four, and a connection is used
better by few large bodies than by many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from surefoot.errors import ChunkMissing
from surefoot.protocol.identities import RankSave

PART_CHUNKS = 4
"""Chunks of a part: up to 16 MiB. Part of the format; see docs/adr/0007."""
_SAVES_GATHERED = 4
"""Saves whose chunks may wait for the rest of their part at once: a writer has as many under way as slots."""


def part_name(number: int) -> str:
    return f"p{number:04d}"


def part_lengths(chunk_lengths: Sequence[int]) -> tuple[int, ...]:
    """Bytes of each part."""
    return tuple(sum(chunk_lengths[at : at + PART_CHUNKS]) for at in range(0, len(chunk_lengths), PART_CHUNKS))


@dataclass(frozen=True, slots=True)
class Cut:
    """Finds chunks of one layout in the stream and its parts."""

    starts: tuple[int, ...]
    stream_bytes: int

    def chunk(self, index: int) -> tuple[int, int, int] | None:
        """Locates a chunk.

        Returns:
            Number of its part, offset in it and bytes; None if there is no such chunk.
        """
        if not 0 <= index < len(self.starts):
            return None
        part = index // PART_CHUNKS
        end = self.starts[index + 1] if index + 1 < len(self.starts) else self.stream_bytes
        return part, self.starts[index] - self.starts[part * PART_CHUNKS], end - self.starts[index]

    def part_bytes(self, part: int) -> int:
        after = (part + 1) * PART_CHUNKS
        end = self.starts[after] if after < len(self.starts) else self.stream_bytes
        return end - self.starts[part * PART_CHUNKS]


@dataclass(slots=True)
class PartBuffer:
    """Gathers chunks until their part is whole.

    Of few saves, a part of each at most.
    """

    _of: dict[RankSave, dict[int, bytes]] = field(default_factory=dict)

    def add(self, save: RankSave, index: int, data: memoryview) -> list[bytes] | None:
        """Keeps a copy of a chunk.

        Returns:
            All chunks of the part if this was the last that it wanted.
        """
        if save not in self._of and len(self._of) >= _SAVES_GATHERED:
            del self._of[next(iter(self._of))]  # given up long ago: its commit would find the part missing
        waiting = self._of.setdefault(save, {})
        first = index - index % PART_CHUNKS
        for other in [number for number in waiting if number - number % PART_CHUNKS != first]:
            del waiting[other]  # of a part that was left before it was whole
        waiting[index] = bytes(data)
        if len(waiting) < PART_CHUNKS:
            return None
        return self.take(save)

    def waiting(self, save: RankSave) -> dict[int, int]:
        """Bytes of each chunk that waits."""
        return {index: len(data) for index, data in self._of.get(save, {}).items()}

    def take(self, save: RankSave) -> list[bytes]:
        """What waits, in order; nothing of this save waits any more."""
        waiting = self._of.pop(save, {})
        return [waiting[index] for index in sorted(waiting)]


def not_whole(save: RankSave, what: str, found: int | None, wanted: int) -> ChunkMissing:
    """Why a save cannot be committed, as an error to raise."""
    has = "no" if found is None else found
    return ChunkMissing(f"{save} cannot be committed: {what} has {has} bytes, not {wanted}")
