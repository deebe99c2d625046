"""Serves each rank its share of the global sample order, or of a batch sampler's lists.

A batch sampler for torch's DataLoader, and the source of `ElasticLoader`'s batches. A DataLoader draws indexes far
ahead of the step that uses them; a sampler whose state is what was drawn would lose all of those at each restart.
"""

from __future__ import annotations

import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch.utils.data import Sampler

from surefoot.data.consumed_batches import BeforeBatch, Consumption
from surefoot.data.sample_digest import sample_digest
from surefoot.data.sample_order import rank_range, samples_at
from surefoot.errors import ConfigurationError, StateMismatch

# ---- rank and world of this process ----------------------------------------------------------------------------------
# `place_of_process` finds rank and world of this process, without loading torch.


def rank_and_replicas() -> tuple[int, int]:
    """Returns rank and world of the process group, else the launcher's.

    The launcher's are `RANK` and `WORLD_SIZE`; without them, rank 0 of 1.
    """
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def checked_rank(rank: int | None, world: int | None) -> tuple[int, int]:
    """Returns rank and world as given, else this process'.

    Raises:
        ConfigurationError: the rank is not of that world.
    """
    found_rank, found_world = rank_and_replicas()
    rank, world = (found_rank if rank is None else rank), (found_world if world is None else world)
    if not 0 <= rank < world:
        raise ConfigurationError(f"rank {rank} of {world}: a rank is from 0 to world − 1")
    return rank, world


def remaining_epochs(source: ElasticSampler | BatchSequence, count: int) -> Iterator[int]:
    """Yields a source's epochs from the current one up to `count`.

    Raises:
        ConfigurationError: Its iterators do not end.
    """
    if not source.by_epoch:
        raise ConfigurationError(
            "epochs() needs by_epoch=True: without it an iterator is endless, and never ends an epoch"
        )
    return iter(range(source.epoch, count))


def describe_other_samples(consumption: Consumption, state: Mapping[str, Any]) -> list[str]:
    """Describes a data set whose samples are not those of the checkpoint, as far as both were digested."""
    saved, current = state.get("samples"), consumption.source_digest
    if not saved or not current or saved == current:
        return []
    return [
        f"the loader's data set has as many samples as in the checkpoint, and other ones: it continues at sample"
        f" {state['position']}. Train on the data that the run began with, or begin another run (folder=, or job_uid=)"
    ]


# ---- sampler ---------------------------------------------------------------------------------------------------------

T = TypeVar("T")
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class RankBatch:
    """`Share` is what one rank loads of one global batch.

    Positions `[start, stop)` of the global order, the samples at them, and the loss weight. An empty share names one
    position that is not the rank's own, with weight 0.
    """

    start: int
    stop: int
    positions: range
    indexes: tuple[int, ...]
    weight: float
    is_last: bool = False
    """Whether the next global batch begins in another epoch."""


