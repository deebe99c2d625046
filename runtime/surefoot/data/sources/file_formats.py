"""`TextLines` and `JsonLines` read lines; a shard is a byte range.

A shard has the lines that begin in its range, so that any range can be read without those before it.
"""

from __future__ import annotations

import json
import os
import tarfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

from surefoot.data.data_source import BadSample, DataError, DataShard, buffered_rows
from surefoot.data.loader import check_dataset
from surefoot.data.sources.file_access import (
    CHUNK_BYTES,
    FileVersion,
    check,
    find_files,
    is_local,
    measured,
    opened,
    read_range,
)
from surefoot.errors import ConfigurationError

MAX_COUNTED_BYTES = 1 << 30
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
        counted = whole <= MAX_COUNTED_BYTES if count is None else count
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


def _texts(file: FileVersion, at: int, ends: int, stop: int) -> Iterator[bytes]:
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


def _marked(file: FileVersion, first: int, stop: int) -> array[int]:
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


# ---- tokens ----------------------------------------------------------------------------------------------------------
# `TokenFile` reads nanoGPT's .bin, `MegatronDocuments` Megatron's .bin with .idx.

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
        self._places: list[tuple[FileVersion, int, int]] = []
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

    def __init__(self, file: FileVersion) -> None:
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


# ---- mds -------------------------------------------------------------------------------------------------------------
# `MosaicShards` reads MosaicML streaming's shards (MDS) without its package.

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
        self._places: list[tuple[FileVersion, dict[str, Any]]] = []
        for folder in (os.fspath(one).rstrip("/") for one in wanted):
            index = measured(f"{folder}/index.json")
            for about in _shard_entries(index):
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
                sample = _decode_mds_sample(body, about["column_names"], about["column_sizes"], decoders)
            except (ValueError, IndexError) as error:
                sample = BadSample(error)
            yield sample


def _shard_entries(index: FileVersion) -> list[dict[str, Any]]:
    """Returns what the index tells of each shard."""
    try:
        found: list[dict[str, Any]] = json.loads(read_range(index, 0, index.size))["shards"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{index.url} is no index of MDS ({type(error).__name__}: {error}): bring the writer's own back"
        ) from error
    return found


def _decode_mds_sample(
    body: bytes, names: list[str], sizes: list[int | None], decoders: list[Callable[[bytes], Any]]
) -> Any:
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


# ---- parquet ---------------------------------------------------------------------------------------------------------
# `ParquetRows` reads Parquet files; a shard is a row group.


class ParquetRows:
    """`ParquetRows` reads Parquet; a sample is a row as a dict.

    Needs pyarrow.

    Args:
        paths: paths, URLs or patterns.
        columns: the columns to read; by default all.
        column: one column whose value alone is the sample, in place of a dict.

    Raises:
        ConfigurationError: pyarrow is missing, a pattern matches no file, or a file lacks a column.
        DataError: a file cannot be read, or is no whole Parquet.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        column: str | None = None,
    ) -> None:
        self._columns = [column] if column is not None else None if columns is None else list(columns)
        self._column = column
        self._places: list[tuple[FileVersion, int, int]] = []
        for file in find_files(paths):
            about = _parquet(file).metadata
            missing = set(self._columns or ()) - set(about.schema.to_arrow_schema().names)
            if missing:
                raise ConfigurationError(f"{file.url} has no column {sorted(missing)[0]!r}")
            self._places += [(file, group, about.row_group(group).num_rows) for group in range(about.num_row_groups)]

    def shards(self) -> Sequence[DataShard]:
        return [DataShard(f"{file.url}, row group {g}", rows, file.identity) for file, g, rows in self._places]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        file, group, _ = self._places[shard]
        with _telling(file):
            table = _parquet(file).read_row_group(group, columns=self._columns)
        for batch in table.slice(start).to_batches(max_chunksize=256):
            rows = batch.to_pylist()
            yield from rows if self._column is None else (row[self._column] for row in rows)


def _parquet(file: FileVersion) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError("ParquetRows needs pyarrow: pip install pyarrow") from error
    with _telling(file):
        return pyarrow.parquet.ParquetFile(opened(file))


@contextmanager
def _telling(file: FileVersion) -> Iterator[None]:
    """Names the file in what pyarrow says of its content."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file.url} cannot be read as Parquet ({error}): bring a whole file back, or begin another job without it"
        ) from error


# ---- tars ------------------------------------------------------------------------------------------------------------
# `TarSamples` reads webdataset's tars: members of one stem are one sample.


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


def _samples(file: FileVersion) -> Iterator[tuple[str, list[tuple[str, tarfile.TarInfo]], tarfile.TarFile]]:
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


# ---- hugging face ----------------------------------------------------------------------------------------------------
# `HuggingFaceStream` reads Hugging Face's streaming data sets, shard by shard.


class HuggingFaceStream:
    """`HuggingFaceStream` reads the rows of a `datasets.IterableDataset`.

    From `load_dataset(..., streaming=True)` or `to_iterable_dataset`. A shard's length is not known before it is read.
    Order and shares are the stream's: a data set that shuffles in a buffer would lose that buffer's rows at each
    restart. A map-style data set goes into `Items`, or to `ElasticLoader`.

    Args:
        dataset: unshuffled, and not split by node.

    Raises:
        ConfigurationError: it is no streaming data set, shuffles by itself, or is split by node.
    """

    def __init__(self, dataset: Any) -> None:
        kind = type(dataset).__name__
        if not (callable(getattr(dataset, "shard", None)) and isinstance(getattr(dataset, "num_shards", None), int)):
            raise ConfigurationError(f"HuggingFaceStream was given a {kind}, which is no streaming data set in shards")
        if buffered_rows(dataset):
            raise ConfigurationError(
                f"the {kind} shuffles by itself: give it without shuffle(), and ElasticStream a shuffle_window= to shuffle in"
            )
        if getattr(dataset, "_distributed", None) is not None:
            raise ConfigurationError(
                f"the {kind} was split by node: give all of it, as the stream divides it among ranks"
            )
        self._dataset = dataset

    def shards(self) -> Sequence[DataShard]:
        count, info = self._dataset.num_shards, getattr(self._dataset, "info", None)
        mark = f"{getattr(info, 'dataset_name', '')} {getattr(info, 'version', '')} {count}"
        return [DataShard(f"shard {number} of {count}", None, mark) for number in range(count)]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        found = self._dataset.shard(num_shards=self._dataset.num_shards, index=shard)
        return iter(found.skip(start) if start else found)


# ---- items -----------------------------------------------------------------------------------------------------------
# `Items` reads map-style datasets, Hugging Face's among them.


class Items:
    """`Items` serves a dataset with a length and samples by index.

    For one such dataset alone `ElasticLoader` shuffles better: it permutes samples, not shards.

    Args:
        dataset: map-style.
        shard_samples: how many neighbours are one shard.

    Raises:
        ConfigurationError: the dataset has no length or index.
    """

    def __init__(self, dataset: Any, shard_samples: int = 256) -> None:
        check_dataset(dataset)
        self._dataset, self._shard_samples = dataset, shard_samples

    def shards(self) -> Sequence[DataShard]:
        size = len(self._dataset)
        # what a Hugging Face dataset says of its content; of others there is only their length
        mark = str(getattr(self._dataset, "_fingerprint", ""))
        starts = range(0, size, self._shard_samples)
        return [DataShard(f"samples from {at}", min(self._shard_samples, size - at), mark) for at in starts]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        first = shard * self._shard_samples
        stop = min(first + self._shard_samples, len(self._dataset))
        return (self._dataset[number] for number in range(first + start, stop))
