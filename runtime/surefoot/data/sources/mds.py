"""`MosaicShards` reads MosaicML streaming's shards (MDS) without its package."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from surefoot.data.data_source import BadSample, DataError, DataShard
from surefoot.data.sources.file_access import FileAt, check, measured, read_range
from surefoot.errors import ConfigurationError

_PLAIN: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": bytes.decode,
    "json": json.loads,
    "int": lambda body: int(np.frombuffer(body, np.int64)[0]),
    "str_int": int,
    "str_float": float,
}
_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class MosaicShards:
    """`MosaicShards` reads MDS folders; a sample is a dict of columns.

    Images come as the bytes they were stored as. Compressed shards and pickled columns are refused: unpack the first,
    write the second anew. A compressed shard cannot be opened in its middle, and a pickle may run any code. What cannot
    be decoded is a bad sample.

    Args:
        folders: paths or URLs of folders with an `index.json`.

    Raises:
        ConfigurationError: a shard or column of a kind that is not read.
        DataError: a file is missing, or its size is not the index's, or that is no index.
    """

    def __init__(self, folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        wanted = [folders] if isinstance(folders, str | os.PathLike) else list(folders)
        self._places: list[tuple[FileAt, dict[str, Any]]] = []
        for folder in (os.fspath(one).rstrip("/") for one in wanted):
            index = measured(f"{folder}/index.json")
            for about in _told(index):
                if about.get("format") != "mds" or about.get("compression"):
                    kind = about.get("compression") or about.get("format")
                    raise ConfigurationError(
                        f"{folder} has shards of kind {kind}: only plain MDS can be opened anywhere"
                    )
                for encoding in about["column_encodings"]:
                    _decoder(encoding, folder)
                file = measured(f"{folder}/{about['raw_data']['basename']}")
                if file.size != about["raw_data"]["bytes"]:
                    raise DataError(
                        f"{file.url} has {file.size} bytes and index.json tells of {about['raw_data']['bytes']}"
                    )
                self._places.append((file, about))

    def shards(self) -> Sequence[DataShard]:
        return [DataShard(file.url, about["samples"], file.identity) for file, about in self._places]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        file, about = self._places[shard]
        check(file)
        samples = about["samples"]
        bounds = np.frombuffer(read_range(file, 4, 4 * (samples + 2)), np.uint32)
        decoders = [_decoder(encoding, file.url) for encoding in about["column_encodings"]]
        for number in range(start, samples):
            body = read_range(file, int(bounds[number]), int(bounds[number + 1]))
            try:
                sample = _decoded(body, about["column_names"], about["column_sizes"], decoders)
            except (ValueError, IndexError) as error:
                sample = BadSample(error)
            yield sample


def _told(index: FileAt) -> list[dict[str, Any]]:
    """Returns what the index tells of each shard."""
    try:
        found: list[dict[str, Any]] = json.loads(read_range(index, 0, index.size))["shards"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{index.url} is no index of MDS ({type(error).__name__}: {error}): bring the writer's own back"
        ) from error
    return found


def _decoded(body: bytes, names: list[str], sizes: list[int | None], decoders: list[Callable[[bytes], Any]]) -> Any:
    """Returns the columns of a sample: sizes of varying columns come first, then the columns."""
    varying = sum(size is None for size in sizes)
    told = iter(np.frombuffer(body, np.uint32, varying).tolist())
    at, found = 4 * varying, {}
    for name, size, decode in zip(names, sizes, decoders, strict=True):
        length = next(told) if size is None else size
        found[name] = decode(body[at : at + length])
        at += length
    return found


def _decoder(encoding: str, where: str) -> Callable[[bytes], Any]:
    kind, _, rest = encoding.partition(":")
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _NUMBERS:
        dtype = np.dtype(kind)
        return lambda body: np.frombuffer(body, dtype)[0]
    parts = rest.split(":")
    if kind == "ndarray" and len(parts) == 2:
        array, shape = np.dtype(parts[0]), tuple(int(size) for size in parts[1].split(","))
        return lambda body: np.frombuffer(body, array).reshape(shape)
    raise ConfigurationError(
        f"{where} has a column of encoding {encoding!r}, which is not read here; write it as ndarray"
    )
