"""Sources of every kind: opened at any sample, each sample once through a hundred kills and resizes, changes named."""

from __future__ import annotations

import json
import os
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.shards import World
from support.streamed_files import KINDS, MOSAIC, Streamed, streamed
from surefoot.data.data_source import BadSample, DataError, identity_of
from surefoot.data.sources import (
    HuggingFaceStream,
    JsonLines,
    MegatronDocuments,
    MosaicShards,
    ParquetRows,
    TarSamples,
    TextLines,
    TokenFile,
)
from surefoot.data.stream import ElasticStream
from surefoot.errors import ConfigurationError

SAMPLES = 60


@pytest.fixture(params=sorted(KINDS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Streamed:
    needs = {"parquet": "pyarrow", "hugging face stream": "datasets", "hugging face map": "datasets"}
    if request.param in needs:
        pytest.importorskip(needs[request.param])
    return streamed(request.param, tmp_path, SAMPLES)


@pytest.mark.gate_only
def test_a_shard_opens_at_any_sample(source: Streamed) -> None:
    data, number = source
    found = []
    for shard, about in enumerate(data.shards()):
        whole = [number(sample) for sample in data.open(shard, 0)]
        assert about.samples in (None, len(whole))
        for start in range(len(whole) + 1):
            assert [number(sample) for sample in data.open(shard, start)] == whole[start:]
        found += whole
    assert sorted(found) == list(range(len(found)))
    assert len(found) in (SAMPLES, 30)


@pytest.mark.gate_only
def test_each_sample_comes_as_undisturbed_through_a_hundred_kills_and_resizes(
    source: Streamed,
) -> None:
    data, number = source
    chance = random.Random(7)
    options: dict[str, Any] = {"global_batch_size": 6, "lanes": 3, "collate_fn": list, "shuffle_window": 3, "seed": 5}

    def build(rank: int, world: int) -> ElasticStream:
        return ElasticStream(data, rank=rank, num_replicas=world, **options)

    seen: list[int] = []
    states: list[Any] = []
    for _ in range(100):
        world = World(build, chance.randint(1, 4), states)
        for _ in range(chance.randint(0, 2)):
            seen += [number(sample) for part in world.step()[0] for sample in part]
        states = json.loads(json.dumps(world.states()))
        for _ in range(chance.randint(0, 1)):
            world.step()
    assert seen == [number(s) for batch in islice(build(0, 1), len(seen) // 6) for s in batch.data]
    assert len(seen) > 400


@pytest.mark.parametrize("kind", ["text", "json lines", "tokens", "megatron", "parquet", "tars"])
def test_a_file_that_changed_or_vanished_is_named(kind: str, tmp_path: Path) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    data, _ = streamed(kind, tmp_path, SAMPLES)
    file = max((p for p in tmp_path.iterdir() if p.suffix != ".idx"), key=lambda path: path.name)
    last = len(data.shards()) - 1
    body = file.read_bytes()
    file.write_bytes(body)
    os.utime(file, ns=(1, 1))  # as many bytes, written at another time
    with pytest.raises(DataError, match=f"{file.name} was changed"):
        list(data.open(last, 0))
    file.unlink()
    with pytest.raises(DataError, match=f"{file.name} is not there"):
        list(data.open(last, 0))


def test_a_copy_elsewhere_is_the_same_source_and_another_content_is_not(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        np.arange(801 if name != "three" else 802, dtype=np.uint16)[-801:].tofile(tmp_path / name / "t.bin")
    one, two, three = (
        identity_of(TokenFile(tmp_path / name / "t.bin", 8).shards()) for name in ("one", "two", "three")
    )
    assert one == two != three


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([b"", b"a", b"\r", b"long line", b"\xc3\xa4", b"\xff", b"end\r"]), max_size=12),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(0, 9),
    st.booleans(),
)
def test_lines_are_those_of_the_file_wherever_it_is_cut(
    tmp_path: Path, lines: list[bytes], ended: bool, shard_bytes: int, mark: int, marks: int, piece: int, counted: bool
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n".join(lines) + b"\n" * (ended and bool(lines)))
    whole = lines if ended or not lines or lines[-1] else lines[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surefoot.data.sources.file_formats.CHUNK_BYTES", mark * marks)
        patch.setattr("surefoot.data.sources.file_formats.MARK_BYTES", mark)
        patch.setattr("surefoot.data.sources.file_formats.PIECE_BYTES", piece)
        source = TextLines(tmp_path / "a.txt", shard_bytes=shard_bytes, count=counted)
        found = [list(source.open(shard, 0)) for shard in range(len(source.shards()))]
        for shard, part in enumerate(found):
            for start in range(len(part) + 2):
                assert list(map(repr, source.open(shard, start))) == list(map(repr, part[start:]))
    if counted:
        assert [shard.samples for shard in source.shards()] == [len(part) for part in found]
    assert [isinstance(x, BadSample) or x.encode() for part in found for x in part] == [
        line == b"\xff" or line.removesuffix(b"\r") for line in whole
    ]


def test_a_line_that_is_no_json_is_a_bad_sample(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": \n{"no": 3}\n{"id": 4}\n')
    found = list(JsonLines(tmp_path / "a.jsonl", field="id").open(0, 0))
    assert [isinstance(sample, BadSample) for sample in found] == [False, True, True, False]


def test_what_cannot_be_opened_anywhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"x")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "odd.idx").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="compressed"):
        TextLines(tmp_path / "a.jsonl.gz")
    with pytest.raises(ConfigurationError, match="no multiple of a uint16"):
        TokenFile(tmp_path / "odd.bin", 4)
    with pytest.raises(ConfigurationError, match="no index of Megatron"):
        MegatronDocuments(tmp_path / "odd.bin")
    with pytest.raises(ConfigurationError, match="names no file"):
        TextLines(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match=r"nowhere\.txt is not there"):
        TextLines(tmp_path / "nowhere.txt")
    (tmp_path / "c.tar").write_bytes(b"\x1f\x8b" + bytes(2000))
    with pytest.raises(DataError, match="cannot be read as a tar"):
        TarSamples(tmp_path / "c.tar")


def test_a_file_whose_content_is_broken_is_named(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "none.parquet").write_bytes(bytes(500))
    with pytest.raises(DataError, match=r"none\.parquet cannot be read as Parquet"):
        ParquetRows(tmp_path / "none.parquet")
    pq.write_table(pyarrow.table({"text": [f"row {number}" for number in range(100)]}), tmp_path / "cut.parquet")
    body = bytearray((tmp_path / "cut.parquet").read_bytes())
    body[30:400] = bytes(370)
    (tmp_path / "cut.parquet").write_bytes(bytes(body))
    with pytest.raises(DataError, match=r"cut\.parquet cannot be read as Parquet"):
        list(ParquetRows(tmp_path / "cut.parquet").open(0, 0))
    for index in ("{", "{}", "[]"):
        (tmp_path / "index.json").write_text(index)
        with pytest.raises(DataError, match=r"index\.json is no index of MDS"):
            MosaicShards(tmp_path)


def test_a_folder_is_refused_with_a_pattern_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    for path in (tmp_path, f"{tmp_path.parent}/{tmp_path.name[:-1]}?"):
        with pytest.raises(ConfigurationError, match="is a folder: give a pattern"):
            TextLines(path)


def test_hugging_face_streams_are_taken_whole_and_unshuffled() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"id": list(range(8))}).to_iterable_dataset(num_shards=2)
    with pytest.raises(ConfigurationError, match="shuffles by itself"):
        HuggingFaceStream(rows.shuffle(buffer_size=3))
    with pytest.raises(ConfigurationError, match="split by node"):
        HuggingFaceStream(split_dataset_by_node(rows, 0, 2))
    with pytest.raises(ConfigurationError, match="no streaming data set"):
        HuggingFaceStream([1, 2])


def test_what_an_mds_shard_has_that_cannot_be_decoded_is_a_bad_sample(tmp_path: Path) -> None:
    shutil.copytree(MOSAIC, tmp_path / "mds")
    first = Path(MosaicShards(tmp_path / "mds").shards()[0].name)
    body = bytearray(first.read_bytes())
    samples = int(np.frombuffer(body[:4], np.uint32)[0])
    body[8:12] = np.uint32(0).tobytes()  # where the second sample begins and the first ends
    first.write_bytes(bytes(body))
    found = list(MosaicShards(tmp_path / "mds").open(0, 0))
    assert [isinstance(sample, BadSample) for sample in found] == [True, True] + [False] * (samples - 2)
    stream = ElasticStream(MosaicShards(tmp_path / "mds"), 2, rank=0, num_replicas=1, lanes=2, collate_fn=list)
    with pytest.raises(DataError, match=rf"sample 0 of .*{first.name} is bad"):
        list(islice(stream, 50))


def test_mosaic_columns_are_what_was_written() -> None:
    sample = next(iter(MosaicShards(MOSAIC).open(1, 2)))
    number = sample["id"]
    assert sample["text"] == "text " + "x" * (number % 7)
    assert sample["tokens"].tolist() == list(range(number, number + 4))
    assert (sample["meta"], sample["raw"], sample["weight"]) == ({"n": number}, bytes([number]), number / 2)
