"""Which batches were trained on: one a step, several, fetched ahead, looked at; what is uncertain is refused at step 1."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data import ElasticLoader, ElasticStream
from surefoot.data.sources import Items
from surefoot.errors import ConfigurationError, StateMismatch

SIZE, BATCH = 100, 4


def loader(**options: Any) -> ElasticLoader:
    made = ElasticLoader(range(SIZE), BATCH, seed=1, collate_fn=list, **options)
    made.count_by_step()
    return made


ORDER = [
    batch.indices for batch in islice(ElasticLoader(range(SIZE), BATCH, seed=1, collate_fn=list), 80)
]  # four a step, four lives of five


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_whatever_is_fetched_ahead_each_step_goes_on_exactly(per_step: int, ahead: int, lives: list[int]) -> None:
    """Steps of several batches behind a prefetcher, killed after each life: together they train on the order, once."""
    used: list[Any] = []
    state: Any = None
    for steps in lives:
        mine = loader(batches_per_step=per_step)
        if state is not None:
            mine.load_state_dict(state)
        stream = iter(mine)
        queue = [next(stream).indices for _ in range(ahead)]
        for _ in range(steps):
            for _ in range(per_step):
                queue.append(next(stream).indices)
                used.append(queue.pop(0))
            spans = mine.end_step()
            assert spans == tuple((i * BATCH, (i + 1) * BATCH) for i in range(len(used) - per_step, len(used)))
        state = mine.state_dict()
        assert mine.step_range is None  # each step is of one size
    assert used == ORDER[: len(used)]


def test_several_batches_before_the_first_step_are_refused_unless_it_is_said_what_they_are() -> None:
    mine = loader()
    list(islice(mine, 2))
    with pytest.raises(
        ConfigurationError, match=r"2 batches were taken.*batches_per_step=2.*batches_per_step=1.*commit"
    ):
        mine.end_step()


def test_fewer_batches_than_were_said_are_refused() -> None:
    mine = loader(batches_per_step=4)
    list(islice(mine, 2))
    with pytest.raises(ConfigurationError, match="2 batches were taken"):
        mine.end_step()


def test_a_batch_that_is_left_out_later_is_consumed_by_the_step_behind_it() -> None:
    mine, seen = loader(), []
    stream = iter(mine)
    for taken in (1, 1, 3, 1):
        seen += [next(stream).indices for _ in range(taken)]
        mine.end_step()
    assert mine.position == 6 * BATCH


def test_an_iterator_for_every_batch_goes_on_behind_the_last() -> None:
    mine = loader(batches_per_step=2)
    seen = []
    for _ in range(3):
        seen += [next(iter(mine)).indices for _ in range(2)]
        mine.end_step()
    assert seen == ORDER[:6]
    assert mine.position == 6 * BATCH


def test_a_new_iterator_hands_out_again_what_the_one_before_fetched_ahead() -> None:
    mine, seen = loader(batches_per_step=1), []
    for _ in range(3):  # three passes of a trainer that makes an iterator each time, and fetches one ahead
        stream = iter(mine)
        waiting = next(stream)
        for _ in range(2):
            current, waiting = waiting, next(stream)
            seen.append(current.indices)
            mine.end_step()
    assert seen == ORDER[:6]


def test_a_look_at_a_batch_costs_none_where_a_step_takes_one() -> None:
    mine = loader(batches_per_step=1)
    assert next(iter(mine)).indices == ORDER[0]
    assert next(iter(mine)).indices == ORDER[0]
    mine.end_step()
    assert mine.position == BATCH


def test_what_was_looked_at_and_what_was_trained_on_are_not_guessed_apart() -> None:
    mine = loader(batches_per_step=2)
    next(iter(mine))
    list(islice(mine, 2))
    with pytest.raises(ConfigurationError, match="3 batches were taken"):
        mine.end_step()


def test_what_was_committed_by_hand_is_what_counts() -> None:
    mine = loader()
    stream = iter(mine)
    for _ in range(5):
        next(stream)
    mine.commit(2)
    assert (mine.end_step(), mine.step_range) == (((0, 4), (4, 8)), (0, 8))
    mine.commit()
    assert (mine.end_step(), mine.step_range) == (((8, 12),), (8, 12))
    assert (mine.end_step(), mine.step_range) == ((), (12, 12))
    assert mine.position == 12
    with pytest.raises(ConfigurationError, match="2 batches were handed out and not yet committed"):
        mine.commit(3)


def test_batches_that_another_thread_takes_need_commit() -> None:
    mine = loader()
    taking = threading.Thread(target=lambda: next(iter(mine)))
    taking.start()
    taking.join()
    with pytest.raises(ConfigurationError, match="another thread"):
        mine.end_step()


def test_an_iterator_that_began_before_the_restore_is_an_error() -> None:
    mine = loader()
    stream = iter(mine)
    next(stream)
    mine.load_state_dict({"position": 40, "seed": 1, "size": SIZE})
    with pytest.raises(StateMismatch, match="before the loader's state was restored"):
        next(stream)
    assert next(iter(mine)).indices == ORDER[10]


def test_an_iterator_that_had_not_begun_follows_the_restore() -> None:
    mine = loader()
    stream = iter(mine)
    mine.load_state_dict({"position": 40, "seed": 1, "size": SIZE})
    assert next(stream).indices == ORDER[10]


def test_of_two_iterators_only_the_newer_goes_on() -> None:
    mine = loader()
    first, second = iter(mine), iter(mine)
    next(first)
    next(second)
    with pytest.raises(StateMismatch, match="newer iterator"):
        next(first)


class _Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


DATASET = torch.utils.data.TensorDataset(torch.zeros(8))


@pytest.mark.parametrize(
    ("given_to_it", "said"),
    [
        (
            torch.utils.data.DataLoader(DATASET),
            r"a DataLoader, which has no samples by number.*as \.dataset of this one",
        ),
        (torch.utils.data.BatchSampler(range(8), 2, drop_last=False), "a BatchSampler, which has no samples by number"),
        (torch.utils.data.RandomSampler(range(8)), "a RandomSampler, which has no samples by number"),
        (_Numbers(), "_Numbers has no length.*loader="),
        ({"x": [1, 2]}, "a dict, which has no samples by number"),
    ],
)
def test_what_is_no_dataset_is_refused_when_it_is_given(given_to_it: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ElasticLoader(given_to_it, 4)


def test_options_of_workers_need_workers() -> None:
    with pytest.raises(ConfigurationError, match="prefetch_factor is for workers"):
        ElasticLoader(range(8), 2, prefetch_factor=2)
    with pytest.raises(ConfigurationError, match="worker_init_fn is for workers"):
        ElasticLoader(range(8), 2, worker_init_fn=print)
    with pytest.raises(ConfigurationError, match="prefetch_factor is for workers"):
        ElasticStream(Items(range(8)), 2, prefetch_factor=2)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("sampler", r"Subset\(dataset, indices\)"),
        ("batch_size", "global_batch_size="),
        ("shuffle", "by seed="),
        ("drop_last", "every batch is whole"),
        ("generator", "seed="),
    ],
)
def test_options_of_torchs_loader_that_decide_the_order_are_refused_with_what_to_give(
    option: str, instead: str
) -> None:
    given: dict[str, Any] = {option: torch.utils.data.SequentialSampler(range(8))}
    with pytest.raises(ConfigurationError, match=f"ElasticLoader has no {option}=: .*{instead}"):
        ElasticLoader(range(8), 4, **given)
    if option not in ("batch_size", "shuffle"):  # which it has itself
        with pytest.raises(ConfigurationError, match=f"ElasticStream has no {option}=: .*{instead}"):
            ElasticStream(Items(range(8)), 4, **given)
    with pytest.raises(TypeError, match="no option batches"):
        ElasticLoader(range(8), 4, batches=given)


@pytest.mark.parametrize("option", ["timeout", "multiprocessing_context", "pin_memory_device", "in_order"])
def test_options_of_torchs_workers_that_are_not_passed_on_say_which_loader_takes_them(option: str) -> None:
    for build in (
        lambda: ElasticLoader(range(8), 4, **{option: 1}),
        lambda: ElasticStream(Items(range(8)), 4, **{option: 1}),
    ):
        with pytest.raises(ConfigurationError, match=rf"no {option}=: it is not passed on.*ElasticSampler"):
            build()


def test_the_indexes_of_a_sampler_are_taken_as_a_subset() -> None:
    indexes = list(torch.utils.data.WeightedRandomSampler([1.0, 3.0, 1.0, 0.0], 12))
    loader = ElasticLoader(torch.utils.data.Subset(range(4), indexes), 4, rank=0, num_replicas=1, by_epoch=True)
    assert sorted(x for batch in loader for x in batch.data.tolist()) == sorted(indexes)


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'pin_memory' argument is set")
@pytest.mark.parametrize("kind", [ElasticLoader, ElasticStream])
def test_worker_processes_are_begun_as_torch_begins_them(kind: Any, tmp_path: Path) -> None:
    def begun(worker: int) -> None:
        (tmp_path / f"{worker}").touch()

    told: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3, "pin_memory": True, "worker_init_fn": begun}
    made = kind(range(40) if kind is ElasticLoader else Items(range(40)), 4, rank=0, num_replicas=1, **told)
    seen = [x for batch in islice(made, 10) for x in batch.data.tolist()]
    assert sorted(seen) == list(range(40))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_options_of_torchs_loader_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given_on: dict[str, Any] = {}

    def noting(dataset: Any, **options: Any) -> list[Any]:
        given_on.update(options)
        return []

    monkeypatch.setattr(torch.utils.data, "DataLoader", noting)
    made = ElasticLoader(range(8), 2, num_workers=2, pin_memory=True, prefetch_factor=3, worker_init_fn=print)
    assert list(made) == []
    told = {name: given_on[name] for name in ("num_workers", "pin_memory", "prefetch_factor")}
    assert told == {"num_workers": 2, "pin_memory": True, "prefetch_factor": 3}
    assert given_on["worker_init_fn"]._function is print
