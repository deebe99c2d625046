"""Locates live tensors in their global ones.

Only this module handles DTensor, tensor subclasses, and torch's protocol for tensors that declare their own boxes. Used
by the parts of a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from surefoot.errors import ConfigurationError
from surefoot.geometry import Box
from surefoot.geometry.box import flat_boxes
from surefoot.geometry.sharding import Cut, Grid, ShardingRule
from surefoot.state.entries import Entry, LocalBox, Sharing, TensorLocation, dtype_name, is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


# ---- flat parameters -------------------------------------------------------------------------------------------------
# Maps flat parameters (FSDP1, ZeRO) to the tensors whose ranges they contain. Ranges become boxes here, without asking
# any other rank. A program describes its own flat tensors with `describe_flat`; torch describes those of FSDP1. Used by
# the parts of a program.

_ATTRIBUTE = "_surefoot_flat"


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Maps elements `start` to `stop` of tensor `name` into a flat tensor.

    They begin at element `offset` of the flat tensor; `start` and `stop` count in the flattened tensor of `shape`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    def alone(self, prefix: str) -> FlatRange:
        """Returns the same range, as the only one of a tensor."""
        return replace(self, name=f"{prefix}{self.name}", offset=0)

    def boxes(self) -> Iterator[tuple[Box, LocalBox]]:
        offset = self.offset
        for box in flat_boxes(self.shape, self.start, self.stop):
            yield box, LocalBox((offset,), flat=True)
            offset += box.volume


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Lists a flat tensor's ranges and the ranks with the same ones."""

    ranges: tuple[FlatRange, ...]
    same: Grid

    def with_prefix(self, prefix: str) -> FlatLayout:
        return replace(self, ranges=tuple(replace(r, name=f"{prefix}{r.name}") for r in self.ranges))


def describe_flat(
    tensor: torch.Tensor, ranges: Iterable[tuple[str, Sequence[int], int, int, int]], ranks: Sequence[int] = ()
) -> None:
    """Declares which ranges of which parameters an optimizer's own flat tensor contains.

    Args:
        tensor: flat, one-dimensional, such as a partition of fp32 weights.
        ranges: (name of the parameter as saved, `model/layer.weight`; its whole shape; first element; one past the last;
            where they begin in `tensor`), counted in elements of the flattened parameter.
        ranks: those with exactly the same ranges; default: this rank alone.

    Raises:
        ConfigurationError: a range is not inside its parameter, or not inside `tensor`.
    """
    flat_ranges = tuple(
        FlatRange(name, tuple(shape), start, stop, offset) for name, shape, start, stop, offset in ranges
    )
    for flat_range in flat_ranges:
        if not 0 <= flat_range.start <= flat_range.stop <= prod(
            flat_range.shape
        ) or not 0 <= flat_range.offset <= tensor.numel() - (flat_range.stop - flat_range.start):
            raise ConfigurationError(
                f"elements {flat_range.start} to {flat_range.stop} of {flat_range.name} {list(flat_range.shape)} do not lie"
                f" at {flat_range.offset} of a flat tensor of {tensor.numel()}: give the range in elements of the flattened parameter"
            )
    setattr(tensor, _ATTRIBUTE, (flat_ranges, tuple(ranks)))


def declared_ranges(tensor: torch.Tensor, rank: int) -> FlatLayout | None:
    """Returns the ranges that `describe_flat` declared, or None."""
    declaration = getattr(tensor, _ATTRIBUTE, None)
    if declaration is None:
        return None
    ranges, ranks = declaration
    return FlatLayout(ranges, Grid.of(sorted(ranks)) if ranks else Grid.alone(rank))


@dataclass(frozen=True, slots=True)
class FlatHandle:
    """Describes one flat parameter of FSDP1.

    `parameters` pairs the views that the program sees (use_orig_params) with their ranges.
    """

    flat_parameter: torch.Tensor
    flat: FlatLayout
    parameters: tuple[tuple[torch.Tensor, FlatRange | None], ...]


