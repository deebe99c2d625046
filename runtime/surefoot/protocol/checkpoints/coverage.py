"""Checks whether rank layouts cover every tensor exactly once.

Pure; done once per set of layout digests. A global plan could promise this; checking what was really saved needs none,
so pipeline and expert parallel ranks, which never see each other's tensors, need no common plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod

from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.records import Layout, Piece
from surefoot.protocol.text import shown


def uncovered(layouts: Iterable[Layout]) -> str | None:
    """Describes the first tensor that is not covered exactly once, or None."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for layout in layouts:
        for tensor in layout.tensors:
            if shapes.setdefault(tensor.name, tensor.shape) != tensor.shape:
                return f"tensor {tensor.name} has shape {shapes[tensor.name]} on one rank and {tensor.shape} on another"
            if dtypes.setdefault(tensor.name, tensor.dtype) != tensor.dtype:
                return f"tensor {tensor.name} has dtype {dtypes[tensor.name]} on one rank and {tensor.dtype} on another"
            pieces[tensor.name].extend(tensor.pieces)
    for name, shape in shapes.items():
        problem = _gap_or_overlap(shape, pieces[name])
        if problem:
            return f"tensor {name} of shape {shape}: {problem}"
    return None


def _gap_or_overlap(shape: tuple[int, ...], pieces: Sequence[Piece]) -> str | None:
    if any(len(p.offsets) != len(shape) or len(p.lengths) != len(shape) for p in pieces):
        return "a piece has another number of dimensions"
    if any(n < 0 for p in pieces for n in p.lengths):
        return "a piece has a negative length"
    wanted, found = prod(shape), sum(prod(p.lengths) for p in pieces)
    if wanted == 0:
        return None
    if found != wanted:
        return f"{shown(found)} of {shown(wanted)} elements saved"
    full = [p for p in pieces if prod(p.lengths)]  # where a piece without elements lies means nothing
    if any(o < 0 or o + n > s for p in full for o, n, s in zip(p.offsets, p.lengths, shape, strict=True)):
        return "a piece reaches beyond it"
    return _overlap_of(shape, full)


def _overlap_of(shape: tuple[int, ...], boxes: list[Piece]) -> str | None:
    """Whether some of the boxes overlap, which lie inside the shape and together have as many elements.

    A sum of boxes is known by its corners, each counted with the sign of its parity: exactly those of the whole are
    left if, and only if, every element is in one box. No box is compared with another, so a record that was written to
    be slow is not; dimensions that no box is cut along add nothing.
    """
    cut = [d for d, n in enumerate(shape) if any(box.lengths[d] != n for box in boxes)]
    if not cut:
        return None if len(boxes) == 1 else "two pieces overlap"  # two saves of a 0-d tensor too
    if len(boxes) << len(cut) > bounds.MAX_COVERAGE_CORNERS:
        return f"{len(boxes)} pieces are cut along {len(cut)} dimensions, which are too many corners to compare"
    corners: dict[tuple[int, ...], int] = defaultdict(int)
    whole = Piece((0,) * len(shape), shape, shape, 0)
    for box, weight in ((whole, -1), *((box, 1) for box in boxes)):
        ends = [((o := box.offsets[d], 1), (o + box.lengths[d], -1)) for d in cut]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += weight * prod(sign for _, sign in corner)
    return "two pieces overlap" if any(corners.values()) else None
