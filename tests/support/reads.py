"""Which blocks of which saved pieces hold a wanted box, worked out plainly: what tests count and compare bytes by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from surefoot.geometry.box import BlockRun, Box, Tiling, box_of
from surefoot.protocol.checkpoints.records import Piece


@dataclass(frozen=True, slots=True)
class PieceRead:
    """What to read of one saved piece: `box` is the wanted part in the tensor's own coordinates, `runs` its blocks."""

    piece: Piece
    box: Box
    runs: tuple[BlockRun, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes to read; whole blocks, so at least the bytes that are wanted."""
        return sum(run.stop - run.start for run in self.runs)


def reads(wanted: Box, pieces: Iterable[Piece], itemsize: int) -> list[PieceRead]:
    """For each saved piece that has elements of `wanted`: which, and in which of its blocks they lie."""
    found = []
    for piece in pieces:
        shared = wanted.intersect(box_of(piece))
        if shared is not None:
            tiling = Tiling(piece.lengths, piece.tile, itemsize)
            found.append(PieceRead(piece, shared, tuple(tiling.runs(shared.relative_to(piece.offsets)))))
    return found
