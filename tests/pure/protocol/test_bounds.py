"""What others wrote is compared with its bounds before anything is sized by it, and large jobs are within them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from surefoot.errors import OutOfBounds
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.completeness import (
    LineageEntry,
    TierReading,
    complete_checkpoints,
    count_copies,
    describe_uncovered_tensor,
    layout_sets_to_check,
)
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES, Layout, Piece, RankManifest, TensorLayout
from surefoot.protocol.identities import MemoryServerInstance, RankSave
from surefoot.tiers import persistent_records

TESTS = Path(__file__).parents[2]
LARGE_BYTES = 80_000_000_000
MANIFEST = RankManifest(RankSave(1, 5, 0), 1, "i" * 12, "a" * 16, 64, 1, "d" * 16, 8, "v" * 16, 2, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("world_size", 10**9),
        ("world_size", 0),
        ("chunks", 3 * 10**8),
        ("chunks", -1),
        ("stream_bytes", 10**15),
        ("digests_bytes", 10**12),
        ("values_bytes", -1),
        ("saved_at", float("nan")),
        ("save", RankSave(-1, 5, 0)),
        ("save", RankSave(1, 10**30, 0)),
        ("save", RankSave(1, 5, 10**9)),
        ("layout", "a" * 2000),
        ("objects", tuple((str(n), "x") for n in range(5000))),
    ],
)
def test_a_manifest_beyond_its_bounds_is_refused_by_name(field: str, value: object) -> None:
    text = replace(MANIFEST, **{field: value}).to_json()  # type: ignore[arg-type]
    with pytest.raises(OutOfBounds, match=r"out of bounds: .* is .*, allowed are"):
        RankManifest.from_json(text)


def test_a_world_of_a_billion_is_never_counted() -> None:
    """Also where a manifest comes without its text: a claim of a world sizes nothing."""
    claims = replace(MANIFEST, world_size=10**9)
    reading = TierReading({MemoryServerInstance("n", "i"): (claims,)}, (claims,))
    begun = time.process_time()
    assert layout_sets_to_check(reading) == set()
    assert complete_checkpoints(reading, (LineageEntry(1, None, 1),), 1, frozenset(), {}) == []
    assert count_copies(claims.save.checkpoint, reading, {}) == 0
    assert (
        persistent_records.read_newest_record(b'{"format":1,"generation":1,"step":1,"world_size":1000000000}') is None
    )
    assert time.process_time() - begun < 1.0


def test_a_rank_of_80_gigabytes_and_50000_parameters_with_their_moments_is_within_bounds() -> None:
    each = LARGE_BYTES // 150_000 // 2
    tensors = tuple(
        TensorLayout(
            f"model.layers.{n // 3}.mlp.experts.down_projection.weight/{('', 'exp_avg', 'exp_avg_sq')[n % 3]}",
            "bfloat16", (each, 16), (Piece((0, 0), (each, 1), (each, 1), n * each * 2),),
        )
        for n in range(150_000)
    )  # fmt: skip
    starts = tuple(range(0, LARGE_BYTES, MAX_CHUNK_BYTES))
    layout = Layout(tensors, starts, LARGE_BYTES)
    assert Layout.from_json(layout.to_json()) == layout
    save = RankSave(10**6, 10**9, bounds.MAX_RANKS - 1)
    large = replace(MANIFEST, save=save, world_size=bounds.MAX_RANKS, stream_bytes=LARGE_BYTES, chunks=len(starts))
    assert RankManifest.from_json(large.to_json()) == large


def test_two_thousand_workers_of_eight_ranks_are_within_bounds() -> None:
    ranks, copies, checkpoints = 16_000, 2, 5
    assert bounds.max_manifests_per_tier(ranks) >= ranks * copies * checkpoints
    assert 8 * copies * checkpoints <= bounds.MAX_INDEX_ENTRIES


@pytest.mark.parametrize("text", ["[" * 40_000_000, '{"a":[' + "0," * 5_000_000 + "0]}", "[" * 5_000_000])
def test_a_layout_record_that_would_fill_memory_is_refused_unread(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(OutOfBounds):
        Layout.from_json(text)
    assert time.process_time() - begun < 1.0


@pytest.mark.gate_only
def test_pieces_in_many_dimensions_are_compared_in_time_or_refused() -> None:
    def layout(dimensions: int, more: tuple[Piece, ...] = ()) -> Layout:
        shape = (2,) * dimensions
        pieces = tuple(Piece(at, (1,) * dimensions, (1,) * dimensions, 0) for at in product((0, 1), repeat=dimensions))
        return Layout((TensorLayout("w", "float32", shape, (*pieces[: len(pieces) - len(more)], *more)),), (), 0)

    begun = time.process_time()
    assert describe_uncovered_tensor([layout(9)]) is None
    assert "overlap" in (describe_uncovered_tensor([layout(9, (Piece((0,) * 9, (1,) * 9, (1,) * 9, 0),))]) or "")
    assert "too many corners" in (describe_uncovered_tensor([layout(13)]) or "")
    assert time.process_time() - begun < 10.0


@pytest.mark.gate_only
def test_records_with_hostile_numbers_are_used_or_refused_within_memory_and_time() -> None:
    command = [sys.executable, "-m", "fuzzing.records", "--records", "700", "--seed", "1"]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 tracebacks" in ended.stdout