def flat_handle(module: torch.nn.Module, rank: int, clean_name: Any) -> FlatHandle | None:
    """Reads the flat parameter of an FSDP1 module; None without one.

    `clean_name` removes wrappers' parts from a name.
    """
    handle: Any = getattr(module, "_handle", None)
    if handle is None:
        return None
    parameter = handle.flat_param
    ranges: list[FlatRange | None] = []
    for name, shape, info in zip(parameter._fqns, parameter._shapes, parameter._shard_param_infos, strict=True):
        if not info.in_shard:
            ranges.append(None)
            continue
        start, stop = info.intra_param_start_idx, info.intra_param_end_idx + 1
        ranges.append(FlatRange(clean_name(name), tuple(shape), start, stop, info.offset_in_shard))
    flat = FlatLayout(tuple(r for r in ranges if r is not None), _ranks_with_same_shard(module, handle, rank))
    views = parameter._params or ()
    return FlatHandle(parameter, flat, tuple(zip(views, ranges, strict=True)) if views else ())


def _ranks_with_same_shard(module: Any, handle: Any, rank: int) -> Grid:
    """Returns the ranks with the same shard: this one, hybrid sharding's replicas, or all if unsharded."""
    import torch.distributed as dist

    if not handle.uses_sharded_strategy:
        return Grid.of(sorted(dist.get_process_group_ranks(handle.process_group)))
    replicas = getattr(module, "_inter_node_pg", None)
    return Grid.alone(rank) if replicas is None else Grid.of(sorted(dist.get_process_group_ranks(replicas)))


# ---- replicas --------------------------------------------------------------------------------------------------------
# Parses the program's statement of which ranks have the same plain tensors. It is needed if ranks have different
# models: pipeline stages, and experts that are not DTensors. Used by the parts.


class Replicas:
    """Maps names to the ranks that have the same plain tensors.

    `ranks_or_patterns`: a process group, a device mesh or ranks, for all modules, or a mapping from patterns of names
    (`model/experts.*`) to these.
    """

    def __init__(self, ranks_or_patterns: Any, rank: int) -> None:
        by_pattern = isinstance(ranks_or_patterns, Mapping)
        self._grids = {pattern: _grid(ranks) for pattern, ranks in ranks_or_patterns.items()} if by_pattern else {}
        self._modules = None if by_pattern or ranks_or_patterns is None else _grid(ranks_or_patterns)
        for grid in (*self._grids.values(), *([] if self._modules is None else [self._modules])):
            if grid.coordinate(rank) is None:
                raise ConfigurationError(
                    f"replicas are given as ranks without this one ({rank}): name the ranks that hold the same as it"
                )

    def of(self, name: str) -> Grid | None:
        """Returns the ranks that have a named tensor or object; None: not given."""
        for pattern, grid in self._grids.items():
            if fnmatchcase(name, pattern) or name.partition("/")[0] == pattern:
                return grid
        return self._modules

    def of_objects(self) -> Replicas:
        """Returns a copy with only the ranks given by name, for schedulers and param groups."""
        by_name_only = copy(self)
        by_name_only._modules = None
        return by_name_only


def _grid(ranks: Any) -> Grid:
    mesh = getattr(ranks, "mesh", None)
    if mesh is not None:
        return Grid.of(sorted(int(rank) for rank in mesh.flatten().tolist()))
    if isinstance(ranks, Iterable):
        return Grid.of(sorted(int(rank) for rank in ranks))
    import torch.distributed as dist

    return Grid.of(sorted(dist.get_process_group_ranks(ranks)))


# ---- tensor locations ------------------------------------------------------------------------------------------------

_STAGES = ("pp", "pipe", "stage")
"""Prefixes of the names of mesh dimensions whose ranks have different tensors."""

Owner = tuple[str, torch.Tensor]
"""A parameter's full name, and the parameter."""


