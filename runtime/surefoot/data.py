"""Which samples a step consumes, at any world size: the elastic sampler, its loader, and sample-indexed randomness.

The order of samples depends on the seed alone: position p of the run is sample `order(seed, pass)[p mod size]` of pass
p ÷ size. A step takes the next `global_batch` positions whatever the world size, and each rank a contiguous share of
them, so the same step sees the same samples at world 8 and at world 3, and across a change of the world none is lost
or seen twice. Used by training scripts; its state (one position) travels with the checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.errors import ConfigurationError, StateMismatch

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_ROUNDS = 8


def share(global_batch: int, world: int, rank: int) -> tuple[int, int]:
    """Start and stop, within a global batch, of a rank's contiguous share: sizes differ by at most one (3+3+2)."""
    size, larger = divmod(global_batch, world)
    start = rank * size + min(rank, larger)
    return start, start + size + (rank < larger)


def sample_at(seed: int, size: int, position: int) -> int:
    """The sample at `position` of the endless global order over `size` samples: a permutation for each pass.

    A Feistel network over the smallest even power of two that holds `size`, walked until it lands inside: random
    access in constant memory, and the same on every machine and with every version of every library.
    """
    turn, place = divmod(position, size)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    key = _mixed((seed & _MASK) ^ _mixed(turn))
    while True:
        left, right = place >> half, place & low
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(key + (round_number << 56) + right) & low)
        place = (left << half) | right
        if place < size:
            return place


def _mixed(value: int) -> int:
    """splitmix64's finaliser: every bit of the input reaches every bit of the output."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample_seed(seed: int, position: int) -> int:
    """A 63-bit seed for whatever is random about the sample at `position`, equal at every world size."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_generator(seed: int, position: int) -> torch.Generator:
    """A CPU generator for augmenting the sample at `position`: draw from it instead of from the global one."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(sample_seed(seed, position))
    return generator


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
    """The samples in `data`."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank loads for one step: positions [start, stop), the samples behind them, and the loss weight."""

    start: int
    stop: int
    positions: tuple[int, ...]
    indexes: tuple[int, ...]
    weight: float


class ElasticSampler:
    """The global order of `size` samples, cut into global batches and into this rank's shares of them."""

    def __init__(self, size: int, global_batch: int, *, seed: int = 0, rank: int = 0, world: int = 1) -> None:
        if size < 1 or global_batch < 1:
            raise ConfigurationError(f"{size} samples in global batches of {global_batch}: both must be at least 1")
        if not 0 <= rank < world:
            raise ConfigurationError(f"rank {rank} of {world}: a rank is from 0 to world − 1")
        self.size, self.global_batch, self.seed = size, global_batch, seed
        self.rank, self.world = rank, world

    def share(self, position: int) -> Share:
        """This rank's share of the global batch that begins at `position`."""
        start, stop = share(self.global_batch, self.world, self.rank)
        positions = range(position + start, position + stop) or range(position, position + 1)
        return Share(
            start=position + start,
            stop=position + stop,
            positions=tuple(positions),
            indexes=tuple(sample_at(self.seed, self.size, p) for p in positions),
            weight=(stop - start) * self.world / self.global_batch,
        )


class ElasticLoader:
    """Batches of any map-style dataset in the elastic order: `for batch in loader`, endless, from where it stands.

    `transform(sample, generator)` is called with a generator that belongs to the sample's position, so that random
    augmentation too is the same at every world size. `workers` > 0 loads ahead in processes of torch's DataLoader;
    what was loaded ahead and not consumed does not count. Rank and world are those of data parallelism; by default
    the process group's, else the launcher's environment's.
    """

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
        workers: int = 0,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise ConfigurationError(f"{type(dataset).__name__} has no length: a map-style dataset is needed")
        found_rank, found_world = _place()
        self.sampler = ElasticSampler(
            len(dataset),
            global_batch,
            seed=seed,
            rank=found_rank if rank is None else rank,
            world=found_world if world is None else world,
        )
        self._samples = _Samples(dataset, transform, seed)
        self._collate, self._workers = collate, workers
        self._position = 0
        self._consumed: tuple[int, int] | None = None

    @property
    def consumed(self) -> tuple[int, int] | None:
        """Positions [start, stop) of the batch that was handed out last; None before the first."""
        return self._consumed

    @property
    def position(self) -> int:
        """Positions consumed so far by all ranks together; the next global batch begins here."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        shares = self._shares(self._position)
        for part, data in self._loaded(shares) if self._workers == 0 else self._loaded_ahead():
            self._position += self.sampler.global_batch
            self._consumed = (part.start, part.stop)
            yield Batch(data, part.weight, part.start, part.stop, part.indexes)

    def state_dict(self) -> dict[str, int]:
        """The position behind the batch handed out last, and what the order depends on."""
        return {"position": self._position, "seed": self.sampler.seed, "size": self.sampler.size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on behind the batch that was consumed last; another seed or dataset is another order, and refused."""
        for name, mine in (("seed", self.sampler.seed), ("size", self.sampler.size)):
            if state[name] != mine:
                raise StateMismatch(
                    f"the loader's {name} is {mine} and was {state[name]} in the checkpoint: samples would be lost or"
                    f" repeated; build the loader as before, or start anew"
                )
        self._position, self._consumed = int(state["position"]), None

    def _shares(self, position: int) -> Iterator[Share]:
        while True:
            yield self.sampler.share(position)
            position += self.sampler.global_batch

    def _loaded(self, shares: Iterator[Share]) -> Iterator[tuple[Share, Any]]:
        collate = self._collate or _default_collate()
        for part in shares:
            yield part, collate([self._samples[key] for key in zip(part.indexes, part.positions, strict=True)])

    def _loaded_ahead(self) -> Iterator[tuple[Share, Any]]:
        from torch.utils.data import DataLoader

        begin = self._position
        keys = (list(zip(part.indexes, part.positions, strict=True)) for part in self._shares(begin))
        loader: DataLoader[Any] = DataLoader(
            self._samples,  # type: ignore[arg-type]  # map-style by protocol: __len__ and __getitem__ are all it calls
            batch_sampler=keys,  # its elements are keys of _Samples, not plain indexes
            num_workers=self._workers,
            collate_fn=self._collate or _default_collate(),
        )
        yield from zip(self._shares(begin), loader, strict=False)


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


def _default_collate() -> Callable[[list[Any]], Any]:
    from torch.utils.data import default_collate

    return default_collate


def _place() -> tuple[int, int]:
    """Rank and world of the process group if there is one, else of the launcher's environment."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
