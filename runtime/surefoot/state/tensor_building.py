"""Builds saved tensors that the program lacks: plain, DTensor, or subclass.

A save records as a tensor's facts whatever its name, type and shape do not describe (`facts_of`); building it reads
them. State that can be described can be restored. State that cannot is rejected while the program that created it is
still running. Used by the parts of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
# Flattens nested state into tensors and plain values, and unflattens it. Placeholders with the tensors' names take
# their place, so that the structure is saved as plain values and the tensors as tensors. Used by the parts.

Facts = Mapping[str, Any]
"""Properties needed to build a tensor in addition to its name, type and shape."""


@dataclass(frozen=True, slots=True)
class TensorPlaceholder:
    """Marks the place of a tensor in a tree of plain values."""

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
    """Replaces a tree's tensors by placeholders and collects the tensors by path.

    `join` combines the parent's path and a key.
    """
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree
        return TensorPlaceholder(path, facts_of(tree))
    if values.has_only_scalars(tree):
        return type(tree)(tree)
    return values.map_container(
        tree, lambda key, value: extract_tensors(value, join(path, key), tensors, facts_of, join)
    )


def insert_tensors(tree: Any, tensor_of: Callable[[str], torch.Tensor], live: Any = _NOTHING, path: str = "") -> Any:
    """Replaces placeholders by tensors, and objects saved by name by those in `live`."""
    if isinstance(tree, TensorPlaceholder):
        return tensor_of(tree.name)
    if isinstance(tree, NamedObject):
        return _resolve_object(tree, live, path)
    if values.has_only_scalars(tree):
        return type(tree)(tree)
    return values.map_container(
        tree, lambda key, v: insert_tensors(v, tensor_of, _child_at(live, key), f"{path}/{key}")
    )


def _child_at(live: Any, key: Any) -> Any:
    try:
        return live[key] if isinstance(live, Mapping | list | tuple) else getattr(live, str(key), _NOTHING)
    except (KeyError, IndexError, TypeError):
        return _NOTHING


def _resolve_object(saved: NamedObject, live: Any, path: str) -> Any:
    live_text = "nothing" if live is _NOTHING else repr(live)
    if live is not _NOTHING and values.is_nameable(live) and values.name_of(live) == saved:
        return live
    raise StateMismatch(
        f"{path} is {saved} in the checkpoint and {live_text} here: classes and functions are never taken from a checkpoint,"
        " so build the program with the same one in its place"
    )


def by_shape(tensors: Iterable[torch.Tensor]) -> dict[torch.Size, list[torch.Tensor]]:
    """Groups tensors by shape, so that only those that can be equal to another one are compared with it."""
    groups: dict[torch.Size, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.shape, []).append(tensor)
    return groups


def marks(tree: Any) -> list[TensorPlaceholder]:
    """Lists the placeholders in a tree, in its order."""
    placeholders: list[TensorPlaceholder] = []

    def collect(_: Any, value: Any) -> Any:
        if isinstance(value, TensorPlaceholder):
            placeholders.append(value)
        elif not values.has_only_scalars(value):
            values.map_container(value, collect)
        return None

    collect(None, tree)
    return placeholders


def marked(tree: Any) -> list[str]:
    """Lists the names of a tree's tensors."""
    return [mark.name for mark in marks(tree)]


def has_named_objects(tree: Any) -> bool:
    """Returns whether a tree has a class or function that was saved by its name alone."""
    named_objects: list[Any] = []

    def collect(_: Any, value: Any) -> Any:
        if isinstance(value, NamedObject):
            named_objects.append(value)
        elif not (isinstance(value, TensorPlaceholder) or values.has_only_scalars(value)):
            values.map_container(value, collect)
        return None

    collect(None, tree)
    return bool(named_objects)


