"""The order of a stream, and the cursors in its state, are a format: a job that is upgraded goes on in it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from support.shards import Numbers, World
from surefoot.data.data_source import BadSample
from surefoot.data.stream import ElasticStream

SIZES = (37, 5, 90, 1, 64, 23, 23, 8, 41, 12, 3, 77)


def _torn(number: int) -> Any:
    return BadSample(ValueError("torn")) if number % 29 == 11 else number


@pytest.mark.gate_only
@pytest.mark.parametrize(
    ("options", "digest"),
    [
        ({}, "34d66ad0ff68afae"),
        ({"known": False}, "c70472999a0f5106"),
        ({"shuffle_window": 7}, "003c94e8dd90caa6"),
        ({"shuffle_window": 7, "known": False}, "72ad2fc1b4972997"),
        ({"value": _torn}, "f8a3f7cf4395b0fd"),
        ({"value": _torn, "shuffle_window": 5, "known": False}, "86c33aa5fa2bee66"),
        ({"shuffle": False, "lane_groups": 2}, "f25a8b7f172a85b6"),
        ({"transform": lambda number, _: number}, "34d66ad0ff68afae"),
    ],
)
def test_the_order_and_its_cursors_are_those_of_every_release(options: dict[str, Any], digest: str) -> None:
    # a change of these digests would make every running job lose and repeat samples when it is upgraded
    given = dict(options)
    source = Numbers(SIZES, given.pop("known", True), given.pop("value", int))
    seen = hashlib.sha256()
    for seed in (0, 7, 2**40):
        for lanes in (12, 6, 1) if given.get("lane_groups") is None else (6, 1):
            for size in (1, 3, 5):
                world = World(
                    lambda rank, world, seed=seed, lanes=lanes: ElasticStream(  # type: ignore[misc]
                        source,
                        12,
                        seed=seed,
                        lanes=lanes,
                        rank=rank,
                        num_replicas=world,
                        collate_fn=list,
                        max_bad_samples=10_000,
                        **given,
                    ),
                    size,
                )
                for step in range(60):
                    drawn, spans = world.step()
                    seen.update(json.dumps([drawn, spans]).encode())
                    if step % 7 == 3:
                        lanes_told = [state["lanes"] for state in world.states()]
                        seen.update(json.dumps(lanes_told).encode())
    assert seen.hexdigest()[:16] == digest
