"""`ElasticLoader` makes batches of a map-style dataset in the elastic order.

Its state is one position, the same on every rank, so that it may be restored at any world size.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.data.consumed_batches import BeforeBatch
from surefoot.data.sample_order import sample_seed
from surefoot.data.sampler import BatchSequence, ElasticSampler, RankBatch
from surefoot.data.seeded_samples import BatchKeys, SeededSamples, WorkerStart
from surefoot.errors import ConfigurationError

if TYPE_CHECKING:
    import torch


# ---- options of torch's DataLoader -----------------------------------------------------------------------------------
# `refuse_options` refuses DataLoader options that loader and stream lack. A sampler of one's own decides on each rank
# which samples come in what order: it cannot be divided among another number of ranks, so that samples would be lost or
# repeated. The message says what to give instead; a bare TypeError would not.

_ORDER = (
    "the order follows from seed=. For a part of the samples, or some of them more often, give it"
    " torch.utils.data.Subset(dataset, indices), with indices drawn once by a seed of your own, alike on all ranks"
)
_OWN_LOADER = (
    "it is not passed on. Of a data set with samples by number, torch's DataLoader takes it, with"
    " batch_sampler=surefoot.ElasticSampler(dataset, global_batch_size, batches_per_step=1)"
)
_INSTEAD = {
    "batch_size": "give global_batch_size=, the samples a step on all ranks together",
    "shuffle": "samples are always shuffled, by seed=",
    "drop_last": "every batch is whole: no sample is left over, as the next pass fills the last one up",
    "sampler": _ORDER,
    "batch_sampler": "give ElasticLoader the data set and batch_sampler=. For batches of like length, or of so many"
    " tokens, give ElasticStream(Items(dataset), max_tokens=, shuffle_window=)",
    **dict.fromkeys(("timeout", "multiprocessing_context", "pin_memory_device", "in_order"), _OWN_LOADER),
    "generator": "give seed=, and transform=, which is called with each sample's own generator",
}


def refuse_options(kind: str, given: Iterable[str]) -> None:
    """Refuses each option in `given`, with what to give instead.

    Raises:
        ConfigurationError: torch's DataLoader has the option.
        TypeError: nobody has it.
    """
    for name in given:
        if name not in _INSTEAD:
            raise TypeError(f"{kind} has no option {name}")
        raise ConfigurationError(f"{kind} has no {name}=: {_INSTEAD[name]}")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for options of worker processes without workers.

    Torch's DataLoader would ignore some of them silently.
    """
    for name in ("prefetch_factor", "worker_init_fn", "persistent_workers"):
        if options.get(name) and not options["num_workers"]:
            raise ConfigurationError(f"{name} is for workers, and there are none: give num_workers= too")


# ---- loader ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """`Batch` is one rank's part of one global batch.

    Multiply the mean loss over `data` by `weight` before `backward()`: averaged over ranks, as FSDP and DDP do, that is
    exactly the mean over the global batch, also where shares are uneven. A rank whose share is empty gets one sample
    that is not its own, with weight 0, so that it takes part in the step's collectives and no rank waits for it. Of a
    stream's groups in a world of several ranks `weight` is NaN: take `ElasticStream.token_weight`.
    """

    data: Any
    weight: float
    start: int
    """First position of this rank's share in the global order."""
    stop: int
    indices: tuple[int, ...]
    """The samples in `data`; none of a stream."""
    tokens: int = 0
    """Of a stream's groups: tokens in `data`, without padding."""
    last: bool = False
    """Whether it is the last one of its epoch; of a stream always False."""

    def __iter__(self) -> Iterator[Any]:
        """Unpacks `data`: `for inputs, targets in loader`.

        Raises:
            ConfigurationError: this rank's share needs a weight, which an unpacked batch would lose.
            TypeError: `data` is no tuple or list.
        """
        if self.weight != 1.0:
            raise ConfigurationError(
                f"a batch of weight {self.weight:g} was unpacked: ranks have uneven shares, and the mean is exact only as loss *"
                " batch.weight. Write for batch in loader: inputs, targets = batch.data; or give a global batch that the number"
                " of ranks divides"
            )
        if not isinstance(self.data, tuple | list):
            raise TypeError(f"a batch of a {type(self.data).__name__} cannot be unpacked: use batch.data")
        return iter(self.data)