def first_difference(saved: Any, live: Any, path: str = "") -> str | None:
    """Describes the first difference in keys, types or shapes; None without one.

    Values may differ. The text is the subject and verb of a sentence that the caller completes.
    """
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        saved_class, live_class = (
            torch.Tensor if isinstance(t, torch.nn.Parameter) else type(t) for t in (saved, live)
        )
        if saved_class is not live_class:
            return f"{path} would come back as {saved_class.__name__} where {live_class.__name__} was"
        if (saved.dtype, saved.shape) != (live.dtype, live.shape):
            return f"{path} would come back as {saved.dtype} {tuple(saved.shape)}, not {live.dtype} {tuple(live.shape)}"
        return None
    if type(saved) is not type(live):
        return f"{path} would come back as {type(saved).__name__}, not {type(live).__name__}"
    if values.has_only_scalars(saved) and list(map(type, saved)) == list(map(type, live)):
        return None
    saved_children, live_children = _children_by_key(saved), _children_by_key(live)
    for key in [*live_children, *saved_children]:
        if key not in saved_children or key not in live_children:
            return (
                f"{path}/{key} would {'not come back' if key not in saved_children else 'come back, and is not there'}"
            )
        if difference := first_difference(saved_children[key], live_children[key], f"{path}/{key}"):
            return difference
    return None


def _children_by_key(tree: Any) -> dict[Any, Any]:
    children: dict[Any, Any] = {}

    def collect(key: Any, value: Any) -> Any:
        children[key] = value
        return value

    values.map_container(tree, collect)
    return children


# ---- tensor building -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BuildLocation:
    """Determines the device of a built tensor: that of `parameter`, or the host.

    `scratch`: a meta tensor without memory, to be compared and discarded.
    """

    rank: int
    parameter: torch.Tensor | None = None
    scratch: bool = False

    def device(self, kind: str | None) -> torch.device:
        """Returns the device to build on for a saved device type; None: the host."""
        if self.scratch:
            return torch.device("meta")
        if kind is None:
            return torch.device("cpu")
        if self.parameter is not None and self.parameter.device.type != "cpu":
            return self.parameter.device
        return torch.device(kind) if _is_available(kind) else torch.device("cpu")


def _is_available(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())


