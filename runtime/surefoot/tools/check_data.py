"""`python -m surefoot.tools.check_data PATH...`: checks whether a data source is elastic.

Started by `surefoot data check`. Prints sentences; exits with 0 if the source is elastic, else with 1.
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
_MAX_SHARDS_READ = 3


def kind_of(paths: list[str]) -> tuple[str, list[str]]:
    """Guesses the source's kind by the first path's ending.

    A folder's kind is that of its files; an unknown ending counts as text.

    Returns:
        the kind, and the paths in the form that its source takes.

    Raises:
        ConfigurationError: a folder has files of several kinds, or of no known kind.
    """
    if PurePosixPath(paths[0].rstrip("/")).suffix:
        return _BY_ENDING.get(PurePosixPath(paths[0]).suffix, "text"), paths
    kinds_and_paths = [_kind_of_folder(folder.rstrip("/")) for folder in paths]
    kinds = {kind for kind, _ in kinds_and_paths}
    if len(kinds) > 1:
        raise ConfigurationError(f"{' and '.join(paths)} are {' and '.join(sorted(kinds))}: check them one by one")
    return kinds_and_paths[0][0], [path for _, path in kinds_and_paths]


def _kind_of_folder(folder: str) -> tuple[str, str]:
    """Returns kind and path pattern of a folder's files: MDS by its index, else by the only known ending."""
    names = names_of(f"{glob.escape(folder)}/*")
    if not names or f"{folder}/index.json" in names:
        return "mds", folder  # an empty or missing folder too: the source's error names the missing index
    endings = {PurePosixPath(name).suffix for name in names}
    if {".bin", ".idx"} <= endings:
        return "megatron", f"{folder}/*.bin"
    known_endings = sorted(endings & (_BY_ENDING.keys() | {".txt"}))
    if len(known_endings) != 1:
        raise ConfigurationError(
            f"{folder} has files of {'the kinds ' + ' '.join(known_endings) if known_endings else 'no known kind'}: name"
            f" those to be read by a pattern, as '{folder}/*{known_endings[0] if known_endings else '.txt'}', with --kind where their"
            " ending does not say it"
        )
    return _BY_ENDING.get(known_endings[0], "text"), f"{folder}/*{known_endings[0]}"


def source_of(kind: str, paths: list[str], length: int, dtype: str) -> DataSource:
    """Creates the source as a script would."""
    if kind == "tokens":
        return TokenFile(paths, length, dtype=dtype)
    source_classes: dict[str, Any] = {
        "text": TextLines,
        "jsonl": JsonLines,
        "parquet": ParquetRows,
        "tar": TarSamples,
        "megatron": MegatronDocuments,
        "mds": MosaicShards,
    }
    source: DataSource = source_classes[kind](paths)
    return source


def read_through(source: DataSource, number: int, shard: DataShard) -> tuple[int, int]:
    """Reads one shard twice, the second time from its middle.

    Returns the numbers of samples and of bad samples; raises ConfigurationError if the two reads differ.
    """
    samples = [_comparable(sample) for sample in source.open(number, 0)]
    if shard.samples not in (None, len(samples)):
        raise ConfigurationError(f"{shard.name} has {len(samples)} samples, and {shard.samples} were counted")
    middle = len(samples) // 2
    if [_comparable(sample) for sample in source.open(number, middle)] != samples[middle:]:
        raise ConfigurationError(f"{shard.name} gives other samples when it is opened at sample {middle}")
    return len(samples), sum(text is None for text in samples)


def _comparable(sample: Any) -> str | None:
    return None if isinstance(sample, BadSample) else repr(sample)


def verdict(source: DataSource, args: argparse.Namespace) -> str:
    """Describes the world sizes that can read a source; raises ConfigurationError if there are none."""
    stream = ElasticStream(
        source, args.global_batch_size, lanes=args.lanes, lane_groups=args.lane_groups, rank=0, num_replicas=1
    )
    return (
        f"elastic: a global batch of {args.global_batch_size} is the same at every world size, up to {stream.shape.slots}"
        f" ranks have a part of it ({stream.shape.lanes} lanes)"
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
    args = parser.parse_args(arguments)
    try:
        kind, paths = (args.kind, args.paths) if args.kind else kind_of(args.paths)
        source = source_of(kind, paths, args.sequence_length, args.dtype)
        shards = source.shards()
        known_counts = [shard.samples for shard in shards if shard.samples is not None]
        count_text = (
            f"{sum(known_counts)} samples" if len(known_counts) == len(shards) else "lengths known when they are read"
        )
        print(f"{kind}: {len(shards)} shards, {count_text}")
        last = len(shards) - 1
        shard_numbers = (
            range(len(shards)) if args.all else sorted({0, last // 2, last} if shards else ())[:_MAX_SHARDS_READ]
        )
        counts = [read_through(source, number, shards[number]) for number in shard_numbers]
        samples, bad_count = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        print(
            f"{len(counts)} shards were read, and again from their middle: {samples} samples, {bad_count} of them bad"
        )
        print(verdict(source, args))
    except SurefootError as error:
        print(f"not elastic: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
