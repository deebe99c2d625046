"""Locates live tensors in their global ones.

The one spot that knows DTensor, tensor subclasses, and torch's protocol for tensors that say themselves which boxes
they hold. Used by the parts of a program.
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
# Maps flat parameters (FSDP1, ZeRO) to the tensors they hold ranges of. Ranges become boxes here, without asking any
# other rank. A program says of its own flat tensors what they hold with `describe_flat`; of FSDP1's, torch says it.
# Used by the parts of a program.

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

    def boxes(self) -> Iterator[tuple[Box, LocalBox]]:
        at = self.offset
        for box in flat_boxes(self.shape, self.start, self.stop):
            yield box, LocalBox((at,), flat=True)
            at += box.volume


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


def declared_ranges(tensor: torch.Tensor, rank: int) -> FlatLayout | None:
    """The ranges that `describe_flat` declared, or None."""
    said = getattr(tensor, _ATTRIBUTE, None)
    if said is None:
        return None
    ranges, ranks = said
    return FlatLayout(ranges, Grid.of(sorted(ranks)) if ranks else Grid.alone(rank))


@dataclass(frozen=True, slots=True)
class FlatHandle:
    """Describes one flat parameter of FSDP1.

    `parameters` pairs the views that the program sees (use_orig_params) with their ranges.
    """

    flat_parameter: torch.Tensor
    flat: FlatLayout
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
    flat = FlatLayout(tuple(r for r in found if r is not None), _same_shard(module, handle, rank))
    views = parameter._params or ()
    return FlatHandle(parameter, flat, tuple(zip(views, found, strict=True)) if views else ())


def _same_shard(module: Any, handle: Any, rank: int) -> Grid:
    """Ranks with the same shard: none else, those of hybrid sharding's other replicas, or all without sharding."""
    import torch.distributed as dist

    if not handle.uses_sharded_strategy:
        return Grid.of(sorted(dist.get_process_group_ranks(handle.process_group)))
    replicas = getattr(module, "_inter_node_pg", None)
    return Grid.alone(rank) if replicas is None else Grid.of(sorted(dist.get_process_group_ranks(replicas)))


# ---- replicas --------------------------------------------------------------------------------------------------------
# Parses which ranks hold the same plain tensors, as the program says. Needed where not all ranks have the same model:
# pipeline stages, and experts that are not DTensors. Used by the parts.


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


# ---- tensor locations ------------------------------------------------------------------------------------------------

_STAGES = ("pp", "pipe", "stage")
"""How names of mesh dimensions begin whose ranks hold different tensors."""

Owner = tuple[str, torch.Tensor]
"""A parameter's full name, and itself."""


