"""JobStatus <-> JSON: camelCase as a CRD has it, nothing lost either way. Pure; called by fabrics that store status.

Reading is lenient about fields that a newer operator added (they are left out) and strict about everything else.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from surefoot.protocol.plain import shown
from surefoot_operator.api.names import camel_case
from surefoot_operator.api.status import JobStatus
from surefoot_operator.errors import InvariantBroken


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """The status as JSON can hold it; fields at their default are left out."""
    return typing.cast(dict[str, Any], _plain(status))


def status_from_json(body: Mapping[str, Any]) -> JobStatus:
    """The inverse of `status_to_json`."""
    return typing.cast(JobStatus, _build(JobStatus, dict(body), "status"))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            camel_case(field.name): _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default  # MISSING where it is required: equal to nothing that can stand in a field


def _build(cls: type[Any], body: Any, path: str) -> Any:
    if not isinstance(body, dict):
        raise InvariantBroken(f"{path} is {type(body).__name__}, not a mapping: the stored status was damaged")
    hints = _hints(typing.cast(typing.Hashable, cls))
    values = {
        field.name: _value(hints[field.name], body[camel_case(field.name)], f"{path}.{camel_case(field.name)}")
        for field in dataclasses.fields(cls)
        if camel_case(field.name) in body
    }
    try:
        return cls(**values)
    except TypeError as error:
        raise InvariantBroken(f"{path} is incomplete: {error}; the stored status was damaged") from error


@functools.cache
def _hints(cls: typing.Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)  # compiles every annotation, at each call


def _value(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _value(next(a for a in arguments if a is not type(None)), value, path)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {str(key): str(item) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), value, path)
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise InvariantBroken(f"{path} is {shown(value)}, which is not of the type {hint}: the stored status was damaged")
