"""`ElasticLoader`: batches of a map-style dataset in the elastic order, and their consumption.

Used by training scripts; its state (one position) travels with the checkpoint and is the same on every rank, so that
it may be restored at any world size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.data.order import sample_generator, sample_seed
from surefoot.data.sampler import ElasticSampler, Share
from surefoot.errors import ConfigurationError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of one global batch.

    Multiply the mean loss over `data` by `weight` before `backward()`: averaged over ranks, as FSDP and DDP do, that
    is exactly the mean over the global batch, also where shares are uneven. A rank whose share is empty gets one
    sample that is not its own, with weight 0, so that it can take part in the collectives of the step.
    """

    data: Any
    weight: float
    start: int
    """First position of this rank's share in the global order."""
    stop: int
    indexes: tuple[int, ...]
    """The samples in `data`; none of a stream."""


class ElasticLoader:
    """Batches of any map-style dataset in the elastic order.

    `for batch in loader` goes on from where it stands. It is endless, unless `by_epoch` ends each iterator with its pass over the samples: `for epoch in range(loader.epoch,
    epochs): for batch in loader`. A batch is always whole: the last one of an epoch has the first samples of the next.

    Given to a `Checkpointer`, a batch counts as consumed at the `step()` behind it: one batch a step, unless
    `batches_per_step` says otherwise. With it, what a prefetcher takes ahead is known too, and not counted. `commit()`
    counts by hand. Without a Checkpointer a batch counts when it is handed out.

    Args:
        dataset: map-style: it has a length and an index.
        global_batch: samples a step on all ranks together, whatever their number.
        seed: what the order of samples, and nothing else of it, depends on.
        rank, world: of data parallelism; by default the process group's, else the launcher's.
        by_epoch: ends each iterator with its pass over the samples.
        collate: from a list of samples to `batch.data`; by default torch's.
        transform: called with a sample and a generator that belongs to its position, so that random augmentation too is
            the same at every world size.
        batches_per_step: how many batches one `step()` consumes.
        workers: processes of torch's DataLoader that load ahead; 0: none.
        pin_memory, prefetch_factor, persistent_workers, worker_init_fn: as torch's DataLoader has them.

    Raises:
        ConfigurationError: a dataset, batch, rank or option that cannot be.
    """

    elastic = True
    """Its state is one for all ranks, and may be restored at any world size."""

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        by_epoch: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        batches_per_step: int | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        check_dataset(dataset)
        for_workers = {
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": worker_init_fn,
            "persistent_workers": persistent_workers or None,
        }
        for name, value in for_workers.items():
            if value is not None and workers == 0:
                raise ConfigurationError(f"{name} is for workers, and there are none: give workers= too")
        self.sampler = ElasticSampler(
            dataset,
            global_batch,
            seed=seed,
            rank=rank,
            world=world,
            by_epoch=by_epoch,
            batches_per_step=batches_per_step,
        )
        self._samples = _Samples(dataset, transform, seed)
        self._collate = collate
        self._options: dict[str, Any] = {
            "num_workers": workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "worker_init_fn": worker_init_fn,
        }
        self._ahead: _ReadAhead | None = None

    def __iter__(self) -> Iterator[Batch]:
        begin = self.sampler.begin()
        ahead = self._options["num_workers"] or self._options["pin_memory"]
        for part, data in self.sampler.drawn(self._loaded_ahead(begin) if ahead else self._loaded(begin)):
            yield Batch(data, part.weight, part.start, part.stop, part.indexes)

    def __len__(self) -> int:
        """Batches of the present epoch, those consumed included. Raises TypeError without `by_epoch`: it never ends."""
        return len(self.sampler)

    @property
    def position(self) -> int:
        """Positions consumed so far by all ranks together; of the batches not yet consumed, the first begins here."""
        return self.sampler.position

    @property
    def epoch(self) -> int:
        """Passes that are over: the number, from 0 on, of the one in which the next batch begins."""
        return self.sampler.epoch

    @property
    def handed_out(self) -> int:
        """How many batches were handed out."""
        return self.sampler.handed_out

    @property
    def step_samples(self) -> int:
        """Samples of this rank that the last step consumed."""
        return self.sampler.step_samples

    def passes(self) -> list[float]:
        """Passes over the samples that are consumed, the share of the present one included: one number."""
        return self.sampler.passes()

    def commit(self, batches: int = 1) -> None:
        """Says that the next `batches` of those handed out have been trained on; from then on nothing else counts.

        For whoever takes batches in another thread, or looks at some. Raises ConfigurationError if there are not as many.
        """
        self.sampler.commit(batches)

    def count_by_step(self) -> None:
        """Called by Checkpointer: from here on batches are consumed by `step_ends`."""
        self.sampler.count_by_step()

    def step_ends(self) -> tuple[tuple[int, int], ...]:
        """Called by Checkpointer at each step. Returns positions [start, stop) of this rank's shares of its batches."""
        return self.sampler.step_ends()

    def state_dict(self) -> dict[str, int]:
        """The position behind the batch consumed last, and what the order depends on."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on behind the batch that was consumed last; another seed or dataset is another order, and refused."""
        self.sampler.load_state_dict(state)

    def _loaded(self, begin: int) -> Iterator[tuple[Share, Any]]:
        collate = self._collate or default_collate_function()
        for part in self.sampler.shares(begin):
            yield part, collate(self._samples.__getitems__(list(zip(part.indexes, part.positions, strict=True))))

    def _loaded_ahead(self, begin: int) -> Iterator[tuple[Share, Any]]:
        if self._ahead is None:
            self._ahead = _ReadAhead(self.sampler, self._samples, self._collate, self._options)
        return self._ahead.loaded(begin)


