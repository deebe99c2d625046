"""Who saves which part: shard layouts, and how ranks that hold the same tensor share the saving of it. Pure.

Every rank computes this alone and must come to the same answer, so nothing here depends on anything but its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import ceil, prod

from surefoot.geometry.box import Box

SPLIT_BYTES = 1024 * 1024
"""Replicated tensors of at least this size are cut by rows; smaller ones are given whole to one rank."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor, as far as sharing it out needs to know it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.itemsize


def chunked(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index` when `length` is cut as `torch.chunk` does: equal parts, the last ones less."""
    size = ceil(length / parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def near_equal(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index` when no part differs from another by more than one."""
    size, larger = divmod(length, parts)
    return index * size + min(index, larger), size + (index < larger)


def shard_box(shape: tuple[int, ...], dimension: int, parts: int, index: int) -> Box:
    """What rank `index` of `parts` holds of a tensor sharded along `dimension` (FSDP2's and `Shard`'s layout)."""
    start, length = chunked(shape[dimension], parts, index)
    offsets, lengths = [0] * len(shape), list(shape)
    offsets[dimension], lengths[dimension] = start, length
    return Box(tuple(offsets), tuple(lengths))


def split_replicated(tensors: Iterable[Shape], ranks: int, index: int) -> dict[str, Box]:
    """What member `index` of `ranks` that all hold these tensors saves of them, by name; absent means nothing.

    Large tensors go by rows in near-equal parts; the rest, largest first, to whoever has the fewest bytes so far.
    Together the members save every element once, and their bytes differ by about one small tensor.
    """
    ordered = sorted(tensors, key=lambda t: (-t.size_bytes, t.name))
    load, mine = [0] * ranks, {}
    by_rows = [t for t in ordered if t.size_bytes >= SPLIT_BYTES and t.shape[:1] >= (ranks,)]
    for turn, tensor in enumerate(by_rows):
        row_bytes = tensor.size_bytes // tensor.shape[0]
        for member in range(ranks):
            # taking turns at the front: the members with one row more are not the same for every tensor
            start, rows = near_equal(tensor.shape[0], ranks, (member + turn) % ranks)
            load[member] += rows * row_bytes
            if member == index and rows:
                mine[tensor.name] = Box((start, *[0] * (len(tensor.shape) - 1)), (rows, *tensor.shape[1:]))
    queue = [(bytes_so_far, member) for member, bytes_so_far in enumerate(load)]
    heapify(queue)
    split = {t.name for t in by_rows}
    for tensor in ordered:
        if tensor.name in split or tensor.size_bytes == 0:
            continue
        bytes_so_far, member = queue[0]
        heapreplace(queue, (bytes_so_far + tensor.size_bytes, member))
        if member == index:
            mine[tensor.name] = Box.whole(tensor.shape)
    return mine
