"""Epochs, and a sampler in torch's own DataLoader: what was read ahead and not trained on is read again, exactly once."""

from __future__ import annotations

import os
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from support.shards import Numbers
from surefoot.data import ElasticLoader, ElasticSampler, ElasticStream, sample_at
from surefoot.errors import ConfigurationError, StateMismatch


def order(size: int, count: int, seed: int = 1) -> list[int]:
    return [sample_at(seed, size, position) for position in range(count)]


@given(
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
)
@example(size=3, batch=2, per_step=2, ahead=1, lives=[2])
def test_epochs_behind_a_prefetcher_go_on_exactly_wherever_they_are_killed(
    size: int, batch: int, per_step: int, ahead: int, lives: list[int]
) -> None:
    """A program with an iterator for each epoch; its prefetcher runs dry at the end of each."""
    batch = min(batch, size)
    used: list[int] = []
    state: Any = None
    for steps in lives:
        loader = ElasticLoader(range(size), batch, seed=1, by_epoch=True, collate=list, batches_per_step=per_step)
        loader.count_by_step()
        if state is not None:
            loader.load_state_dict(state)
        taken: list[int] = []
        done = 0
        while done < steps:
            found = iter(loader)
            queue = [list(part.indexes) for part in islice(found, ahead)]
            while done < steps:
                if (part := next(found, None)) is not None:
                    queue.append(list(part.indexes))
                if not queue:
                    break
                taken += queue.pop(0)
                if len(taken) == batch * per_step:
                    loader.step_ends()
                    used, taken, done = used + taken, [], done + 1
            if taken and not done:
                return  # an epoch with fewer batches than its first step wants, which step() refuses
        state = loader.state_dict()
        assert state["position"] == len(used)
    assert used == order(size, len(used))


@given(st.integers(1, 50), st.integers(1, 9))
def test_an_epoch_s_batches_are_whole_and_are_those_that_begin_in_it(size: int, batch: int) -> None:
    batch = min(batch, size)
    loader = ElasticLoader(range(size), batch, seed=1, by_epoch=True, collate=list)
    starts: list[int] = []
    for epoch in range(4):
        assert loader.epoch == epoch
        whole = len(loader)
        mine = []
        for part in loader:
            mine.append(part.start)
            assert len(part.indexes) == batch
            if loader.epoch == epoch:
                assert len(loader) == whole, "the same throughout the epoch"
        assert len(mine) == whole
        assert {start // size for start in mine} == {epoch}
        starts += mine
    assert {b - a for a, b in pairwise(starts)} <= {batch}


def test_without_epochs_there_is_no_length_and_a_batch_beyond_an_epoch_is_refused() -> None:
    with pytest.raises(TypeError, match=r"endless.*by_epoch=True"):
        len(ElasticLoader(range(8), 2))
    with pytest.raises(ConfigurationError, match="a global batch of 9 and 8 samples: an epoch has no whole batch"):
        ElasticLoader(range(8), 9, by_epoch=True)


def test_what_a_step_read_and_how_far_that_is_are_told() -> None:
    loader = ElasticLoader(range(20), 5, rank=0, world=2, batches_per_step=2, collate=list)
    loader.count_by_step()
    for _ in islice(loader, 2):
        pass
    loader.step_ends()
    assert (loader.step_samples, loader.passes()) == (6, [0.5])


def test_a_stream_tells_how_far_into_its_shards_it_is() -> None:
    stream = ElasticStream([Numbers((12,)), Numbers((6, 6))], 2, weights=[1, 1], lanes=1, collate=list)
    stream.count_by_step()
    found = iter(stream)
    for step in range(1, 13):
        next(found)
        stream.step_ends()
        assert stream.step_samples == 2
        assert sum(stream.passes()) == pytest.approx(2 * step / 12)
    idle = ElasticStream(Numbers((12,)), 2, rank=2, world=3)
    assert idle.passes() == []


def worker_of(sample: int) -> tuple[int, int]:
    return sample, os.getpid()


class Whose(torch.utils.data.Dataset[tuple[int, int]]):
    """Each sample, and the process that read it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int]:
        return worker_of(index)


def test_persistent_workers_outlive_epochs_and_restores() -> None:
    loader = ElasticLoader(Whose(), 4, seed=1, by_epoch=True, workers=2, persistent_workers=True, collate=list)
    loader.count_by_step()
    processes, used = set(), []
    for _ in range(2):
        for batch in loader:
            loader.step_ends()
            used += [sample for sample, _ in batch.data]
            processes |= {process for _, process in batch.data}
    state = loader.state_dict()
    next(iter(loader))  # others wait in the workers, and are let go of
    loader.load_state_dict(state | {"position": 8})
    again = [sample for batch in islice(loader, 1) for sample, _ in batch.data]
    assert used == order(12, 24)
    assert again == order(12, 12)[8:]
    assert len(processes) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_in_torch_s_own_loader_counts_steps_not_what_was_read_ahead(workers: int) -> None:
    used: list[int] = []
    state: Any = None
    for world, steps in ((1, 4), (2, 9), (1, 3)):
        parts: list[list[int]] = []
        for rank in range(world):
            sampler = ElasticSampler(range(20), 4, seed=1, rank=rank, world=world, by_epoch=True, batches_per_step=1)
            sampler.count_by_step()
            if state is not None:
                sampler.load_state_dict(state)
            loader: Any = DataLoader(torch.arange(20), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
            mine: list[list[int]] = []
            while len(mine) < steps:
                for batch in islice(loader, steps - len(mine)):
                    (span,) = sampler.step_ends()
                    assert order(20, span[1])[span[0] :] == batch.tolist()
                    mine.append(batch.tolist())
            parts = [a + b for a, b in zip(parts, mine, strict=True)] if parts else mine
        state = sampler.state_dict()
        used += [sample for step in parts for sample in step]
    assert used == order(20, 64)


def test_a_loader_that_reads_ahead_of_its_first_step_must_be_told_what_a_step_takes() -> None:
    sampler = ElasticSampler(range(20), 4)
    sampler.count_by_step()
    loader: Any = DataLoader(torch.arange(20), batch_sampler=sampler, num_workers=1)  # type: ignore[arg-type]
    next(iter(loader))
    with pytest.raises(ConfigurationError, match=r"3 batches were taken.*batches_per_step=1"):
        sampler.step_ends()


def test_uneven_shares_are_refused_where_nobody_could_weigh_them() -> None:
    loader: Any = DataLoader(torch.arange(20), batch_sampler=ElasticSampler(20, 4, rank=0, world=3))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="4 is not divisible by 3 ranks"):
        next(iter(loader))


def test_a_sampler_s_iterator_from_before_a_restore_is_an_error() -> None:
    sampler = ElasticSampler(20, 4)
    found = iter(sampler)
    next(found)
    sampler.load_state_dict({"position": 4, "seed": 0, "size": 20})
    with pytest.raises(StateMismatch, match="before the loader's state was restored"):
        next(found)