class ElasticLoader:
    """`ElasticLoader` serves batches of a map-style dataset in the elastic order.

    `for batch in loader` continues at `position` and is endless; with `by_epoch` an iterator ends with its pass over
    the samples: `for epoch in loader.epochs(count): for batch in loader`. A batch is always whole: the last one
    of an epoch is filled up with the first samples of the next.

    Given to a `Checkpointer`, a batch counts as consumed at the `step()` behind it: one batch a step, unless
    `batches_per_step` says otherwise. With it, what a prefetcher takes ahead is known too, and not counted; counted, it
    would be lost at each restart. `commit()` counts by hand. Without a Checkpointer a batch counts when it is handed
    out.

    The order is a keyed permutation of positions (`surefoot.data.sample_order`), not an iterator's: it needs no state but the
    position, and depends on `seed` and the dataset's length alone.

    Args:
        dataset: map-style: it has a length and an index.
        global_batch_size: samples a step on all ranks together, whatever their number.
        batch_sampler: in its place, an order of one's own: an iterable, as torch's BatchSampler, that gives lists of
            sample numbers, each the batch of one step on all ranks together, and the same ones whenever an epoch is
            iterated over. `set_epoch(epoch)` is called before, if it or its `sampler` has it.
        seed: what the order of samples depends on, and each sample's generator.
        rank, num_replicas: of data parallelism; by default the process group's, else the launcher's.
        by_epoch: ends each iterator with its pass over the samples.
        collate_fn: from a list of samples to `batch.data`; by default torch's.
        transform: called with a sample and a generator that belongs to its position, so that random augmentation too is
            the same at every world size.
        batches_per_step: how many batches one `step()` consumes.
        num_workers: processes of torch's DataLoader that load ahead; 0: none.
        pin_memory, prefetch_factor, persistent_workers, worker_init_fn: as torch's DataLoader has them.
        of_torch: other options of torch's DataLoader: refused, with what to give in their place.

    Raises:
        ConfigurationError: the dataset has no length or index, a number is out of range, or an option is refused.
        TypeError: an option that neither this class nor torch's DataLoader has.
    """

    elastic = True
    """Its state is one for all ranks, and may be restored at any world size."""

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int | None = None,
        *,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        by_epoch: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        batches_per_step: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        **of_torch: Any,
    ) -> None:
        refuse_options("ElasticLoader", of_torch)
        check_dataset(dataset)
        if (global_batch_size is None) == (batch_sampler is None):
            raise ConfigurationError(
                "give either global_batch_size= (samples a step on all ranks together) or batch_sampler="
            )
        how: dict[str, Any] = {"seed": seed, "rank": rank, "num_replicas": num_replicas}
        how |= {"by_epoch": by_epoch, "batches_per_step": batches_per_step}
        self.sampler: ElasticSampler | BatchSequence = (
            BatchSequence(batch_sampler, len(dataset), **how)
            if batch_sampler is not None
            else ElasticSampler(dataset, global_batch_size or 0, **how)
        )
        self.sampler.mark_source(dataset)
        self._samples = SeededSamples(dataset, collate_fn or default_collate_function(), transform, seed)
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "worker_init_fn": worker_init_fn,
        }
        check_options(self._options)
        self._ahead: _ReadAhead | None = None

    def __iter__(self) -> Iterator[Batch]:
        begin = self.sampler.begin()
        ahead = self._options["num_workers"] or self._options["pin_memory"]
        for part, data in self.sampler.count_drawn(self._loaded_ahead(begin) if ahead else self._loaded(begin)):
            yield Batch(data, part.weight, part.start, part.stop, part.indexes, last=part.is_last)

    def __len__(self) -> int:
        """Returns the present epoch's number of batches, consumed ones included.

        Raises:
            TypeError: without `by_epoch`, as the loader is endless.
        """
        return len(self.sampler)

    @property
    def position(self) -> int:
        """The number of samples consumed so far by all ranks together.

        In the elastic order the first batch not yet consumed begins here.
        """
        return self.sampler.position

    @property
    def epoch(self) -> int:
        """The number, from 0 on, of the present pass over the samples.

        It is the pass in which the first batch not yet consumed begins.
        """
        return self.sampler.epoch

    @property
    def batches_yielded(self) -> int:
        """The number of batches handed out so far, repeated ones included."""
        return self.sampler.batches_yielded

    @property
    def step_samples(self) -> int:
        """Samples of this rank that the last step consumed."""
        return self.sampler.step_samples

    @property
    def step_range(self) -> tuple[int, int] | None:
        """The last step's positions `(start, stop)` on all ranks, where sizes differ.

        None where every step takes as many samples.
        """
        return self.sampler.step_range

    @property
    def step_ends_epoch(self) -> bool:
        """Whether the last step consumed its epoch's last batch, with `by_epoch`."""
        return self.sampler.step_ends_epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs from the current one up to `count`.

        A restarted script so trains each epoch once; `range(90)` would begin at 0 again.

        Args:
            count: epochs of the whole run.

        Raises:
            ConfigurationError: the loader is endless, without `by_epoch`.
        """
        return self.sampler.epochs(count)

    def consumed_epochs(self) -> list[float]:
        """Returns the passes over the samples consumed so far, as one fraction."""
        return self.sampler.consumed_epochs()

    def commit(self, batches: int = 1) -> None:
        """Counts the next `batches` handed out as trained on.

        For scripts that take batches in another thread, or a varying number a step: from then on `step()` counts none
        by itself.

        Args:
            batches: how many; they are counted in the order in which they were handed out.

        Raises:
            ConfigurationError: fewer are handed out and not yet consumed; none ever are without a Checkpointer.
        """
        self.sampler.commit(batches)

    def count_by_step(self, before_batch: BeforeBatch | None = None) -> None:
        """Called by Checkpointer: makes `end_step` count what is consumed, and announces requests for batches."""
        self.sampler.count_by_step(before_batch)

    def end_step(self) -> tuple[tuple[int, int], ...]:
        """Called by Checkpointer: ends a step and returns its positions.

        Returns:
            Ranges `[start, stop)` of the global order: this rank's share of each batch that the step consumed.

        Raises:
            ConfigurationError: whether batches were used or fetched ahead is uncertain at the first step.
        """
        return self.sampler.end_step()

    def skip_steps(self, steps: int) -> None:
        """Called by Checkpointer: leaves out the batches of so many steps.

        Behind a restore: a rollback so goes on without what spoiled the run.

        Args:
            steps: of `batches_per_step` batches each; one batch each where the script commits by hand.
        """
        self.sampler.skip_steps(steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last consumed batch, seed, sizes and a digest of some samples."""
        return self.sampler.state_dict()

    def describe_differences(self, state: Mapping[str, Any]) -> list[str]:
        """Called by Checkpointer: describes how the batches differ from those of a state that can be loaded."""
        return self.sampler.describe_differences(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the batch that was consumed last.

        Iterators made before raise StateMismatch at their next batch: what they hold belongs to another position.

        Raises:
            StateMismatch: seed, number of samples or the batch sampler's lists are not those of the state, so the order
                is another.
        """
        self.sampler.load_state_dict(state)

    def _loaded(self, begin: int) -> Iterator[tuple[RankBatch, Any]]:
        for part in self.sampler.rank_batches(begin):
            yield part, self._samples.__getitems__(_keys(part))

    def _loaded_ahead(self, begin: int) -> Iterator[tuple[RankBatch, Any]]:
        if self._ahead is None:
            self._ahead = _ReadAhead(self.sampler, self._samples, self._options)
        return self._ahead.loaded(begin)


class _ReadAhead:
    """Torch's DataLoader over the sampler's shares: one for all iterators, so that its workers may outlive one.

    Its workers are asked for what torch would ask them for, sample numbers of the data set itself, and answer with data
    alone. Which share each answer is was kept when it was asked for: a share drawn again for each answer, behind those
    that were drawn ahead, had the order computed twice.
    """

    def __init__(
        self,
        sampler: ElasticSampler | BatchSequence,
        samples: SeededSamples,
        options: Mapping[str, Any],
    ) -> None:
        import torch
        from torch.utils.data import DataLoader

        self._sampler, self._begin = sampler, 0
        if options["num_workers"]:
            options = {**options, "worker_init_fn": WorkerStart(options["worker_init_fn"])}
        self._asked = deque[RankBatch]()
        # else its workers' seed is drawn from the global generator, once more in each life of a program
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]  # map-style by protocol
            batch_sampler=_Keys(self),
            collate_fn=_as_it_is,
            generator=self._generator,
            **options,
        )

    def loaded(self, begin: int) -> Iterator[tuple[RankBatch, Any]]:
        """The batches from position `begin` on. What an older iterator had fetched ahead is let go of."""
        self._begin, self._asked = begin, deque()
        self._generator.manual_seed(sample_seed(self._sampler.seed, begin))
        asked = self._asked
        for data in self._loader:  # in the order in which they were asked for
            yield asked.popleft(), data

    def keys(self) -> Iterator[Any]:
        """Of each batch: what the data set is asked for."""
        asked = self._asked
        for part in self._sampler.rank_batches(self._begin):
            asked.append(part)
            yield _keys(part)


class _Keys:
    """A batch sampler that begins anew, where it is wanted, with each iterator of the DataLoader."""

    def __init__(self, ahead: _ReadAhead) -> None:
        self._ahead = ahead

    def __iter__(self) -> Iterator[Any]:
        return self._ahead.keys()


def check_dataset(dataset: Any) -> None:
    """Refuses a dataset without a length or samples by number.

    Here, when the loader is built, the message can name the way out; at the first batch it would be a bare TypeError.

    Raises:
        ConfigurationError: it is a stream, a mapping, or has no `__getitem__`.
    """
    kind = type(dataset).__name__
    torch_data: Any = sys.modules.get("torch.utils.data")
    stream = torch_data is not None and isinstance(dataset, torch_data.IterableDataset)
    if stream or not isinstance(dataset, Sized):
        raise ConfigurationError(
            f"{kind} has no length, but ElasticLoader needs a map-style dataset, with len() and samples by number. Give its files"
            " to surefoot.ElasticStream, or give the stream's own loader to Checkpointer as loader=: such a loader continues only"
            " at an unchanged world size"
        )
    if isinstance(dataset, Mapping) or not hasattr(type(dataset), "__getitem__"):
        own = ", as .dataset of this one" if hasattr(dataset, "dataset") else ""
        raise ConfigurationError(
            f"ElasticLoader was given a {kind}, which has no samples by number: give it the dataset itself{own}; it makes"
            " the batches, their order and the ranks' shares"
        )


def _keys(part: RankBatch) -> BatchKeys:
    return BatchKeys(part.positions.start, list(part.indexes))


def _as_it_is(batch: Any) -> Any:
    """Collates nothing: `SeededSamples` has done it, while the generators are seeded."""
    return batch


def default_collate_function() -> Callable[[list[Any]], Any]:
    """Returns torch's `default_collate`, imported when it is wanted."""
    from torch.utils.data import default_collate

    return default_collate
