"""`ElasticSampler`: each rank's shares of the elastic order, and how far the world has consumed it.

A batch sampler for torch's DataLoader, and what `ElasticLoader` takes its batches from. A DataLoader draws indexes far ahead
of the step that uses them; a sampler whose state is what was drawn would lose all of that at each restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TypeVar

from surefoot.data.consumption import Consumption
from surefoot.data.order import samples_at, share
from surefoot.data.process_place import place_of_process
from surefoot.errors import ConfigurationError, StateMismatch

T = TypeVar("T")
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank loads for one step: positions [start, stop), the samples behind them, and the loss weight."""

    start: int
    stop: int
    positions: tuple[int, ...]
    indexes: tuple[int, ...]
    weight: float


class ElasticSampler:
    """Batches of sample numbers in the elastic order: `DataLoader(dataset, batch_sampler=sampler, num_workers=4)`.

    For a DataLoader of one's own; `ElasticLoader` has one in it. Given to `Checkpointer` as `loader=`, in place of the
    DataLoader, it counts a batch as consumed at the `step()` behind it, whatever worker processes have read ahead. A
    DataLoader with workers always reads ahead, so say how many batches a step takes: `batches_per_step=1`.

    A DataLoader knows no weights: the global batch must be divisible by the world. `by_epoch` ends an iterator with the
    pass over the samples; else it is endless.

    Args:
        size: samples, or a dataset with a length.
        global_batch: samples a step on all ranks together.
        seed: of the order.
        rank: of data parallelism; default the process group's, else the launcher's.
        world: likewise.
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
        global_batch: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        by_epoch: bool = False,
        batches_per_step: int | None = None,
    ) -> None:
        found_rank, found_world = place_of_process()
        self.size = size if isinstance(size, int) else len(size)
        self.global_batch, self.seed, self.by_epoch = global_batch, seed, by_epoch
        self.rank = found_rank if rank is None else rank
        self.world = found_world if world is None else world
        if self.size < 1 or global_batch < 1:
            raise ConfigurationError(
                f"{self.size} samples in global batches of {global_batch}: both must be at least 1"
            )
        if by_epoch and global_batch > self.size:
            raise ConfigurationError(
                f"by_epoch with a global batch of {global_batch} and {self.size} samples: an epoch has no whole batch;"
                " give a smaller one, or leave by_epoch out: then batches go on from pass to pass"
            )
        if not 0 <= self.rank < self.world:
            raise ConfigurationError(f"rank {self.rank} of {self.world}: a rank is from 0 to world − 1")
        self._chunk = 0, list[int]()
        """First position, and the samples from there on: positions are asked for in their order."""
        self._loaded_position = 0
        self._consumption = Consumption(batches_per_step)
        self.step_samples = 0
        """Samples of this rank that the last step consumed."""
        self._iterator = 0
        """Which one is the newest: one that was made before a restore, or before another, must not go on."""

    # ---- what a script calls ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        if self.global_batch % self.world:
            raise ConfigurationError(
                f"a global batch of {self.global_batch} is not divisible by {self.world} ranks, and a DataLoader knows no"
                " weights for uneven shares: give ElasticLoader the dataset, or a batch that every world size divides"
            )
        for part in self.drawn(self.shares(self.begin())):
            yield list(part.indexes)

    def __len__(self) -> int:
        """Batches of the present epoch, those consumed included; of passes that a batch spans, the earlier one's.

        Raises TypeError without `by_epoch`: then it never ends.
        """
        if not self.by_epoch:
            raise TypeError("it is endless, and has no len(): by_epoch=True ends each iterator with its epoch")
        behind = (self.position - self.epoch * self.size) // self.global_batch
        return behind + self._left(self.position)

    @property
    def position(self) -> int:
        """Positions consumed so far by all ranks together; of the batches not yet consumed, the first begins here."""
        return self._position_of(self._consumption.consumed)

    @property
    def epoch(self) -> int:
        """Passes that are over: the number, from 0 on, of the one in which the next batch begins."""
        return self.position // self.size

    @property
    def handed_out(self) -> int:
        """How many batches were handed out."""
        return self._consumption.handed_out

    def passes(self) -> list[float]:
        """Passes over the samples that are consumed, the share of the present one included: one number."""
        return [self.position / self.size]

    def share(self, position: int) -> Share:
        """This rank's share of the global batch that begins at `position`."""
        start, stop = share(self.global_batch, self.world, self.rank)
        positions = range(position + start, position + stop) or range(position, position + 1)
        return Share(
            start=position + start,
            stop=position + stop,
            positions=tuple(positions),
            indexes=self._samples(positions),
            weight=(stop - start) * self.world / self.global_batch,
        )

    def commit(self, batches: int = 1) -> None:
        """Says that the next `batches` of those handed out have been trained on; from then on nothing else counts.

        For whoever takes batches in another thread, or looks at some. Raises ConfigurationError if there are not as many.
        """
        self._consumption.commit(batches)

    def state_dict(self) -> dict[str, int]:
        """The position behind the batch consumed last, and what the order depends on."""
        return {"position": self.position, "seed": self.seed, "size": self.size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on behind the batch that was consumed last; another seed or dataset is another order, and refused."""
        for name, mine in (("seed", self.seed), ("size", self.size)):
            if state[name] != mine:
                raise StateMismatch(
                    f"the loader's {name} is {mine} and was {state[name]} in the checkpoint: samples would be lost or"
                    f" repeated; build the loader as before, or start anew"
                )
        self._loaded_position = int(state["position"])
        self._consumption.forget()
        self._iterator += 1

    # ---- what Checkpointer and ElasticLoader call ------------------------------------------------------------------

    def count_by_step(self) -> None:
        """Called by Checkpointer: from here on batches are consumed by `step_ends`."""
        self._loaded_position = self.position
        self._consumption.count_by_step()

    def step_ends(self) -> tuple[tuple[int, int], ...]:
        """Called by Checkpointer at each step. Returns positions [start, stop) of this rank's shares of its batches."""
        first, last = self._consumption.step_ends()
        begin, end = share(self.global_batch, self.world, self.rank)
        self.step_samples = (last - first) * (end - begin)
        starts = (self._position_of(number) for number in range(first, last))
        return tuple((start + begin, start + end) for start in starts)

    def begin(self) -> int:
        """Called by ElasticLoader. Position of the first batch of a new iterator; older ones raise from now on."""
        self._iterator += 1
        return self._position_of(self._consumption.begin())

    def _position_of(self, batch: int) -> int:
        """Where batch number `batch` begins, counted from where the state was last loaded."""
        return self._loaded_position + batch * self.global_batch

    def shares(self, position: int) -> Iterator[Share]:
        """Called by ElasticLoader. This rank's shares from `position` on: of the epoch, or endless."""
        left = self._left(position) if self.by_epoch else -1
        while left:
            yield self.share(position)
            position += self.global_batch
            left -= 1

    def drawn(self, found: Iterator[T]) -> Iterator[T]:
        """Called by ElasticLoader. Counts each of `found` as one batch. Raises StateMismatch in an older iterator."""
        mine = self._iterator
        while True:
            if mine != self._iterator:
                raise StateMismatch(
                    "this iterator was made before the loader's state was restored, or before a newer iterator: what it"
                    " hands out is not what the loader counts. Call restore() first, then iter(loader), once"
                )
            try:
                one = next(found)
            except StopIteration:
                self._consumption.end()
                return
            self._consumption.hand_out()
            yield one

    def _left(self, position: int) -> int:
        """Batches that begin at `position` or behind it in the same pass."""
        return -(-(self.size - position % self.size) // self.global_batch)

    def _samples(self, positions: range) -> tuple[int, ...]:
        first, samples = self._chunk
        if not (first <= positions.start and positions.stop <= first + len(samples)):
            # a share of each of the next steps lies in it, and what is between belongs to other ranks
            first = positions.start
            ahead = min(_CHUNK, self.size, 4 * len(samples))  # grown: whoever asks once does not pay for thousands
            samples = samples_at(self.seed, self.size, first, max(len(positions), ahead))
            self._chunk = first, samples
        return tuple(samples[positions.start - first : positions.stop - first])
