"""`python -m surefoot.tools.check_data PATH...`: what a source has, and who can read it.

Started by `surefoot data check`. Prints sentences; ends with 0 where the source is elastic, 1 where it is not.
"""

from __future__ import annotations

import argparse
import glob
import sys
from pathlib import PurePosixPath
from typing import Any

from surefoot.data.data_source import BadSample, DataShard, DataSource
from surefoot.data.sources import (
    JsonLines,
    MegatronDocuments,
    MosaicShards,
    ParquetRows,
    TarSamples,
    TextLines,
    TokenFile,
)
from surefoot.data.sources.file_access import names_of
from surefoot.data.stream import ElasticStream
from surefoot.errors import ConfigurationError, SurefootError

KINDS = ("text", "jsonl", "parquet", "tar", "tokens", "megatron", "mds")
_BY_ENDING = {".jsonl": "jsonl", ".parquet": "parquet", ".tar": "tar", ".bin": "tokens"}
_SHARDS_READ = 3


def kind_of(paths: list[str]) -> tuple[str, list[str]]:
    """Guesses the source's kind by the first path's ending.

    Of a folder by what is in it; an unknown ending is taken for text.

    Returns:
        the kind, and the paths as its source takes them.

    Raises:
        ConfigurationError: a folder has files of several kinds, or none that is known.
    """
    if PurePosixPath(paths[0].rstrip("/")).suffix:
        return _BY_ENDING.get(PurePosixPath(paths[0]).suffix, "text"), paths
    found = [_inside(folder.rstrip("/")) for folder in paths]
    kinds = {kind for kind, _ in found}
    if len(kinds) > 1:
        raise ConfigurationError(f"{' and '.join(paths)} are {' and '.join(sorted(kinds))}: check them one by one")
    return found[0][0], [path for _, path in found]


def _inside(folder: str) -> tuple[str, str]:
    """Kind and path of what is in a folder: MDS by its index, else the one kind of ending that is known."""
    names = names_of(f"{glob.escape(folder)}/*")
    if not names or f"{folder}/index.json" in names:
        return "mds", folder  # an empty one, or one that is not there: the error names the index that lacks
    endings = {PurePosixPath(name).suffix for name in names}
    if {".bin", ".idx"} <= endings:
        return "megatron", f"{folder}/*.bin"
    known = sorted(endings & (_BY_ENDING.keys() | {".txt"}))
    if len(known) != 1:
        raise ConfigurationError(
            f"{folder} has files of {'the kinds ' + ' '.join(known) if known else 'no known kind'}: name those to be read"
            f" by a pattern, as '{folder}/*{known[0] if known else '.txt'}', with --kind where their ending does not say it"
        )
    return _BY_ENDING.get(known[0], "text"), f"{folder}/*{known[0]}"


def source_of(kind: str, paths: list[str], length: int, dtype: str) -> DataSource:
    """The source as a script would make it."""
    if kind == "tokens":
        return TokenFile(paths, length, dtype=dtype)
    made: dict[str, Any] = {
        "text": TextLines,
        "jsonl": JsonLines,
        "parquet": ParquetRows,
        "tar": TarSamples,
        "megatron": MegatronDocuments,
        "mds": MosaicShards,
    }
    source: DataSource = made[kind](paths)
    return source


def read_through(source: DataSource, number: int, about: DataShard) -> tuple[int, int]:
    """Reads one shard twice, the second time from its middle.

    Returns samples and bad ones; raises ConfigurationError where the readings differ.
    """
    whole = [_shown(sample) for sample in source.open(number, 0)]
    if about.samples not in (None, len(whole)):
        raise ConfigurationError(f"{about.name} has {len(whole)} samples, and {about.samples} were counted")
    middle = len(whole) // 2
    if [_shown(sample) for sample in source.open(number, middle)] != whole[middle:]:
        raise ConfigurationError(f"{about.name} gives other samples when it is opened at sample {middle}")
    return len(whole), sum(text is None for text in whole)


def _shown(sample: Any) -> str | None:
    return None if isinstance(sample, BadSample) else repr(sample)


def verdict(source: DataSource, given: argparse.Namespace) -> str:
    """Describes who can read it; ConfigurationError with advice if nobody can."""
    stream = ElasticStream(
        source, given.global_batch_size, lanes=given.lanes, lane_groups=given.lane_groups, rank=0, num_replicas=1
    )
    return (
        f"elastic: a global batch of {given.global_batch_size} is the same at every world size, up to {stream.shape.slots} ranks"
        f" have a part of it ({stream.shape.lanes} lanes)"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="check a source of samples")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--lane-groups", type=int)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--dtype", default="uint16")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args(arguments)
    try:
        kind, paths = (given.kind, given.paths) if given.kind else kind_of(given.paths)
        source = source_of(kind, paths, given.sequence_length, given.dtype)
        shards = source.shards()
        known = [shard.samples for shard in shards if shard.samples is not None]
        told = f"{sum(known)} samples" if len(known) == len(shards) else "lengths known when they are read"
        print(f"{kind}: {len(shards)} shards, {told}")
        last = len(shards) - 1
        chosen = range(len(shards)) if given.all else sorted({0, last // 2, last} if shards else ())[:_SHARDS_READ]
        found = [read_through(source, number, shards[number]) for number in chosen]
        samples, bad = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
        print(f"{len(found)} shards were read, and again from their middle: {samples} samples, {bad} of them bad")
        print(verdict(source, given))
    except SurefootError as error:
        print(f"not elastic: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