def is_checkpointable_tensor(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has the fields of torch's CheckpointableTensor."""
    return hasattr(tensor, "global_shape") and hasattr(tensor, "global_offsets")


def grid_of_mesh(mesh: DeviceMesh) -> Grid:
    """The ranks of a device mesh."""
    return Grid.of([int(rank) for rank in mesh.mesh.flatten().tolist()], tuple(mesh.mesh.shape))


def rule_of(tensor: torch.Tensor, rank: int, placements: tuple[Any, ...] | None = None) -> ShardingRule:
    """The sharding rule of a DTensor, or of `placements` on its mesh."""
    spread: Any = tensor
    return _rule(spread.device_mesh, tuple(spread.placements if placements is None else placements), rank)


def classify_inner_split(local: torch.Tensor, attribute: str, part: torch.Tensor) -> str:
    """Classifies how a subclass' inner tensor splits along with its elements.

    `cut` like them, so many elements for each of their `rows`, or the `whole` of it with each part.
    """
    if part.shape == local.shape:
        return "cut"
    blocks = bool(getattr(local, "block_size", None)) and attribute in ("codes", "scale")  # torchao's optimizer states
    if blocks and part.dim() == 1 and local.dim() and local.shape[0] and part.numel() % local.shape[0] == 0:
        return "rows"
    return "whole" if attribute == "qmap" else "cut"


def grid_of_dtensor(tensor: torch.Tensor, rank: int) -> Grid:
    """All ranks of a DTensor's mesh, along every dimension."""
    spread: Any = tensor
    return _rule(spread.device_mesh, tuple(spread.placements), rank).grid


class EntryPlacer:
    """Makes and caches the entries of one part's tensors.

    Computing a place is too slow for each save. `default`: who holds a plain tensor, unless `replicas` says otherwise.
    """

    def __init__(self, rank: int, default: Grid, replicas: Replicas) -> None:
        self.rank = rank
        self._default, self._replicas = default, replicas
        self._cache: dict[str, tuple[torch.Tensor, tuple[Entry, ...]]] = {}
        self._plain: dict[tuple[tuple[int, ...], Grid], TensorLocation] = {}
        """Places of plain tensors: those of one shape and the same holders share one."""

    def forget(self) -> None:
        """Clears the cache of entries."""
        self._cache.clear()

    def of(
        self, name: str, tensor: torch.Tensor, sharing: Sharing, lazy: bool = False, owner: Owner | None = None
    ) -> tuple[Entry, ...]:
        """The entries of a tensor, which may be state of `owner`."""
        known = self._cache.get(name)
        if known is not None and known[0] is tensor:
            return known[1]
        found = tuple(
            Entry(called, tensor, dtype_name(part.dtype), place, sharing, lazy, window, inner)
            for called, part, inner in inner_parts(name, tensor)
            for place, window in self._places(called, tensor, part, owner or (name, tensor), inner)
        )
        self._cache[name] = (tensor, found)
        return found

    def of_flat(
        self, prefix: str, leaf: str, tensor: torch.Tensor, flat: FlatLayout, lazy: bool = False
    ) -> tuple[Entry, ...]:
        """The entries of a flat tensor's ranges, named `prefix`range`leaf`."""
        key = f"{prefix}{flat.ranges[0].name if flat.ranges else ''}{leaf}"
        known = self._cache.get(key)
        if known is not None and known[0] is tensor:
            return known[1]
        dtype = dtype_name(tensor.dtype)
        found = tuple(
            Entry(
                f"{prefix}{r.name}{leaf}", tensor, dtype, TensorLocation(r.shape, box, flat.same), "split", lazy, window
            )
            for r in flat.ranges
            for box, window in r.boxes()
        )
        self._cache[key] = (tensor, found)
        return found

    def of_flat_scalar(self, prefix: str, leaf: str, tensor: torch.Tensor, flat: FlatLayout) -> tuple[Entry, ...]:
        """The entries of a counter that belongs to a whole flat tensor.

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

    def _places(
        self, name: str, tensor: torch.Tensor, part: torch.Tensor, owner: Owner, attribute: str | None
    ) -> Iterator[tuple[TensorLocation, LocalBox | None]]:
        if is_dtensor(tensor):
            yield from self._of_dtensor(name, tensor, part, attribute)  # type: ignore[arg-type]  # is_dtensor has just said so
            return
        if part.layout != torch.strided or part.is_quantized or part.device.type == "meta":
            raise ConfigurationError(
                f"{name} is a {part.layout} tensor on {part.device}: only dense tensors with memory can be saved"
            )
        told = self._replicas.of(owner[0])
        if is_checkpointable_tensor(owner[1]):
            told = told or Grid.alone(self.rank)
            if owner[1].shape == tensor.shape:
                yield from _declared_locations(owner[1], told)
            else:  # a counter: saved with the tensor's first element
                shape = tuple(part.shape)
                yield TensorLocation(shape, Box.whole(shape), told if _has_first(owner[1]) else None), None
            return
        if told is None and is_dtensor(owner[1]):
            told = grid_of_dtensor(owner[1], self.rank)
        alike = tuple(part.shape), told or self._default
        if alike not in self._plain:
            rule = ShardingRule.replicated(alike[1].only({}))
            self._plain[alike] = TensorLocation(alike[0], Box.whole(alike[0]), rule.grid, rule)
        yield self._plain[alike], None

    def _of_dtensor(
        self, name: str, tensor: DTensor, part: torch.Tensor, attribute: str | None
    ) -> Iterator[tuple[TensorLocation, LocalBox | None]]:
        if any(p.is_partial() for p in tensor.placements):
            raise ConfigurationError(f"{name} is a partial sum over {tensor.device_mesh}: reduce it before saving it")
        rule = _rule(tensor.device_mesh, tuple(tensor.placements), self.rank)
        if rule.grid.coordinate(self.rank) is None:
            raise ConfigurationError(
                f"{name} lives on a mesh that rank {self.rank} is not part of: do not give it to this rank"
            )
        shape = tuple(tensor.shape)
        local = rule.local_shape(shape, self.rank)
        how = classify_inner_split(tensor._local_tensor, attribute, part) if attribute else "cut"
        if how == "whole":
            everywhere = ShardingRule.replicated(rule.grid.only({}))
            yield TensorLocation(tuple(part.shape), Box.whole(tuple(part.shape)), everywhere.grid, everywhere), None
            return
        if how == "rows":
            yield from self._rows(name, tensor, part, rule)
            return
        if tuple(part.shape) != local:
            shape = _shape_of_inner(name, tensor, part, rule)
            local = rule.local_shape(shape, self.rank)
        parts = rule.parts(shape, self.rank)
        same = rule.same(self.rank)
        if not parts:
            yield TensorLocation(shape, Box((0,) * len(shape), local), same, rule), None
        for one in parts:
            window = None if one.box.lengths == local else LocalBox(one.local)
            yield TensorLocation(shape, one.box, same, rule), window

    def _rows(
        self, name: str, tensor: DTensor, part: torch.Tensor, rule: ShardingRule
    ) -> Iterator[tuple[TensorLocation, LocalBox | None]]:
        """Blocks that lie within rows, as so many for each row; cut as the rows are."""
        rows = int(tensor._local_tensor.shape[0])
        shape = (int(tensor.shape[0]), part.numel() // rows)
        parts = rule.parts(shape, self.rank)
        if any(c is not None and c[0] != 0 for c in rule.cuts) or len(parts) != 1 or parts[0].box.lengths[0] != rows:
            raise ConfigurationError(
                f"{name} are blocks of a tensor that is placed as {tensor.placements}: only rows that are cut once can be"
                " put together at another world size"
            )
        yield TensorLocation(shape, parts[0].box, rule.same(self.rank), rule), LocalBox((0,), flat=True)


@lru_cache(maxsize=1024)
def _rule(mesh: DeviceMesh, placements: tuple[Any, ...], rank: int) -> ShardingRule:
    """How such a DTensor is spread. One on part of a mesh (FSDP's dimension of an FSDP × TP mesh) is there again for
    each coordinate of the other dimensions, except along those of pipeline stages, which hold other tensors.
    """
    cuts: list[Cut | None] = []
    for placement in placements:
        factor = getattr(placement, "split_factor", 1)
        cuts.append(None if placement.is_replicate() else (int(placement.dim), int(factor)))
    grid = grid_of_mesh(mesh)
    again = [] if grid.listed else _other_dimensions(mesh, grid, rank)
    base = grid.base - sum(at * stride for _, stride, at in again)
    sizes = (*(size for size, _, _ in again), *grid.sizes)
    strides = (*(stride for _, stride, _ in again), *grid.strides)
    return ShardingRule(Grid(base, sizes, strides, grid.listed), (*(None for _ in again), *cuts))


def _other_dimensions(mesh: DeviceMesh, grid: Grid, rank: int) -> list[tuple[int, int, int]]:
    """(size, stride, this rank's coordinate) of the dimensions of the whole mesh that this part of it stands still in."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    whole = grid_of_mesh(root)
    here = whole.coordinate(rank)
    if here is None or whole.listed or grid.count == whole.count:
        return []
    found = []
    names = root.mesh_dim_names or ("",) * len(whole.sizes)
    for d, (size, stride, name) in enumerate(zip(whole.sizes, whole.strides, names, strict=True)):
        line = [rank + (c - here[d]) * stride for c in range(size)]
        alone = sum(grid.coordinate(r) is not None for r in line) == 1
        if size > 1 and alone and not name.startswith(_STAGES):
            found.append((size, stride, here[d]))
    return found


def inner_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Yields (name, memory, attribute) of each tensor that holds elements.

    A subclass that wraps a tensor of its own shape and type (Float8 training keeps the weight in full precision so)
    counts as that tensor, under the plain name; a quantized one is saved as the tensors it is made of.
    """
    local = local_part(tensor) if not is_dtensor(tensor) else tensor._local_tensor  # type: ignore[attr-defined]
    flatten = getattr(local, "__tensor_flatten__", None)
    if flatten is None or type(local) in (torch.Tensor, torch.nn.Parameter):
        yield name, local, None
        return
    inner = [(attribute, getattr(local, attribute)) for attribute in flatten()[0]]
    alike = [(a, t) for a, t in inner if t.shape == local.shape and t.dtype == local.dtype]
    if alike and sum(t.numel() for _, t in inner) <= alike[0][1].numel() + 1:  # nothing beside it but a scale
        yield name, alike[0][1], alike[0][0]
        return
    for attribute, part in inner:
        yield f"{name}:{attribute}", part, attribute


def _shape_of_inner(name: str, tensor: DTensor, part: torch.Tensor, rule: ShardingRule) -> tuple[int, ...]:
    """The global shape of what a subclass wraps beside its elements (scales): known where no cut dimension differs."""
    local, shape = tuple(tensor._local_tensor.shape), tuple(tensor.shape)
    if part is not tensor._local_tensor:
        cut = {c[0] for c in rule.cuts if c is not None}
        if not cut or (len(part.shape) == len(shape) and all(part.shape[d] == local[d] for d in cut)):
            return tuple(shape[d] if d in cut else int(n) for d, n in enumerate(part.shape))
    raise ConfigurationError(
        f"{name} holds {tuple(part.shape)} here where its placement {tensor.placements} says {local} of {shape}: it is"
        " not cut as its elements are, so it cannot be put together at another world size"
    )


def _has_first(tensor: Any) -> bool:
    return any(not any(start) for start in tensor.global_offsets)


def _declared_locations(tensor: Any, same: Grid) -> Iterator[tuple[TensorLocation, LocalBox | None]]:
    shape = tuple(map(int, tensor.global_shape))
    for start, local, lengths in zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True):
        box = Box(tuple(map(int, start)), tuple(map(int, lengths)))
        window = None if box.lengths == tuple(tensor.shape) or not local else LocalBox(tuple(map(int, local)))
        yield TensorLocation(shape, box, same), window
