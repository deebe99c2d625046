"""What a rollback has loaders leave out: exactly the batches of so many steps, at any world size, and no others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards import Numbers
from surefoot.data import ElasticLoader, ElasticSampler, ElasticStream

Build = Callable[[int, int], Any]


def _loader(rank: int, world: int) -> ElasticLoader:
    return ElasticLoader(range(50), 6, seed=3, rank=rank, world=world, collate=list)


def _lists(rank: int, world: int) -> ElasticLoader:
    lists = [[n, n + 1] if n % 3 else [n, n + 1, n + 2] for n in range(40)]
    return ElasticLoader(range(50), batch_sampler=lists, rank=rank, world=world, collate=list)


def _stream(rank: int, world: int) -> ElasticStream:
    return ElasticStream(Numbers((9, 7, 8, 5)), 6, lanes=3, seed=3, window=4, rank=rank, world=world, collate=list)


def _restored(build: Build, world: int, steps: int, skip: int) -> list[Any]:
    """Loaders of a world that restores what one rank saved after `steps`, skips, and goes on."""
    one = build(0, 1)
    one.count_by_step()
    for _ in islice(one, steps):
        one.step_ends()
    made = [build(rank, world) for rank in range(world)]
    for rank, loader in enumerate(made):
        if steps and world > 1 and hasattr(loader, "load_state_dicts"):
            loader.load_state_dicts([one.state_dict()], rank, world)
        elif steps:
            loader.load_state_dict(one.state_dict())
        loader.count_by_step()
        loader.skip_steps(skip)
    return made


@pytest.mark.parametrize("build", [_loader, _lists, _stream])
@settings(max_examples=30, deadline=None)
@given(world=st.integers(1, 3), steps=st.integers(0, 12), skip=st.integers(0, 12))
def test_the_run_goes_on_behind_what_is_left_out(build: Build, world: int, steps: int, skip: int) -> None:
    whole = [sorted(batch.data) for batch in islice(build(0, 1), steps + skip + 3)][steps + skip :]
    parts = [
        [list(batch.data) if batch.weight else [] for batch in islice(one, 3)]
        for one in _restored(build, world, steps, skip)
    ]
    assert [sorted(x for part in parts for x in part[n]) for n in range(3)] == whole


def test_a_step_of_several_batches_leaves_out_as_many() -> None:
    sampler = ElasticSampler(50, 4, seed=3, rank=0, world=1, batches_per_step=3)
    sampler.skip_steps(2)
    assert sampler.position == 24


def test_what_is_saved_behind_it_has_the_place_behind_it() -> None:
    loader = _loader(0, 1)
    loader.skip_steps(5)
    assert loader.state_dict()["position"] == 30
