"""Parses which ranks hold the same plain tensors, as the program says.

Needed where not all ranks have the same model: pipeline stages, and experts that are not DTensors. Used by the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from fnmatch import fnmatchcase
from typing import Any

from surefoot.errors import ConfigurationError
from surefoot.geometry.grids import Grid


class Replicas:
    """Holds which ranks have the same plain tensors.

    `given`: a process group, a device mesh or ranks, for all modules, or by pattern of names (`model/experts.*`).
    """

    def __init__(self, given: Any, rank: int) -> None:
        by_pattern = isinstance(given, Mapping)
        self._grids = {pattern: _grid(what) for pattern, what in given.items()} if by_pattern else {}
        self._modules = None if by_pattern or given is None else _grid(given)
        for grid in (*self._grids.values(), *([] if self._modules is None else [self._modules])):
            if grid.coordinate(rank) is None:
                raise ConfigurationError(
                    f"replicas are given as ranks without this one ({rank}): name the ranks that hold the same as it"
                )

    def of(self, name: str) -> Grid | None:
        """The ranks that hold a named tensor or object; None: not given."""
        for pattern, grid in self._grids.items():
            if fnmatchcase(name, pattern) or name.partition("/")[0] == pattern:
                return grid
        return self._modules

    def of_objects(self) -> Replicas:
        """Restricts to what was given by name, for schedulers and param groups."""
        found = copy(self)
        found._modules = None
        return found


def _grid(what: Any) -> Grid:
    mesh = getattr(what, "mesh", None)
    if mesh is not None:
        return Grid.of(sorted(int(rank) for rank in mesh.flatten().tolist()))
    if isinstance(what, Iterable):
        return Grid.of(sorted(int(rank) for rank in what))
    import torch.distributed as dist

    return Grid.of(sorted(dist.get_process_group_ranks(what)))
