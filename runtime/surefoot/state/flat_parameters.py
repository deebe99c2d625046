"""Maps flat parameters (FSDP1, ZeRO) to the tensors they hold ranges of.

Ranges become boxes here, without asking any other rank. A program says of its own flat tensors what they hold with
`describe_flat`; of FSDP1's, torch says it. Used by the parts of a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from surefoot.errors import ConfigurationError
from surefoot.geometry import Box
from surefoot.geometry.flat import flat_boxes
from surefoot.geometry.grids import Grid
from surefoot.state.entries import Window

_ATTRIBUTE = "_surefoot_flat"


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Maps elements `start` to `stop` of tensor `name` into a flat tensor.

    They begin at its element `offset`; `start` and `stop` count in the flattened tensor of `shape`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    def alone(self, prefix: str) -> FlatRange:
        """The same range, as the only one of a tensor."""
        return replace(self, name=f"{prefix}{self.name}", offset=0)

    def boxes(self) -> Iterator[tuple[Box, Window]]:
        at = self.offset
        for box in flat_boxes(self.shape, self.start, self.stop):
            yield box, Window((at,), flat=True)
            at += box.volume


@dataclass(frozen=True, slots=True)
class Flat:
    """Lists a flat tensor's ranges and the ranks with the same ones."""

    ranges: tuple[FlatRange, ...]
    same: Grid

    def named(self, prefix: str) -> Flat:
        return replace(self, ranges=tuple(replace(r, name=f"{prefix}{r.name}") for r in self.ranges))


def describe_flat(
    tensor: torch.Tensor, ranges: Iterable[tuple[str, Sequence[int], int, int, int]], ranks: Sequence[int] = ()
) -> None:
    """Declares which parameters' ranges an optimizer's own flat tensor holds.

    Args:
        tensor: flat, one-dimensional, such as a partition of fp32 weights.
        ranges: (name of the parameter as saved, `model/layer.weight`; its whole shape; first element; one past the last;
            where they begin in `tensor`), counted in elements of the flattened parameter.
        ranks: those that hold the very same ranges; default: this rank alone.

    Raises:
        ConfigurationError: a range is not inside its parameter, or not inside `tensor`.
    """
    found = tuple(FlatRange(name, tuple(shape), start, stop, at) for name, shape, start, stop, at in ranges)
    for r in found:
        if not 0 <= r.start <= r.stop <= prod(r.shape) or not 0 <= r.offset <= tensor.numel() - (r.stop - r.start):
            raise ConfigurationError(
                f"elements {r.start} to {r.stop} of {r.name} {list(r.shape)} do not lie at {r.offset} of a flat tensor of"
                f" {tensor.numel()}: give the range in elements of the flattened parameter"
            )
    setattr(tensor, _ATTRIBUTE, (found, tuple(ranks)))


def described(tensor: torch.Tensor, rank: int) -> Flat | None:
    """The ranges that `describe_flat` declared, or None."""
    said = getattr(tensor, _ATTRIBUTE, None)
    if said is None:
        return None
    ranges, ranks = said
    return Flat(ranges, Grid.of(sorted(ranks)) if ranks else Grid.alone(rank))


@dataclass(frozen=True, slots=True)
class FlatHandle:
    """Describes one flat parameter of FSDP1.

    `parameters` pairs the views that the program sees (use_orig_params) with their ranges.
    """

    flat_parameter: torch.Tensor
    flat: Flat
    parameters: tuple[tuple[torch.Tensor, FlatRange | None], ...]


def flat_handle(module: torch.nn.Module, rank: int, clean: Any) -> FlatHandle | None:
    """Reads the flat parameter of an FSDP1 module; None without one.

    `clean` removes wrappers' parts from a name.
    """
    handle: Any = getattr(module, "_handle", None)
    if handle is None:
        return None
    parameter = handle.flat_param
    found: list[FlatRange | None] = []
    for name, shape, info in zip(parameter._fqns, parameter._shapes, parameter._shard_param_infos, strict=True):
        if not info.in_shard:
            found.append(None)
            continue
        begin, stop = info.intra_param_start_idx, info.intra_param_end_idx + 1
        found.append(FlatRange(clean(name), tuple(shape), begin, stop, info.offset_in_shard))
    flat = Flat(tuple(r for r in found if r is not None), _same_shard(module, handle, rank))
    views = parameter._params or ()
    return FlatHandle(parameter, flat, tuple(zip(views, found, strict=True)) if views else ())


def _same_shard(module: Any, handle: Any, rank: int) -> Grid:
    """Ranks with the same shard: none else, those of hybrid sharding's other replicas, or all without sharding."""
    import torch.distributed as dist

    if not handle.uses_sharded_strategy:
        return Grid.of(sorted(dist.get_process_group_ranks(handle.process_group)))
    replicas = getattr(module, "_inter_node_pg", None)
    return Grid.alone(rank) if replicas is None else Grid.of(sorted(dist.get_process_group_ranks(replicas)))
