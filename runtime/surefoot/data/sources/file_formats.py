"""`TextLines` and `JsonLines` read lines; a shard is a byte range.

A shard has the lines that begin in its range, so that any range can be read without those before it.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from surefoot.data.data_source import BadSample, DataShard
from surefoot.data.sources.file_access import CHUNK_BYTES, FileAt, check, find_files, is_local, read_range
from surefoot.errors import ConfigurationError

MOST_COUNTED_BYTES = 1 << 30
PIECE_BYTES = 32 << 10
MARK_BYTES = 16 << 10
"""So far apart are the places of which it is known how many lines lie before them; a divisor of `CHUNK_BYTES`."""


class TextLines:
    """`TextLines` reads text files; a sample is a line without its end.

    Empty lines are samples too. A line that is no UTF-8 is a bad sample.

    Args:
        paths: paths, URLs or patterns of uncompressed files.
        shard_bytes: bytes a shard.
        count: whether lines are counted first, which reads all files once; by default up to 1 GiB in all. Uncounted, a
            shard's length is known when it has been read.

    Raises:
        ConfigurationError: a pattern matches no file, or a file is compressed and cannot be opened in its middle.
        DataError: a file cannot be read.
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
        self._marks = [_marked(file, start, stop) if counted else array("q", [0]) for file, start, stop in self._places]
        """Of each shard, from the byte before it on: ends of lines before every `MARK_BYTES`; the last one, of all."""
        self._shards = [
            DataShard(f"{file.url}[{start}:{stop}]", marks[-1] + (start == 0) if counted else None, file.identity)
            for (file, start, stop), marks in zip(self._places, self._marks, strict=True)
        ]

    def shards(self) -> Sequence[DataShard]:
        return self._shards

    def open(self, shard: int, start: int) -> Iterator[Any]:
        file, first, stop = self._places[shard]
        check(file)
        ends = start + (first > 0)  # of lines, from the byte before the shard on: it tells whether one begins there
        mark = max(0, bisect_left(self._marks[shard], ends) - 1)
        at, ends = max(0, first - 1) + mark * MARK_BYTES, ends - self._marks[shard][mark]
        return chain.from_iterable(map(self._samples, chain.from_iterable(map(_pieces, _texts(file, at, ends, stop)))))

    def _samples(self, text: bytes) -> Iterable[Any]:
        """Returns the samples of whole lines, joined by their ends."""
        try:
            lines = text.decode().split("\n")
        except UnicodeDecodeError:
            return map(_decoded, _split(text))
        return [line.removesuffix("\r") for line in lines] if b"\r" in text else lines


class JsonLines(TextLines):
    """`JsonLines` reads JSONL files; a sample is a line's object.

    A line that is no JSON, or lacks the field, is a bad sample.

    Args:
        paths, shard_bytes, count: as TextLines'.
        field: the one field of each object that is the sample; by default the whole object.

    Raises:
        ConfigurationError, DataError: as TextLines.
    """

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

    def _samples(self, text: bytes) -> Iterable[Any]:
        return map(self._sample, _split(text))

    def _sample(self, line: bytes) -> Any:
        try:
            found = json.loads(line)
            return found if self._field is None else found[self._field]
        except (ValueError, KeyError, TypeError) as error:
            return BadSample(error)


def _texts(file: FileAt, at: int, ends: int, stop: int) -> Iterator[bytes]:
    """Yields the lines that begin before `stop`, behind the first `ends` ends of lines from `at` on.

    Many at once, the last without its end; it may end behind `stop`. Lines looked at one by one cost several times what
    they do when a block of them is split.
    """
    rest: list[bytes] = []
    size = MARK_BYTES if is_local(file) else CHUNK_BYTES
    while at < file.size:
        chunk = read_range(file, at, at + size)
        begin, at, size = at, at + len(chunk), min(2 * size, CHUNK_BYTES)
        if ends:
            behind, ends = _behind(chunk, ends)
            if ends:
                continue
            chunk, begin = chunk[behind:], begin + behind
            if begin >= stop:
                return
        # the last line ends at the first end that is not before stop − 1
        last = chunk.find(b"\n", max(0, stop - 1 - begin)) if at >= stop else -1
        cut = chunk.rfind(b"\n") if last < 0 else last
        if cut < 0:
            rest.append(chunk)
            continue
        yield b"".join((*rest, chunk[:cut]))
        rest = [chunk[cut + 1 :]]
        if last >= 0:
            return
    if any(rest):
        yield b"".join(rest)


def _behind(chunk: bytes, ends: int) -> tuple[int, int]:
    """Returns where the line behind so many ends begins, and how many of them the chunk lacks."""
    at = 0
    while at < len(chunk):
        here = chunk.count(b"\n", at, at + MARK_BYTES)
        if here >= ends:  # a split finds them in a quarter of the time that a search for each takes
            return len(chunk) - len(chunk[at:].split(b"\n", ends)[-1]), 0
        at, ends = at + MARK_BYTES, ends - here
    return len(chunk), ends


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yields whole lines, few enough to stay in the processor's cache until somebody takes them."""
    at = 0
    while (end := text.find(b"\n", at + PIECE_BYTES)) >= 0:
        yield text[at:end]
        at = end + 1
    yield text[at:]


def _split(text: bytes) -> list[bytes]:
    lines = text.split(b"\n")
    return [line.removesuffix(b"\r") for line in lines] if b"\r" in text else lines


def _decoded(line: bytes) -> Any:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return BadSample(error)


def _marked(file: FileAt, first: int, stop: int) -> array[int]:
    """Returns how many ends of lines there are before each mark in [first − 1, stop − 1).

    With the file's first line, which no end precedes, they are the lines that begin in [first, stop).
    """
    found, at = array("q", [0]), max(0, first - 1)
    while at < stop - 1:
        chunk = read_range(file, at, min(at + CHUNK_BYTES, stop - 1))
        for begin in range(0, len(chunk), MARK_BYTES):
            found.append(found[-1] + chunk.count(b"\n", begin, begin + MARK_BYTES))
        at += len(chunk)
    return found
