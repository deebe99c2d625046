"""What `surefoot data check` takes a path for."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.errors import ConfigurationError
from surefoot.tools.check_data import kind_of, main


@pytest.mark.parametrize(
    ("names", "kind", "pattern"),
    [
        (["a.jsonl", "b.jsonl", "README"], "jsonl", "*.jsonl"),
        (["a.parquet"], "parquet", "*.parquet"),
        (["a.tar"], "tar", "*.tar"),
        (["a.txt"], "text", "*.txt"),
        (["train.bin", "val.bin"], "tokens", "*.bin"),
        (["a.bin", "a.idx"], "megatron", "*.bin"),
        (["index.json", "shard.00000.mds"], "mds", ""),
        (["index.json", "a.jsonl"], "mds", ""),
        ([], "mds", ""),
    ],
)
def test_a_folder_is_what_its_files_are(tmp_path: Path, names: list[str], kind: str, pattern: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert kind_of([f"{tmp_path}/"]) == (kind, [f"{tmp_path}/{pattern}".rstrip("/")])


@pytest.mark.parametrize(
    ("path", "kind"),
    [("a.jsonl", "jsonl"), ("s3://b/x-*.parquet", "parquet"), ("x.log", "text"), ("/nowhere.d/mds", "mds")],
)
def test_a_file_is_what_its_ending_says(path: str, kind: str) -> None:
    assert kind_of([path]) == (kind, [path])


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a.jsonl", "b.tar"], r"files of the kinds \.jsonl \.tar: .*/\*\.jsonl"), (["x.csv"], "no known kind")],
)
def test_a_folder_of_several_kinds_or_of_none_is_refused_with_what_to_give(
    tmp_path: Path, names: list[str], said: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ConfigurationError, match=said):
        kind_of([str(tmp_path)])


def test_folders_of_one_kind_are_checked_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("{}\n" * 12)
    assert main(["--all", f"{tmp_path}/one", f"{tmp_path}/two"]) == 0
    assert capsys.readouterr().out.startswith("jsonl: 2 shards, 24 samples\n2 shards were read")
    (tmp_path / "two" / "a.jsonl").rename(tmp_path / "two" / "a.txt")
    assert main([f"{tmp_path}/one", f"{tmp_path}/two"]) == 1
    assert "check them one by one" in capsys.readouterr().out
