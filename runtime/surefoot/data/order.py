"""Which samples a step consumes, at any world size: the elastic order, its sampler, and sample-indexed randomness.

The order of samples depends on the seed alone: position p of the run is sample `order(seed, pass)[p mod size]` of pass
p ÷ size. A step takes the next `global_batch` positions whatever the world size, and each rank a contiguous share of
them, so the same step sees the same samples at world 8 and at world 3, and across a change of the world none is lost
or seen twice. Used by training scripts; its state (one position) travels with the checkpoint.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from surefoot.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_ROUNDS = 8
_CHUNK = 4096
_FEW = 16
"""Positions that are sooner drawn one by one than with numpy."""


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


def samples_at(seed: int, size: int, first: int, count: int) -> list[int]:
    """`sample_at` of `count` positions from `first` on, all at once: some hundred times faster where numpy is there."""
    if find_spec("numpy") is None:
        return [sample_at(seed, size, position) for position in range(first, first + count)]
    found: list[int] = []
    while count:
        turn, place = divmod(first, size)
        some = min(count, size - place)
        if some < _FEW:
            found += [sample_at(seed, size, position) for position in range(first, first + some)]
        else:
            found += _block(seed, size, turn, place, some)
        first, count = first + some, count - some
    return found


def _block(seed: int, size: int, turn: int, start: int, count: int) -> list[int]:
    import numpy as np

    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low, shift = np.uint64((1 << half) - 1), np.uint64(half)
    key = _mixed((seed & _MASK) ^ _mixed(turn))
    keys = [np.uint64((key + (number << 56)) & _MASK) for number in range(_ROUNDS)]
    places = np.arange(start, start + count, dtype=np.uint64)
    todo = np.arange(count)
    while todo.size:
        left, right = places[todo] >> shift, places[todo] & low
        for round_key in keys:
            left, right = right, left ^ (_mixed_all(round_key + right) & low)
        places[todo] = (left << shift) | right
        todo = todo[places[todo] >= size]
    return [int(place) for place in places.tolist()]


def _mixed_all(values: Any) -> Any:
    """`_mixed` of an array of unsigned integers, which wrap around as it masks."""
    import numpy as np

    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


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
        self._chunk = 0, list[int]()
        """First position, and the samples from there on: positions are asked for in their order."""

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

    def _samples(self, positions: range) -> tuple[int, ...]:
        first, samples = self._chunk
        if not (first <= positions.start and positions.stop <= first + len(samples)):
            # a share of each of the next steps lies in it, and what is between belongs to other ranks
            first = positions.start
            ahead = min(_CHUNK, self.size, 2 * len(samples))  # doubled: whoever asks once does not pay for thousands
            samples = samples_at(self.seed, self.size, first, max(len(positions), ahead))
            self._chunk = first, samples
        return tuple(samples[positions.start - first : positions.stop - first])
