"""Builds saved tensors that the program lacks: plain, DTensor, or subclass.

What a name, a type and a shape do not say of a tensor is written down as its facts when it is saved (`facts_of`), and
read when it is built. So a state that can be described can be brought back, and what cannot be described is refused
while the program that made it is still running. Used by the parts of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from surefoot.errors import StateMismatch, StateNotRestorable
from surefoot.format import values
from surefoot.format.values import NamedObject
from surefoot.geometry.sharding import ShardingRule
from surefoot.staging.host_copies import PLAIN_CLASSES
from surefoot.state.entries import SavedTensor, dtype_from_name, escaped, is_dtensor
from surefoot.state.tensor_locations import classify_inner_split, inner_parts, is_checkpointable_tensor, rule_of

# ---- trees -----------------------------------------------------------------------------------------------------------
# Flattens nested state into tensors and plain values, and unflattens it. Tensors are replaced by marks that name them,
# so that the structure can travel as plain values and the tensors as tensors. Used by the parts.

Facts = Mapping[str, Any]
"""What building a tensor needs beside its name, type and shape (`tensor_building`)."""


@dataclass(frozen=True, slots=True)
class TensorPlaceholder:
    """Stands where a tensor belongs."""

    name: str
    facts: Facts | None = None


_NOTHING = object()


def extract_tensors(
    tree: Any,
    path: str,
    tensors: dict[str, torch.Tensor],
    facts_of: Callable[[torch.Tensor], Facts | None] = lambda _: None,
    join: Callable[[str, Any], str] = lambda path, key: f"{path}/{escaped(key)}",
) -> Any:
    """Replaces a tree's tensors by marks and collects them by path.

    `join` makes a path from the one above and a key.
    """
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree
        return TensorPlaceholder(path, facts_of(tree))
    return values.map_container(
        tree, lambda key, value: extract_tensors(value, join(path, key), tensors, facts_of, join)
    )


def insert_tensors(tree: Any, tensor_of: Callable[[str], torch.Tensor], live: Any = _NOTHING, path: str = "") -> Any:
    """Replaces marks by tensors, and objects saved by name by `live`'s."""
    if isinstance(tree, TensorPlaceholder):
        return tensor_of(tree.name)
    if isinstance(tree, NamedObject):
        return _same_object(tree, live, path)
    return values.map_container(
        tree, lambda key, v: insert_tensors(v, tensor_of, _value_at(live, key), f"{path}/{key}")
    )


def _value_at(live: Any, key: Any) -> Any:
    try:
        return live[key] if isinstance(live, Mapping | list | tuple) else getattr(live, str(key), _NOTHING)
    except (KeyError, IndexError, TypeError):
        return _NOTHING


def _same_object(saved: NamedObject, live: Any, path: str) -> Any:
    here = "nothing" if live is _NOTHING else repr(live)
    if live is not _NOTHING and values.is_nameable(live) and values.name_of(live) == saved:
        return live
    raise StateMismatch(
        f"{path} is {saved} in the checkpoint and {here} here: classes and functions are never taken from a checkpoint,"
        " so build the program with the same one in its place"
    )


def marks(tree: Any) -> list[TensorPlaceholder]:
    """The marks in a tree, in its order."""
    found: list[TensorPlaceholder] = []

    def note(_: Any, value: Any) -> Any:
        if isinstance(value, TensorPlaceholder):
            found.append(value)
        else:
            values.map_container(value, note)
        return None

    note(None, tree)
    return found


def marked(tree: Any) -> list[str]:
    """Names of the tensors that belong into a tree."""
    return [mark.name for mark in marks(tree)]


def has_named_objects(tree: Any) -> bool:
    """Whether something in it was saved by its name alone."""
    found: list[Any] = []

    def note(_: Any, value: Any) -> Any:
        if isinstance(value, NamedObject):
            found.append(value)
        elif not isinstance(value, TensorPlaceholder):
            values.map_container(value, note)
        return None

    note(None, tree)
    return bool(found)


def first_difference(saved: Any, live: Any, path: str = "") -> str | None:
    """Describes the first difference in keys or kinds; None without one.

    A sentence's subject and verb. Values may differ.
    """
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        a, b = (torch.Tensor if isinstance(t, torch.nn.Parameter) else type(t) for t in (saved, live))
        if a is not b:
            return f"{path} would come back as {a.__name__} where {b.__name__} was"
        if (saved.dtype, saved.shape) != (live.dtype, live.shape):
            return f"{path} would come back as {saved.dtype} {tuple(saved.shape)}, not {live.dtype} {tuple(live.shape)}"
        return None
    if type(saved) is not type(live):
        return f"{path} would come back as {type(saved).__name__}, not {type(live).__name__}"
    ours, theirs = _children(saved), _children(live)
    for key in [*theirs, *ours]:
        if key not in ours or key not in theirs:
            return f"{path}/{key} would {'not come back' if key not in ours else 'come back, and is not there'}"
        if found := first_difference(ours[key], theirs[key], f"{path}/{key}"):
            return found
    return None