def is_checkpointable_tensor(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has the fields of torch's CheckpointableTensor."""
    return hasattr(tensor, "global_shape") and hasattr(tensor, "global_offsets")


def grid_of_mesh(mesh: DeviceMesh) -> Grid:
    """Returns the ranks of a device mesh."""
    return Grid.of([int(rank) for rank in mesh.mesh.flatten().tolist()], tuple(mesh.mesh.shape))


def rule_of(tensor: torch.Tensor, rank: int, placements: tuple[Any, ...] | None = None) -> ShardingRule:
    """Returns the sharding rule of a DTensor, or of `placements` on its mesh."""
    dtensor: Any = tensor
    return _rule(dtensor.device_mesh, tuple(dtensor.placements if placements is None else placements), rank)


def classify_inner_split(local: torch.Tensor, attribute: str, part: torch.Tensor) -> str:
    """Classifies how a subclass' inner tensor splits along with its elements.

    `cut`: like the elements. `rows`: a fixed number of values for each row. `whole`: complete on every rank.
    """
    if part.shape == local.shape:
        return "cut"
    is_blockwise = bool(getattr(local, "block_size", None)) and attribute in (
        "codes",
        "scale",
    )  # torchao's optimizer states
    if is_blockwise and part.dim() == 1 and local.dim() and local.shape[0] and part.numel() % local.shape[0] == 0:
        return "rows"
    return "whole" if attribute == "qmap" else "cut"


def grid_of_dtensor(tensor: torch.Tensor, rank: int) -> Grid:
    """Returns all ranks that have parts of a DTensor, along every dimension of its mesh."""
    dtensor: Any = tensor
    return _rule(dtensor.device_mesh, tuple(dtensor.placements), rank).grid


class EntryPlacer:
    """Makes and caches the entries of one part's tensors.

    Computing a location is too slow for each save. `default`: the ranks that have a plain tensor, unless `replicas`
    gives others.
    """

    def __init__(self, rank: int, default: Grid, replicas: Replicas) -> None:
        self.rank = rank
        self._default, self._replicas = default, replicas
        self._cache: dict[str, tuple[torch.Tensor, tuple[Entry, ...]]] = {}
        self._plain_locations: dict[tuple[tuple[int, ...], Grid], TensorLocation] = {}
        """Locations of plain tensors; those with the same shape and ranks share one."""

    def forget(self) -> None:
        """Clears the cache of entries."""
        self._cache.clear()

    def of(
        self, name: str, tensor: torch.Tensor, sharing: Sharing, lazy: bool = False, owner: Owner | None = None
    ) -> tuple[Entry, ...]:
        """Returns the entries of a tensor, which may be state of `owner`."""
        cached = self._cache.get(name)
        if cached is not None and cached[0] is tensor:
            return cached[1]
        entries = tuple(
            Entry(saved_name, tensor, dtype_name(part.dtype), location, sharing, lazy, window, inner)
            for saved_name, part, inner in inner_parts(name, tensor)
            for location, window in self._locations_of(saved_name, tensor, part, owner or (name, tensor), inner)
        )
        self._cache[name] = (tensor, entries)
        return entries

    def of_flat(
        self, prefix: str, leaf: str, tensor: torch.Tensor, flat: FlatLayout, lazy: bool = False
    ) -> tuple[Entry, ...]:
        """Returns the entries of a flat tensor's ranges, named `prefix`range`leaf`."""
        key = f"{prefix}{flat.ranges[0].name if flat.ranges else ''}{leaf}"
        cached = self._cache.get(key)
        if cached is not None and cached[0] is tensor:
            return cached[1]
        dtype = dtype_name(tensor.dtype)
        entries = tuple(
            Entry(
                f"{prefix}{r.name}{leaf}", tensor, dtype, TensorLocation(r.shape, box, flat.same), "split", lazy, window
            )
            for r in flat.ranges
            for box, window in r.boxes()
        )
        self._cache[key] = (tensor, entries)
        return entries

    def of_flat_scalar(self, prefix: str, leaf: str, tensor: torch.Tensor, flat: FlatLayout) -> tuple[Entry, ...]:
        """Returns the entries of a counter that belongs to a whole flat tensor.

        It is saved once for each range, by the rank that has the range's first element.
        """
        shape = tuple(tensor.shape)
        return tuple(
            Entry(
                f"{prefix}{r.name}{leaf}",
                tensor,
                dtype_name(tensor.dtype),
                TensorLocation(shape, Box.whole(shape), flat.same if r.start == 0 else None),
                "lowest",
                copy_in_background=True,
            )
            for r in flat.ranges
        )

    def _locations_of(
        self, name: str, tensor: torch.Tensor, part: torch.Tensor, owner: Owner, attribute: str | None
    ) -> Iterator[tuple[TensorLocation, LocalBox | None]]:
        """Yields the locations of one inner tensor; `owner` is the parameter whose state it may be."""
        if is_dtensor(tensor):
            yield from self._dtensor_locations(name, tensor, part, attribute)  # type: ignore[arg-type]  # is_dtensor has just said so
            return
        if part.layout != torch.strided or part.is_quantized or part.device.type == "meta":
            kind = "quantized" if part.is_quantized else f"{str(part.layout).removeprefix('torch.')} {part.device.type}"
            raise ConfigurationError(
                f"{name} is a {kind} tensor: only dense tensors with memory can be saved. A buffer that the program builds again by"
                " itself is left out if it is registered as not persistent (the last argument of register_buffer is False); keep others as dense"
                " tensors"
            )
        grid = self._replicas.of(owner[0])
        if is_checkpointable_tensor(owner[1]):
            grid = grid or Grid.alone(self.rank)
            if owner[1].shape == tensor.shape:
                yield from _declared_locations(owner[1], grid)
            else:  # a counter: saved with the tensor's first element
                shape = tuple(part.shape)
                yield TensorLocation(shape, Box.whole(shape), grid if _has_first_element(owner[1]) else None), None
            return
        # plain state of a sharded parameter is the same on all ranks of the parameter's mesh
        if grid is None and is_dtensor(owner[1]):
            grid = grid_of_dtensor(owner[1], self.rank)
        shape_and_grid = tuple(part.shape), grid or self._default
        if shape_and_grid not in self._plain_locations:
            rule = ShardingRule.replicated(shape_and_grid[1].only({}))
            self._plain_locations[shape_and_grid] = TensorLocation(
                shape_and_grid[0], Box.whole(shape_and_grid[0]), rule.grid, rule
            )
        yield self._plain_locations[shape_and_grid], None

    def _dtensor_locations(
        self, name: str, tensor: DTensor, part: torch.Tensor, attribute: str | None
    ) -> Iterator[tuple[TensorLocation, LocalBox | None]]:
        """Yields the locations of a DTensor's local part, or of one inner tensor of a sharded subclass."""
        if any(p.is_partial() for p in tensor.placements):
            raise ConfigurationError(f"{name} is a partial sum over {tensor.device_mesh}: reduce it before saving it")
        rule = _rule(tensor.device_mesh, tuple(tensor.placements), self.rank)
        if rule.grid.coordinate(self.rank) is None:
            raise ConfigurationError(
                f"{name} lives on a mesh that rank {self.rank} is not part of: do not give it to this rank"
            )
        shape = tuple(tensor.shape)
        local = rule.local_shape(shape, self.rank)
        split = classify_inner_split(tensor._local_tensor, attribute, part) if attribute else "cut"
        if split == "whole":
            replicated = ShardingRule.replicated(rule.grid.only({}))
            yield TensorLocation(tuple(part.shape), Box.whole(tuple(part.shape)), replicated.grid, replicated), None
            return
        if split == "rows":
            yield from self._block_locations(name, tensor, part, rule)
            return
        if tuple(part.shape) != local:
            shape = _shape_of_inner(name, tensor, part, rule)
            local = rule.local_shape(shape, self.rank)
        parts = rule.parts(shape, self.rank)
        same = rule.same(self.rank)
        if not parts:  # an empty shard still needs an entry, so that the tensor is in the layout
            yield TensorLocation(shape, Box((0,) * len(shape), local), same, rule), None
        for shard_part in parts:
            window = None if shard_part.box.lengths == local else LocalBox(shard_part.local)
            yield TensorLocation(shape, shard_part.box, same, rule), window

    def _block_locations(
        self, name: str, tensor: DTensor, part: torch.Tensor, rule: ShardingRule
    ) -> Iterator[tuple[TensorLocation, LocalBox | None]]:
        """Locates quantization blocks within rows as a fixed number for each row, sharded like the rows."""
        row_count = int(tensor._local_tensor.shape[0])
        shape = (int(tensor.shape[0]), part.numel() // row_count)
        parts = rule.parts(shape, self.rank)
        if (
            any(c is not None and c[0] != 0 for c in rule.cuts)
            or len(parts) != 1
            or parts[0].box.lengths[0] != row_count
        ):
            raise ConfigurationError(
                f"{name} are blocks of a tensor that is placed as {tensor.placements}: only rows that are cut once can be"
                " put together at another world size"
            )
        yield TensorLocation(shape, parts[0].box, rule.same(self.rank), rule), LocalBox((0,), flat=True)


@lru_cache(maxsize=1024)
def _rule(mesh: DeviceMesh, placements: tuple[Any, ...], rank: int) -> ShardingRule:
    """Computes the sharding rule of a DTensor's mesh and placements.

    A DTensor on part of a mesh (FSDP's dimension of an FSDP × TP mesh) is repeated for each coordinate of the other
    dimensions, except along pipeline stages, which have different tensors.
    """
    cuts: list[Cut | None] = []
    for placement in placements:
        factor = getattr(placement, "split_factor", 1)
        cuts.append(None if placement.is_replicate() else (int(placement.dim), int(factor)))
    grid = grid_of_mesh(mesh)
    outer_dimensions = [] if grid.listed else _other_dimensions(mesh, grid, rank)
    base = grid.base - sum(coordinate * stride for _, stride, coordinate in outer_dimensions)
    sizes = (*(size for size, _, _ in outer_dimensions), *grid.sizes)
    strides = (*(stride for _, stride, _ in outer_dimensions), *grid.strides)
    return ShardingRule(Grid(base, sizes, strides, grid.listed), (*(None for _ in outer_dimensions), *cuts))


def _other_dimensions(mesh: DeviceMesh, grid: Grid, rank: int) -> list[tuple[int, int, int]]:
    """Returns (size, stride, this rank's coordinate) of root mesh dimensions that `mesh` does not span."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    root_grid = grid_of_mesh(root)
    coordinate = root_grid.coordinate(rank)
    if coordinate is None or root_grid.listed or grid.count == root_grid.count:
        return []
    dimensions = []
    names = root.mesh_dim_names or ("",) * len(root_grid.sizes)
    for d, (size, stride, name) in enumerate(zip(root_grid.sizes, root_grid.strides, names, strict=True)):
        ranks = [rank + (c - coordinate[d]) * stride for c in range(size)]
        meets_once = sum(grid.coordinate(r) is not None for r in ranks) == 1
        if size > 1 and meets_once and not name.startswith(_STAGES):
            dimensions.append((size, stride, coordinate[d]))
    return dimensions


def inner_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Yields (name, memory, attribute) of each tensor that contains elements.

    A subclass that wraps a tensor of its own shape and type (as Float8 training does with the full-precision weight)
    counts as that tensor, under the plain name. A quantized subclass is saved as its inner tensors.
    """
    local = local_part(tensor) if not is_dtensor(tensor) else tensor._local_tensor  # type: ignore[attr-defined]
    flatten = getattr(local, "__tensor_flatten__", None)
    if flatten is None or type(local) in (torch.Tensor, torch.nn.Parameter):
        yield name, local, None
        return
    inner = [(attribute, getattr(local, attribute)) for attribute in flatten()[0]]
    same_kind = [(a, t) for a, t in inner if t.shape == local.shape and t.dtype == local.dtype]
    if same_kind and sum(t.numel() for _, t in inner) <= same_kind[0][1].numel() + 1:  # the only other value is a scale
        yield name, same_kind[0][1], same_kind[0][0]
        return
    for attribute, part in inner:
        yield f"{name}:{attribute}", part, attribute


def _shape_of_inner(name: str, tensor: DTensor, part: torch.Tensor, rule: ShardingRule) -> tuple[int, ...]:
    """Returns the global shape of a subclass's other inner tensors, such as scales.

    Raises ConfigurationError if it differs from the elements in a sharded dimension.
    """
    local, shape = tuple(tensor._local_tensor.shape), tuple(tensor.shape)
    if part is not tensor._local_tensor:
        cut = {c[0] for c in rule.cuts if c is not None}
        if not cut or (len(part.shape) == len(shape) and all(part.shape[d] == local[d] for d in cut)):
            return tuple(shape[d] if d in cut else int(n) for d, n in enumerate(part.shape))
    raise ConfigurationError(
        f"{name} holds {tuple(part.shape)} here where its placement {tensor.placements} says {local} of {shape}: it is"
        " not cut as its elements are, so it cannot be put together at another world size"
    )


def _has_first_element(tensor: Any) -> bool:
    return any(not any(start) for start in tensor.global_offsets)


def _declared_locations(tensor: Any, same: Grid) -> Iterator[tuple[TensorLocation, LocalBox | None]]:
    shape = tuple(map(int, tensor.global_shape))
    for start, local, lengths in zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True):
        box = Box(tuple(map(int, start)), tuple(map(int, lengths)))
        window = None if box.lengths == tuple(tensor.shape) or not local else LocalBox(tuple(map(int, local)))
        yield TensorLocation(shape, box, same), window
