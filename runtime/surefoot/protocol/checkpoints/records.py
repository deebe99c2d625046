"""Defines the stored records: rank manifest, layout and index entry.

Pure: versioned JSON, never pickle. The flush engine writes them; the operator reads them to choose a restore point, and
every restoring rank reads them. docs/format.md specifies the JSON; a change of it increases `FORMAT`.
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
"""Version of every record in this module."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)

MAX_CHUNK_BYTES = 4 * 1024 * 1024 - 64
"""Largest chunk: with Redis' own header it fits into one allocation of 4 MiB, where 4 MiB of payload would take 5."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Locates one box of a tensor in a rank's byte stream.

    The box is stored as blocks, in row-major order of tiles; the elements of each block are in row-major order, too,
    and tiles at the far edges are clipped.
    """

    offsets: tuple[int, ...]
    """Where the box begins in the global tensor, in elements per dimension; empty for a 0-d tensor."""
    lengths: tuple[int, ...]
    """Size of the box in elements per dimension; empty for a 0-d tensor."""
    tile: tuple[int, ...]
    """Shape of a block in elements per dimension; empty for a 0-d tensor, which has one block."""
    stream_offset: int
    """Where the box begins in the stream, in bytes."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The part of one tensor that a rank saves."""

    name: str
    """Name of the tensor in the checkpoint."""
    dtype: str
    """PyTorch's name of the element type, without `torch.`."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    pieces: tuple[Piece, ...]
    """Boxes that this rank saves; empty if it saves none."""


SpreadRule = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[tuple[int, int] | None, ...]]
"""(base, sizes, strides, listed) of a grid of ranks, and one cut for each of its dimensions: see `geometry.sharding`."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a layout's tensors are sharded over all ranks, so that one rank's layout determines the others'."""

    rules: tuple[SpreadRule, ...]
    """The different rules of sharding."""
    rule_indices: tuple[int, ...]
    """Index into `rules` for each tensor; −1: every rank has a tensor of its own, under a name of its own."""
    unshared_tensors: tuple[int, ...]
    """Indices of the tensors that the first of several ranks with equal copies saves alone; of others each saves a part."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Locates a rank's tensors in its byte stream, and the stream's chunks.

    It is the same for every step until the program's structure changes, and is stored once under its digest. Local
    tensors, which differ on each rank, have the rank in their names and cover themselves.
    """

    tensors: tuple[TensorLayout, ...]
    """All tensors of which this rank saves a part, and those whose shape it knows without saving any."""
    chunk_starts: tuple[int, ...]
    """Stream offset of each chunk, in bytes; no block is in two chunks."""
    stream_bytes: int
    """Length of the stream."""
    spread: Spread | None = None
    """How the tensors are sharded; None: unknown, so other ranks' layouts cannot be derived."""

    def chunk_lengths(self) -> tuple[int, ...]:
        """Returns the length of each chunk in bytes, at most CHUNK_BYTES."""
        if not self.chunk_starts:
            return ()
        ends = (*self.chunk_starts[1:], self.stream_bytes)
        return tuple(end - start for start, end in zip(self.chunk_starts, ends, strict=True))

    def to_json(self, texts: Sequence[str] | None = None) -> str:
        """Encodes it as canonical JSON, whose digest is its name; `texts` are the encoded tensors, None: encode them."""
        body: dict[str, Any] = {"chunk_starts": self.chunk_starts, "stream_bytes": self.stream_bytes}
        if self.spread is not None:
            body["spread"] = [self.spread.rules, self.spread.rule_indices, self.spread.unshared_tensors]
        tensors = _encode_compact(list(map(_tensor_fields, self.tensors))) if texts is None else f"[{','.join(texts)}]"
        return f'{{"format":{FORMAT},"tensors":{tensors},{_encode_compact(body)[1:]}'

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Decodes a layout record; raises ProtocolError if it is damaged, OutOfBounds if a number is too large."""
        bounds.require_json_in_bounds("a layout record", text, bounds.MAX_LAYOUT_BYTES, bounds.MAX_LAYOUT_VALUES)
        body = _decode_record(text, "layout")
        try:
            tensors = tuple(
                TensorLayout(
                    name, dtype, tuple(shape), tuple(Piece(tuple(o), tuple(n), tuple(t), s) for o, n, t, s in pieces)
                )
                for name, dtype, shape, pieces in body["tensors"]
            )
            layout = cls(tensors, tuple(body["chunk_starts"]), body["stream_bytes"], _decode_spread(body.get("spread")))
            _check_layout(layout)
            return layout
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ProtocolError(
                f"cannot decode a layout record: {shorten(repr(error))}; this copy is damaged, use another one"
            ) from error


def encode_tensor(tensor: TensorLayout) -> str:
    """Encodes one tensor of a layout record."""
    return _encode_compact(_tensor_fields(tensor))


def _tensor_fields(tensor: TensorLayout) -> list[Any]:
    """Returns a tensor's fields in the order in which a layout record has them."""
    pieces = [(p.offsets, p.lengths, p.tile, p.stream_offset) for p in tensor.pieces]
    return [tensor.name, tensor.dtype, tensor.shape, pieces]