class _ReadAhead:
    """Torch's DataLoader over the sampler's shares: one for all iterators, so that its workers may outlive one."""

    def __init__(
        self,
        sampler: ElasticSampler,
        samples: _Samples,
        collate: Callable[[list[Any]], Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        import torch
        from torch.utils.data import DataLoader

        self._sampler, self._begin = sampler, 0
        # else its workers' seed is drawn from the global generator, once more in each life of a program
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]  # map-style by protocol: __len__ and __getitem__ are all it calls
            batch_sampler=_Keys(self),  # its elements are keys of _Samples, not plain indexes
            collate_fn=collate or default_collate_function(),
            generator=self._generator,
            **options,
        )

    def loaded(self, begin: int) -> Iterator[tuple[Share, Any]]:
        """The batches from position `begin` on. What an older iterator had fetched ahead is let go of."""
        self._begin = begin
        self._generator.manual_seed(sample_seed(self._sampler.seed, begin))
        for data, part in zip(self._loader, self._sampler.shares(begin), strict=False):
            yield part, data

    def keys(self) -> Iterator[list[tuple[int, int]]]:
        """Of each batch: what _Samples is asked for."""
        for part in self._sampler.shares(self._begin):
            yield list(zip(part.indexes, part.positions, strict=True))


class _Keys:
    """A batch sampler that begins anew, where it is wanted, with each iterator of the DataLoader."""

    def __init__(self, ahead: _ReadAhead) -> None:
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._ahead.keys()


def check_dataset(dataset: Any) -> None:
    """Whatever has no samples by number is refused here, not at the first batch."""
    kind = type(dataset).__name__
    torch_data: Any = sys.modules.get("torch.utils.data")
    stream = torch_data is not None and isinstance(dataset, torch_data.IterableDataset)
    if stream or not isinstance(dataset, Sized):
        raise ConfigurationError(
            f"{kind} has no length: a map-style dataset is needed, with len() and samples by number. Give its files to"
            " surefoot.ElasticStream, or the stream's own loader to Checkpointer as loader=: that one goes on where it was"
            " in a world of the same size alone"
        )
    if isinstance(dataset, Mapping) or not hasattr(type(dataset), "__getitem__"):
        own = ", as .dataset of this one" if hasattr(dataset, "dataset") else ""
        raise ConfigurationError(
            f"ElasticLoader was given a {kind}, which has no samples by number: give it the dataset itself{own}; it makes"
            " the batches, their order and the ranks' shares"
        )


class _Samples:
    """The dataset behind keys (index, position), with the transform applied; picklable if its parts are."""

    def __init__(self, dataset: Any, transform: Callable[[Any, torch.Generator], Any] | None, seed: int) -> None:
        self._dataset, self._transform, self._seed = dataset, transform, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        """A batch at once, as torch's fetcher asks for it; of a data set that can give one, as Hugging Face's, likewise."""
        several = getattr(self._dataset, "__getitems__", None)
        dataset = self._dataset
        samples: list[Any] = (
            [dataset[index] for index, _ in keys] if several is None else several([index for index, _ in keys])
        )
        transform, seed = self._transform, self._seed
        if transform is None:
            return samples
        return [transform(one, sample_generator(seed, key[1])) for one, key in zip(samples, keys, strict=True)]


def default_collate_function() -> Callable[[list[Any]], Any]:
    from torch.utils.data import default_collate

    return default_collate
