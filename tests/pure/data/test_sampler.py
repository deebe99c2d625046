"""Tests of `data.sampler`."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from support.shards import Numbers
from surefoot.data import ElasticLoader, ElasticSampler, ElasticStream, sample_at
from surefoot.data.sources.file_formats import Items
from surefoot.errors import ConfigurationError, StateMismatch

# ---- batch sequence --------------------------------------------------------------------------------------------------
# Batch samplers of one's own: each of their lists once, divided among any ranks, wherever the job is killed.

lives = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=6)
"""Of each: world size, steps up to its checkpoint, steps behind it that a kill undoes."""


class ByLength:
    """Lists of unlike sizes, of samples of like length, shuffled anew each epoch."""

    def __init__(self, size: int, most: int, seed: int) -> None:
        self.size, self.most, self.seed, self.epoch = size, most, seed, 0
        self.iterated = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.iterated += 1
        chance = random.Random(self.seed * 1000 + self.epoch)
        samples = sorted(range(self.size), key=lambda sample: (sample * 7 % 5, chance.random()))
        batches = []
        while samples:
            taken = chance.randint(1, self.most)
            batches.append(samples[:taken])
            del samples[:taken]
        chance.shuffle(batches)
        return iter(batches)


def sequence(sampler: Any, epochs: int) -> list[list[int]]:
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        found += list(sampler)
    return found


def ranks(world: int, state: Any, build: Any) -> list[ElasticLoader]:
    loaders = [build(rank, world) for rank in range(world)]
    for loader in loaders:
        loader.count_by_step()
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def stepped(loaders: list[ElasticLoader], iterators: list[Any]) -> list[int]:
    """What all ranks trained on in one step; their positions are those of the whole step, each once."""
    drawn: list[int] = []
    behind = loaders[0].position
    told = list[int]()
    for loader, iterator in zip(loaders, iterators, strict=True):
        batch = next(iterator)
        own = list(batch.indices) if batch.weight else []
        assert batch.data == [10 * sample for sample in batch.indices]
        assert batch.stop - batch.start == len(own)
        (span,) = loader.end_step()
        assert span == (batch.start, batch.stop)
        assert loader.step_samples == len(own)
        drawn += own
        told += range(*span)
        assert loader.step_range == (behind, loader.position)
    assert told == list(range(behind, loaders[0].position))
    return drawn


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 99), lives)
def test_each_list_is_one_step_s_through_kills_and_resizes(
    size: int, most: int, seed: int, worlds: list[tuple[int, int, int]]
) -> None:
    def build(rank: int, world: int) -> ElasticLoader:
        dataset = [10 * sample for sample in range(size)]
        return ElasticLoader(
            dataset,
            batch_sampler=ByLength(size, most, seed),
            rank=rank,
            num_replicas=world,
            collate_fn=list,
            batches_per_step=1,
        )

    seen: list[list[int]] = []
    state: Any = None
    for world, kept, undone in worlds:
        loaders = ranks(world, state, build)
        iterators = [iter(loader) for loader in loaders]
        seen += [stepped(loaders, iterators) for _ in range(kept)]
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state = json.loads(json.dumps(states[0]))
        assert state["position"] == sum(map(len, seen))
        for _ in range(undone):
            stepped(loaders, iterators)
    assert seen == sequence(ByLength(size, most, seed), len(seen) + 1)[: len(seen)]


@pytest.mark.gate_only
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_torchs_batch_sampler_over_a_seeded_order_goes_on_epoch_by_epoch(workers: int, whole: bool) -> None:
    def sampler() -> Any:
        order: Any = DistributedSampler(range(22), num_replicas=1, rank=0, seed=5)  # type: ignore[arg-type]
        return BatchSampler(order, 4, drop_last=not whole)

    expected = []
    for epoch in range(3):
        one = sampler()
        one.sampler.set_epoch(epoch)
        expected.append(list(one))
    assert expected[0] != expected[1]
    seen: list[list[list[int]]] = [[], [], []]
    state: Any = None
    for world, steps in ((2, 3), (1, 5), (3, 100)):
        parts: list[list[tuple[int, list[int]]]] = []
        for loader in ranks(
            world,
            state,
            lambda rank, world: ElasticLoader(
                range(22),
                batch_sampler=sampler(),
                rank=rank,
                num_replicas=world,
                by_epoch=True,
                num_workers=workers,
                collate_fn=list,
                batches_per_step=1,
            ),
        ):
            mine: list[tuple[int, list[int]]] = []
            while loader.epoch < 3 and len(mine) < steps:
                epoch = loader.epoch
                assert len(loader) == len(expected[epoch])
                for batch in islice(loader, steps - len(mine)):
                    loader.end_step()
                    mine.append((epoch, list(batch.data) if batch.weight else []))
            parts.append(mine)
            state = loader.state_dict()
        for step in zip(*parts, strict=True):
            seen[step[0][0]].append([sample for _, drawn in step for sample in drawn])
    assert seen == expected
    assert state["epoch"] == 3


def test_weights_of_uneven_shares_make_the_mean_over_the_list() -> None:
    values = torch.arange(40.0, dtype=torch.float64) ** 2
    loaders = [ElasticLoader(values, batch_sampler=ByLength(40, 9, 1), rank=rank, num_replicas=4) for rank in range(4)]
    for step in islice(zip(*loaders, strict=True), 30):
        whole = [sample for batch in step if batch.weight for sample in batch.indices]
        mean = sum(batch.weight * float(batch.data.mean()) for batch in step) / 4
        assert mean == pytest.approx(float(values[whole].mean()), rel=1e-12)


def test_a_sample_s_generator_belongs_to_its_place_in_the_sequence() -> None:
    def jitter(sample: int, generator: torch.Generator) -> float:
        return sample + float(torch.rand((), generator=generator))

    def values(world: int) -> list[float]:
        loaders = [
            ElasticLoader(
                range(20),
                batch_sampler=ByLength(20, 6, 2),
                rank=rank,
                num_replicas=world,
                transform=jitter,
                collate_fn=list,
            )
            for rank in range(world)
        ]
        steps = islice(zip(*loaders, strict=True), 25)
        return [value for step in steps for batch in step if batch.weight for value in batch.data]

    assert values(1) == values(2) == values(5)
    assert len({value % 1 for value in values(1)}) == len(values(1))


def test_what_lies_behind_is_let_go_of() -> None:
    for counted in (True, False):
        loader = ElasticLoader(range(10), batch_sampler=ByLength(10, 3, 1), rank=0, num_replicas=1, collate_fn=list)
        if counted:
            loader.count_by_step()
        for _ in islice(loader, 500):
            if counted:
                loader.end_step()
        assert loader.consumed_epochs()[0] == pytest.approx(loader.epoch, abs=1)
        assert len(loader.sampler._epochs) <= 2  # type: ignore[union-attr]
        assert len(loader.sampler._positions) < 20  # type: ignore[union-attr]


def _once() -> Iterator[list[int]]:
    yield [0, 1]


class OfRank:
    num_replicas = 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0]])


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (BatchSampler(RandomSampler(range(30)), 4, False), "other batches each time"),
        (
            BatchSampler(RandomSampler(range(30), generator=torch.Generator().manual_seed(1)), 4, False),
            r"other batches each time.*set_epoch\(epoch\) alone, as of BatchSampler\(DistributedSampler",
        ),
        (_once(), "no batches in epoch 0: one that can be iterated over once"),
        ([], "no batches in epoch 0"),
        ([[0, 1], []], "an empty list"),
        (SequentialSampler(range(30)), "gives 0, which is no list of sample numbers"),
        ([[0.5]], "no list of sample numbers"),
        ([[0, 30]], "samples from 0 to 30, of a data set of 30"),
        ([[-1]], "samples from -1"),
        (OfRank(), "each of 4 ranks a part of its own: build it with num_replicas=1"),
        (BatchSampler(OfRank(), 4, False), "each of 4 ranks"),  # type: ignore[arg-type]
    ],
)
def test_a_batch_sampler_that_could_not_be_gone_on_with_is_refused(sampler: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        ElasticLoader(range(30), batch_sampler=sampler)


def test_either_a_global_batch_or_a_batch_sampler() -> None:
    for options in ({}, {"global_batch_size": 4, "batch_sampler": [[0]]}):
        with pytest.raises(ConfigurationError, match=r"either global_batch_size= .* or batch_sampler="):
            ElasticLoader(range(8), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"ElasticStream has no batch_sampler=: give ElasticLoader"):
        ElasticStream(Items(range(8)), 4, batch_sampler=[[0]])


def test_a_state_of_other_batches_is_refused() -> None:
    def loader(**options: Any) -> ElasticLoader:
        return ElasticLoader(range(30), rank=0, num_replicas=1, collate_fn=list, **options)

    had = loader(batch_sampler=ByLength(30, 4, 1))
    state = (next(iter(had)), had.state_dict())[1]
    with pytest.raises(StateMismatch, match="gives epoch 0 other batches than in the checkpoint"):
        loader(batch_sampler=ByLength(30, 4, 2)).load_state_dict(state)
    with pytest.raises(StateMismatch, match="seed is 3 and was 0"):
        loader(batch_sampler=ByLength(30, 4, 1), seed=3).load_state_dict(state)
    with pytest.raises(StateMismatch, match="has no batch_sampler, and had one"):
        loader(global_batch_size=4).load_state_dict(state)
    with pytest.raises(StateMismatch, match="has a batch_sampler, and had none"):
        had.load_state_dict(loader(global_batch_size=4).state_dict())


def test_an_iterator_from_before_a_restore_is_an_error() -> None:
    loader = ElasticLoader(range(30), batch_sampler=ByLength(30, 4, 1), rank=0, num_replicas=1, collate_fn=list)
    found = iter(loader)
    next(found)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match="before the loader's state was restored"):
        next(found)


# ---- epochs ----------------------------------------------------------------------------------------------------------
# Epochs, and a sampler in torch's own DataLoader: what was read ahead and not trained on is read again, exactly once.


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
        loader = ElasticLoader(range(size), batch, seed=1, by_epoch=True, collate_fn=list, batches_per_step=per_step)
        loader.count_by_step()
        if state is not None:
            loader.load_state_dict(state)
        taken: list[int] = []
        done = 0
        while done < steps:
            found = iter(loader)
            queue = [list(part.indices) for part in islice(found, ahead)]
            while done < steps:
                if (part := next(found, None)) is not None:
                    queue.append(list(part.indices))
                if not queue:
                    break
                taken += queue.pop(0)
                if len(taken) == batch * per_step:
                    loader.end_step()
                    used, taken, done = used + taken, [], done + 1
            if taken and not done:
                return  # an epoch with fewer batches than its first step wants, which step() refuses
        state = loader.state_dict()
        assert state["position"] == len(used)
    assert used == order(size, len(used))


@given(st.integers(1, 50), st.integers(1, 9))
def test_an_epoch_s_batches_are_whole_and_are_those_that_begin_in_it(size: int, batch: int) -> None:
    batch = min(batch, size)
    loader = ElasticLoader(range(size), batch, seed=1, by_epoch=True, collate_fn=list)
    starts: list[int] = []
    for epoch in range(4):
        assert loader.epoch == epoch
        whole = len(loader)
        mine = []
        for part in loader:
            mine.append(part.start)
            assert len(part.indices) == batch
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
    loader = ElasticLoader(range(20), 5, rank=0, num_replicas=2, batches_per_step=2, collate_fn=list)
    loader.count_by_step()
    for _ in islice(loader, 2):
        pass
    loader.end_step()
    assert (loader.step_samples, loader.consumed_epochs()) == (6, [0.5])


def test_a_stream_tells_how_far_into_its_shards_it_is() -> None:
    stream = ElasticStream([Numbers((12,)), Numbers((6, 6))], 2, weights=[1, 1], lanes=1, collate_fn=list)
    stream.count_by_step()
    found = iter(stream)
    for step in range(1, 13):
        next(found)
        stream.end_step()
        assert stream.step_samples == 2
        assert sum(stream.consumed_epochs()) == pytest.approx(2 * step / 12)
    idle = ElasticStream(Numbers((12,)), 2, rank=2, num_replicas=3)
    assert idle.consumed_epochs() == []


def worker_of(sample: int) -> tuple[int, int]:
    return sample, os.getpid()


class Whose(torch.utils.data.Dataset[tuple[int, int]]):
    """Each sample, and the process that read it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int]:
        return worker_of(index)


