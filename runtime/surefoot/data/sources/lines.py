"""Text by lines, and JSONL: a shard is a range of a file's bytes, and has the lines that begin in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from surefoot.data.source import BadSample, DataShard
from surefoot.data.sources.files import CHUNK_BYTES, FileAt, check, find_files, read_range
from surefoot.errors import ConfigurationError

MOST_COUNTED_BYTES = 1 << 30


class TextLines:
    """Lines of text files, as text without their ends; empty ones are samples too.

    Lines are counted first, which reads all files once, unless together they are larger than a gibibyte: `count` says
    otherwise. Uncounted, a shard's length is known when it has been read.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        shard_bytes: int = 4 << 20,
        count: bool | None = None,
    ) -> None:
        if shard_bytes < 1:
            raise ConfigurationError(f"shard_bytes={shard_bytes}: at least 1")
        self._files = find_files(paths)
        for file in self._files:
            if file.url.endswith((".gz", ".zst", ".bz2", ".xz")):
                raise ConfigurationError(
                    f"{file.url} is compressed and cannot be opened in its middle: unpack it first"
                )
        self._places = [
            (file, start, min(start + shard_bytes, file.size))
            for file in self._files
            for start in range(0, file.size, shard_bytes)
        ]
        whole = sum(file.size for file in self._files)
        counted = whole <= MOST_COUNTED_BYTES if count is None else count
        self._shards = [
            DataShard(f"{file.url}[{start}:{stop}]", _count(file, start, stop) if counted else None, file.identity)
            for file, start, stop in self._places
        ]

    def shards(self) -> Sequence[DataShard]:
        return self._shards

    def open(self, shard: int, start: int) -> Iterator[Any]:
        file, first, stop = self._places[shard]
        check(file)
        yield from map(self._sample, islice(_lines(file, first, stop), start, None))

    def _sample(self, line: bytes) -> Any:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            return BadSample(error)


class JsonLines(TextLines):
    """The objects of JSONL files; of each only `field`, where one is named."""

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        field: str | None = None,
        shard_bytes: int = 4 << 20,
        count: bool | None = None,
    ) -> None:
        super().__init__(paths, shard_bytes=shard_bytes, count=count)
        self._field = field

    def _sample(self, line: bytes) -> Any:
        try:
            found = json.loads(line)
            return found if self._field is None else found[self._field]
        except (ValueError, KeyError, TypeError) as error:
            return BadSample(error)


def _lines(file: FileAt, first: int, stop: int) -> Iterator[bytes]:
    """The lines that begin in [first, stop); the last of them may end behind it."""
    at = max(0, first - 1)  # the byte before tells whether a line begins at `first`
    skipping = first > 0
    begin, rest = at, b""
    while at < file.size:
        chunk = read_range(file, at, at + CHUNK_BYTES)
        at += len(chunk)
        parts = (rest + chunk).split(b"\n")
        rest = parts.pop()
        for line in parts:
            here, begin = begin, begin + len(line) + 1
            if skipping:
                skipping = False
                continue
            if here >= stop:
                return
            yield line.removesuffix(b"\r")
        if not skipping and begin >= stop:
            return
    if rest and not skipping and begin < stop:
        yield rest.removesuffix(b"\r")


def _count(file: FileAt, first: int, stop: int) -> int:
    """How many lines begin in [first, stop): as many as ends lie in [first − 1, stop − 1), and the file's first."""
    ends, at = 0, max(0, first - 1)
    while at < stop - 1:
        chunk = read_range(file, at, min(at + CHUNK_BYTES, stop - 1))
        ends += chunk.count(b"\n")
        at += len(chunk)
    return ends + (first == 0)
