"""Makes the schema of `status` in the CRD from the dataclasses of `api.status`.

A field's docstring is its description, its type is its schema: seconds that are a moment become a time, an optional field
may be left out, one without a default is always written. `spec_pages` does the same for `spec` and writes both.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, SourceJob
from surefoot_operator.api import status
from surefoot_operator.api.fields import camel_case
from surefoot_operator.api.status_json import MOMENTS, SCHEMA_VERSION
from surefoot_operator.api.time_spent import CATEGORIES

Schema = dict[str, Any]

_AS_TEXTS = (status.Member, MemoryServerEndpoint)
"""Classes of which a list is written as one text per entry."""
_MAX_ITEMS = {"incidents": 10, "stragglers": 8, "replacedStragglers": 8, "conditions": 32, "members": 100_000}
_MAX_OTHER_ITEMS = 10_000
_SCALARS: dict[Any, Schema] = {
    int: {"type": "integer", "format": "int64"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}
_TEXTS_OF_THE_RUNTIME = {
    Checkpoint: {
        "generation": "Generation that saved it; below 0: a generation of the source job, negated.",
        "step": "Number of finished optimizer steps.",
    },
    LineageEntry: {
        "generation": "A committed generation.",
        "parent": "Checkpoint from which the generation started; null: step 0.",
        "world_size": "Number of ranks of the generation.",
    },
    SourceJob: {
        "uri": "Persistent tier of the source job.",
        "uid": "Unique id of the source job.",
    },
}
"""Descriptions of the fields of classes that the runtime shares: their docstrings are written for developers."""

_SCHEMA_VERSION: Schema = {
    "description": f"Version of this status' format; an operator refuses to read any but {SCHEMA_VERSION}.",
    **_SCALARS[int],
}
_COLUMNS: dict[str, Schema] = {
    "replicas": {
        "description": "Workers that exist and have not ended, without spares. The scale subresource shows it.",
        "type": "integer",
        "format": "int32",
    },
    "readyReplicas": {
        "description": "Workers that run and are not being deleted, without spares.",
        "type": "integer",
        "format": "int32",
    },
    "ready": {"description": "Column Ready: readyReplicas of spec.replicas.", "type": "string"},
    "selector": {"description": "Label selector of the job's pods, for autoscalers.", "type": "string"},
    "checkpointTime": {
        "description": "When lastComplete was first written.",
        "type": "string",
        "format": "date-time",
    },
}
"""What `api_writes.add_printer_columns` adds for columns and autoscalers."""


def status_schema() -> Schema:
    """Returns the schema of the whole status."""
    schema = class_schema(status.JobStatus)
    properties = {"schemaVersion": _SCHEMA_VERSION, **schema["properties"], **_COLUMNS}
    return {
        "description": "State of the job, written by the operator alone.",
        "type": "object",
        "properties": properties,
    }


def class_schema(cls: type[Any]) -> Schema:
    """Returns the schema of one dataclass."""
    properties, required = {}, []
    for field, hint in _fields(cls):
        name = _json_name(field.name)
        properties[name] = {"description": plain(_texts(cls)[field.name]), **_value_schema(name, hint)}
        if _has_no_default(field) and not name.endswith("Time"):
            required.append(name)
            if _is_optional(hint):
                properties[name]["nullable"] = True
    if cls is status.TimeSpent:
        properties["category"]["enum"] = list(CATEGORIES)
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def plain(markdown: str) -> str:
    """Removes links and code marks, for `kubectl explain`."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", markdown).replace("`", "")


def _value_schema(name: str, hint: Any) -> Schema:
    hint = _without_none(hint)
    if name.endswith("Time"):
        return {"type": "string", "format": "date-time"}
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        items = {"type": "string"} if item in _AS_TEXTS else _value_schema("", item)
        keys: Schema = {"x-kubernetes-list-type": "atomic"}
        if item is status.Condition:
            keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        return {"type": "array", "maxItems": _MAX_ITEMS.get(name, _MAX_OTHER_ITEMS), "items": items, **keys}
    if get_origin(hint) is Literal:
        return {"type": "string", "enum": list(get_args(hint))}
    if get_origin(hint) is dict:
        return {"type": "object", "maxProperties": 64, "additionalProperties": {"type": "string"}}
    if dataclasses.is_dataclass(hint):
        return class_schema(hint)  # type: ignore[arg-type]
    return dict(_SCALARS[hint])


def _fields(cls: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield field, hints[field.name]


def _json_name(attribute: str) -> str:
    name = camel_case(attribute)
    moment = name.removesuffix("Seconds")
    return f"{moment}Time" if name != moment and moment in MOMENTS else name


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def _without_none(hint: Any) -> Any:
    if not _is_optional(hint):
        return hint
    [value] = [part for part in get_args(hint) if part is not type(None)]
    return value


@functools.cache
def _texts(cls: type[Any]) -> dict[str, str]:
    """Maps the attributes of a class to their descriptions."""
    if cls in _TEXTS_OF_THE_RUNTIME:
        return _TEXTS_OF_THE_RUNTIME[cls]
    texts = docstrings(cls)
    missing = [field.name for field in dataclasses.fields(cls) if field.name not in texts]
    assert not missing, f"{cls.__name__} needs a docstring below each of {missing}: it is the field's description"
    return texts


@functools.cache
def docstrings(cls: type[Any]) -> dict[str, str]:
    """Maps the attributes of a class to the docstrings of their declarations, in one line each."""
    [definition] = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for node, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            value = after.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[node.target.id] = re.sub(r"\s+", " ", value.value).strip()
    return texts
