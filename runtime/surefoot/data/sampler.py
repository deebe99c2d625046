"""`ElasticSampler` serves each rank's shares of the elastic order.

A batch sampler for torch's DataLoader, and the source of `ElasticLoader`'s batches. A DataLoader draws indexes far
ahead of the step that uses them; a sampler whose state is what was drawn would lose all of those at each restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TypeVar

from torch.utils.data import Sampler

from surefoot.data.consumed_batches import Consumption
from surefoot.data.process_place import checked_place
from surefoot.data.sample_order import samples_at, share
from surefoot.errors import ConfigurationError, StateMismatch

T = TypeVar("T")
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Share:
    """`Share` is what one rank loads of one global batch.

    Positions `[start, stop)` of the global order, the samples at them, and the loss weight. An empty share names one
    position that is not the rank's own, with weight 0.
    """

    start: int
    stop: int
    positions: range
    indexes: tuple[int, ...]
    weight: float


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
        global_batch: samples a step on all ranks together.
        seed: what the order depends on.
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
        self.size = size if isinstance(size, int) else len(size)
        self.global_batch, self.seed, self.by_epoch = global_batch, seed, by_epoch
        self.rank, self.world = checked_place(rank, world)
        if self.size < 1 or global_batch < 1:
            raise ConfigurationError(
                f"{self.size} samples in global batches of {global_batch}: both must be at least 1"
            )
        if by_epoch and global_batch > self.size:
            raise ConfigurationError(
                f"by_epoch with a global batch of {global_batch} and {self.size} samples: an epoch has no whole batch;"
                " give a smaller one, or leave by_epoch out: then batches go on from pass to pass"
            )
        self._chunk = 0, tuple[int, ...]()
        """First position, and the samples from there on: positions are asked for in their order."""
        self._loaded_position = 0
        self._consumption = Consumption(batches_per_step)
        self.step_samples = 0
        """Samples of this rank that the last step consumed."""
        self.step_span: tuple[int, int] | None = None
        """Where all ranks' batches of the last step begin and end, if steps may take unlike numbers of them."""

    # ---- what a script calls ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        if self.global_batch % self.world:
            raise ConfigurationError(
                f"a global batch of {self.global_batch} is not divisible by {self.world} ranks, and a DataLoader knows no"
                " weights for uneven shares: give ElasticLoader the dataset, or a batch that every world size divides"
            )
        yield from self.drawn(self._drawn_ahead(self.begin()))

    def __len__(self) -> int:
        """Returns the present epoch's number of batches, consumed ones included.

        A batch that spans two passes belongs to the earlier one.

        Raises:
            TypeError: without `by_epoch`, as the sampler is endless.
        """
        if not self.by_epoch:
            raise TypeError("it is endless, and has no len(): by_epoch=True ends each iterator with its epoch")
        behind = (self.position - self.epoch * self.size) // self.global_batch
        return behind + self._left(self.position)

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
        return self.position // self.size

    @property
    def handed_out(self) -> int:
        """The number of batches handed out so far, repeated ones included."""
        return self._consumption.handed_out

    def passes(self) -> list[float]:
        """Returns the passes over the samples consumed so far, as one fraction."""
        return [self.position / self.size]

    def share(self, position: int) -> Share:
        """Returns this rank's share of the global batch that begins at `position`."""
        start, stop = share(self.global_batch, self.world, self.rank)
        positions = range(position + start, position + stop) or range(position, position + 1)
        return Share(
            start=position + start,
            stop=position + stop,
            positions=positions,
            indexes=self._samples(positions),
            weight=(stop - start) * self.world / self.global_batch,
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

    def state_dict(self) -> dict[str, int]:
        """Returns the position behind the last consumed batch, seed and size."""
        return {"position": self.position, "seed": self.seed, "size": self.size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues behind the batch that was consumed last.

        Iterators made before raise StateMismatch at their next batch: what they hold belongs to another position.

        Raises:
            StateMismatch: seed or number of samples are not those of the state, so the order is another. What the
                samples contain is not compared.
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
        self._consumption.restored()

    # ---- what Checkpointer and ElasticLoader call ------------------------------------------------------------------

    def skip_steps(self, steps: int) -> None:
        """Called by Checkpointer: leaves out the batches of so many steps.

        Args:
            steps: of `batches_per_step` batches each.
        """
        self._loaded_position = self._position_of(steps * self._consumption.per_step)
        self._consumption.restored()

    def count_by_step(self) -> None:
        """Called by Checkpointer: makes `step_ends` count what is consumed."""
        self._loaded_position = self.position
        self._consumption.count_by_step()

    def step_ends(self) -> tuple[tuple[int, int], ...]:
        """Called by Checkpointer: ends a step and returns its positions.

        Returns:
            Ranges `[start, stop)` of the global order: this rank's share of each batch that the step consumed.

        Raises:
            ConfigurationError: whether batches were used or fetched ahead is uncertain at the first step.
        """
        first, last = self._consumption.step_ends()
        begin, end = share(self.global_batch, self.world, self.rank)
        self.step_samples = (last - first) * (end - begin)
        by_hand = self._consumption.by_hand
        self.step_span = (self._position_of(first), self._position_of(last)) if by_hand else None
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

    def shares(self, position: int) -> Iterator[Share]:
        """Called by ElasticLoader: yields this rank's shares from `position` on.

        Endless; with `by_epoch` up to the end of the pass.
        """
        left = self._left(position) if self.by_epoch else -1
        while left:
            yield self.share(position)
            position += self.global_batch
            left -= 1

    def drawn(self, found: Iterator[T]) -> Iterator[T]:
        """Called by ElasticLoader: counts each element of `found` as one batch.

        Raises:
            StateMismatch: a newer iterator was begun, or the state was restored.
        """
        return self._consumption.counted(found)

    def _left(self, position: int) -> int:
        """Returns how many batches begin at `position` or behind it in the same pass."""
        return -(-(self.size - position % self.size) // self.global_batch)

    def _drawn_ahead(self, position: int) -> Iterator[list[int]]:
        """Yields the sample indexes of `shares` alone, which is all that a DataLoader asks for."""
        start, stop = share(self.global_batch, self.world, self.rank)
        left = self._left(position) if self.by_epoch else -1
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
