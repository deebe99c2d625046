"""One source of each kind, over files that are written for it; samples tell their number, each once."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.data.data_source import DataSource
from surefoot.data.sources import (
    HuggingFaceStream,
    Items,
    JsonLines,
    MegatronDocuments,
    MosaicShards,
    ParquetRows,
    TarSamples,
    TextLines,
    TokenFile,
)

Streamed = tuple[DataSource, Callable[[Any], int]]
"""A source, and what number a sample of it has."""

MOSAIC = Path(__file__).with_name("mosaic")
"""Written by streaming 0.13's own MDSWriter: 30 samples in 5 shards."""


def streamed(kind: str, folder: Path, samples: int) -> Streamed:
    """The source of that kind, of about so many samples (MDS has its own)."""
    return KINDS[kind](folder, samples)


def text(folder: Path, samples: int, count: bool = True) -> Streamed:
    for part in range(3):
        numbers = range(part * samples // 3, (part + 1) * samples // 3)
        end = b"" if part == 1 else b"\n"  # of a file without a last line's end nothing may be lost
        lines = [f"{n} {'é' * (n % 9)}".encode() for n in numbers]
        (folder / f"{part}.txt").write_bytes(b"\n".join(lines) + end)
    return TextLines(folder / "*.txt", shard_bytes=17, count=count), lambda line: int(line.split()[0])


def json_lines(folder: Path, samples: int) -> Streamed:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (n % 5), "id": n}) + "\n" for n in range(samples)))
    return JsonLines(path, shard_bytes=100, field="id"), int


def tokens(folder: Path, samples: int) -> Streamed:
    np.arange(samples * 4 + 1, dtype=np.uint16).tofile(folder / "train.bin")
    return TokenFile(folder / "train.bin", 4, shard_samples=7), lambda row: int(row[0]) // 4


def megatron(folder: Path, samples: int) -> Streamed:
    sizes = np.array([1 + n % 3 for n in range(samples)], np.int32)
    np.concatenate([np.full(size, n, np.uint16) for n, size in enumerate(sizes)]).tofile(folder / "corpus.bin")
    starts = (np.concatenate([[0], np.cumsum(sizes)[:-1]]) * 2).astype(np.int64)
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8])
    counts = len(sizes).to_bytes(8, "little") + (len(sizes) + 1).to_bytes(8, "little")
    body = sizes.tobytes() + starts.tobytes() + np.arange(len(sizes) + 1, dtype=np.int64).tobytes()
    (folder / "corpus.idx").write_bytes(head + counts + body)
    return MegatronDocuments(folder / "corpus.bin", shard_samples=9), lambda row: int(row[0])


def parquet(folder: Path, samples: int) -> Streamed:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"id": list(range(samples)), "text": [f"t{n}" for n in range(samples)]})
    pq.write_table(table, folder / "rows.parquet", row_group_size=11)
    return ParquetRows(folder / "rows.parquet", column="id"), int


def tars(folder: Path, samples: int, count: bool = True) -> Streamed:
    for part in range(6):
        with tarfile.open(folder / f"{part}.tar", "w") as tar:
            for n in range(part * samples // 6, (part + 1) * samples // 6):
                for ending, body in (("cls", str(n).encode()), ("seg.png", b"image")):
                    info = tarfile.TarInfo(f"in/{n:03}.{ending}")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
    return TarSamples(folder / "*.tar", count=count), lambda sample: int(sample["cls"])


def items(_: Path, samples: int) -> Streamed:
    return Items(list(range(samples)), shard_samples=8), int


def hugging_face(_: Path, samples: int) -> Streamed:
    import datasets

    rows = datasets.Dataset.from_dict({"id": list(range(samples))}).to_iterable_dataset(num_shards=6)
    return HuggingFaceStream(rows), lambda row: int(row["id"])


def hugging_face_map(_: Path, samples: int) -> Streamed:
    import datasets

    return Items(datasets.Dataset.from_dict({"id": list(range(samples))}), 8), lambda row: int(row["id"])


def mosaic(_: Path, __: int) -> Streamed:
    return MosaicShards(MOSAIC), lambda sample: int(sample["id"])


KINDS: dict[str, Callable[[Path, int], Streamed]] = {
    "text": text,
    "text, uncounted": lambda folder, samples: text(folder, samples, count=False),
    "json lines": json_lines,
    "tokens": tokens,
    "megatron": megatron,
    "parquet": parquet,
    "tars": tars,
    "tars, uncounted": lambda folder, samples: tars(folder, samples, count=False),
    "items": items,
    "hugging face stream": hugging_face,
    "hugging face map": hugging_face_map,
    "mosaic": mosaic,
}
