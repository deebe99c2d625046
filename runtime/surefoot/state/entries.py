"""Defines an entry: one box of a named tensor in this rank's memory.

Most tensors have one entry. A tensor whose local memory contains several boxes (flat parameters, shards within shards)
has several entries of the same name. `tensor_locations` creates entries; program parts, saves and restores use them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from operator import attrgetter, eq
from typing import Any, Literal

import torch

from surefoot.errors import StateMismatch
from surefoot.format.layouts import itemsize
from surefoot.geometry import Box
from surefoot.geometry.sharding import Grid, HeldBox, ShardingRule
from surefoot.staging.host_copies import PLAIN_CLASSES

Sharing = Literal["split", "lowest", "local"]
"""How ranks with the same box divide its saving: in parts, all by the lowest rank, or each rank its own tensor."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Locates a box in its global tensor, and lists the ranks that have the same box.

    `same` includes this rank; None: other ranks save the box. `rule` describes how the whole tensor is sharded; None if
    no single rule describes it.
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

    `tensor` is the program's own tensor; `local_part` returns this rank's memory of it.
    """

    name: str
    tensor: torch.Tensor
    dtype: str
    location: TensorLocation
    sharing: Sharing
    copy_in_background: bool = False
    """True if the tensor only changes when a hooked optimizer steps: its copy may overlap forward and backward."""
    window: LocalBox | None = None
    inner: str | None = None
    """Attribute of the tensor subclass that contains the elements; None for other tensors."""

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
        """Returns the program's tensor if the box covers all of it and it is plain memory, else None."""
        plain = type(self.tensor) in PLAIN_CLASSES and self.window is None and self.inner is None
        return self.tensor if plain and not is_flat_parameter(self.tensor) else None

    def held_box(self) -> HeldBox:
        """Describes the entry for dividing the saving among ranks."""
        sharing: Literal["split", "lowest"] = "split" if self.sharing == "split" else "lowest"
        return HeldBox(self.name, self.location.box, itemsize(self.dtype), self.location.same, sharing)

    def as_per_rank(self, rank: int) -> Entry:
        """Renames the entry as this rank's own tensor, which covers itself."""
        shape = self.location.box.lengths
        location = TensorLocation(shape, Box.whole(shape), Grid.alone(rank), ShardingRule.replicated(Grid.alone(rank)))
        return replace(self, name=local_name(rank, self.name), location=location, sharing="local")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A saved tensor's type and shape."""

    dtype: str
    shape: tuple[int, ...]

    def empty(self) -> torch.Tensor:
        """Allocates a host tensor to read it into."""
        return torch.empty(self.shape, dtype=dtype_from_name(self.dtype), device="cpu")


def local_name(rank: int, name: str) -> str:
    """Returns the name under which rank `rank` saves a tensor that differs on each rank."""
    return f"local/{rank}/{name}"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without `torch.`, such as `float32`: records outlive the library."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateMismatch(
            f"the checkpoint has a tensor of type {name}, which torch {torch.__version__} lacks: use a newer torch"
        )
    return dtype


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a DTensor, without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def covers_object(pattern: str, name: str) -> bool:
    """Returns whether a pattern names the object of an entry: `optimizer` covers `optimizer.base_optimizer/…` too."""
    return name.partition("/")[0].partition(".")[0] == pattern


def outlines(entries: Sequence[Entry]) -> list[tuple[object, ...]]:
    """Lists the properties (name, dtype, shape) on which rebuilding entries depends."""
    return [(e.name, e.dtype, e.location.shape) for e in entries]


class TensorKinds:
    """Remembers the dtype, shape and device of entries' tensors, to detect that one was changed in place.

    `Module.to`, `p.data = …` and `resize_` keep the tensor and change its type or size; a save planned before would
    write it under its old type.
    """

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        parts = {(id(entry.tensor), entry.inner): (entry.tensor, entry.inner) for entry in entries}
        own = [type(t) in PLAIN_CLASSES and inner is None and not is_flat_parameter(t) for t, inner in parts.values()]
        self._plain = [tensor for (tensor, _), is_own in zip(parts.values(), own, strict=True) if is_own]
        self._wrapped = [part for part, is_own in zip(parts.values(), own, strict=True) if not is_own]
        self._kinds = list(self._current())

    def are_the_same(self) -> bool:
        """Returns whether no tensor has changed its dtype, shape or device."""
        return all(map(eq, self._current(), self._kinds))

    def _current(self) -> Iterator[tuple[torch.dtype, torch.Size, torch.device]]:
        yield from map(_KIND, self._plain)
        for tensor, inner in self._wrapped:
            yield _KIND(local_part(tensor, inner))


