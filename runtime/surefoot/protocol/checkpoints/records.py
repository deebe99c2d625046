"""Defines the stored records: rank manifest, layout, index entry.

Pure: versioned JSON, never pickle. Written by the drain, read by the operator (to choose a restore point) and by every
restoring rank. The exact JSON stands in docs/format.md; `FORMAT` grows with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from surefoot.errors import OutOfBounds, ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.identities import RankSave
from surefoot.protocol.text import short_repr, shorten

FORMAT = 1
"""Version of every record in this file."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)

CHUNK_BYTES = 4 * 1024 * 1024 - 64
"""Largest chunk payload: with Redis' own header it fills one 4 MiB allocation (4 MiB exactly would take 5)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Locates one box of a tensor in a rank's byte stream.

    `offsets`/`lengths` place the box in the global tensor; `tile` is the block's shape (same number of dimensions):
    blocks stand in row-major order of tiles, each block's elements row-major, tiles at the far edges clipped.
    `stream_offset` is where the piece begins in the stream, in bytes. A 0-d tensor has empty tuples and one block.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    tile: tuple[int, ...]
    stream_offset: int


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor's global shape and the pieces this rank saves (maybe none)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


SpreadRule = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[tuple[int, int] | None, ...]]
"""(base, sizes, strides, listed) of a grid of ranks, and one cut per dimension of it: see `geometry.sharding`."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a layout's tensors are sharded over all ranks.

    With it, one rank's layout tells the others'. `rules[of[i]]` is that of tensor i; −1: every rank has its own under
    its own name. `lowest` numbers the tensors that the first of equal holders saves alone; the others share.
    """

    rules: tuple[SpreadRule, ...]
    of: tuple[int, ...]
    lowest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Locates a rank's tensors in its stream, and the stream's chunks.

    `chunk_starts[i]` is the stream offset of chunk i; no block straddles a chunk. The same for every step until the
    program's structure changes: stored once per digest. Local tensors (different on each rank) carry the rank in
    their name and cover themselves.
    """

    tensors: tuple[TensorLayout, ...]
    chunk_starts: tuple[int, ...]
    stream_bytes: int
    spread: Spread | None = None

    def chunk_lengths(self) -> tuple[int, ...]:
        """Length of each chunk in bytes; each ≤ CHUNK_BYTES."""
        if not self.chunk_starts:
            return ()
        ends = (*self.chunk_starts[1:], self.stream_bytes)
        return tuple(end - start for start, end in zip(self.chunk_starts, ends, strict=True))

    def to_json(self, texts: Sequence[str] | None = None) -> str:
        """Canonical JSON, whose digest names the layout; `texts`: its tensors', if known."""
        body: dict[str, Any] = {"chunk_starts": self.chunk_starts, "stream_bytes": self.stream_bytes}
        if self.spread is not None:
            body["spread"] = [self.spread.rules, self.spread.of, self.spread.lowest]
        tensors = _compact(list(map(_tensor_body, self.tensors))) if texts is None else f"[{','.join(texts)}]"
        return f'{{"format":{FORMAT},"tensors":{tensors},{_compact(body)[1:]}'

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        bounds.check_json("a layout record", text, bounds.MAX_LAYOUT_BYTES, bounds.MAX_LAYOUT_VALUES)
        body = _body(text, "layout")
        try:
            tensors = tuple(
                TensorLayout(
                    name, dtype, tuple(shape), tuple(Piece(tuple(o), tuple(n), tuple(t), s) for o, n, t, s in pieces)
                )
                for name, dtype, shape, pieces in body["tensors"]
            )
            layout = cls(tensors, tuple(body["chunk_starts"]), body["stream_bytes"], _spread(body.get("spread")))
            _check_layout(layout)
            return layout
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ProtocolError(
                f"a layout record cannot be read: {shorten(repr(error))}; the copy is damaged, another is needed"
            ) from error


def tensor_json(tensor: TensorLayout) -> str:
    """Encodes one tensor of a layout record."""
    return _compact(_tensor_body(tensor))


def _tensor_body(tensor: TensorLayout) -> list[Any]:
    pieces = [(p.offsets, p.lengths, p.tile, p.stream_offset) for p in tensor.pieces]
    return [tensor.name, tensor.dtype, tensor.shape, pieces]