def test_persistent_workers_outlive_epochs_and_restores() -> None:
    loader = ElasticLoader(Whose(), 4, seed=1, by_epoch=True, num_workers=2, persistent_workers=True, collate_fn=list)
    loader.count_by_step()
    processes, used = set(), []
    for _ in range(2):
        for batch in loader:
            loader.end_step()
            used += [sample for sample, _ in batch.data]
            processes |= {process for _, process in batch.data}
    state = loader.state_dict()
    next(iter(loader))  # others wait in the workers, and are let go of
    loader.load_state_dict(state | {"position": 8})
    again = [sample for batch in islice(loader, 1) for sample, _ in batch.data]
    assert used == order(12, 24)
    assert again == order(12, 12)[8:]
    assert len(processes) == 2


@pytest.mark.gate_only
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_in_torch_s_own_loader_counts_steps_not_what_was_read_ahead(workers: int) -> None:
    used: list[int] = []
    state: Any = None
    for world, steps in ((1, 4), (2, 9), (1, 3)):
        parts: list[list[int]] = []
        for rank in range(world):
            sampler = ElasticSampler(
                range(20), 4, seed=1, rank=rank, num_replicas=world, by_epoch=True, batches_per_step=1
            )
            sampler.count_by_step()
            if state is not None:
                sampler.load_state_dict(state)
            loader: Any = DataLoader(torch.arange(20), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
            mine: list[list[int]] = []
            while len(mine) < steps:
                for batch in islice(loader, steps - len(mine)):
                    (span,) = sampler.end_step()
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
        sampler.end_step()


def test_uneven_shares_are_refused_where_nobody_could_weigh_them() -> None:
    loader: Any = DataLoader(torch.arange(20), batch_sampler=ElasticSampler(20, 4, rank=0, num_replicas=3))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="4 is not divisible by 3 ranks"):
        next(iter(loader))


def test_a_sampler_s_iterator_from_before_a_restore_is_an_error() -> None:
    sampler = ElasticSampler(20, 4)
    found = iter(sampler)
    next(found)
    sampler.load_state_dict({"position": 4, "seed": 0, "size": 20})
    with pytest.raises(StateMismatch, match="before the loader's state was restored"):
        next(found)
