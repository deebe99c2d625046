"""One named tensor as this rank holds it: its place in the global tensor, and which ranks hold the same.

`place` is the one spot that knows DTensor (FSDP2's sharded parameters, uneven shards included); everything behind it
sees boxes. Used by the parts of a program's state, and by whoever saves or restores them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from surefoot.errors import ConfigurationError, StateMismatch
from surefoot.geometry import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Sharing = Literal["split", "lowest", "local"]
"""How ranks that hold the same box share its saving: in parts, all by the lowest rank, or each its own tensor."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank's part of a tensor lies, and the ranks that hold the very same part (this one among them)."""

    shape: tuple[int, ...]
    box: Box
    group: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to save and restore. `tensor` may be a DTensor; `local_part` gives the memory behind it."""

    name: str
    tensor: torch.Tensor
    place: Place
    sharing: Sharing
    lazy: bool = False
    """It stands still until a hooked optimizer steps, so that its copy may overlap forward and backward."""

    @property
    def dtype(self) -> str:
        return dtype_name(self.tensor.dtype)

    def local_part(self) -> torch.Tensor:
        return local_part(self.tensor)

    def kept_local(self, rank: int) -> Entry:
        """The same tensor as this rank's own affair: under a name of its own, covering itself."""
        shape = tuple(local_part(self.tensor).shape)
        own = Place(shape, Box.whole(shape), (rank,))
        return replace(self, name=local_name(rank, self.name), place=own, sharing="local")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint says of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    def empty(self) -> torch.Tensor:
        """A host tensor to read it into."""
        return torch.empty(self.shape, dtype=dtype_named(self.dtype))


def local_name(rank: int, name: str) -> str:
    """The name under which rank `rank` saves what differs on each rank."""
    return f"local/{rank}/{name}"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`: names without the library, for records that outlive it."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise StateMismatch(
            f"the checkpoint has a tensor of type {name}, which torch {torch.__version__} lacks: use a newer torch"
        )
    return found


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Without importing distributed tensors into a program that has none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of a tensor, sharing its version counter."""
    if is_dtensor(tensor):
        dtensor: Any = tensor
        local: torch.Tensor = dtensor._local_tensor
        return local.detach()
    return tensor.detach()


def place(name: str, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Place:
    """Where the tensor lies; a plain tensor is whole, and the same on all of `ranks`."""
    if is_dtensor(tensor):
        return _dtensor_place(name, tensor)  # type: ignore[arg-type]  # is_dtensor has just said so
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ConfigurationError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}: only dense tensors with memory can be saved"
        )
    shape = tuple(tensor.shape)
    return Place(shape, Box.whole(shape), ranks)


def _dtensor_place(name: str, tensor: DTensor) -> Place:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(p.is_partial() for p in placements):
        raise ConfigurationError(f"{name} is a partial sum over {mesh}: reduce it before saving it")
    shape = tuple(tensor.shape)
    lengths, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    box = Box(tuple(int(o) for o in offsets), tuple(int(n) for n in lengths))
    if tuple(tensor._local_tensor.shape) != box.lengths:
        raise ConfigurationError(
            f"{name} holds {tuple(tensor._local_tensor.shape)} here where its placement {placements} says {box.lengths}:"
            " this sharding is not one box a rank, and not supported"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigurationError(f"{name} lives on a mesh that this rank is not part of: do not give it to this rank")
    same = mesh.mesh[
        tuple(slice(None) if p.is_replicate() else int(c) for p, c in zip(placements, coordinate, strict=True))
    ]
    return Place(shape, box, tuple(sorted(int(r) for r in same.flatten().tolist())))


def ranks_of(tensors: list[torch.Tensor], world: int) -> tuple[int, ...]:
    """Ranks that hold a module's plain tensors: those of its sharded ones' mesh, else all."""
    for tensor in tensors:
        if is_dtensor(tensor):
            dtensor: Any = tensor
            return tuple(sorted(int(r) for r in dtensor.device_mesh.mesh.flatten().tolist()))
    return tuple(range(world))


class Entries:
    """Makes entries of one part's tensors, and remembers them: asking DTensor for a place is too slow for each save."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._known: dict[str, Entry] = {}

    def of(self, name: str, tensor: torch.Tensor, sharing: Sharing, lazy: bool = False) -> Entry:
        """The entry of this very tensor."""
        known = self._known.get(name)
        if known is None or known.tensor is not tensor:
            known = self._known[name] = Entry(name, tensor, place(name, tensor, self._ranks), sharing, lazy)
        return known
