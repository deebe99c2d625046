"""The elastic order: the same samples at any world size, none lost and none seen twice across changes of the world."""

from __future__ import annotations

import sys
from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Sampler, get_worker_info

from surefoot.data import ElasticLoader, ElasticSampler, rank_range, sample_at, sample_generator, sample_seed
from surefoot.data.sample_order import samples_at
from surefoot.errors import ConfigurationError, StateMismatch

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**64 - 1)


@given(seeds, sizes, st.integers(0, 5))
def test_each_pass_is_a_permutation(seed: int, size: int, turn: int) -> None:
    order = [sample_at(seed, size, turn * size + place) for place in range(size)]
    assert sorted(order) == list(range(size))


def test_the_order_depends_on_seed_and_pass_and_looks_shuffled() -> None:
    first, second, other = (
        [sample_at(seed, 500, turn * 500 + i) for i in range(500)] for seed, turn in ((1, 0), (1, 1), (2, 0))
    )
    assert first != second
    assert first != other
    for order in (first, second, other):
        in_place = sum(i == sample for i, sample in enumerate(order))
        rising = sum(a < b for a, b in pairwise(order))
        assert in_place < 8
        assert 200 < rising < 300


def test_the_order_is_the_same_in_every_version_of_everything() -> None:
    # a change of these numbers would make every running job lose and repeat samples when it is upgraded
    assert [sample_at(7, 1000, p) for p in (0, 1, 2, 999, 1000, 123456)] == [532, 199, 871, 302, 584, 676]
    assert sample_seed(7, 12) == 5284549605453972457


@given(seeds, st.integers(1, 5000), st.integers(0, 2**40), st.integers(0, 400))
def test_many_positions_at_once_are_those_one_by_one(seed: int, size: int, first: int, count: int) -> None:
    assert samples_at(seed, size, first, count) == [sample_at(seed, size, p) for p in range(first, first + count)]


@given(st.integers(1, 100), st.integers(1, 20))
def test_shares_are_contiguous_and_differ_by_at_most_one(batch: int, world: int) -> None:
    parts = [rank_range(batch, world, rank) for rank in range(world)]
    assert parts[0][0] == 0
    assert parts[-1][1] == batch
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1


def test_eight_samples_on_three_ranks_are_three_three_and_two() -> None:
    assert [stop - start for start, stop in (rank_range(8, 3, rank) for rank in range(3))] == [3, 3, 2]


