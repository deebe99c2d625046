"""`SeededSamples` gives each sample's random augmentation a seed that depends on its position alone.

Most data sets augment with the global generators of Python, numpy and torch, as torchvision's transforms do. What they
draw would depend on the ranks, the worker processes and the restarts of a job. So these generators are seeded from the run's
seed and the sample's position before the data set is asked for it, and once more before a batch is collated. Seeding costs
some 12 µs a sample, so a process whose first sample draws nothing goes without it until a batch does: that batch is then
fetched again. The training's own random numbers stay as they are.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from array import array
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from surefoot.data.sample_order import sample_generator

_MT19937_BYTES = 625 * 4
"""624 words and an index, as Python and numpy keep them."""


class BatchKeys(NamedTuple):
    """Names what a data set is asked for: samples, and where the first of them is in the global order."""

    first_position: int
    indices: list[int]


class SeededSamples:
    """The data set that torch's DataLoader asks for collated batches; picklable if its parts are.

    Args:
        dataset: The script's.
        collate: From a list of samples to a batch.
        transform: Called with a sample and a generator of its own, if not None.
        seed: The run's.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        transform: Callable[[Any, torch.Generator], Any] | None,
        seed: int,
    ) -> None:
        self.dataset = dataset
        self._collate, self._transform, self._seed = collate, transform, seed
        self._draws: bool | None = None
        """Whether batches draw from global generators in this process; None: nothing was fetched yet."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        raise TypeError("a sample's seed depends on its position: __getitems__ is given it")

    def __getitems__(self, keys: BatchKeys) -> Any:
        """Returns a collated batch, as torch's fetcher asks for it."""
        if threading.current_thread() is not threading.main_thread():
            return self._fetch(keys)  # the training draws from the same generators at the same time
        if self._draws is None:
            self._draws = self._probe(keys.indices[0])
        if not self._draws:
            states = GeneratorStates()
            try:
                batch = self._fetch(keys)
            except Exception:
                if not states.have_moved():
                    raise
            else:
                if not states.have_moved():
                    return batch
            states.restore()
            self._draws = True
        training_states = None if get_worker_info() is not None else GeneratorStates(is_complete=True)
        try:
            return self._fetch_seeded(keys)
        finally:
            if training_states is not None:
                training_states.restore()

    def _fetch(self, keys: BatchKeys) -> Any:
        fetch_many = getattr(self.dataset, "__getitems__", None)
        dataset, transform = self.dataset, self._transform
        samples = [dataset[index] for index in keys.indices] if fetch_many is None else fetch_many(keys.indices)
        if transform is not None:
            samples = [
                transform(sample, sample_generator(self._seed, position))
                for position, sample in enumerate(samples, keys.first_position)
            ]
        return self._collate(samples)

    def _fetch_seeded(self, keys: BatchKeys) -> Any:
        fetch_many = getattr(self.dataset, "__getitems__", None)
        dataset, transform = self.dataset, self._transform
        samples = []
        for position, index in enumerate(keys.indices, keys.first_position):
            seed_generators(f"{self._seed}:{position}")
            sample = dataset[index] if fetch_many is None else fetch_many([index])[0]
            if transform is not None:
                sample = transform(sample, sample_generator(self._seed, position))
            samples.append(sample)
        seed_generators(f"{self._seed}:{keys.first_position}:batch")
        return self._collate(samples)

    def _probe(self, index: int) -> bool:
        """Returns whether a sample draws, so that of most data sets that do no batch is fetched twice."""
        states = GeneratorStates(is_complete=True)
        try:
            fetch_many = getattr(self.dataset, "__getitems__", None)
            _ = self.dataset[index] if fetch_many is None else fetch_many([index])
            return states.have_moved()
        finally:
            states.restore()


def seed_generators(text: str) -> None:
    """Seeds the global generators of Python, numpy and torch's CPU with different digests of a text."""
    digest = blake2b(text.encode(), digest_size=24, person=b"global").digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    torch.default_generator.manual_seed(int.from_bytes(digest[8:16], "little") >> 1)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(digest[16:20], "little"))


class GeneratorStates:
    """The states of the global generators as they were when this was made.

    It is made for every batch, so it reads the words of Python's and numpy's generators where they are: 2 µs in place of 100.

    Args:
        is_complete: Take the second one of a pair of normal numbers that numpy keeps, too, which only its slow interface gives.
    """

    def __init__(self, is_complete: bool = False) -> None:
        self._torch = torch.default_generator.get_state()
        self._torch_words = ctypes.string_at(self._torch.data_ptr(), self._torch.nbytes)
        address, self._pair = _python_address(), random._inst.gauss_next  # type: ignore[attr-defined]  # typeshed leaves it out
        self._python = random.getstate() if address is None else None
        self._python_words = None if address is None else ctypes.string_at(address, _MT19937_BYTES)
        numpy = sys.modules.get("numpy")
        address = None if numpy is None else _numpy_address(numpy)
        self._numpy = numpy.random.get_state() if numpy is not None and (is_complete or address is None) else None
        self._numpy_words = None if address is None else ctypes.string_at(address, _MT19937_BYTES)

    def have_moved(self) -> bool:
        """Returns whether a number was drawn since; the second one of a pair of numpy's normals is not noticed."""
        return GeneratorStates()._marks() != self._marks()

    def restore(self) -> None:
        """Sets the generators back."""
        torch.default_generator.set_state(self._torch)
        if self._python is not None:
            random.setstate(self._python)
        else:
            ctypes.memmove(_python_address() or 0, self._python_words or b"", _MT19937_BYTES)
            random._inst.gauss_next = self._pair  # type: ignore[attr-defined]  # as above
        numpy = sys.modules.get("numpy")
        if self._numpy is not None:
            numpy.random.set_state(self._numpy)  # type: ignore[union-attr]  # it was there when this was made
        elif self._numpy_words is not None:
            ctypes.memmove(_numpy_address(numpy) or 0, self._numpy_words, _MT19937_BYTES)
            # what the data set's draws have kept of a pair must not be the training's next number
            numpy.random.set_state((*numpy.random.get_state()[:3], 0, 0.0))  # type: ignore[union-attr]  # as above

    def _marks(self) -> tuple[object, ...]:
        numpy = self._numpy_words if self._numpy_words is not None else repr(self._numpy)
        return self._torch_words, self._python_words or self._python, self._pair, numpy


@lru_cache(maxsize=1)
def _python_address() -> int | None:
    """Returns where Python's global generator keeps its index and words; None: not where CPython has them."""
    generator = random._inst
    if type(generator).__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return None
    words = random.getstate()[1]
    address = id(generator) + object.__basicsize__
    expected = array("I", (words[-1], *words[:-1])).tobytes()
    return address if ctypes.string_at(address, _MT19937_BYTES) == expected else None


def _numpy_address(numpy: Any) -> int | None:
    """Returns where numpy's global generator keeps its words, as its ctypes interface says; None: it is of another kind."""
    generator = getattr(numpy.random.mtrand._rand, "_bit_generator", None)
    if type(generator).__name__ != "MT19937":
        return None
    address: int = generator.ctypes.state_address  # type: ignore[union-attr]  # its type was just looked at
    return address


class WorkerStart:
    """Shows the script's `worker_init_fn` and data set the data set itself, in each worker process."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None, "torch calls it in workers alone"
        object.__setattr__(info, "dataset", getattr(info.dataset, "dataset"))  # noqa: B009  # torch types it as any data set
        if self._function is not None:
            self._function(worker)
