"""The elastic order maps each position of a run to a sample.

Position p is sample `order(seed, pass)[p mod size]` of pass p ÷ size. A step takes the next `global_batch` positions
whatever the world size, and each rank a contiguous share of them, so the same step sees the same samples at world 8 and
at world 3, and across a change of the world none is lost or seen twice. A permutation that is computed for any position
needs no shuffled list in memory or in the state, as TensorFlow's `index_shuffle`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_ROUNDS = 8
_FEW = 16
"""Positions that are sooner drawn one by one than with numpy."""


def rank_range(global_batch: int, world: int, rank: int) -> tuple[int, int]:
    """Returns a rank's contiguous share of a global batch as `(start, stop)`.

    Shares differ by one sample at most: 8 on 3 ranks are 3 + 3 + 2.
    """
    size, larger = divmod(global_batch, world)
    start = rank * size + min(rank, larger)
    return start, start + size + (rank < larger)


def sample_at(seed: int, size: int, position: int) -> int:
    """Returns the sample at `position` of the endless order over `size` samples.

    Each pass is a permutation: a Feistel network over the smallest power of four that holds `size`, applied again until
    the result is below `size` (cycle walking, Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Access
    is random, memory is constant, and the order is the same on every machine and with every version of every library.
    """
    turn, place = divmod(position, size)
    return _permuted_below_size(place, _mixed((seed & _MASK) ^ _mixed(turn)), size)


def _permuted_below_size(place: int, key: int, size: int) -> int:
    """Applies the network until the place is below `size`."""
    half = _half(size)
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(key + (round_number << 56) + right) & low)
        place = (left << half) | right
        if place < size:
            return place


def _half(size: int) -> int:
    """Returns the bits of half a place."""
    return max(1, ((size - 1).bit_length() + 1) // 2)


def samples_at(seed: int, size: int, first: int, count: int) -> list[int]:
    """Returns `sample_at` of `count` positions from `first` on.

    Computed at once with numpy, where it is installed; one by one, the order costs more than a cheap sample's read.
    """
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

    half = _half(size)
    key = _mixed((seed & _MASK) ^ _mixed(turn))
    tables = _tables(key, half)
    places = _apply_feistel(np.arange(start, start + count), tables, half)
    todo = np.flatnonzero(places >= size)
    while todo.size > _FEW:
        places[todo] = again = _apply_feistel(places[todo], tables, half)
        todo = todo[again >= size]
    found: list[int] = places.tolist()
    for at in todo.tolist():
        found[at] = _permuted_below_size(found[at], key, size)  # the last ones take long to land
    return found


def _apply_feistel(places: Any, tables: list[Any], half: int) -> Any:
    """Applies the network once to each place."""
    left, right = places >> half, places & ((1 << half) - 1)
    for table in tables:
        left, right = right, left ^ table.take(right)
    return (left << half) | right


@lru_cache(maxsize=4)
def _tables(key: int, half: int) -> list[Any]:
    """Returns each round's function as a table over halves of a place: for 10⁹ samples 2 MiB."""
    import numpy as np

    halves, low = np.arange(1 << half, dtype=np.uint64), np.uint64((1 << half) - 1)
    keys = [np.uint64((key + (number << 56)) & _MASK) for number in range(_ROUNDS)]
    return [(_mixed_all(one + halves) & low).astype(np.int64) for one in keys]


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
    """Returns a 63-bit seed for the sample at `position`.

    Equal at every world size, so that augmentation does not change with the ranks.
    """
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_generator(seed: int, position: int) -> torch.Generator:
    """Returns a CPU generator for augmenting the sample at `position`.

    Drawing from the global generator instead makes augmentation depend on the world size and on what else draws.

    Args:
        seed: the run's.
        position: of the sample in the global order.
    """
    import torch

    generator = torch.Generator()
    generator.manual_seed(sample_seed(seed, position))
    return generator
