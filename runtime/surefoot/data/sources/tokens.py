"""`TokenFile` reads nanoGPT's .bin, `MegatronDocuments` Megatron's .bin with .idx."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from surefoot.data.data_source import DataError, DataShard
from surefoot.data.sources.file_access import FileAt, check, find_files, read_range
from surefoot.errors import ConfigurationError

_MEGATRON = b"MMIDIDX\x00\x00"
_DTYPES: dict[int, type[Any]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class TokenFile:
    """`TokenFile` reads flat token files; a sample is `length` + 1 tokens.

    Each window begins `length` tokens behind the one before, so that inputs and targets of one row are `row[:-1]` and
    `row[1:]`; tokens behind a file's last whole window are left out. Samples are int64 arrays.

    Args:
        paths: paths, URLs or patterns.
        length: tokens of a row's inputs.
        dtype: how tokens are stored.
        shard_samples: windows a shard.

    Raises:
        ConfigurationError: a pattern matches no file, a size is no multiple of `dtype`'s, or a number is below 1.
        DataError: a file cannot be read.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        length: int,
        *,
        dtype: str = "uint16",
        shard_samples: int = 1024,
    ) -> None:
        if length < 1 or shard_samples < 1:
            raise ConfigurationError(f"length={length}, shard_samples={shard_samples}: at least 1")
        self._length, self._dtype = length, np.dtype(dtype)
        self._places: list[tuple[FileAt, int, int]] = []
        for file in find_files(paths):
            if file.size % self._dtype.itemsize:
                raise ConfigurationError(f"{file.url} has {file.size} bytes, no multiple of a {dtype}: give its dtype=")
            windows = (file.size // self._dtype.itemsize - 1) // length
            for first in range(0, windows, shard_samples):
                self._places.append((file, first, min(shard_samples, windows - first)))

    def shards(self) -> Sequence[DataShard]:
        mark = f"{self._length} {self._dtype}"
        return [
            DataShard(f"{file.url}, windows from {first}", samples, f"{file.identity} {mark}")
            for file, first, samples in self._places
        ]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        file, first, samples = self._places[shard]
        check(file)
        width = self._dtype.itemsize
        at = 64  # windows a read
        for number in range(first + start, first + samples, at):
            some = min(at, first + samples - number)
            begin = number * self._length * width
            body = read_range(file, begin, begin + (some * self._length + 1) * width)
            tokens = np.frombuffer(body, self._dtype).astype(np.int64)
            for row in range(some):
                yield tokens[row * self._length : (row + 1) * self._length + 1]


class MegatronDocuments:
    """`MegatronDocuments` reads Megatron's indexed datasets; a sample is a document.

    Documents are int64 arrays of any length, for the stream's `pack`.

    Args:
        paths: paths, URLs or patterns of .bin files; each has its .idx beside it.
        shard_samples: documents a shard.

    Raises:
        ConfigurationError: a pattern matches no file, or an index is of another version or token type.
        DataError: a file cannot be read, or its size is not the index's.
    """

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, shard_samples: int = 1024
    ) -> None:
        self._parts = [_Indexed(file) for file in find_files(paths)]
        self._places = [
            (part, first, min(shard_samples, len(part.bounds) - 1 - first))
            for part in self._parts
            for first in range(0, len(part.bounds) - 1, shard_samples)
        ]

    def shards(self) -> Sequence[DataShard]:
        return [
            DataShard(
                f"{part.file.url}, documents from {first}", samples, f"{part.file.identity} {part.index.identity}"
            )
            for part, first, samples in self._places
        ]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        part, first, samples = self._places[shard]
        check(part.file)
        for document in range(first + start, first + samples):
            begin, stop = int(part.bounds[document]), int(part.bounds[document + 1])
            yield np.frombuffer(read_range(part.file, begin, stop), part.dtype).astype(np.int64)


class _Indexed:
    """One .bin with its .idx: the byte at which each document begins."""

    def __init__(self, file: FileAt) -> None:
        self.file = file
        self.index = find_files(file.url.removesuffix(".bin") + ".idx")[0]
        body = read_range(self.index, 0, self.index.size)
        if body[:9] != _MEGATRON or int.from_bytes(body[9:17], "little") != 1:
            raise ConfigurationError(f"{self.index.url} is no index of Megatron's of version 1")
        if body[17] not in _DTYPES:
            raise ConfigurationError(f"{self.index.url} has tokens of code {body[17]}, which is no kind of integer")
        self.dtype = np.dtype(_DTYPES[body[17]])
        sequences, documents = int.from_bytes(body[18:26], "little"), int.from_bytes(body[26:34], "little")
        sizes = np.frombuffer(body, np.int32, sequences, 34).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)]) * self.dtype.itemsize
        ends = np.frombuffer(body, np.int64, documents, 34 + 12 * sequences)
        self.bounds = starts[ends]
        if int(self.bounds[-1]) != file.size:
            raise DataError(f"{file.url} has {file.size} bytes and its index tells of {int(self.bounds[-1])}")
