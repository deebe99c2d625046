"""Groups of like length: cut alike at any world size, each sample once a pass, and the mean over tokens is exact."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards import Numbers, World, trained_on
from surefoot.data.data_source import BadSample, DataError
from surefoot.data.length_grouping import Grouping
from surefoot.data.stream import ElasticStream
from surefoot.errors import ConfigurationError, StateMismatch

MOST = 12
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=64).map(tuple)
lives = st.lists(st.tuples(st.integers(1, 16), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6)
"""Of each: world size, steps up to its checkpoint, steps behind it that a kill undoes."""
cuts = st.sampled_from([(MOST, None), (None, 3), (MOST, 2)])


def row(number: int) -> Any:
    return [number] * (number * 7 % 5 + 1)


def build(source: Any, rank: int, world: int, **options: Any) -> ElasticStream:
    return ElasticStream(
        source, rank=rank, num_replicas=world, collate_fn=list, **{"max_tokens": MOST, "shuffle_window": 6, **options}
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, MOST), max_size=40), cuts, st.integers(0, 2**40), st.sets(st.integers(0, 39)))
def test_a_window_is_cut_into_sorted_groups_that_could_take_no_more(
    sizes: list[int], most: tuple[int | None, int | None], seed: int, bad: set[int]
) -> None:
    samples = [BadSample(ValueError()) if at in bad else [0] * size for at, size in enumerate(sizes)]
    order, ends = Grouping(*most).cut(samples, seed)
    assert sorted(order) == list(range(len(sizes)))
    groups = [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    left_out = groups.pop(0) if groups and groups[0][0] in bad else []
    assert left_out == [at for at in range(len(sizes)) if at in bad]
    found = sorted(([sizes[at] for at in group] for group in groups), key=lambda one: (one[-1], one))
    assert all(one == sorted(one) and _allowed(one, *most) for one in found)
    whole = sorted(size for at, size in enumerate(sizes) if at not in bad)
    assert sorted(size for one in found for size in one) == whole
    expected: list[list[int]] = []
    for size in whole:
        if expected and _allowed([*expected[-1], size], *most):
            expected[-1].append(size)
        else:
            expected.append([size])
    assert found == sorted(expected, key=lambda one: (one[-1], one))


def _allowed(group: list[int], tokens: int | None, samples: int | None) -> bool:
    return (tokens is None or len(group) * max(group) <= tokens) and (samples is None or len(group) <= samples)


@pytest.mark.gate_only
@settings(max_examples=60, deadline=None)
@given(lengths, st.booleans(), st.integers(0, 2**40), st.integers(1, 12), st.sampled_from([1, 2]), cuts, lives)
def test_groups_are_the_undisturbed_run_s_through_kills_and_resizes(
    sizes: tuple[int, ...],
    known: bool,
    seed: int,
    batch: int,
    stripes: int,
    most: tuple[int | None, int | None],
    worlds: list[Any],
) -> None:
    source = Numbers(sizes, known, value=row)
    options: dict[str, Any] = {"global_batch_size": batch, "lane_groups": stripes, "seed": seed}
    options |= {"max_tokens": most[0], "max_samples": most[1]}
    if (sum(sizes) if known else len(sizes)) < batch * stripes:
        return
    seen = trained_on(lambda r, w: build(source, r, w, **options), worlds)
    alone = build(source, 0, 1, **options)
    assert seen == [group for found in islice(alone, len(seen) // batch) for group in found.data]
    assert all(_allowed([len(one) for one in group], *most) for group in seen)


@pytest.mark.gate_only
@settings(max_examples=60, deadline=None)
@given(lengths, st.booleans(), st.integers(0, 2**40), st.integers(1, 9), st.sets(st.integers(0, 40)), lives)
def test_each_pass_has_every_good_sample_once(
    sizes: tuple[int, ...], known: bool, seed: int, batch: int, bad: set[int], worlds: list[Any]
) -> None:
    source = Numbers(sizes, known, value=lambda n: BadSample(ValueError("torn")) if n in bad else row(n))
    good = [n for n in range(sum(sizes)) if n not in bad]
    if (sum(sizes) if known else len(sizes)) < batch or len(good) < sum(sizes) - 1:
        bad, source, good = set(), Numbers(sizes, known, value=row), list(range(sum(sizes)))
    if (sum(sizes) if known else len(sizes)) < batch or (len(bad) and batch > 1) or not good:
        return  # a lane may have the bad sample alone
    passes: dict[int, Counter[int]] = {}
    states: list[Any] = []
    for world, kept, _ in [*worlds, (3, 10_000, 0)]:
        mine = World(
            lambda r, w: build(source, r, w, global_batch_size=batch, seed=seed, max_bad_samples=10_000), world, states
        )
        for _ in range(kept):
            drawn, _ = mine.step()
            turns = {lane[0]: lane[4] for stream in mine.streams for lane in stream.state_dict()["lanes"]}
            for lane, group in enumerate(group for part in drawn for group in part):
                passes.setdefault(turns[lane], Counter()).update(sample[0] for sample in group)
            if min(turns.values()) >= 2:
                break
        states = mine.states()
    assert passes[0] == passes[1] == Counter(good)


@pytest.mark.gate_only
@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(0, 2**40), st.integers(1, 20), st.integers(1, 16), st.booleans())
def test_the_average_of_weighted_means_is_the_mean_over_all_tokens(
    sizes: tuple[int, ...], seed: int, batch: int, world: int, relaxed: bool
) -> None:
    if sum(sizes) < max(batch, world):
        return
    how = {"batch_size": 2} if relaxed else {"global_batch_size": batch}
    streams = [build(Numbers(sizes, value=row), rank, world, seed=seed, **how) for rank in range(world)]
    batches = [next(iter(stream)) for stream in streams]
    owned = [b for b in batches if b.weight]
    assert all(math.isnan(b.weight) for b in owned) or world == 1  # a loss that takes it is no number
    total = sum(b.tokens for b in batches)
    tokens = [[token for group in b.data for sample in group for token in sample] for b in batches]
    assert total == sum(len(mine) for mine, b in zip(tokens, batches, strict=True) if b.weight)
    weights = [stream.token_weight(b, total) for stream, b in zip(streams, batches, strict=True)]
    mean = sum(w * sum(mine) / len(mine) for w, mine in zip(weights, tokens, strict=True)) / world
    whole = [token for mine, b in zip(tokens, batches, strict=True) if b.weight for token in mine]
    assert mean == pytest.approx(float(Fraction(sum(whole), len(whole))), rel=1e-12)


@pytest.mark.gate_only
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_worker_processes_make_the_same_groups(workers: int) -> None:
    source = Numbers((30, 30, 30), value=row)
    seen: list[Any] = []
    states: list[Any] = []
    for world in (2, 1):
        read = workers if world == 2 else 0
        mine = World(
            lambda r, w, read=read: build(source, r, w, global_batch_size=4, lane_groups=6, num_workers=read),
            world,
            states,
        )
        for _ in range(7):
            seen += [group for part in mine.step()[0] for group in part]
        states = mine.states()
    alone = build(source, 0, 1, global_batch_size=4, lane_groups=6)
    assert seen == [group for found in islice(alone, 14) for group in found.data]


def test_a_mixture_of_groups_is_the_undisturbed_run_s() -> None:
    sources = [Numbers((40, 9), value=row), Numbers((30,), value=lambda n: row(n + 100))]
    options: dict[str, Any] = {"global_batch_size": 4, "weights": [3, 1]}
    seen = trained_on(lambda r, w: build(sources, r, w, **options), [(n, 2, 1) for n in (3, 1, 2, 5, 4) * 3])
    assert seen == [group for found in islice(build(sources, 0, 1, **options), 30) for group in found.data]


def test_a_sample_that_no_group_has_room_for_is_named() -> None:
    source = Numbers((9,), value=lambda n: [n] * (n + 5))
    with pytest.raises(
        DataError, match=r"sample \d of shard-0 is bad \(ValueError: it has 13 tokens, and max_tokens=12"
    ):
        list(islice(build(source, 0, 1, global_batch_size=1, shuffle_window=9), 9))
    stream = build(source, 0, 1, global_batch_size=1, shuffle_window=9, max_bad_samples=9)
    assert sorted(x[0] for found in islice(stream, 7) for group in found.data for x in group) == list(range(8))


def test_windows_that_are_cut_otherwise_than_before_are_refused() -> None:
    def stream(length: Any) -> ElasticStream:
        return build(Numbers((30,), value=row), 0, 1, global_batch_size=1, shuffle_window=30, length_fn=length)

    had = stream(len)
    next(iter(had))
    had = stream(len)
    had.load_state_dict(json.loads(json.dumps(_stepped(had))))
    other = stream(lambda sample: 1)
    other.load_state_dict(_stepped(stream(len)))
    with pytest.raises(DataError, match="cut into other groups"):
        next(iter(other))
    for options in ({"max_tokens": 13}, {"max_samples": 3}):
        with pytest.raises(StateMismatch, match=f"the stream's {next(iter(options))} is"):
            build(Numbers((30,), value=row), 0, 1, global_batch_size=1, shuffle_window=30, **options).load_state_dict(
                had.state_dict()
            )


def _stepped(stream: ElasticStream) -> Any:
    """The state behind a first group of more than one sample."""
    stream.count_by_step()
    for batch in stream:
        stream.end_step()
        if len(batch.data[0]) > 1:
            break
    return stream.state_dict()


@pytest.mark.parametrize(
    "options", [{"shuffle_window": 1}, {"sequence_length": 8}, {"max_tokens": 0}, {"max_samples": 0}]
)
def test_groups_that_cannot_be_made_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"max_tokens=|groups of like length"):
        build(Numbers((30,), value=row), 0, 1, global_batch_size=1, **options)


def test_a_weight_that_nobody_can_add_up_is_refused() -> None:
    stream = build(Numbers((30,), value=row), 0, 2, global_batch_size=2)
    with pytest.raises(ConfigurationError, match="no process group: give it total="):
        stream.token_weight(next(iter(stream)))
