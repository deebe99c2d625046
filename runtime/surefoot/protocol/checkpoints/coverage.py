"""Checks whether rank layouts cover every tensor exactly once.

Pure; done once per set of layout digests. A global plan could promise this; checking what was really saved needs none,
so pipeline and expert parallel ranks, which never see each other's tensors, need no common plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

from surefoot.protocol.checkpoints.records import Layout, Piece


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
        return f"{found} of {wanted} elements saved"
    full = [p for p in pieces if prod(p.lengths)]  # where a piece without elements lies means nothing
    if any(o < 0 or o + n > s for p in full for o, n, s in zip(p.offsets, p.lengths, shape, strict=True)):
        return "a piece reaches beyond it"
    return "two pieces overlap" if _any_overlap(full) else None


def _any_overlap(boxes: list[Piece]) -> bool:
    """Sweep along the dimension with the most distinct starts; only pieces that meet there are compared."""
    if len(boxes) < 2:
        return False
    if not boxes[0].lengths:
        return True  # two saves of a 0-d tensor
    dimension = max(range(len(boxes[0].lengths)), key=lambda d: len({p.offsets[d] for p in boxes}))
    boxes.sort(key=lambda p: p.offsets[dimension])
    active: list[Piece] = []
    for box in boxes:
        start = box.offsets[dimension]
        active = [a for a in active if a.offsets[dimension] + a.lengths[dimension] > start]
        if any(_meet(a, box) for a in active):
            return True
        active.append(box)
    return False


def _meet(a: Piece, b: Piece) -> bool:
    return all(
        ao < bo + bn and bo < ao + an for ao, an, bo, bn in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True)
    )
