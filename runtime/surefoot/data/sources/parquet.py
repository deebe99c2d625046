"""`ParquetRows` reads Parquet files; a shard is a row group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from surefoot.data.data_source import DataError, DataShard
from surefoot.data.sources.file_access import FileAt, find_files, opened
from surefoot.errors import ConfigurationError


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
        self._places: list[tuple[FileAt, int, int]] = []
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


def _parquet(file: FileAt) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError("ParquetRows needs pyarrow: pip install pyarrow") from error
    with _telling(file):
        return pyarrow.parquet.ParquetFile(opened(file))


@contextmanager
def _telling(file: FileAt) -> Iterator[None]:
    """Names the file in what pyarrow says of its content."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file.url} cannot be read as Parquet ({error}): bring a whole file back, or begin another job without it"
        ) from error
