"""Digests some samples of a data set, so that a restored run reports that its data is another.

Only data sets are digested whose samples are in memory: reading one of them has no side effect, costs nothing, and gives the same
each time. Texts are left out: paths may differ between the nodes of a job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

MAX_ITEMS = 64
MAX_ELEMENTS = 1024
_MAX_DEPTH = 4


def sample_digest(dataset: Any) -> str | None:
    """Returns a digest of the first, the middle and the last sample; None: the data set is not in memory, or is empty."""
    digest = blake2b(digest_size=8)
    for number in sorted({0, len(dataset) // 2, len(dataset) - 1}):
        where, index = _storage_of(dataset, number) if len(dataset) else (None, 0)
        if where is None:
            return None
        for part in where if isinstance(where, _Columns) else (where,):
            for chunk in _bytes_of(part[index], 0):
                digest.update(chunk)
    return digest.hexdigest()


class _Columns(tuple[Any, ...]):
    """The tensors of a TensorDataset: a sample is a row of each."""


def _storage_of(dataset: Any, index: int) -> tuple[Any, int]:
    """Returns the sequence in memory that has a sample, and its index there; None: it is not in memory."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    if type(dataset) in (list, tuple) or _is_array(dataset):
        return dataset, index
    if torch_data is None:
        return None, 0
    if type(dataset) is torch_data.TensorDataset:
        return _Columns(dataset.tensors), index
    if type(dataset) is torch_data.Subset:
        return _storage_of(dataset.dataset, int(dataset.indices[index]))
    if type(dataset) is torch_data.ConcatDataset:
        for part in dataset.datasets:
            if index < len(part):
                return _storage_of(part, index)
            index -= len(part)
    return None, 0


def _is_array(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def _bytes_of(value: Any, depth: int) -> Iterator[bytes]:
    """Yields bytes that are equal for equal samples."""
    yield type(value).__name__.encode()
    if isinstance(value, bool | int | float | complex):
        yield repr(value).encode()
    elif _is_array(value):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if not getattr(value.dtype, "hasobject", False):
            yield repr(value.reshape(-1)[:MAX_ELEMENTS].tolist()).encode()
    elif isinstance(value, Mapping | list | tuple) and depth < _MAX_DEPTH:
        items = value.values() if isinstance(value, Mapping) else value
        for _, item in zip(range(MAX_ITEMS), items, strict=False):
            yield from _bytes_of(item, depth + 1)
