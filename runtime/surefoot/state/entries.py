"""Defines one box of a named tensor as this rank holds it.

Most tensors are one entry; one whose local memory holds several boxes (flat parameters, shards within shards) is
several of one name. Made by `tensor_locations`; used by the parts of a program's state, and by whoever saves or restores them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal

import torch

from surefoot.errors import StateMismatch
from surefoot.format.layouts import itemsize
from surefoot.geometry import Box
from surefoot.geometry.sharding import Grid, HeldBox, ShardingRule
from surefoot.staging.host_copies import PLAIN_CLASSES

Sharing = Literal["split", "lowest", "local"]
"""How ranks that hold the same box share its saving: in parts, all by the lowest rank, or each its own tensor."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Locates a box in its global tensor, and its holding ranks.

    `same` are the ranks with the same box, this one among them; None: others save it. `rule` says how the whole tensor
    is sharded, where one rule does.
    """

    shape: tuple[int, ...]
    box: Box
    same: Grid | None
    rule: ShardingRule | None = None


@dataclass(frozen=True, slots=True)
class LocalBox:
    """Locates a box in local memory by offsets.

    `flat`: the one offset counts elements of a one-dimensional tensor.
    """

    offsets: tuple[int, ...]
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes one box to save and restore.

    `tensor` is the program's; `local_part` gives the memory behind it.
    """

    name: str
    tensor: torch.Tensor
    dtype: str
    location: TensorLocation
    sharing: Sharing
    copy_in_background: bool = False
    """It stands still until a hooked optimizer steps, so that its copy may overlap forward and backward."""
    window: LocalBox | None = None
    inner: str | None = None
    """Attribute of a tensor subclass that has the elements."""

    def local_part(self) -> torch.Tensor:
        """The memory of the box, sharing its version counter."""
        memory = local_part(self.tensor, self.inner)
        if self.window is None:
            return memory
        lengths = self.location.box.lengths
        if self.window.flat:
            start = self.window.offsets[0]
            return memory[start : start + prod(lengths)].view(lengths)
        return memory[tuple(slice(o, o + n) for o, n in zip(self.window.offsets, lengths, strict=True))]

    def own_tensor(self) -> torch.Tensor | None:
        """The program's tensor where the box is all of plain memory."""
        plain = type(self.tensor) in PLAIN_CLASSES and self.window is None and self.inner is None
        return self.tensor if plain and not is_flat_parameter(self.tensor) else None

    def held_box(self) -> HeldBox:
        """Describes the entry for dividing the saving among ranks."""
        sharing: Literal["split", "lowest"] = "split" if self.sharing == "split" else "lowest"
        return HeldBox(self.name, self.location.box, itemsize(self.dtype), self.location.same, sharing)

    def as_per_rank(self, rank: int) -> Entry:
        """Renames the entry as this rank's own tensor, which covers itself."""
        shape = self.location.box.lengths
        own = TensorLocation(shape, Box.whole(shape), Grid.alone(rank), ShardingRule.replicated(Grid.alone(rank)))
        return replace(self, name=local_name(rank, self.name), location=own, sharing="local")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A saved tensor's type and shape."""

    dtype: str
    shape: tuple[int, ...]

    def empty(self) -> torch.Tensor:
        """A host tensor to read it into."""
        return torch.empty(self.shape, dtype=dtype_from_name(self.dtype), device="cpu")