def _encode_compact(body: Any) -> str:
    """Encodes JSON without spaces."""
    return _ENCODER.encode(body)


def _decode_spread(body: Any) -> Spread | None:
    """Decodes how a layout's tensors are sharded; None if the record does not have it."""
    if body is None:
        return None
    rules, of, lowest = body
    return Spread(
        tuple(
            (
                int(base),
                tuple(sizes),
                tuple(strides),
                tuple(listed_ranks),
                tuple(None if c is None else tuple(c) for c in cuts),
            )
            for base, sizes, strides, listed_ranks, cuts in rules
        ),
        tuple(of),
        tuple(lowest),
    )


_FINER_CHUNKS = 256
"""Chunks beyond the computed number that a writer may use."""

_CHECKSUM = re.compile(rb'"crc32":([0-9]+),')
"""The checksum in canonical JSON; a comma always follows, because keys are sorted and `crc32` is not the last."""


@dataclass(frozen=True, slots=True)
class RankManifest:
    """Describes one rank save. In a memory server's index it also states that the server has all of that save.

    Digests are xxh3_64 as 16 hex digits. A manifest names no location, so that all its copies are equal.
    """

    save: RankSave
    """The rank save that it describes."""
    world_size: int
    """Number of ranks of the generation."""
    incarnation: str
    """Random id of the agent's start under which the rank ran."""
    layout: str
    """Digest of the layout record."""
    stream_bytes: int
    """Length of the byte stream."""
    chunks: int
    """Number of chunks of the stream."""
    digests_digest: str
    """Digest of the digest table, which has the xxh3_64 of each block as 8 little-endian bytes, in stream order."""
    digests_bytes: int
    """Length of the digest table."""
    values_digest: str
    """Digest of the plain values, which are stored as tagged JSON."""
    values_bytes: int
    """Length of the plain values."""
    saved_at: float
    """Unix time of the save in seconds, for display and for `keepSeconds`, which can only retain more checkpoints."""
    objects: tuple[tuple[str, str], ...] = ()
    """Name of each stateful object apart from modules and optimizers, and the digest of its values on this rank or
    `save_state.OWN`; sorted by name."""
    suspect: bool = False
    """Whether the step had a loss anomaly: retention then also keeps the newest checkpoint without one."""

    def to_json(self) -> str:
        """Encodes it as canonical JSON with a checksum that detects damage of the manifest itself."""
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
        return _encode_canonical({**body, "crc32": crc32(_encode_canonical(body).encode())})

    @classmethod
    def from_json(cls, text: str | bytes) -> RankManifest:
        """Decodes a manifest; raises ProtocolError if it is damaged, OutOfBounds if a number is too large."""
        bounds.require_json_in_bounds("a rank manifest", text, bounds.MAX_MANIFEST_BYTES, bounds.MAX_MANIFEST_VALUES)
        body = _decode_record(text, "rank manifest")
        # before any field is read: a flipped bit may still be valid JSON
        if not _matches_checksum(text, body.pop("crc32", None), body):
            raise ProtocolError("a rank manifest does not match its checksum; this copy is damaged, use another one")
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
                f"cannot decode a rank manifest: {shorten(repr(error))}; this copy is damaged, use another one"
            ) from error
        # after parsing, since an error of the bounds should name the save
        manifest.check_bounds()
        return manifest

    def check_bounds(self) -> None:
        """Raises OutOfBounds if a number or text is larger than in any possible rank save."""
        save, record = self.save, f"the manifest of {self.save}"
        for field, value in (("generation", save.generation), ("step", save.step)):
            bounds.require_in_range(record, field, value, bounds.MAX_COUNT)
        bounds.require_in_range(record, "world_size", self.world_size, bounds.MAX_RANKS, 1)
        bounds.require_in_range(record, "rank", save.rank, bounds.MAX_RANKS - 1)
        bounds.require_in_range(record, "stream_bytes", self.stream_bytes, bounds.MAX_RANK_BYTES)
        min_chunks, max_chunks = chunk_count_range(self.stream_bytes)
        bounds.require_in_range(record, "chunks", self.chunks, max_chunks, min_chunks)
        for field, value in (("digests_bytes", self.digests_bytes), ("values_bytes", self.values_bytes)):
            bounds.require_in_range(record, field, value, bounds.MAX_PART_BYTES)
        bounds.require_in_range(record, "saved_at", self.saved_at, bounds.MAX_COUNT)
        bounds.require_in_range(record, "the number of objects", len(self.objects), bounds.MAX_OBJECTS)
        names = (self.incarnation, self.layout, self.digests_digest, self.values_digest)
        for text in (*names, *(text for entry in self.objects for text in entry)):
            bounds.require_max_length(record, "a name", text)

    def has_same_bytes_as(self, other: RankManifest) -> bool:
        """Returns whether both describe the same saved bytes; the time of saving may differ."""
        content = (self.save, self.world_size, self.layout, self.digests_digest, self.values_digest, self.stream_bytes)
        return content == (
            other.save,
            other.world_size,
            other.layout,
            other.digests_digest,
            other.values_digest,
            other.stream_bytes,
        )


