"""Rank streams as a drain would find them, and a restore that reads them block by block, without tiers or threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from surefoot.geometry import Box, Tiling
from surefoot.protocol.checkpoints.completeness import describe_uncovered_tensor
from surefoot.protocol.checkpoints.records import Layout
from surefoot.staging import prepare_copies
from surefoot.state import Entry, Program, SavedTensor, dtype_from_name, read_values, save_plan


@dataclass(frozen=True)
class Stream:
    """What one rank saved."""

    layout: Layout
    data: bytes
    values: bytes


def saved(program: Program, rank: int, step: int) -> Stream:
    """Everything of one rank, copied as staging does."""
    entries = program.entries()
    plan = save_plan(entries, rank)
    slot = np.zeros(plan.layout.stream_bytes, dtype=np.uint8)
    for portion in plan.portions:
        part = entries[portion.entry].local_part()
        slices = tuple(slice(o, o + n) for o, n in zip(portion.within.offsets, portion.within.lengths, strict=True))
        for copy in prepare_copies(part[slices], portion.tile, slot[portion.start : portion.stop]):
            copy.run()
    return Stream(plan.layout, slot.tobytes(), program.values(step))


def merged(streams: list[Stream]) -> dict[str, torch.Tensor]:
    """Every global tensor, put together from all ranks' blocks; fails where they do not cover each exactly once."""
    gap = describe_uncovered_tensor(stream.layout for stream in streams)
    assert gap is None, gap
    found: dict[str, torch.Tensor] = {}
    for stream in streams:
        for tensor in stream.layout.tensors:
            dtype = dtype_from_name(tensor.dtype)
            whole = found.setdefault(tensor.name, torch.empty(tensor.shape, dtype=dtype))
            for piece in tensor.pieces:
                _place(
                    whole, piece.offsets, Tiling(piece.lengths, piece.tile, dtype.itemsize), piece.stream_offset, stream
                )
    return found


def _place(whole: torch.Tensor, corner: tuple[int, ...], tiling: Tiling, at: int, stream: Stream) -> None:
    for index in range(tiling.blocks):
        box = tiling.block_box(index)
        start = at + tiling.block_start(index)
        raw = bytearray(stream.data[start : start + tiling.block_bytes(index)])
        block = torch.frombuffer(raw, dtype=whole.dtype).reshape(box.lengths)
        place = Box(tuple(o + c for o, c in zip(box.offsets, corner, strict=True)), box.lengths)
        whole[_slices(place)] = block


def restored(program: Program, streams: list[Stream], rank: int, world: int, step: int) -> None:
    """Brings streams of any world back into a program of another."""
    tensors = merged(streams)
    index = {name: SavedTensor(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    shared = read_values(streams[0].values)
    own = read_values(streams[rank].values) if len(streams) == world else None
    program.prepare(shared, own, index)
    fill(program.targets(), tensors)
    program.apply(step, shared, own)


def fill(entries: list[Entry], tensors: Mapping[str, torch.Tensor]) -> None:
    for entry in entries:
        with torch.no_grad():
            entry.local_part().copy_(tensors[entry.name][_slices(entry.location.box)])


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