def _compact(body: Any) -> str:
    return _ENCODER.encode(body)


def _spread(body: Any) -> Spread | None:
    if body is None:
        return None
    rules, of, lowest = body
    return Spread(
        tuple(
            (
                int(base),
                tuple(sizes),
                tuple(strides),
                tuple(listed),
                tuple(None if c is None else tuple(c) for c in cuts),
            )
            for base, sizes, strides, listed, cuts in rules
        ),
        tuple(of),
        tuple(lowest),
    )


_FINER_CHUNKS = 256

_CHECKSUM = re.compile(rb'"crc32":([0-9]+),')
"""In canonical JSON: keys are in order, so it never ends a manifest."""


@dataclass(frozen=True, slots=True)
class RankManifest:
    """Describes one rank save; in a holder's index: it is complete there.

    Digests are xxh3_64 as 16 hex digits. `layout` names the layout record. The digest table is the concatenation of
    each block's xxh3_64 as 8 little-endian bytes, in stream order. `values` is the tagged JSON of plain values.
    Manifests name no locations: where a copy is, its holder says.
    """

    save: RankSave
    world_size: int
    incarnation: str
    layout: str
    stream_bytes: int
    chunks: int
    digests_digest: str
    digests_bytes: int
    values_digest: str
    values_bytes: int
    saved_at: float
    """Unix seconds; for people, and for `keepSeconds`, which only adds to what is kept."""
    objects: tuple[tuple[str, str], ...] = ()
    """Objects beside modules and optimizers, by name: the digest of their values on this rank, or that each rank's are
    its own (`protocol.checkpoints.save_state`)."""
    suspect: bool = False
    """The loss of that step was no number, so these weights may be none: retention keeps the last that are not."""

    def to_json(self) -> str:
        """Canonical JSON with its own checksum against flipped bytes."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "generation": self.save.generation,
            "step": self.save.step,
            "rank": self.save.rank,
            "world_size": self.world_size,
            "incarnation": self.incarnation,
            "layout": self.layout,
            "stream_bytes": self.stream_bytes,
            "chunks": self.chunks,
            "digests": [self.digests_digest, self.digests_bytes],
            "values": [self.values_digest, self.values_bytes],
            "saved_at": self.saved_at,
            **({"objects": dict(self.objects)} if self.objects else {}),
            **({"loss_anomaly": True} if self.suspect else {}),
        }
        return _canonical({**body, "crc32": crc32(_canonical(body).encode())})

    @classmethod
    def from_json(cls, text: str | bytes) -> RankManifest:
        bounds.check_json("a rank manifest", text, bounds.MAX_MANIFEST_BYTES, bounds.MAX_MANIFEST_VALUES)
        body = _body(text, "rank manifest")
        if not _matches(text, body.pop("crc32", None), body):
            raise ProtocolError("a rank manifest does not match its checksum; the copy is damaged, another is needed")
        try:
            manifest = cls(
                save=RankSave(int(body["generation"]), int(body["step"]), int(body["rank"])),
                world_size=int(body["world_size"]),
                incarnation=str(body["incarnation"]),
                layout=str(body["layout"]),
                stream_bytes=int(body["stream_bytes"]),
                chunks=int(body["chunks"]),
                digests_digest=str(body["digests"][0]),
                digests_bytes=int(body["digests"][1]),
                values_digest=str(body["values"][0]),
                values_bytes=int(body["values"][1]),
                saved_at=float(body["saved_at"]),
                objects=tuple(sorted((str(name), str(value)) for name, value in body.get("objects", {}).items())),
                suspect=body.get("loss_anomaly", False) is True,
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise ProtocolError(
                f"a rank manifest cannot be read: {shorten(repr(error))}; the copy is damaged, another is needed"
            ) from error
        manifest.check_bounds()
        return manifest

    def check_bounds(self) -> None:
        """Raises OutOfBounds if one of its numbers or texts is larger than any rank save's."""
        save, record = self.save, f"the manifest of {self.save}"
        for field, value in (("generation", save.generation), ("step", save.step)):
            bounds.check(record, field, value, bounds.MAX_COUNT)
        bounds.check(record, "world_size", self.world_size, bounds.MAX_RANKS, 1)
        bounds.check(record, "rank", save.rank, bounds.MAX_RANKS - 1)
        bounds.check(record, "stream_bytes", self.stream_bytes, bounds.MAX_RANK_BYTES)
        least, most = chunks_of(self.stream_bytes)
        bounds.check(record, "chunks", self.chunks, most, least)
        for field, value in (("digests_bytes", self.digests_bytes), ("values_bytes", self.values_bytes)):
            bounds.check(record, field, value, bounds.MAX_PART_BYTES)
        bounds.check(record, "saved_at", self.saved_at, bounds.MAX_COUNT)
        bounds.check(record, "the number of objects", len(self.objects), bounds.MAX_OBJECTS)
        names = (self.incarnation, self.layout, self.digests_digest, self.values_digest)
        for text in (*names, *(text for named in self.objects for text in named)):
            bounds.check_text(record, "a name", text)

    def same_bytes_as(self, other: RankManifest) -> bool:
        """Whether both describe the very same saved bytes (the time of saving aside)."""
        mine = (self.save, self.world_size, self.layout, self.digests_digest, self.values_digest, self.stream_bytes)
        return mine == (
            other.save,
            other.world_size,
            other.layout,
            other.digests_digest,
            other.values_digest,
            other.stream_bytes,
        )