@given(
    seeds, st.integers(1, 60), st.integers(1, 12), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), max_size=6)
)
def test_any_sequence_of_world_sizes_sees_every_sample_exactly_once(
    seed: int, size: int, batch: int, worlds: list[tuple[int, int]]
) -> None:
    state: dict[str, int] | None = None
    seen: list[int] = []
    for world, steps in worlds:
        loaders = [ElasticLoader(range(size), batch, seed=seed, rank=rank, num_replicas=world) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for step in zip(*(islice(loader, steps) for loader in loaders), strict=True):
            seen += [index for part in step if part.weight > 0 for index in part.indices]
            assert sum(part.weight for part in step) == pytest.approx(world)
        states = [loader.state_dict() for loader in loaders]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert seen == [sample_at(seed, size, p) for p in range(sum(steps for _, steps in worlds) * batch)]


@given(st.integers(1, 12), st.integers(1, 16))
def test_the_weighted_mean_of_local_means_is_the_global_mean(batch: int, world: int) -> None:
    loaders = [
        ElasticLoader([float(i * i) for i in range(50)], batch, rank=r, num_replicas=world) for r in range(world)
    ]
    parts = [next(iter(loader)) for loader in loaders]
    averaged = sum(p.weight * float(p.data.mean()) for p in parts) / world
    whole = next(iter(ElasticLoader([float(i * i) for i in range(50)], batch, rank=0, num_replicas=1)))
    assert averaged == pytest.approx(float(whole.data.mean()), rel=1e-12)


def test_a_rank_without_a_share_gets_a_sample_of_weight_nought_and_reports_none() -> None:
    batch = next(iter(ElasticLoader(range(10), 2, rank=2, num_replicas=3)))
    assert batch.weight == 0
    assert (batch.start, batch.stop) == (2, 2)
    assert len(batch.data) == 1


def test_the_state_counts_what_was_consumed_not_what_was_loaded_ahead() -> None:
    loader = ElasticLoader(range(100), 4, rank=0, num_replicas=2, num_workers=1)
    stream = iter(loader)
    ahead = [next(stream).indices for _ in range(3)]
    assert loader.state_dict()["position"] == 12
    assert loader.batches_yielded == 3
    assert ahead == [b.indices for b in islice(ElasticLoader(range(100), 4, rank=0, num_replicas=2), 3)]


def test_a_transform_draws_the_same_for_a_sample_at_every_world_size() -> None:
    def jitter(sample: int, generator: torch.Generator) -> float:
        return sample + float(torch.rand((), generator=generator))

    def values(world: int) -> list[float]:
        parts = [
            ElasticLoader(range(30), 6, seed=3, rank=r, num_replicas=world, transform=jitter) for r in range(world)
        ]
        return [float(x) for step in zip(*(islice(p, 7) for p in parts), strict=True) for b in step for x in b.data]

    assert values(1) == values(2) == values(3)


class Rows:
    """A data set that gives several rows at once, as Hugging Face's do."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        raise AssertionError("one by one is what costs")

    def __getitems__(self, indexes: list[int]) -> list[int]:
        self.asked.append(indexes)
        return [10 * index for index in indexes]


def test_a_data_set_that_gives_several_samples_at_once_is_asked_for_a_batch() -> None:
    rows = Rows()
    (batch,) = islice(
        ElasticLoader(rows, 4, rank=1, num_replicas=2, collate_fn=list, transform=lambda row, _: row + 1), 1
    )
    # one sample tells whether the data set draws from global generators; then whole batches are asked for
    assert rows.asked == [[batch.indices[0]], list(batch.indices)]
    assert batch.data == [10 * index + 1 for index in batch.indices]


def kind_of_dataset(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    print(type(info.dataset).__name__, file=sys.stderr, flush=True)


def test_worker_init_fn_finds_the_data_set_itself(capfd: pytest.CaptureFixture[str]) -> None:
    loader = ElasticLoader(
        Rows(), 4, rank=0, num_replicas=1, num_workers=1, worker_init_fn=kind_of_dataset, collate_fn=list
    )
    (batch,) = islice(loader, 1)
    assert batch.data == [10 * index for index in batch.indices]
    assert capfd.readouterr().err == "Rows\n"


def test_reading_ahead_draws_each_position_of_the_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def counted(seed: int, size: int, first: int, count: int) -> list[int]:
        drawn.extend(range(first, first + count))
        return samples_at(seed, size, first, count)

    monkeypatch.setattr("surefoot.data.sampler.samples_at", counted)
    loader = ElasticLoader(range(40_000), 64, rank=0, num_replicas=1, num_workers=2)
    plain = ElasticLoader(range(40_000), 64, rank=0, num_replicas=1)
    found = [batch.indices for batch in islice(loader, 200)]
    assert len(set(drawn)) == len(drawn)
    assert found == [batch.indices for batch in islice(plain, 200)]


def test_generators_of_two_positions_differ_and_of_one_agree() -> None:
    draws = [float(torch.rand((), generator=sample_generator(1, p))) for p in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("name", "loader"), [("seed", ElasticLoader(range(9), 3, seed=1)), ("size", ElasticLoader(range(8), 3))]
)
def test_a_state_of_another_order_is_refused_by_name(name: str, loader: ElasticLoader) -> None:
    with pytest.raises(StateMismatch, match=name):
        loader.load_state_dict(ElasticLoader(range(9), 3).state_dict())


def test_a_dataset_without_length_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="map-style"):
        ElasticLoader(iter([1, 2]), 2)


def test_an_elastic_sampler_is_a_sampler_of_torch() -> None:
    assert isinstance(ElasticSampler(10, 2, rank=0, num_replicas=1), Sampler)


def test_a_rank_outside_its_world_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rank 3"):
        ElasticSampler(10, 2, rank=3, num_replicas=3)
