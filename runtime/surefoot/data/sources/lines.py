"""`TextLines` and `JsonLines` read lines; a shard is a byte range.

A shard has the lines that begin in its range, so that any range can be read without those before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from surefoot.data.source import BadSample, DataShard
from surefoot.data.sources.files import CHUNK_BYTES, FileAt, check, find_files, read_range
from surefoot.errors import ConfigurationError

MOST_COUNTED_BYTES = 1 << 30
PIECE_BYTES = 32 << 10


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
        self._shards = [
            DataShard(f"{file.url}[{start}:{stop}]", _count(file, start, stop) if counted else None, file.identity)
            for file, start, stop in self._places
        ]

    def shards(self) -> Sequence[DataShard]:
        return self._shards

    def open(self, shard: int, start: int) -> Iterator[Any]:
        file, first, stop = self._places[shard]
        check(file)
        texts = chain.from_iterable(map(_pieces, _texts(file, first, stop)))
        return islice(chain.from_iterable(map(self._samples, texts)), start, None)

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


def _texts(file: FileAt, first: int, stop: int) -> Iterator[bytes]:
    """Yields the lines that begin in [first, stop), many at once, the last without its end; it may end behind `stop`.

    Lines looked at one by one cost several times what they do when a block of them is split.
    """
    at = max(0, first - 1)  # the byte before tells whether a line begins at `first`
    rest: list[bytes] = []
    skipping = first > 0
    while at < file.size:
        chunk = read_range(file, at, at + CHUNK_BYTES)
        begin, at = at, at + len(chunk)
        if skipping:
            end = chunk.find(b"\n") + 1
            if not end:
                continue
            chunk, begin, skipping = chunk[end:], begin + end, False
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


def _count(file: FileAt, first: int, stop: int) -> int:
    """Returns how many lines begin in [first, stop): the ends in [first − 1, stop − 1), and the file's first line."""
    ends, at = 0, max(0, first - 1)
    while at < stop - 1:
        chunk = read_range(file, at, min(at + CHUNK_BYTES, stop - 1))
        ends += chunk.count(b"\n")
        at += len(chunk)
    return ends + (first == 0)
