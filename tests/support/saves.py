"""Small worlds of tensors, cut over ranks, saved through a real Drain; and the plain arrays that a restore must give back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from surefoot.flush.engine import FlushArena, Flusher, FlushListener, FlushOptions
from surefoot.flush.state_machine import StagedSave
from surefoot.format.layouts import Stream, TensorParts, block_digests, build_layout
from surefoot.format.manifests import build_manifest
from surefoot.geometry import Box
from surefoot.protocol.identities import MemoryServerInstance, RankSave
from surefoot.tiers import Tier

Arrays = Mapping[str, npt.NDArray[np.generic]]


def arrays(
    step: int, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32"
) -> dict[str, npt.NDArray[np.generic]]:
    """Random tensors that a step determines."""
    random = np.random.default_rng(step)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def split(shape: tuple[int, ...], ranks: int, rank: int) -> tuple[Box, ...]:
    """Rank's share along dimension 0, uneven where it must be; 0-d tensors belong to rank 0."""
    if not shape:
        return (Box((), ()),) if rank == 0 else ()
    first, last = shape[0] * rank // ranks, shape[0] * (rank + 1) // ranks
    return (Box((first, *([0] * (len(shape) - 1))), (last - first, *shape[1:])),) if last > first else ()


def stream_of(
    tensors: Arrays, boxes: Mapping[str, tuple[Box, ...]], chunk_blocks: int | None = None
) -> tuple[Stream, bytes]:
    """The layout of a rank that saves these boxes, and its bytes in the order of the stream.

    `chunk_blocks` makes a new chunk of every so many blocks, so that small states have many chunks.
    """
    parts = [TensorParts(n, a.dtype.name, a.shape, boxes.get(n, ())) for n, a in tensors.items()]
    stream = Stream(build_layout(parts))
    if chunk_blocks is not None:
        stream = Stream(replace(stream.layout, chunk_starts=tuple(stream.edges[:-1:chunk_blocks])))
    out = bytearray()
    for placed in stream.pieces:
        array = tensors[placed.tensor.name]
        for number in range(placed.tiling.blocks):
            block = placed.tiling.block_box(number)
            at = tuple(
                slice(p + o, p + o + n)
                for p, o, n in zip(placed.piece.offsets, block.offsets, block.lengths, strict=True)
            )
            out += array[at].tobytes()
    return stream, bytes(out)


def put_save(tier: Tier, save: RankSave, world: int, stream: Stream, data: bytes, values: bytes = b"{}") -> None:
    """Writes a rank save as a drain would."""
    view = memoryview(data)
    table = block_digests(view, stream.edges, range(stream.blocks))
    manifest = build_manifest(save, world, "me", stream, (table, values), 0.0)
    lengths = stream.layout.chunk_lengths()
    for index, (start, length) in enumerate(zip(stream.layout.chunk_starts, lengths, strict=True)):
        tier.put_chunk(save, index, view[start : start + length])
    tier.put_digests(save, table)
    tier.put_values(save, values)
    tier.put_layout(manifest.layout, stream.text)
    tier.commit(manifest, save.generation, lengths)


@dataclass
class Watched:
    """What a drain told its owner."""

    freed: list[tuple[int, int, bool]] = field(default_factory=list)
    saved: list[tuple[RankSave, int]] = field(default_factory=list)
    notices: list[tuple[str, str]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def watcher(self) -> FlushListener:
        return FlushListener(
            lambda slot, step, ok: self._add(self.freed, (slot, step, ok)),
            lambda save, copies: self._add(self.saved, (save, copies)),
            lambda reason, text: self._add(self.notices, (reason, text)),
        )

    def _add(self, to: list, item: object) -> None:  # type: ignore[type-arg]  # three lists of three kinds
        with self.changed:
            to.append(item)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, seconds), (self.freed, self.saved, self.notices)


class Saver:
    """One rank: an arena of two slots, a Drain, and a way to stage arrays into it."""

    def __init__(
        self,
        open_tier: Callable[[MemoryServerInstance], Tier],
        targets: tuple[MemoryServerInstance, ...],
        replicas: int = 2,
        options: FlushOptions | None = None,
        slot_bytes: int = 1 << 20,
        chunk_blocks: int | None = None,
    ) -> None:
        self.chunk_blocks = chunk_blocks
        self.memory = bytearray(2 * slot_bytes)
        self.slot_bytes = slot_bytes
        self.watched = Watched()
        arena = FlushArena(memoryview(self.memory), 2, slot_bytes)
        self.drain = Flusher(arena, "me", open_tier, self.watched.watcher(), options)
        self.drain.set_targets(targets, frozenset(targets), replicas)

    def stage(
        self, slot: int, save: RankSave, tensors: Arrays, world: int = 1, values: bytes = b'{"plain": 1}'
    ) -> Stream:
        boxes = {name: split(array.shape, world, save.rank) for name, array in tensors.items()}
        stream, data = stream_of(tensors, boxes, self.chunk_blocks)
        begin = slot * self.slot_bytes
        self.memory[begin : begin + len(data) + len(values)] = data + values
        sealed = StagedSave(save, world, "me", stream.digest, len(data), len(values))
        self.drain.add_staged(slot, sealed, stream.text)
        return stream

    def save(self, save: RankSave, tensors: Arrays, world: int = 1, values: bytes = b'{"plain": 1}') -> Stream:
        """Stages into slot 0 and waits until it is drained."""
        stream = self.stage(0, save, tensors, world, values)
        assert self.drain.wait_until_idle(20)
        return stream

    def close(self) -> None:
        assert self.drain.close(10)
