"""`ElasticLoader`: batches of a map-style dataset in the elastic order, and their consumption.

Used by training scripts; its state (one position) travels with the checkpoint and is the same on every rank, so that
it may be restored at any world size.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.data.consumption import Consumption
from surefoot.data.order import ElasticSampler, Share, sample_generator
from surefoot.errors import ConfigurationError, StateMismatch

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
    """Batches of any map-style dataset in the elastic order: `for batch in loader`, endless, from where it stands.

    `transform(sample, generator)` is called with a generator that belongs to the sample's position, so that random
    augmentation too is the same at every world size. `workers` > 0 loads ahead in processes of torch's DataLoader;
    `pin_memory`, `prefetch_factor` and `worker_init_fn` are its own. Rank and world are those of data parallelism; by
    default the process group's, else the launcher's environment's.

    Given to a `Checkpointer`, a batch counts as consumed at the `step()` behind it: one batch a step, unless
    `batches_per_step` says otherwise. With it, what a prefetcher takes ahead is known too, and not counted. `commit()`
    counts by hand. Without a Checkpointer a batch counts when it is handed out.
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
        collate: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        batches_per_step: int | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        check_dataset(dataset)
        for name, value in (("prefetch_factor", prefetch_factor), ("worker_init_fn", worker_init_fn)):
            if value is not None and workers == 0:
                raise ConfigurationError(f"{name} is for workers, and there are none: give workers= too")
        found_rank, found_world = place_of_process()
        self.sampler = ElasticSampler(
            len(dataset),
            global_batch,
            seed=seed,
            rank=found_rank if rank is None else rank,
            world=found_world if world is None else world,
        )
        self._samples = _Samples(dataset, transform, seed)
        self._collate, self._workers = collate, workers
        self._options: dict[str, Any] = {
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": worker_init_fn,
        }
        self._loaded_position = 0
        self._consumption = Consumption(batches_per_step)
        self._iterator = 0
        """Which one is the newest: one that was made before a restore, or before another, must not go on."""

    @property
    def position(self) -> int:
        """Positions consumed so far by all ranks together; of the batches not yet consumed, the first begins here."""
        return self._position_of(self._consumption.consumed)

    @property
    def handed_out(self) -> int:
        """How many batches were handed out."""
        return self._consumption.handed_out

    def commit(self, batches: int = 1) -> None:
        """Says that the next `batches` of those handed out have been trained on; from then on nothing else counts.

        For whoever takes batches in another thread, or looks at some. Raises ConfigurationError if there are not as many.
        """
        self._consumption.commit(batches)

    def count_by_step(self) -> None:
        """Called by Checkpointer: from here on batches are consumed by `step_ends`."""
        self._loaded_position = self.position
        self._consumption.count_by_step()

    def step_ends(self) -> tuple[tuple[int, int], ...]:
        """Called by Checkpointer at each step. Returns positions [start, stop) of this rank's shares of its batches."""
        first, last = self._consumption.step_ends()
        shares = (self.sampler.share(self._position_of(number)) for number in range(first, last))
        return tuple((share.start, share.stop) for share in shares)

    def __iter__(self) -> Iterator[Batch]:
        self._iterator += 1
        mine = self._iterator
        begin = self._position_of(self._consumption.begin())
        loaded = self._loaded if self._workers == 0 and not self._options["pin_memory"] else self._loaded_ahead
        for part, data in loaded(begin):
            if mine != self._iterator:
                raise StateMismatch(
                    "this iterator was made before the loader's state was restored, or before a newer iterator: what it"
                    " hands out is not what the loader counts. Call restore() first, then iter(loader), once"
                )
            self._consumption.hand_out()
            yield Batch(data, part.weight, part.start, part.stop, part.indexes)

    def state_dict(self) -> dict[str, int]:
        """The position behind the batch consumed last, and what the order depends on."""
        return {"position": self.position, "seed": self.sampler.seed, "size": self.sampler.size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on behind the batch that was consumed last; another seed or dataset is another order, and refused."""
        for name, mine in (("seed", self.sampler.seed), ("size", self.sampler.size)):
            if state[name] != mine:
                raise StateMismatch(
                    f"the loader's {name} is {mine} and was {state[name]} in the checkpoint: samples would be lost or"
                    f" repeated; build the loader as before, or start anew"
                )
        self._loaded_position = int(state["position"])
        self._consumption.forget()
        self._iterator += 1

    def _position_of(self, batch: int) -> int:
        return self._loaded_position + batch * self.sampler.global_batch

    def _shares(self, position: int) -> Iterator[Share]:
        while True:
            yield self.sampler.share(position)
            position += self.sampler.global_batch

    def _loaded(self, begin: int) -> Iterator[tuple[Share, Any]]:
        collate = self._collate or default_collate_function()
        for part in self._shares(begin):
            yield part, collate([self._samples[key] for key in zip(part.indexes, part.positions, strict=True)])

    def _loaded_ahead(self, begin: int) -> Iterator[tuple[Share, Any]]:
        from torch.utils.data import DataLoader

        keys = (list(zip(part.indexes, part.positions, strict=True)) for part in self._shares(begin))
        loader: DataLoader[Any] = DataLoader(
            self._samples,  # type: ignore[arg-type]  # map-style by protocol: __len__ and __getitem__ are all it calls
            batch_sampler=keys,  # its elements are keys of _Samples, not plain indexes
            num_workers=self._workers,
            collate_fn=self._collate or default_collate_function(),
            # else its workers' seed is drawn from the global generator, once more in each life of a program
            generator=sample_generator(self.sampler.seed, begin),
            **self._options,
        )
        yield from zip(self._shares(begin), loader, strict=False)


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
        index, position = key
        sample = self._dataset[index]
        return sample if self._transform is None else self._transform(sample, sample_generator(self._seed, position))


def default_collate_function() -> Callable[[list[Any]], Any]:
    from torch.utils.data import default_collate

    return default_collate


def place_of_process() -> tuple[int, int]:
    """Rank and world of the process group if there is one, else of the launcher's environment."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
