"""`DataSource` describes data in shards that open at any sample.

Positions, not iterators: an iterator's place is known to one process, and a shard with a number is found again by any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from surefoot.errors import SurefootError


class DataError(SurefootError):
    """A source cannot be read, or is not what it was.

    The message names the shard, what happened and what to do.
    """


class DataShard(NamedTuple):
    """`DataShard` names one part of a source.

    `identity` is equal as long as the content is: sizes, checksums, nothing of where it is stored. So a job may go on
    with a copy on another disk, and not with changed data.
    """

    name: str
    samples: int | None
    """None: not known before the shard is read."""
    identity: str = ""


class BadSample(NamedTuple):
    """`BadSample` stands in for a sample that cannot be read.

    An exception in its place would end the iterator, and with it the readable samples behind.
    """

    error: Exception


class DataSource(Protocol):
    """`DataSource` is the protocol of samples in shards.

    An implementation is picklable, as worker processes get a copy of it. Files and connections are opened by the
    process that reads them: they do not survive a fork.
    """

    def shards(self) -> Sequence[DataShard]:
        """Returns all shards, in an order that does not change."""
        ...

    def open(self, shard: int, start: int) -> Iterator[Any]:
        """Yields the samples of shard number `shard` from sample `start` on.

        A sample that cannot be read is yielded as `BadSample`.

        Raises:
            DataError: the shard is gone, or is not what it was.
        """
        ...


def _fingerprint(shards: Sequence[DataShard]) -> bytes:
    """Returns what must not change: last names, lengths, contents; no folder, as a copy is the same data."""
    lines = (f"{shard.name.rpartition('/')[2]}\t{shard.samples}\t{shard.identity}" for shard in shards)
    return "\n".join(lines).encode()


def checks_of(shards: Sequence[DataShard], most: int = 4096) -> bytes:
    """Returns two bytes of digest for each shard.

    Above `most` shards, for each group of neighbours: the digests are saved with every checkpoint.
    """
    size = -(-len(shards) // most) or 1
    found = bytearray()
    for first in range(0, len(shards), size):
        found += hashlib.blake2b(_fingerprint(shards[first : first + size]), digest_size=2).digest()
    return bytes(found)


def identity_of(shards: Sequence[DataShard]) -> str:
    """Returns one digest of all shards' names, lengths and contents."""
    return hashlib.blake2b(_fingerprint(shards), digest_size=8).hexdigest()


def changed_shard(shards: Sequence[DataShard], checks: bytes, most: int = 4096) -> str | None:
    """Returns the name of the first shard that does not match `checks`.

    Where shards are checked in groups, it is the first of the group. None where every check matches, or their number is
    another.
    """
    size = -(-len(shards) // most) or 1
    mine = checks_of(shards, most)
    if len(mine) != len(checks):
        return None
    for at in range(0, len(mine), 2):
        if mine[at : at + 2] != checks[at : at + 2]:
            return shards[at // 2 * size].name
    return None


_INNER = ("base_dataloader", "dataset", "_ex_iterable", "ex_iterable", "ex_iterables")
"""Where a loader keeps what it reads from: torch's, Accelerate's, Hugging Face's."""
_MAX_DEPTH = 32


def buffered_rows(subject: Any, deepest: int = _MAX_DEPTH) -> int:
    """Returns the rows of the largest Hugging Face shuffle buffer in a loader or data set; 0: it has none."""
    rows = 0
    if "BufferShuffled" in type(subject).__name__:
        size = getattr(subject, "buffer_size", 0)
        rows = size if isinstance(size, int) else 0
    if deepest == 0 or isinstance(subject, str | bytes | Mapping):
        return rows
    own = getattr(subject, "__dict__", {})
    for inner in (own[name] for name in _INNER if name in own):
        for part in inner if isinstance(inner, list | tuple) and len(inner) <= _MAX_DEPTH else (inner,):
            rows = max(rows, buffered_rows(part, deepest - 1))
    return rows
