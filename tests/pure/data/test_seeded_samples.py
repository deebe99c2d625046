"""Augmentation by global generators: each sample's depends on seed and position alone, and the training's numbers stay."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from surefoot import ElasticLoader
from surefoot.data import seeded_samples
from surefoot.data.seeded_samples import GeneratorStates


class Augmented:
    """Torchvision's idiom: the transform is in the data set, and draws from the global generators."""

    fetched = 0

    def __init__(self, *kinds: str, rarely: bool = False) -> None:
        self.kinds, self.rarely = kinds, rarely

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        draws: list[float] = []
        if not self.rarely or index == 5:
            draws += [random.random(), random.gauss(0, 1)] if "python" in self.kinds else []
            draws += [np.random.rand(), np.random.randn()] if "numpy" in self.kinds else []
            draws += torch.randn(2).tolist() if "torch" in self.kinds else []
        return index, draws


class Many(Augmented):
    """Gives a batch at once, as Hugging Face's data sets do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def samples_of(dataset: Any, ranks: int, start: int = 0, stop: int = 10, **options: Any) -> list[list[Any]]:
    """Of each step: what all ranks together are given."""
    steps: list[list[Any]] = [[] for _ in range(stop - start)]
    for rank in range(ranks):
        loader = ElasticLoader(dataset, 6, seed=3, rank=rank, num_replicas=ranks, collate_fn=list, **options)
        loader.load_state_dict({"position": 6 * start, "seed": 3, "size": len(dataset)})
        for step, batch in zip(steps, loader, strict=False):
            step.extend(batch.data)
    return steps


@pytest.mark.parametrize("dataset", [Augmented, Many])
@pytest.mark.parametrize("rarely", [False, True])
@pytest.mark.parametrize("kinds", [("python",), ("numpy",), ("torch",), ("python", "numpy", "torch")])
def test_a_sample_is_augmented_alike_at_any_size_and_after_any_restart(
    kinds: tuple[str, ...], rarely: bool, dataset: Any
) -> None:
    random.seed(1)
    expected = samples_of(dataset(*kinds, rarely=rarely), 1)
    numbers = [draws for step in expected for _, draws in step if draws]
    assert len({str(draws) for draws in numbers}) == len(numbers) > 1, "no two samples are augmented alike"
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    assert samples_of(dataset(*kinds, rarely=rarely), 3) == expected
    assert samples_of(dataset(*kinds, rarely=rarely), 2, start=4) == expected[4:]


@pytest.mark.parametrize("rarely", [False, True])
def test_workers_augment_as_the_program_itself_does(rarely: bool) -> None:
    dataset = Augmented("python", "numpy", "torch", rarely=rarely)
    expected = samples_of(dataset, 1, stop=8)
    assert samples_of(dataset, 1, stop=8, num_workers=2) == expected
    assert samples_of(dataset, 1, start=3, stop=8, num_workers=1) == expected[3:]


@pytest.mark.parametrize("rarely", [False, True])
def test_the_trainings_own_numbers_stay(rarely: bool) -> None:
    def drawn(dataset: Any) -> list[float]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)  # type: ignore[operator]
        if not rarely:
            np.random.randn()  # one of a pair: the other one waits
        numbers = []
        for _, _batch in zip(range(8), ElasticLoader(dataset, 6, seed=3, collate_fn=list), strict=False):
            numbers += [random.random(), np.random.rand(), torch.rand(()).item()]
        return [*numbers, np.random.randn(), np.random.randn()]

    assert drawn(Augmented("python", "numpy", "torch", rarely=rarely)) == drawn(Augmented())


def test_a_collate_function_that_draws_is_seeded_too() -> None:
    def mixed(samples: list[Any]) -> Any:
        return [*samples, torch.rand(()).item()]

    def of(start: int) -> list[Any]:
        torch.manual_seed(start)
        loader = ElasticLoader(Augmented(), 6, seed=3, collate_fn=mixed, num_workers=1)
        loader.load_state_dict({"position": 6 * start, "seed": 3, "size": 32})
        return [batch.data[-1] for _, batch in zip(range(6 - start), loader, strict=False)]

    assert of(2) == of(0)[2:]


def test_a_transform_and_a_data_set_draw_other_numbers() -> None:
    loader = ElasticLoader(
        Augmented("torch"),
        4,
        transform=lambda sample, generator: (sample[1], torch.randn(2, generator=generator).tolist()),
        collate_fn=list,
    )
    for own, transformed in next(iter(loader)).data:
        assert own != transformed


def test_data_sets_that_draw_nothing_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Augmented()
    batches = iter(ElasticLoader(dataset, 8, collate_fn=list))
    next(batches)
    monkeypatch.setattr(seeded_samples, "seed_generators", lambda text: pytest.fail("seeded"))
    next(batches)
    assert dataset.fetched == 1 + 16, "the first one once more, to see whether it draws"


def test_an_error_that_comes_of_a_draw_comes_again() -> None:
    class Failing(Augmented):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and random.random() >= 0:
                raise ValueError("cannot be cropped so")
            return index

    state = random.getstate()
    with pytest.raises(ValueError, match="cropped"):
        list(zip(range(6), ElasticLoader(Failing(), 6, seed=3, collate_fn=list), strict=False))
    assert random.getstate() == state


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn, lambda: torch.rand(()), lambda: None],
)
def test_every_draw_is_noticed_and_undone(draw: Any) -> None:
    np.random.seed(0)
    states = GeneratorStates(is_complete=True)
    assert not states.have_moved()
    first = draw()
    assert states.have_moved() == (first is not None)
    states.restore()
    assert not states.have_moved()
    assert draw() == first


def test_a_worker_sees_the_scripts_data_set() -> None:
    dataset = Augmented()
    seen = torch.zeros(1).share_memory_()

    def init(worker: int) -> None:
        info = torch.utils.data.get_worker_info()
        seen[0] = float(type(info.dataset) is Augmented)

    next(iter(ElasticLoader(dataset, 4, num_workers=1, collate_fn=list, worker_init_fn=init)))
    assert seen.item() == 1.0


@pytest.mark.parametrize("unknown", [seeded_samples._python_address, seeded_samples._numpy_address])
def test_generators_in_unknown_places_are_read_as_any_program_does(
    unknown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unknown(np) if unknown is seeded_samples._numpy_address else unknown()
    monkeypatch.setattr(seeded_samples, unknown.__name__, lambda *_: None)
    states = GeneratorStates()
    assert not states.have_moved()
    first = random.random(), np.random.rand()
    assert states.have_moved()
    states.restore()
    assert (random.random(), np.random.rand()) == first