def chunk_count_range(stream_bytes: int) -> tuple[int, int]:
    """Returns the least and the greatest number of chunks of a stream of this length.

    No chunk is longer than CHUNK_BYTES, and two neighbours together are longer: else the first would contain the
    second's first block. The upper limit leaves some room, since it only bounds memory and need not know how each writer
    cuts its stream.
    """
    min_chunks = -(-stream_bytes // MAX_CHUNK_BYTES)
    return min_chunks, 2 * min_chunks + _FINER_CHUNKS


def _check_layout(layout: Layout) -> None:
    """Raises OutOfBounds if a number is too large or there are too many, and TypeError if a name is no text."""
    record = "a layout record"
    bounds.require_in_range(record, "stream_bytes", layout.stream_bytes, bounds.MAX_RANK_BYTES)
    min_chunks, max_chunks = chunk_count_range(layout.stream_bytes)
    bounds.require_in_range(record, "the number of chunks", len(layout.chunk_starts), max_chunks, min_chunks)
    for tensor in layout.tensors:
        if type(tensor.name) is not str or type(tensor.dtype) is not str:
            raise TypeError(f"the name and type of a tensor are {short_repr((tensor.name, tensor.dtype))}, not texts")
        bounds.require_max_length(record, "a tensor's name", tensor.name, bounds.MAX_SMALL_RECORD_BYTES)
        bounds.require_in_range(record, "the number of dimensions", len(tensor.shape), bounds.MAX_DIMENSIONS)
        for piece in tensor.pieces:
            for numbers in (piece.offsets, piece.lengths, piece.tile):
                bounds.require_in_range(record, "the number of dimensions", len(numbers), bounds.MAX_DIMENSIONS)
    # one pass over all numbers: JSON also allows floats and booleans, which would pass a comparison
    number_tuples = (layout.chunk_starts, *(numbers for t in layout.tensors for numbers in _numbers_of(t)))
    if any(type(n) is not int or not 0 <= n <= bounds.MAX_COUNT for numbers in number_tuples for n in numbers):
        raise OutOfBounds(record, "a shape, an offset or a length", "no number of elements", f"0 to {bounds.MAX_COUNT}")


def _numbers_of(tensor: TensorLayout) -> Iterator[tuple[int, ...]]:
    """Yields all tuples of numbers in a tensor's layout."""
    yield tensor.shape
    for piece in tensor.pieces:
        yield from (piece.offsets, piece.lengths, piece.tile, (piece.stream_offset,))


def _encode_canonical(body: dict[str, Any]) -> str:
    """Encodes JSON without spaces and with sorted keys, so that equal values give equal texts."""
    return json.dumps(body, separators=(",", ":"), sort_keys=True)


def _matches_checksum(text: str | bytes, checksum: Any, body: dict[str, Any]) -> bool:
    """Returns whether a checksum is that of the text without it.

    The text is first taken as canonical JSON, which spares encoding the manifest again: an index has a manifest for
    each rank and copy, and encoding costs as much as decoding. The slow path accepts any equivalent JSON.
    """
    encoded = text.encode() if isinstance(text, str) else text
    match = _CHECKSUM.search(encoded)
    if (
        match is not None
        and int(match[1]) == crc32(encoded[match.end() :], crc32(encoded[: match.start()])) == checksum
    ):
        return True
    return bool(checksum == crc32(_encode_canonical(body).encode()))


def _decode_record(text: str | bytes, record: str) -> dict[str, Any]:
    """Decodes the JSON object of a record and checks its format version."""
    try:
        body = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(
            f"cannot decode a {record}, it is not JSON ({error}); this copy is damaged, use another one"
        ) from error
    # the version comes first, as other fields may have another meaning in it
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        format_version = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise ProtocolError(
            f"a {record} has format {short_repr(format_version)}, but this version of surefoot reads {FORMAT}: use the version that wrote it"
        )
    return body
