"""`TarSamples` reads webdataset's tars: members of one stem are one sample."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

from surefoot.data.data_source import DataError, DataShard
from surefoot.data.sources.file_access import FileAt, find_files, opened


class TarSamples:
    """`TarSamples` reads tars; a sample is `{"__key__": …, ending: bytes}`.

    The layout is webdataset's, a shard is a tar; the stream's `transform` decodes the bytes.

    Args:
        paths: paths, URLs or patterns of uncompressed tars.
        count: whether samples are counted first, by reading headers; else a shard's length is known when it was read.

    Raises:
        ConfigurationError: a pattern matches no file.
        DataError: a file cannot be read, or is no plain tar.
    """

    def __init__(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, count: bool = True) -> None:
        self._files = find_files(paths)
        self._shards = [
            DataShard(file.url, sum(1 for _ in _samples(file)) if count else None, file.identity)
            for file in self._files
        ]

    def shards(self) -> Sequence[DataShard]:
        return self._shards

    def open(self, shard: int, start: int) -> Iterator[Any]:
        file = self._files[shard]
        for number, (key, members, archive) in enumerate(_samples(file)):
            if number < start:
                continue  # its headers were read, its bytes were not
            sample: dict[str, Any] = {"__key__": key}
            for ending, member in members:
                body = archive.extractfile(member)
                sample[ending] = body.read() if body is not None else b""
            yield sample


def _samples(file: FileAt) -> Iterator[tuple[str, list[tuple[str, tarfile.TarInfo]], tarfile.TarFile]]:
    try:
        with opened(file) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            key, members = "", list[tuple[str, tarfile.TarInfo]]()
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # else all headers of a shard stay in memory
                if not member.isfile() or member.name.rpartition("/")[2].startswith("."):
                    continue
                folder, slash, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if folder + slash + stem != key and members:
                    yield key, members, archive
                    members = []
                key = folder + slash + stem
                members.append((ending.lower(), member))
            if members:
                yield key, members, archive
    except tarfile.TarError as error:
        raise DataError(
            f"{file.url} cannot be read as a tar ({error}); compressed ones must be unpacked first"
        ) from error