class ElasticSampler(Sampler[list[int]]):
    """`ElasticSampler` serves batches of sample indexes in the elastic order.

    As batch sampler of your own DataLoader: `DataLoader(dataset, batch_sampler=sampler, num_workers=4)`. Given to
    `Checkpointer` as `loader=`, in place of the DataLoader, it counts a batch as consumed at the `step()` behind it,
    whatever worker processes have read ahead. A DataLoader with workers always reads ahead, so say how many batches a
    step takes: `batches_per_step=1`.

    A DataLoader knows no weights: iteration raises ConfigurationError unless the world divides the global batch. An
    iterator is endless; with `by_epoch` it ends with the pass over the samples.

    Args:
        size: samples, or a dataset with a length.
        global_batch_size: samples a step on all ranks together.
        seed: what the order depends on.
        rank: of data parallelism; default the process group's, else the launcher's.
        num_replicas: likewise.
        by_epoch: as ElasticLoader's.
        batches_per_step: as ElasticLoader's.

    Raises:
        ConfigurationError: a size, batch or rank that cannot be.
    """

    elastic = True
    """Its state is one for all ranks, and may be restored at any world size."""

    def __init__(
        self,
        size: int | Sized,
        global_batch_size: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        by_epoch: bool = False,
        batches_per_step: int | None = None,
    ) -> None:
        self.size = size if isinstance(size, int) else len(size)
        self.global_batch, self.seed, self.by_epoch = global_batch_size, seed, by_epoch
        self.rank, self.num_replicas = checked_rank(rank, num_replicas)
        if self.size < 1 or global_batch_size < 1:
            raise ConfigurationError(
                f"{self.size} samples in global batches of {global_batch_size}: both must be at least 1"
            )
        if by_epoch and global_batch_size > self.size:
            raise ConfigurationError(
                f"by_epoch with a global batch of {global_batch_size} and {self.size} samples: an epoch has no whole batch;"
                " give a smaller one, or leave by_epoch out: then batches go on from pass to pass"
            )
        self._chunk = 0, tuple[int, ...]()
        """First position, and the samples from there on: positions are asked for in their order."""
        self._loaded_position = 0
        self._consumption = Consumption(batches_per_step)
        self.step_samples = 0
        """Samples of this rank that the last step consumed."""
        self.step_range: tuple[int, int] | None = None
        """Where all ranks' batches of the last step begin and end, if steps may take unlike numbers of them."""
        self.step_ends_epoch = False
        """Whether an iterator ended with the last step's batches: what the script does next belongs to that step."""
        self.mark_source(size)

    # ---- what a script calls ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        if self.global_batch % self.num_replicas:
            raise ConfigurationError(
                f"a global batch of {self.global_batch} is not divisible by {self.num_replicas} ranks, and a DataLoader knows no"
                " weights for uneven shares: give ElasticLoader the dataset, or a batch that every world size divides"
            )
        yield from self.count_drawn(self._index_batches(self.begin()))

    def __len__(self) -> int:
        """Returns the present epoch's number of batches, consumed ones included.

        A batch that spans two passes belongs to the earlier one.

        Raises:
            TypeError: without `by_epoch`, as the sampler is endless.
        """
        if not self.by_epoch:
            raise TypeError("it is endless, and has no len(): by_epoch=True ends each iterator with its epoch")
        behind = self.position % self.size // self.global_batch
        return behind + self._batches_left_in_epoch(self.position)

    @property
    def position(self) -> int:
        """The number of samples consumed so far by all ranks together.

        In the elastic order the first batch not yet consumed begins here.
        """
        return self._position_of(self._consumption.consumed)

    @property
    def epoch(self) -> int:
        """The number, from 0 on, of the present pass over the samples.

        It is the pass in which the first batch not yet consumed begins.
        """
        self._consumption.is_epoch_read = True
        return self.position // self.size

    @property
    def batches_yielded(self) -> int:
        """The number of batches handed out so far, repeated ones included."""
        return self._consumption.batches_yielded

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs from the current one up to `count`.

        Raises:
            ConfigurationError: Iterators are endless without `by_epoch`.
        """
        return remaining_epochs(self, count)

    def consumed_epochs(self) -> list[float]:
        """Returns the passes over the samples consumed so far, as one fraction."""
        return [self.position / self.size]

    def rank_batch(self, position: int) -> RankBatch:
        """Returns this rank's share of the global batch that begins at `position`."""
        start, stop = rank_range(self.global_batch, self.num_replicas, self.rank)
        positions = range(position + start, position + stop) or range(position, position + 1)
        return RankBatch(
            start=position + start,
            stop=position + stop,
            positions=positions,
            indexes=self._samples(positions),
            weight=(stop - start) * self.num_replicas / self.global_batch,
            is_last=self._is_last(position),
        )

    def commit(self, batches: int = 1) -> None:
        """Counts the next `batches` handed out as trained on.

        For scripts that take batches in another thread, or a varying number a step: from then on `step()` counts none
        by itself.

        Args:
            batches: how many; they are counted in the order in which they were handed out.

        Raises:
            ConfigurationError: fewer are handed out and not yet consumed; none ever are without a Checkpointer.
        """
        self._consumption.commit(batches)

    def mark_source(self, dataset: Any) -> None:
        """Called by ElasticLoader: names the data set, by which loaders are compared."""
        self._consumption.source = None if isinstance(dataset, int) else dataset
        self._consumption.source_digest = None if isinstance(dataset, int) else sample_digest(dataset)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last consumed batch, seed and size, and a digest of some samples."""
        self._consumption.is_state_taken = True
        state = {"position": self.position, "seed": self.seed, "size": self.size}
        return state | {"global_batch_size": self.global_batch, "samples": self._consumption.source_digest}

    def describe_differences(self, state: Mapping[str, Any]) -> list[str]:
        """Called by Checkpointer: describes how the batches differ from those of a state that can be loaded."""
        differences = describe_other_samples(self._consumption, state)
        saved_size = state.get("global_batch_size", self.global_batch)
        if saved_size != self.global_batch:
            differences.append(
                f"the loader's global batch has {self.global_batch} samples and had {saved_size} in the checkpoint: it continues"
                f" at sample {state['position']}, and a step now counts other samples (learning rate, schedules, steps per epoch)"
            )
        return differences if self.rank == 0 else []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the batch that was consumed last.

        Iterators made before raise StateMismatch at their next batch: what they hold belongs to another position.

        Raises:
            StateMismatch: seed or number of samples are not those of the state, so the order is another.
        """
        if "batches" in state:
            raise StateMismatch("the loader has no batch_sampler, and had one in the checkpoint: samples would be lost")
        for name, mine in (("seed", self.seed), ("size", self.size)):
            if state[name] != mine:
                raise StateMismatch(
                    f"the loader's {name} is {mine} and was {state[name]} in the checkpoint: samples would be lost or"
                    f" repeated; build the loader as before, or start anew"
                )
        self._loaded_position = int(state["position"])
        self._consumption.restored(self._loaded_position // self.size if self.by_epoch else 0)

    # ---- what Checkpointer and ElasticLoader call ------------------------------------------------------------------

    def skip_steps(self, steps: int) -> None:
        """Called by Checkpointer: leaves out the batches of so many steps.

        Args:
            steps: of `batches_per_step` batches each.
        """
        self._loaded_position = self._position_of(steps * self._consumption.per_step)
        self._consumption.restored()

    def count_by_step(self, before_batch: BeforeBatch | None = None) -> None:
        """Called by Checkpointer: makes `end_step` count what is consumed, and announces requests for batches."""
        self._loaded_position = self.position
        self._consumption.count_by_step(before_batch)

    def end_step(self) -> tuple[tuple[int, int], ...]:
        """Called by Checkpointer: ends a step and returns its positions.

        Returns:
            Ranges `[start, stop)` of the global order: this rank's share of each batch that the step consumed.

        Raises:
            ConfigurationError: whether batches were used or fetched ahead is uncertain at the first step.
        """
        first, last = self._consumption.end_step()
        begin, end = rank_range(self.global_batch, self.num_replicas, self.rank)
        self.step_samples = (last - first) * (end - begin)
        by_hand = self._consumption.by_hand
        ends = last > first and self._is_last(self._position_of(last - 1))
        self.step_ends_epoch = self.by_epoch and ends and self._consumption.is_taken_here
        self.step_range = (self._position_of(first), self._position_of(last)) if by_hand else None
        starts = (self._position_of(number) for number in range(first, last))
        return tuple((start + begin, start + end) for start in starts)

    def begin(self) -> int:
        """Called by ElasticLoader: starts an iterator, and returns its first position.

        Older iterators raise from now on: two that count at once would each count the other's batches as their own.
        """
        return self._position_of(self._consumption.begin())

    def _position_of(self, batch: int) -> int:
        """Returns the position at which `batch` begins, numbered from where the state was last loaded."""
        return self._loaded_position + batch * self.global_batch

    def rank_batches(self, position: int) -> Iterator[RankBatch]:
        """Called by ElasticLoader: yields this rank's shares from `position` on.

        Endless; with `by_epoch` up to the end of the pass.
        """
        left = self._batches_left_in_epoch(position) if self.by_epoch else -1
        while left:
            yield self.rank_batch(position)
            position += self.global_batch
            left -= 1

    def count_drawn(self, found: Iterator[T]) -> Iterator[T]:
        """Called by ElasticLoader: counts each element of `found` as one batch.

        Raises:
            StateMismatch: a newer iterator was begun, or the state was restored.
        """
        return self._consumption.counted(found)

    def _is_last(self, position: int) -> bool:
        """Returns whether the batch at `position` is the last one that begins in its epoch."""
        return (position + self.global_batch) // self.size > position // self.size

    def _batches_left_in_epoch(self, position: int) -> int:
        """Returns how many batches begin at `position` or after it in the same pass."""
        return -(-(self.size - position % self.size) // self.global_batch)

    def _index_batches(self, position: int) -> Iterator[list[int]]:
        """Yields the sample indexes of `shares` alone, which is all that a DataLoader asks for."""
        start, stop = rank_range(self.global_batch, self.num_replicas, self.rank)
        left = self._batches_left_in_epoch(position) if self.by_epoch else -1
        while left:
            yield list(self._samples(range(position + start, position + stop)))
            position += self.global_batch
            left -= 1

    def _samples(self, positions: range) -> tuple[int, ...]:
        first, samples = self._chunk
        if not (first <= positions.start and positions.stop <= first + len(samples)):
            # a share of each of the next steps lies in it, and what is between belongs to other ranks
            first = positions.start
            ahead = min(_CHUNK, self.size, 4 * len(samples))  # grown: whoever asks once does not pay for thousands
            samples = tuple(samples_at(self.seed, self.size, first, max(len(positions), ahead)))
            self._chunk = first, samples
        return samples[positions.start - first : positions.stop - first]


# ---- batch sequence --------------------------------------------------------------------------------------------------
# `BatchSequence` serves each rank's shares of a batch sampler's lists. The sampler is the script's own: in each epoch
# it gives lists of sample numbers, each of them one step's batch on all ranks together. So the order is the sampler's
# and knows no ranks, and the state is a position in it. A sampler on each rank would give lists that no other number of
# ranks could share out.


class _Epoch(NamedTuple):
    """One epoch's lists, behind one another."""

    number: int
    start: int
    """Samples of all epochs before it."""
    samples: array[int]
    ends: array[int]
    """Of each list, how many samples of the epoch there are up to its end."""
    digest: str

    @property
    def stop(self) -> int:
        return self.start + len(self.samples)

    def list_at(self, position: int) -> int:
        """Which list has the sample at this position of the run."""
        return bisect_right(self.ends, position - self.start)

    def bounds(self, number: int) -> tuple[int, int]:
        """Where a list begins and ends in the epoch."""
        return (self.ends[number - 1] if number else 0), self.ends[number]


class BatchSequence:
    """`BatchSequence` takes what `ElasticSampler` computes from a batch sampler.

    `ElasticLoader(batch_sampler=)` makes it. Positions count the samples of all lists since the run's first. The epoch
    in which the loader stands is drawn at once, and the first one twice, as a sampler that draws anew each time could
    not be gone on with.

    Args:
        batch_sampler: gives lists of sample numbers whenever it is iterated over; `set_epoch(epoch)`, its own or that
            of its `sampler`, is called before.
        size: of the dataset.
        seed: of the generators of samples.
        rank, world, by_epoch, batches_per_step: as ElasticLoader's.

    Raises:
        ConfigurationError: it gives no lists, others at a second time, or a rank's part alone.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        size: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        by_epoch: bool = False,
        batches_per_step: int | None = None,
    ) -> None:
        self._given, self.size, self.seed, self.by_epoch = batch_sampler, size, seed, by_epoch
        self.rank, self.num_replicas = checked_rank(rank, num_replicas)
        self._consumption = Consumption(batches_per_step)
        self.step_samples = 0
        """Samples of this rank that the last step consumed."""
        self.step_range: tuple[int, int] | None = None
        """Where all ranks' lists of the last step begin and end: nobody else could foretell their sizes."""
        self.step_ends_epoch = False
        """Whether an iterator ended with the last step's lists: what the script does next belongs to that step."""
        _reject_parts(batch_sampler)
        first = self._drawn_epoch(0, 0)
        self._reject_another(first, self._drawn_epoch(0, 0))
        self._epochs = [first]
        """From the one in which the first unconsumed list is, as far as was asked for."""
        self._first, self._positions = 0, [0]
        """A list's number since the state was loaded, and where it and those behind it begin, as far as was asked for."""

    def __len__(self) -> int:
        """Returns the present epoch's number of batches, consumed ones included.

        Raises:
            TypeError: without `by_epoch`, as the sequence is endless.
        """
        if not self.by_epoch:
            raise TypeError("it is endless, and has no len(): by_epoch=True ends each iterator with its epoch")
        return len(self._epoch_at(self.position).ends)

    @property
    def position(self) -> int:
        """The number of samples consumed so far by all ranks together."""
        return self._position_of(self._consumption.consumed)

    @property
    def epoch(self) -> int:
        """The epoch of the first list not yet consumed."""
        self._consumption.is_epoch_read = True
        return self._epoch_at(self.position).number

    @property
    def batches_yielded(self) -> int:
        """The number of batches handed out so far, repeated ones included."""
        return self._consumption.batches_yielded

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs from the current one up to `count`."""
        return remaining_epochs(self, count)

    def consumed_epochs(self) -> list[float]:
        """Returns the epochs consumed so far, as one fraction."""
        epoch = self._epoch_at(self.position)
        return [epoch.number + (self.position - epoch.start) / len(epoch.samples)]

    def commit(self, batches: int = 1) -> None:
        """Counts the next `batches` handed out as trained on."""
        self._consumption.commit(batches)

    def count_by_step(self, before_batch: BeforeBatch | None = None) -> None:
        """Makes `end_step` count what is consumed, and announces requests for batches."""
        self._first, self._positions = 0, [self.position]
        self._consumption.count_by_step(before_batch)

    def end_step(self) -> tuple[tuple[int, int], ...]:
        """Ends a step and returns its positions, this rank's of each list."""
        first, last = self._consumption.end_step()
        shares = [self.rank_batch(self._position_of(number)) for number in range(first, last)]
        self.step_samples = sum(part.stop - part.start for part in shares)
        self.step_range = self._position_of(first), self._position_of(last)
        ends = last > first and self._epoch_at(self._position_of(last - 1)).stop == self.step_range[1]
        self.step_ends_epoch = self.by_epoch and ends and self._consumption.is_taken_here
        self._forget_before(last)
        return tuple((part.start, part.stop) for part in shares)

    def begin(self) -> int:
        """Starts an iterator, and returns its first position."""
        return self._position_of(self._consumption.begin())

    def count_drawn(self, found: Iterator[T]) -> Iterator[T]:
        """Counts each element of `found` as one batch."""
        return self._consumption.counted(found)

    def rank_batches(self, position: int) -> Iterator[RankBatch]:
        """Yields this rank's shares from `position` on.

        Endless; with `by_epoch` up to the end of the epoch.
        """
        stop = self._epoch_at(position).stop if self.by_epoch else -1
        while position != stop:
            yield self.rank_batch(position)
            position = self._behind(position)

    def rank_batch(self, position: int) -> RankBatch:
        """Returns this rank's share of the list that begins at `position`."""
        epoch = self._epoch_at(position)
        begin, end = epoch.bounds(epoch.list_at(position))
        first, last = rank_range(end - begin, self.num_replicas, self.rank)
        mine = range(begin + first, begin + last) or range(begin, begin + 1)
        return RankBatch(
            start=epoch.start + begin + first,
            stop=epoch.start + begin + last,
            positions=range(epoch.start + mine.start, epoch.start + mine.stop),
            indexes=tuple(epoch.samples[mine.start : mine.stop]),
            weight=(last - first) * self.num_replicas / (end - begin),
            is_last=epoch.start + end == epoch.stop,
        )

    def mark_source(self, dataset: Any) -> None:
        """Called by ElasticLoader: names the data set, by which loaders are compared."""
        self._consumption.source, self._consumption.source_digest = dataset, sample_digest(dataset)

    def state_dict(self) -> dict[str, Any]:
        """Returns epoch, next list, and a digest of that epoch's lists."""
        self._consumption.is_state_taken = True
        position = self.position
        epoch = self._epoch_at(position)
        return {
            "position": position,
            "seed": self.seed,
            "epoch": epoch.number,
            "batch": epoch.list_at(position),
            "batches": epoch.digest,
            "samples": self._consumption.source_digest,
        }

    def describe_differences(self, state: Mapping[str, Any]) -> list[str]:
        """Called by Checkpointer: describes how the samples differ from those of a state that can be loaded."""
        return describe_other_samples(self._consumption, state) if self.rank == 0 else []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the list that was consumed last.

        Raises:
            StateMismatch: the sampler gives that epoch other lists, or the state has none.
        """
        if "batches" not in state:
            raise StateMismatch("the loader has a batch_sampler, and had none in the checkpoint: samples would be lost")
        if state["seed"] != self.seed:
            raise StateMismatch(f"the loader's seed is {self.seed} and was {state['seed']} in the checkpoint")
        epoch = self._drawn_epoch(int(state["epoch"]), 0)
        if epoch.digest != state["batches"]:
            raise StateMismatch(
                f"the loader's batch_sampler gives epoch {epoch.number} other batches than in the checkpoint: samples"
                " would be lost or repeated; build it as before, from the same data set, or start anew"
            )
        position, done = int(state["position"]), int(state["batch"])
        self._epochs = [epoch._replace(start=position - (epoch.bounds(done)[0]))]
        self._first, self._positions = 0, [position]
        self._consumption.restored(epoch.number if self.by_epoch else 0)

    def skip_steps(self, steps: int) -> None:
        """Leaves out the lists of so many steps, behind a restore."""
        self._forget_before(steps * self._consumption.per_step)
        self._first, self._positions = 0, self._positions[:1]
        self._consumption.restored()

    def _position_of(self, batch: int) -> int:
        """Returns where a list begins, numbered from where the state was last loaded."""
        while len(self._positions) <= batch - self._first:
            self._positions.append(self._behind(self._positions[-1]))
        return self._positions[batch - self._first]

    def _behind(self, position: int) -> int:
        epoch = self._epoch_at(position)
        return epoch.start + epoch.bounds(epoch.list_at(position))[1]

    def _epoch_at(self, position: int) -> _Epoch:
        while self._epochs[-1].stop <= position:
            if not self._consumption.by_step:
                self._forget_before(self._consumption.consumed)  # no step ends
            last = self._epochs[-1]
            self._epochs.append(self._drawn_epoch(last.number + 1, last.stop))
        return next(one for one in reversed(self._epochs) if one.start <= position)

    def _forget_before(self, batch: int) -> None:
        """Lets go of what is known of lists that nobody asks for again."""
        begin = self._position_of(batch)
        self._first, self._positions = batch, self._positions[batch - self._first :]
        self._epochs = [one for one in self._epochs if one.stop > begin] or self._epochs[-1:]

    def _drawn_epoch(self, number: int, start: int) -> _Epoch:
        for one in (self._given, getattr(self._given, "sampler", None)):
            if callable(begin := getattr(one, "set_epoch", None)):
                begin(number)
        samples, lengths = array("q"), array("q")
        for batch in self._given:
            before = len(samples)
            try:
                samples.extend(batch)
            except TypeError:
                self._reject(f"gives {batch!r:.60}, which is no list of sample numbers")
            if len(samples) == before:
                self._reject("gives an empty list, and a step needs samples")
            lengths.append(len(samples) - before)
        if not lengths:
            self._reject(
                f"gives no batches in epoch {number}: one that can be iterated over once alone does not suffice"
            )
        if min(samples) < 0 or max(samples) >= self.size:
            self._reject(f"gives samples from {min(samples)} to {max(samples)}, of a data set of {self.size}")
        digest = blake2b(samples.tobytes() + lengths.tobytes(), digest_size=8).hexdigest()
        return _Epoch(number, start, samples, array("q", accumulate(lengths)), digest)

    def _reject_another(self, one: _Epoch, other: _Epoch) -> None:
        if one.digest != other.digest:
            self._reject(
                f"gives other batches each time that it is iterated over, all in epoch {one.number}: where it stood could"
                " not be found again. What it draws must follow from its seed and set_epoch(epoch) alone, as of"
                " BatchSampler(DistributedSampler(dataset, num_replicas=1, rank=0, seed=…), …)"
            )

    def _reject(self, why: str) -> NoReturn:
        raise ConfigurationError(f"batch_sampler={type(self._given).__name__} {why}")


def _reject_parts(batch_sampler: Any) -> None:
    """Refuses one that knows of ranks: each rank's would be another, and the samples of all others lost."""
    for one in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        replicas = getattr(one, "num_replicas", 1)
        if replicas != 1:
            raise ConfigurationError(
                f"batch_sampler gives each of {replicas} ranks a part of its own: build it with num_replicas=1,"
                " rank=0, alike on all ranks; ElasticLoader divides each of its batches among the ranks there are"
            )
