"""Finds chunks that are equal to those of the save before.

Pure; used by `target_writer` and `uploader`. A target copies such a chunk within itself: of a model whose weights are
mostly frozen (LoRA, embeddings) next to nothing is sent. The digests that are made anyway decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from surefoot.format.digests import DIGEST_BYTES
from surefoot.format.layouts import Stream
from surefoot.protocol.identities import RankSave

MOST_GENERATIONS = 16
"""Saves in a row of which a chunk may be a copy; then all is sent. A bit that a target lost would live on for ever."""


@dataclass(frozen=True, slots=True)
class WrittenSave:
    """Describes a save that its target has whole."""

    save: RankSave
    layout: str
    table: bytes
    """Digests of its blocks."""
    generation: int = 0
    """Saves since the last one of which every byte was sent."""

    def has(self, stream: Stream, index: int, digests: bytes) -> bool:
        """Whether chunk `index` is equal, by the digests of its blocks.

        Of a save of the same layout.
        """
        blocks = stream.blocks_of_chunk(index)
        return self.table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES] == digests

    def has_all(self, stream: Stream, indexes: Iterable[int], table: bytes) -> bool:
        """Whether several chunks are equal, by a whole table."""
        found = ((index, stream.blocks_of_chunk(index)) for index in indexes)
        return all(self.has(stream, i, table[b.start * DIGEST_BYTES : b.stop * DIGEST_BYTES]) for i, b in found)


def base_of(written: WrittenSave | None, save: RankSave, layout: str) -> WrittenSave | None:
    """Chooses the save to copy from; None: everything is to be sent."""
    if written is None or written.save == save or written.save.rank != save.rank or written.layout != layout:
        return None
    return written if written.generation + 1 < MOST_GENERATIONS else None


def successor(base: WrittenSave | None, save: RankSave, layout: str, table: bytes) -> WrittenSave:
    """Describes a save that was written with the help of `base`."""
    return WrittenSave(save, layout, table, 0 if base is None else base.generation + 1)
