"""Whole checkpoints in a folder: verified byte by byte, and compared across world sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.saves import split, stream_of
from surefoot.format.layouts import block_digests
from surefoot.format.manifests import build_manifest
from surefoot.protocol.identities import RankSave
from surefoot.tiers.object_store import DirectoryStore
from surefoot.tiers.persistent import ObjectStoreTier
from surefoot.tools import compare, verify

SHAPES = {"model/weight": (50, 40), "model/bias": (7,), "optimizer/weight/exp_avg": (50, 40), "model/count": ()}


def tensors(nudge: float = 0.0) -> dict[str, Any]:
    random = np.random.default_rng(1)
    made = {name: np.asarray(random.standard_normal(shape)) for name, shape in SHAPES.items()}
    made["model/weight"][30, 3] += nudge
    return made


def save(root: Path, job: str, step: int, world: int, arrays: dict[str, Any]) -> None:
    tier = ObjectStoreTier(DirectoryStore(root, create_root=True), job)
    for rank in range(world):
        boxes = {name: split(array.shape, world, rank) for name, array in arrays.items()}
        stream, data = stream_of(arrays, boxes, chunk_blocks=1)
        table = block_digests(memoryview(data), stream.edges, range(stream.blocks))
        manifest = build_manifest(RankSave(1, step, rank), world, "incarnation", stream, (table, b"{}"), 0.0)
        tier.put_layout(stream.digest, stream.text)
        for number, start in enumerate(stream.layout.chunk_starts):
            length = stream.layout.chunk_lengths()[number]
            tier.put_chunk(manifest.save, number, memoryview(data)[start : start + length])
        tier.put_digests(manifest.save, table)
        tier.put_values(manifest.save, b"{}")
        tier.commit(manifest, 1, stream.layout.chunk_lengths())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUREFOOT_PERSISTENT_URI", f"file://{tmp_path}")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return body


def test_equal_parameters_saved_by_worlds_of_different_size_are_bit_exact(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(root, "a", 10, 3, tensors())
    save(root, "b", 10, 2, tensors())
    assert compare.main(["--job", "a", "--with", "b"]) == 0
    found = told(capsys)
    assert (found["step"], found["tensors"], found["max_difference"], found["bit_exact"]) == (10, 3, 0.0, True)


def test_the_largest_difference_is_found_and_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(root, "a", 10, 3, tensors())
    save(root, "b", 10, 2, tensors(nudge=0.5))
    compare.main(["--job", "a", "--with", "b"])
    found = told(capsys)
    assert found["max_difference"] == pytest.approx(0.5)
    assert (found["bit_exact"], found["worst"]) == (False, "model/weight")


def test_the_newest_step_that_both_have_is_compared(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20):
        save(root, "a", step, 2, tensors())
    for step in (10, 30):
        save(root, "b", step, 2, tensors())
    assert compare.main(["--job", "a", "--with", "b"]) == 0
    assert told(capsys)["step"] == 10
    save(root, "c", 40, 2, tensors())
    assert compare.main(["--job", "a", "--with", "c"]) == 1
    assert "share no step" in told(capsys)["problem"]


def test_a_sound_checkpoint_is_verified_and_one_without_a_rank_is_incomplete(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(root, "a", 10, 2, tensors())
    save(root, "a", 20, 2, tensors())
    (root / "a/20-1/rank-1.json").unlink()
    assert verify.main(["--job", "a"]) == 0
    found = {entry["step"]: entry for entry in told(capsys)["checkpoints"]}
    assert (found[10]["state"], found[10]["ranks"], found[10]["damaged"]) == ("verified", 2, [])
    assert (found[20]["state"], found[20]["ranks"]) == ("incomplete", 1)


@pytest.mark.parametrize("part", ["rank-1/p0000", "rank-1/digests", "rank-1/values", "rank-1.json"])
def test_one_flipped_byte_anywhere_is_found(root: Path, capsys: pytest.CaptureFixture[str], part: str) -> None:
    save(root, "a", 10, 2, tensors())
    path = root / "a/10-1" / part
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert verify.main(["--job", "a"]) == 1
    found = told(capsys)
    assert found["unreadable_manifests"] or found["checkpoints"][0]["damaged"]


def test_without_a_tier_the_tools_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SUREFOOT_PERSISTENT_URI", raising=False)
    assert verify.main(["--job", "a"]) == 1
    assert "SUREFOOT_PERSISTENT_URI" in told(capsys)["problem"]