def local_name(rank: int, name: str) -> str:
    """The name under which rank `rank` saves what differs on each rank."""
    return f"local/{rank}/{name}"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`: names without the library, for records that outlive it."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
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


def outlines(entries: Sequence[Entry]) -> list[tuple[object, ...]]:
    """Lists what building entries again depends on."""
    return [(e.name, e.dtype, e.location.shape) for e in entries]


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Tells FSDP1's flat parameters from others.

    Their memory is the shard, even while forward or backward sees the whole.
    """
    return bool(getattr(tensor, "_is_flat_param", False))


def local_part(tensor: torch.Tensor, inner: str | None = None) -> torch.Tensor:
    """This rank's memory of a tensor, with the tensor's version counter."""
    found: Any = tensor
    if is_dtensor(found):
        found = found._local_tensor
    elif is_flat_parameter(found):
        found = getattr(found, "_local_shard", found)
    if inner is not None:
        found = getattr(found, inner)
    memory: torch.Tensor = found.detach()
    return memory


# ---- fit of saved tensors --------------------------------------------------------------------------------------------
# Defines how a program may differ from the checkpoint it restores.


@dataclass(frozen=True, slots=True)
class AllowedDifferences:
    """States which differences between program and checkpoint are allowed.

    Args:
        strict: False: every name may differ as `optional` ones may.
        optional: objects, or patterns of tensor names, that one side may lack or have in another shape.
        convert_dtypes: numbers may be read in another precision.
    """

    strict: bool = True
    optional: tuple[str, ...] = ()
    convert_dtypes: bool = False

    def may_differ(self, name: str) -> bool:
        """Returns whether a name matches `optional`, or nothing is strict.

        A pattern that names an object, or a name's beginning up to a `/`, covers all below it.
        """
        return not self.strict or any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}/*") for p in self.optional)

    def converts(self, entry: Entry, what: SavedTensor) -> bool:
        """Returns whether elements may be read as another type of their kind."""
        mine, theirs = dtype_from_name(entry.dtype), dtype_from_name(what.dtype)
        alike = (mine.is_floating_point, mine.is_complex) == (theirs.is_floating_point, theirs.is_complex)
        return self.convert_dtypes and alike and (mine.is_floating_point or mine.is_complex)

    def misfit(self, entry: Entry, what: SavedTensor | None) -> str | None:
        """Explains why an entry cannot be filled; None if it can.

        Raises StateMismatch for a difference that is not allowed.
        """
        name = entry.name
        if what is None:
            found = f"the checkpoint has no {name}: the program has changed since it was saved"
        elif what.shape != entry.location.shape:
            found = f"{name} has shape {entry.location.shape} here and {what.shape} in the checkpoint"
        elif what.dtype != entry.dtype and not self.converts(entry, what):
            found = f"{name} is {entry.dtype} here and {what.dtype} in the checkpoint"
            if not self.may_differ(name):
                raise StateMismatch(f"{found}: convert_dtypes=True converts floating point numbers as they are read")
        else:
            return None
        if not self.may_differ(name):
            raise StateMismatch(
                f"{found}; optional=({name.partition('/')[0] + '/…'!r},) or strict=False leaves it as built"
            )
        return f"{found}: it stays as the program built it"


# ---- tensor names ----------------------------------------------------------------------------------------------------
# Encodes keys of any kind as parts of tensor names, without collisions. `/` parts a name into object, parameter and
# key; `:` an element of a tensor subclass from it; `~` begins what lies deeper in a key, and a key that is no text.
# Used by the parts of a program.

_ESCAPES = {"%": "%25", "/": "%2F", ":": "%3A", "~": "%7E"}
_TABLE = str.maketrans(_ESCAPES)


def escaped(key: Any) -> str:
    """Encodes a key as part of a name.

    In text the separators are replaced; a key of another kind is `~` and its `repr`.
    """
    return key.translate(_TABLE) if type(key) is str else f"~{escaped(repr(key))}"


def unescaped(part: str) -> str:
    """The text that was a key."""
    for character, escape in reversed(_ESCAPES.items()):
        part = part.replace(escape, character)
    return part


def is_plain(part: str) -> bool:
    """Returns whether a part is one text key, not nested or wrapped."""
    return "~" not in part and ":" not in part


def joined(path: str, key: Any) -> str:
    """Names what is below `key` of the value named `path`."""
    part = escaped(key)
    return f"{path}{part}" if part.startswith("~") else f"{path}~{part}"
