"""Converts ranges of a flattened tensor into boxes.

Pure. Flat parameters and optimizer partitions hold such ranges. A run of row-major elements is at most 2n − 1 boxes of
n dimensions (the end of a row, whole rows, the beginning of a row, and so on inwards). Each box is contiguous in the
flattened tensor, so a rank needs nobody else to name its part.
"""

from __future__ import annotations

from math import prod

from surefoot.geometry.box import Box


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Converts a range of the flattened tensor to boxes, in order.

    The range goes from element `start` to `stop`.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"elements {start} to {stop} are not in a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _within(shape, first, head, tail)
    found = _within(shape, first, head, row) if head else []
    whole = first + (head > 0)
    if whole < last:
        found.append(Box((whole, *(0,) * (len(shape) - 1)), (last - whole, *shape[1:])))
    return found + _within(shape, last, 0, tail) if tail else found


def _within(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    inner = flat_boxes(shape[1:], start, stop)
    return [Box((row, *box.offsets), (1, *box.lengths)) for box in inner]


def flat_hull(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Finds the least flat range that has all of a box.

    The box must have elements.
    """
    first = last = 0
    for n, offset, length in zip(shape, box.offsets, box.lengths, strict=True):
        first, last = first * n + offset, last * n + offset + length - 1
    return first, last + 1
