"""What a source of samples is to the elastic stream: shards that are named, measured, and opened at any sample.

Positions, not iterators: an iterator knows its place in one process, and a shard with a number is found again by any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from surefoot.errors import SurefootError


class DataError(SurefootError):
    """What a source holds is not what was there, or cannot be read: names the shard, what happened and what to do."""


class DataShard(NamedTuple):
    """One part of a source. `identity` is equal as long as its content is: sizes, checksums, nothing of where it lies."""

    name: str
    samples: int | None
    """None: not known before it is read."""
    identity: str = ""


class BadSample(NamedTuple):
    """What a source gives in place of a sample that cannot be read while those behind it can."""

    error: Exception


class DataSource(Protocol):
    """Samples in shards. Picklable, so that worker processes have it too; opens nothing before it is asked."""

    def shards(self) -> Sequence[DataShard]:
        """All of them, in an order that does not change."""
        ...

    def open(self, shard: int, start: int) -> Iterator[Any]:
        """The samples of shard number `shard` from sample `start` on.

        A sample that is bad comes as BadSample. Raises DataError where the shard is gone, or is not what it was.
        """
        ...


def _said(shards: Sequence[DataShard]) -> bytes:
    """What must stay: last names, lengths and contents, in their order; not the folder, as a copy is the same data."""
    lines = (f"{shard.name.rpartition('/')[2]}\t{shard.samples}\t{shard.identity}" for shard in shards)
    return "\n".join(lines).encode()


def checks_of(shards: Sequence[DataShard], most: int = 8192) -> bytes:
    """Two bytes for each shard, or for each group of neighbours where there are more than `most`."""
    size = -(-len(shards) // most) or 1
    found = bytearray()
    for first in range(0, len(shards), size):
        found += hashlib.blake2b(_said(shards[first : first + size]), digest_size=2).digest()
    return bytes(found)


def identity_of(shards: Sequence[DataShard]) -> str:
    """One digest for all: equal where names, lengths and contents are."""
    return hashlib.blake2b(_said(shards), digest_size=8).hexdigest()


def changed_shard(shards: Sequence[DataShard], checks: bytes, most: int = 8192) -> str | None:
    """The first shard (or the first of the group) that is not what `checks` were made of."""
    size = -(-len(shards) // most) or 1
    mine = checks_of(shards, most)
    if len(mine) != len(checks):
        return None
    for at in range(0, len(mine), 2):
        if mine[at : at + 2] != checks[at : at + 2]:
            return shards[at // 2 * size].name
    return None