_KIND = attrgetter("dtype", "shape", "device")


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a flat parameter of FSDP1.

    Its saved memory is the shard, even while forward or backward sees the gathered parameter.
    """
    return bool(getattr(tensor, "_is_flat_param", False))


def local_part(tensor: torch.Tensor, inner: str | None = None) -> torch.Tensor:
    """Returns this rank's memory of a tensor, with the tensor's version counter."""
    local_tensor: Any = tensor
    if is_dtensor(local_tensor):
        local_tensor = local_tensor._local_tensor
    elif is_flat_parameter(local_tensor):
        local_tensor = getattr(local_tensor, "_local_shard", local_tensor)
    if inner is not None:
        local_tensor = getattr(local_tensor, inner)
    memory: torch.Tensor = local_tensor.detach()
    return memory


def has_overlaps(memory: torch.Tensor) -> bool:
    """Returns whether elements of a tensor share memory because it was expanded."""
    return any(n > 1 and step == 0 for n, step in zip(memory.shape, memory.stride(), strict=True))


def fill_from(entry: Entry, values: torch.Tensor) -> None:
    """Copies values into an entry's memory; into an expanded tensor only values that are the same along that dimension.

    Raises StateMismatch if they are not: one place in memory has one value.
    """
    memory = entry.local_part()
    if not has_overlaps(memory):
        memory.copy_(values)
        return
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in memory.stride())
    if not torch.equal(values, values[once].expand_as(values)):
        raise StateMismatch(
            f"{entry.name} is an expanded tensor here, whose elements share memory, and they differ in the checkpoint:"
            " build it with .clone() after .expand()"
        )
    memory[once].copy_(values[once])


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

        A pattern that matches an object, or the start of a name up to a `/`, covers every name below it.
        """
        return not self.strict or any(
            fnmatchcase(name, p) or fnmatchcase(name, f"{p}/*") or covers_object(p, name) for p in self.optional
        )

    def converts(self, entry: Entry, saved: SavedTensor) -> bool:
        """Returns whether elements may be read as another type of their kind."""
        dtype, saved_dtype = dtype_from_name(entry.dtype), dtype_from_name(saved.dtype)
        same_kind = (dtype.is_floating_point, dtype.is_complex) == (
            saved_dtype.is_floating_point,
            saved_dtype.is_complex,
        )
        return self.convert_dtypes and same_kind and (dtype.is_floating_point or dtype.is_complex)

    def misfit(self, entry: Entry, saved: SavedTensor | None) -> str | None:
        """Explains why an entry cannot be filled; None if it can.

        Raises StateMismatch for a difference that is not allowed.
        """
        name = entry.name
        if saved is None:
            difference = f"the checkpoint has no {name}: the program has changed since it was saved"
        elif saved.shape != entry.location.shape:
            difference = f"{name} has shape {entry.location.shape} here and {saved.shape} in the checkpoint"
        elif saved.dtype != entry.dtype and not self.converts(entry, saved):
            difference = f"{name} is {entry.dtype} here and {saved.dtype} in the checkpoint"
            if not self.may_differ(name):
                raise StateMismatch(
                    f"{difference}: convert_dtypes=True converts floating point numbers as they are read"
                )
        else:
            return None
        if not self.may_differ(name):
            raise StateMismatch(
                f"{difference}; optional=({name.partition('/')[0] + '/…'!r},) or strict=False leaves it as built"
            )
        return f"{difference}: it stays as the program built it"


# ---- tensor names ----------------------------------------------------------------------------------------------------
# Encodes keys of any kind as parts of tensor names, without collisions. `/` separates object, parameter and key; `:`
# separates a tensor subclass from its inner tensor; `~` starts a nested key, and a key that is not text.
# Used by the parts of a program.

_ESCAPES = {"%": "%25", "/": "%2F", ":": "%3A", "~": "%7E"}
_TABLE = str.maketrans(_ESCAPES)


def escaped(key: Any) -> str:
    """Encodes a key as part of a name.

    In text the separators are replaced; a key of another kind is `~` and its `repr`.
    """
    return key.translate(_TABLE) if type(key) is str else f"~{escaped(repr(key))}"


def unescaped(part: str) -> str:
    """Decodes a text key that `escaped` encoded."""
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