def _children(tree: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}

    def note(key: Any, value: Any) -> Any:
        found[key] = value
        return value

    values.map_container(tree, note)
    return found


# ---- tensor building -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BuildLocation:
    """Says where a built tensor goes: beside `parameter`, or on the host.

    `scratch`: as a meta tensor without memory, to be compared and thrown away.
    """

    rank: int
    parameter: torch.Tensor | None = None
    scratch: bool = False

    def device(self, kind: str | None) -> torch.device:
        """The device to build on for a saved device kind; None: host."""
        if self.scratch:
            return torch.device("meta")
        if kind is None:
            return torch.device("cpu")
        if self.parameter is not None and self.parameter.device.type != "cpu":
            return self.parameter.device
        return torch.device(kind) if _has(kind) else torch.device("cpu")


def _has(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())


def facts_of(name: str, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> Facts | None:
    """Describes what building a tensor needs beyond name, type and shape.

    None if those suffice. Raises StateNotRestorable for what differs between ranks in a way that nothing describes.
    """
    if type(tensor) in PLAIN_CLASSES and (parameter is None or not is_dtensor(parameter)):
        return None if tensor.device.type == "cpu" else {"device": tensor.device.type}
    found: dict[str, Any] = {}
    local: Any = tensor
    if is_dtensor(tensor):
        local = local._local_tensor
        if not _as_parameter(tensor, parameter):
            found["spread"] = _spread(name, tensor, parameter)
    elif parameter is not None and is_dtensor(parameter) and tensor.numel() > 1:
        raise StateNotRestorable(
            f"{name} is a plain tensor of shape {tuple(tensor.shape)} beside a parameter that is spread over ranks, so"
            " each rank may hold another one under this name: keep such state as a DTensor (torch.zeros_like of the"
            " parameter makes one), or use an optimizer that does"
        )
    if type(local) not in PLAIN_CLASSES and not _of_the_same_kind(local, parameter):
        found["class"] = _described(name, local, tensor)
    if found and tensor.device.type != "cpu":
        found["device"] = tensor.device.type
    return found or None


def build(name: str, facts: Facts | None, saved: Mapping[str, SavedTensor], home: BuildLocation) -> torch.Tensor | None:
    """Builds an unfilled tensor as it was saved, or None."""
    facts = facts or {}
    device = home.device(facts.get("device"))
    spread, described = facts.get("spread"), facts.get("class")
    rule = _rule_here(name, spread, home)

    def local_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if rule is None else rule.local_shape(shape, home.rank)

    local = _build_local(name, described, saved, local_shape, device)
    if local is None or rule is None:
        return local
    from torch.distributed.tensor import DTensor

    like: Any = home.parameter
    shape = torch.Size(spread["shape"] if spread is not None else like.shape)
    stride = tuple(spread["stride"] if spread is not None else like.stride())
    placements = like.placements if spread is None else _placements(spread["placements"])
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def built_marks(tree: Any, saved: Mapping[str, SavedTensor], home: BuildLocation) -> dict[str, torch.Tensor]:
    """Builds an unfilled tensor for each saved mark in a tree."""
    made = {mark.name: build(mark.name, mark.facts, saved, home) for mark in marks(tree)}
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def build_like_parameter(
    key: str, name: str, what: SavedTensor, home: BuildLocation, dtype: torch.dtype, on_host: bool
) -> torch.Tensor:
    """Builds state of a parameter from name, type and shape alone.

    Like torch's own optimizers: state of the parameter's shape is sharded like it, other state is plain.
    """
    parameter = home.parameter
    assert parameter is not None, "state of a parameter"
    device = torch.device("meta") if home.scratch else parameter.device
    if what.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False, device=device)
    if is_checkpointable_tensor(parameter) and what.shape == tuple(parameter.global_shape):  # type: ignore[attr-defined]
        return torch.zeros(parameter.shape, dtype=dtype, device=device)
    if is_dtensor(parameter) and prod(what.shape) > 1:
        raise StateMismatch(
            f"{name} has shape {what.shape} in the checkpoint and its sharded parameter {tuple(parameter.shape)}:"
            f" nothing says how {key!r} is spread over ranks"
        )
    host = torch.device("meta") if home.scratch else torch.device("cpu")
    return torch.zeros(what.shape, dtype=dtype, device=host if on_host else device)


def _as_parameter(tensor: Any, parameter: Any) -> bool:
    return (
        parameter is not None
        and is_dtensor(parameter)
        and tensor.shape == parameter.shape
        and tensor.placements == parameter.placements
        and tensor.device_mesh == parameter.device_mesh
    )


def _of_the_same_kind(local: torch.Tensor, parameter: Any) -> bool:
    """Whether zeros like the parameter are of this class already."""
    if parameter is None:
        return False
    own = parameter._local_tensor if is_dtensor(parameter) else parameter
    return type(own) is type(local) and len(list(inner_parts("", local))) == 1


