"""`BatchSequence` serves each rank's shares of a batch sampler's lists.

The sampler is the script's own: in each epoch it gives lists of sample numbers, each of them one step's batch on all
ranks together. So the order is the sampler's and knows no ranks, and the state is a position in it. A sampler on each
rank would give lists that no other number of ranks could share out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn, TypeVar

from surefoot.data.consumed_batches import Consumption
from surefoot.data.process_place import checked_place
from surefoot.data.sample_order import share
from surefoot.data.sampler import Share
from surefoot.errors import ConfigurationError, StateMismatch

T = TypeVar("T")


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
        world: int | None = None,
        by_epoch: bool = False,
        batches_per_step: int | None = None,
    ) -> None:
        self._given, self.size, self.seed, self.by_epoch = batch_sampler, size, seed, by_epoch
        self.rank, self.world = checked_place(rank, world)
        self._consumption = Consumption(batches_per_step)
        self.step_samples = 0
        """Samples of this rank that the last step consumed."""
        self.step_span: tuple[int, int] | None = None
        """Where all ranks' lists of the last step begin and end: nobody else could foretell their sizes."""
        _refuse_parts(batch_sampler)
        first = self._drawn_epoch(0, 0)
        self._refuse_another(first, self._drawn_epoch(0, 0))
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
        return self._epoch_at(self.position).number

    @property
    def handed_out(self) -> int:
        """The number of batches handed out so far, repeated ones included."""
        return self._consumption.handed_out

    def passes(self) -> list[float]:
        """Returns the epochs consumed so far, as one fraction."""
        epoch = self._epoch_at(self.position)
        return [epoch.number + (self.position - epoch.start) / len(epoch.samples)]

    def commit(self, batches: int = 1) -> None:
        """Counts the next `batches` handed out as trained on."""
        self._consumption.commit(batches)

    def count_by_step(self) -> None:
        """Makes `step_ends` count what is consumed."""
        self._first, self._positions = 0, [self.position]
        self._consumption.count_by_step()

    def step_ends(self) -> tuple[tuple[int, int], ...]:
        """Ends a step and returns its positions, this rank's of each list."""
        first, last = self._consumption.step_ends()
        shares = [self.share(self._position_of(number)) for number in range(first, last)]
        self.step_samples = sum(part.stop - part.start for part in shares)
        self.step_span = self._position_of(first), self._position_of(last)
        self._forget_before(last)
        return tuple((part.start, part.stop) for part in shares)

    def begin(self) -> int:
        """Starts an iterator, and returns its first position."""
        return self._position_of(self._consumption.begin())

    def drawn(self, found: Iterator[T]) -> Iterator[T]:
        """Counts each element of `found` as one batch."""
        return self._consumption.counted(found)

    def shares(self, position: int) -> Iterator[Share]:
        """Yields this rank's shares from `position` on.

        Endless; with `by_epoch` up to the end of the epoch.
        """
        stop = self._epoch_at(position).stop if self.by_epoch else -1
        while position != stop:
            yield self.share(position)
            position = self._behind(position)

    def share(self, position: int) -> Share:
        """Returns this rank's share of the list that begins at `position`."""
        epoch = self._epoch_at(position)
        begin, end = epoch.bounds(epoch.list_at(position))
        first, last = share(end - begin, self.world, self.rank)
        mine = range(begin + first, begin + last) or range(begin, begin + 1)
        return Share(
            start=epoch.start + begin + first,
            stop=epoch.start + begin + last,
            positions=range(epoch.start + mine.start, epoch.start + mine.stop),
            indexes=tuple(epoch.samples[mine.start : mine.stop]),
            weight=(last - first) * self.world / (end - begin),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns epoch, next list, and a digest of that epoch's lists."""
        position = self.position
        epoch = self._epoch_at(position)
        return {
            "position": position,
            "seed": self.seed,
            "epoch": epoch.number,
            "batch": epoch.list_at(position),
            "batches": epoch.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues behind the list that was consumed last.

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
        self._consumption.restored()

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
                self._refuse(f"gives {batch!r:.60}, which is no list of sample numbers")
            if len(samples) == before:
                self._refuse("gives an empty list, and a step needs samples")
            lengths.append(len(samples) - before)
        if not lengths:
            self._refuse(
                f"gives no batches in epoch {number}: one that can be iterated over once alone does not suffice"
            )
        if min(samples) < 0 or max(samples) >= self.size:
            self._refuse(f"gives samples from {min(samples)} to {max(samples)}, of a data set of {self.size}")
        digest = blake2b(samples.tobytes() + lengths.tobytes(), digest_size=8).hexdigest()
        return _Epoch(number, start, samples, array("q", accumulate(lengths)), digest)

    def _refuse_another(self, one: _Epoch, other: _Epoch) -> None:
        if one.digest != other.digest:
            self._refuse(
                f"gives other batches each time that it is iterated over, all in epoch {one.number}: where it stood could"
                " not be found again. What it draws must follow from its seed and set_epoch(epoch) alone, as of"
                " BatchSampler(DistributedSampler(dataset, num_replicas=1, rank=0, seed=…), …)"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigurationError(f"batch_sampler={type(self._given).__name__} {why}")


def _refuse_parts(batch_sampler: Any) -> None:
    """Refuses one that knows of ranks: each rank's would be another, and the samples of all others lost."""
    for one in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        replicas = getattr(one, "num_replicas", 1)
        if replicas != 1:
            raise ConfigurationError(
                f"batch_sampler gives each of {replicas} ranks a part of its own: build it with num_replicas=1,"
                " rank=0, alike on all ranks; ElasticLoader divides each of its batches among the ranks there are"
            )