def chunks_of(stream_bytes: int) -> tuple[int, int]:
    """The fewest and the most chunks of a stream of that length.

    None is longer than CHUNK_BYTES, and two neighbours are together: else the second's first block were in the first. A
    few more are let through: this bounds memory, and need not know each writer's cut.
    """
    least = -(-stream_bytes // CHUNK_BYTES)
    return least, 2 * least + _FINER_CHUNKS


def _check_layout(layout: Layout) -> None:
    """Raises OutOfBounds; TypeError where a number is none."""
    record = "a layout record"
    bounds.check(record, "stream_bytes", layout.stream_bytes, bounds.MAX_RANK_BYTES)
    least, most = chunks_of(layout.stream_bytes)
    bounds.check(record, "the number of chunks", len(layout.chunk_starts), most, least)
    for tensor in layout.tensors:
        if type(tensor.name) is not str or type(tensor.dtype) is not str:
            raise TypeError(f"the name and type of a tensor are {short_repr((tensor.name, tensor.dtype))}, not texts")
        bounds.check_text(record, "a tensor's name", tensor.name, bounds.MAX_SMALL_BYTES)
        bounds.check(record, "the number of dimensions", len(tensor.shape), bounds.MAX_DIMENSIONS)
        for piece in tensor.pieces:
            for numbers in (piece.offsets, piece.lengths, piece.tile):
                bounds.check(record, "the number of dimensions", len(numbers), bounds.MAX_DIMENSIONS)
    everything = (layout.chunk_starts, *(numbers for t in layout.tensors for numbers in _numbers_of(t)))
    if any(type(n) is not int or not 0 <= n <= bounds.MAX_COUNT for numbers in everything for n in numbers):
        raise OutOfBounds(record, "a shape, an offset or a length", "no number of elements", f"0 to {bounds.MAX_COUNT}")


def _numbers_of(tensor: TensorLayout) -> Iterator[tuple[int, ...]]:
    yield tensor.shape
    for piece in tensor.pieces:
        yield from (piece.offsets, piece.lengths, piece.tile, (piece.stream_offset,))


def _canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"), sort_keys=True)


def _matches(text: str | bytes, checksum: Any, body: dict[str, Any]) -> bool:
    """Whether the checksum is that of the text without it, as it was written; else of the body, whoever wrote it.

    An index has a manifest of each rank and copy, and writing each again only to compare costs as much as reading it.
    """
    written = text.encode() if isinstance(text, str) else text
    found = _CHECKSUM.search(written)
    if (
        found is not None
        and int(found[1]) == crc32(written[found.end() :], crc32(written[: found.start()])) == checksum
    ):
        return True
    return bool(checksum == crc32(_canonical(body).encode()))


def _body(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"a {what} is not JSON ({error}); the copy is damaged, another is needed") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise ProtocolError(
            f"a {what} has format {short_repr(found)}, this version reads {FORMAT}: use the surefoot that wrote it"
        )
    return body