def _spread(name: str, tensor: Any, parameter: Any) -> dict[str, Any]:
    if parameter is None or not is_dtensor(parameter) or tensor.device_mesh != parameter.device_mesh:
        raise StateNotRestorable(
            f"{name} is a DTensor on {tensor.device_mesh}, which is not the mesh of its parameter: nothing says on which"
            " ranks to build it again"
        )
    placements: list[list[Any]] = []
    for placement in tensor.placements:
        if placement.is_replicate():
            placements.append(["replicate"])
        elif placement.is_shard() and not hasattr(placement, "split_factor"):
            placements.append(["shard", int(placement.dim)])
        else:
            raise StateNotRestorable(f"{name} is placed as {placement}, which cannot be built again by itself")
    return {"placements": placements, "shape": list(tensor.shape), "stride": list(tensor.stride())}


def _placements(said: list[list[Any]]) -> tuple[Any, ...]:
    module: Any = __import__("torch.distributed.tensor", fromlist=["Shard"])
    return tuple(module.Replicate() if kind == "replicate" else module.Shard(*at) for kind, *at in said)


def _rule_here(name: str, spread: Mapping[str, Any] | None, home: BuildLocation) -> ShardingRule | None:
    """The sharding rule on this program's ranks; None if it is plain."""
    like: Any = home.parameter
    if like is None or not is_dtensor(like):
        if spread is not None:
            raise StateMismatch(
                f"{name} was spread over ranks, and its parameter is not here: shard the model as before"
            )
        return None
    if spread is None:
        return rule_of(like, home.rank)
    placements = _placements(spread["placements"])
    if len(placements) != like.device_mesh.ndim:
        raise StateMismatch(
            f"{name} was spread as {spread['placements']} over a mesh of {len(placements)} dimensions, and its parameter"
            f" lies on one of {like.device_mesh.ndim} here: use a mesh of as many dimensions, or the old one"
        )
    return rule_of(like, home.rank, placements)


def _described(name: str, local: Any, tensor: torch.Tensor) -> dict[str, Any]:
    """Describes a subclass by its class, its inner tensors, and its other attributes."""
    named = values.name_of(type(local))
    if named is None:
        raise StateNotRestorable(
            f"{name} is a {type(local).__qualname__}, a class that no module has under that name: define it at the top"
            " of a module"
        )
    found: dict[str, Any] = {"name": str(named), "size": list(tensor.shape), "local": list(local.shape)}
    if not hasattr(local, "__tensor_flatten__"):
        return found
    attributes, context = local.__tensor_flatten__()
    alone = len(list(inner_parts("", local))) == 1
    cut = is_dtensor(tensor)
    how = {
        a: "alone" if alone else classify_inner_split(local, a, getattr(local, a)) if cut else "whole"
        for a in attributes
    }
    deeper = [a for a in attributes if type(getattr(local, a)) not in PLAIN_CLASSES]
    if deeper:
        raise StateNotRestorable(f"{name}:{deeper[0]} is a tensor subclass within another: such state cannot be saved")
    return found | {"inner": [[a, how[a]] for a in attributes], "context": context}


def _build_local(
    name: str,
    described: Mapping[str, Any] | None,
    saved: Mapping[str, SavedTensor],
    local_shape: Callable[[tuple[int, ...]], tuple[int, ...]],
    device: torch.device,
) -> torch.Tensor | None:
    def empty(called: str, cut: bool) -> torch.Tensor:
        what = saved[called]
        return torch.zeros(
            local_shape(what.shape) if cut else what.shape, dtype=dtype_from_name(what.dtype), device=device
        )

    if described is None or "inner" not in described:
        if name not in saved:
            return None
        plain = empty(name, cut=True)
        return plain if described is None else plain.as_subclass(_tensor_class(name, described["name"]))
    kind: Any = _tensor_class(name, described["name"])
    inner = dict(described["inner"])
    names = {a: name if how == "alone" else f"{name}:{a}" for a, how in inner.items()}
    if any(called not in saved for called in names.values()):
        return None
    parts = {a: empty(called, inner[a] != "whole") for a, called in names.items()}
    parts = {a: part.reshape(-1) if inner[a] == "rows" else part for a, part in parts.items()}
    size = torch.Size(local_shape(tuple(described["size"])))
    before = torch.Size(described["local"])
    context = values.map_container(
        described["context"], lambda _, v: size if v == before and type(v) is torch.Size else v
    )
    stride = torch.empty(size, device="meta").stride()
    made: torch.Tensor = kind.__tensor_unflatten__(parts, context, size, stride)
    if made.shape != size:
        raise StateMismatch(
            f"{name} comes out as {tuple(made.shape)} where {tuple(size)} belongs: its blocks do not part as its rows do"
            " at this world size; restore at the size it was saved at"
        )
    return made


def _tensor_class(name: str, text: str) -> type[torch.Tensor]:
    kind = values.resolve_name(NamedObject(*text.split(":", 1)))
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
        raise StateMismatch(
            f"{name} is a tensor of class {text} in the checkpoint, which this program has not loaded: import it first"
        )
    return kind