def facts_of(name: str, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> Facts | None:
    """Describes the properties needed to build a tensor beyond name, type and shape.

    None if those suffice. Raises StateNotRestorable if the tensor may differ between ranks without a description.
    """
    if type(tensor) in PLAIN_CLASSES and (parameter is None or not is_dtensor(parameter)):
        return None if tensor.device.type == "cpu" else {"device": tensor.device.type}
    facts: dict[str, Any] = {}
    local: Any = tensor
    if is_dtensor(tensor):
        local = local._local_tensor
        if not _is_sharded_like(tensor, parameter):
            facts["spread"] = _describe_sharding(name, tensor, parameter)
    elif parameter is not None and is_dtensor(parameter) and tensor.numel() > 1:
        raise StateNotRestorable(
            f"{name} is a plain tensor of shape {tuple(tensor.shape)} beside a parameter that is spread over ranks, so"
            " each rank may hold another one under this name: keep such state as a DTensor (torch.zeros_like of the"
            " parameter makes one), or use an optimizer that does"
        )
    if type(local) not in PLAIN_CLASSES and not _is_wrapped_like(local, parameter):
        facts["class"] = _describe_subclass(name, local, tensor)
    if facts and tensor.device.type != "cpu":
        facts["device"] = tensor.device.type
    return facts or None


def build(
    name: str, facts: Facts | None, saved: Mapping[str, SavedTensor], location: BuildLocation
) -> torch.Tensor | None:
    """Builds an unfilled tensor as it was saved; None if a part of it was not saved."""
    facts = facts or {}
    device = location.device(facts.get("device"))
    sharding, subclass = facts.get("spread"), facts.get("class")
    rule = _rule_on_mesh(name, sharding, location)

    def local_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if rule is None else rule.local_shape(shape, location.rank)

    local = _build_local(name, subclass, saved, local_shape, device)
    if local is None or rule is None:
        return local
    from torch.distributed.tensor import DTensor

    parameter: Any = location.parameter
    shape = torch.Size(sharding["shape"] if sharding is not None else parameter.shape)
    stride = tuple(sharding["stride"] if sharding is not None else parameter.stride())
    placements = parameter.placements if sharding is None else _parse_placements(sharding["placements"])
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def built_marks(tree: Any, saved: Mapping[str, SavedTensor], location: BuildLocation) -> dict[str, torch.Tensor]:
    """Builds an unfilled tensor for each placeholder in a tree whose tensor was saved."""
    tensors = {
        placeholder.name: build(placeholder.name, placeholder.facts, saved, location) for placeholder in marks(tree)
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def build_like_parameter(
    key: str, name: str, saved_tensor: SavedTensor, location: BuildLocation, dtype: torch.dtype, on_host: bool
) -> torch.Tensor:
    """Builds state of a parameter from name, type and shape alone.

    Like torch's own optimizers: state of the parameter's shape is sharded like it, other state is plain.
    """
    parameter = location.parameter
    assert parameter is not None, "state of a parameter"
    device = torch.device("meta") if location.scratch else parameter.device
    if saved_tensor.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False, device=device)
    if is_checkpointable_tensor(parameter) and saved_tensor.shape == tuple(parameter.global_shape):  # type: ignore[attr-defined]
        return torch.zeros(parameter.shape, dtype=dtype, device=device)
    if is_dtensor(parameter) and prod(saved_tensor.shape) > 1:
        raise StateMismatch(
            f"{name} has shape {saved_tensor.shape} in the checkpoint and its sharded parameter {tuple(parameter.shape)}:"
            f" nothing says how {key!r} is spread over ranks"
        )
    host = torch.device("meta") if location.scratch else torch.device("cpu")
    return torch.zeros(saved_tensor.shape, dtype=dtype, device=host if on_host else device)


def _is_sharded_like(tensor: Any, parameter: Any) -> bool:
    return (
        parameter is not None
        and is_dtensor(parameter)
        and tensor.shape == parameter.shape
        and tensor.placements == parameter.placements
        and tensor.device_mesh == parameter.device_mesh
    )


def _is_wrapped_like(local: torch.Tensor, parameter: Any) -> bool:
    """Returns whether zeros_like of the parameter already has the class of `local`."""
    if parameter is None:
        return False
    local_parameter = parameter._local_tensor if is_dtensor(parameter) else parameter
    return type(local_parameter) is type(local) and len(list(inner_parts("", local))) == 1


def _describe_sharding(name: str, tensor: Any, parameter: Any) -> dict[str, Any]:
    """Describes a DTensor's placements on its parameter's mesh; raises StateNotRestorable for another mesh."""
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


def _parse_placements(descriptions: list[list[Any]]) -> tuple[Any, ...]:
    module: Any = __import__("torch.distributed.tensor", fromlist=["Shard"])
    return tuple(
        module.Replicate() if kind == "replicate" else module.Shard(*dimension) for kind, *dimension in descriptions
    )


def _rule_on_mesh(name: str, sharding: Mapping[str, Any] | None, location: BuildLocation) -> ShardingRule | None:
    """Returns a tensor's sharding rule on this program's mesh; None for a plain tensor."""
    parameter: Any = location.parameter
    if parameter is None or not is_dtensor(parameter):
        if sharding is not None:
            raise StateMismatch(
                f"{name} was spread over ranks, and its parameter is not here: shard the model as before"
            )
        return None
    if sharding is None:
        return rule_of(parameter, location.rank)
    placements = _parse_placements(sharding["placements"])
    if len(placements) != parameter.device_mesh.ndim:
        raise StateMismatch(
            f"{name} was spread as {sharding['placements']} over a mesh of {len(placements)} dimensions, and its parameter"
            f" lies on one of {parameter.device_mesh.ndim} here: use a mesh of as many dimensions, or the old one"
        )
    return rule_of(parameter, location.rank, placements)


def _describe_subclass(name: str, local: Any, tensor: torch.Tensor) -> dict[str, Any]:
    """Describes a subclass by its class, its inner tensors, and its other attributes."""
    class_name = values.name_of(type(local))
    if class_name is None:
        raise StateNotRestorable(
            f"{name} is a {type(local).__qualname__}, a class that no module has under that name: define it at the top"
            " of a module"
        )
    description: dict[str, Any] = {"name": str(class_name), "size": list(tensor.shape), "local": list(local.shape)}
    if not hasattr(local, "__tensor_flatten__"):
        return description
    attributes, context = local.__tensor_flatten__()
    has_one_part = len(list(inner_parts("", local))) == 1
    is_sharded = is_dtensor(tensor)
    split_by_attribute = {
        a: "alone" if has_one_part else classify_inner_split(local, a, getattr(local, a)) if is_sharded else "whole"
        for a in attributes
    }
    nested_attributes = [a for a in attributes if type(getattr(local, a)) not in PLAIN_CLASSES]
    if nested_attributes:
        raise StateNotRestorable(
            f"{name}:{nested_attributes[0]} is a tensor subclass within another: such state cannot be saved"
        )
    return description | {"inner": [[a, split_by_attribute[a]] for a in attributes], "context": context}


def _build_local(
    name: str,
    subclass: Mapping[str, Any] | None,
    saved: Mapping[str, SavedTensor],
    local_shape: Callable[[tuple[int, ...]], tuple[int, ...]],
    device: torch.device,
) -> torch.Tensor | None:
    """Builds this rank's part of a tensor, as plain memory or as its subclass; None if a part was not saved."""

    def empty(saved_name: str, is_cut: bool) -> torch.Tensor:
        saved_tensor = saved[saved_name]
        return torch.zeros(
            local_shape(saved_tensor.shape) if is_cut else saved_tensor.shape,
            dtype=dtype_from_name(saved_tensor.dtype),
            device=device,
        )

    if subclass is None or "inner" not in subclass:
        if name not in saved:
            return None
        plain = empty(name, is_cut=True)
        return plain if subclass is None else plain.as_subclass(_loaded_class(name, subclass["name"]))
    tensor_class: Any = _loaded_class(name, subclass["name"])
    split_by_attribute = dict(subclass["inner"])
    names = {a: name if split == "alone" else f"{name}:{a}" for a, split in split_by_attribute.items()}
    if any(saved_name not in saved for saved_name in names.values()):
        return None
    parts = {a: empty(saved_name, split_by_attribute[a] != "whole") for a, saved_name in names.items()}
    parts = {a: part.reshape(-1) if split_by_attribute[a] == "rows" else part for a, part in parts.items()}
    size = torch.Size(local_shape(tuple(subclass["size"])))
    saved_local_size = torch.Size(subclass["local"])
    context = values.map_container(
        subclass["context"], lambda _, v: size if v == saved_local_size and type(v) is torch.Size else v
    )
    stride = torch.empty(size, device="meta").stride()
    tensor: torch.Tensor = tensor_class.__tensor_unflatten__(parts, context, size, stride)
    if tensor.shape != size:
        raise StateMismatch(
            f"{name} comes out as {tuple(tensor.shape)} where {tuple(size)} belongs: its blocks do not part as its rows do"
            " at this world size; restore at the size it was saved at"
        )
    return tensor


def _loaded_class(tensor_name: str, class_path: str) -> type[torch.Tensor]:
    tensor_class = values.resolve_name(NamedObject(*class_path.split(":", 1)))
    if not (isinstance(tensor_class, type) and issubclass(tensor_class, torch.Tensor)):
        raise StateMismatch(
            f"{tensor_name} is a tensor of class {class_path} in the checkpoint, which this program has not loaded:"
            " import it first"
        )
    return tensor_class
