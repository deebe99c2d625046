"""Reads a mapping into a frozen dataclass by its type hints.

Pure; called by `parse`, for what type hints can express. No value is ever converted: `"3"` is not a number and `1.0`
not a whole number, because a wrong guess becomes a world of the wrong size later.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from surefoot_operator.api.spec_limits import ANYTHING, LIMITS, Limit
from surefoot_operator.api.yaml_names import NOT_YET, REFUSED_VALUES, yaml_fields
from surefoot_operator.errors import Hidden, SpecError

T = TypeVar("T")

# what changes how a terminal shows the rest: C0, C1, and overrides of the direction of text
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_SUFFIX: dict[str, int] = {s: 1000**n for n, s in enumerate(["", *"kMGTP"])} | {
    f"{s}i": 1024**n for n, s in enumerate("KMGTP", 1)
}
_QUANTITY = re.compile(r"(\d{1,18})(?:\.(\d{1,9}))?([kMGTP]?|[KMGTP]i)")
_QUANTITIES = "a positive number of bytes is allowed, such as 8Gi, 500M or 1048576"


def mapping(body: object, path: str) -> dict[str, Any]:
    """Returns `body` if it is a mapping with text keys. Raises SpecError."""
    if not isinstance(body, dict):
        raise SpecError(path, Hidden() if isinstance(body, str) else body, "a mapping of fields is allowed")
    for key in body:
        if not isinstance(key, str):
            raise SpecError(path, key, "only text is allowed as the name of a field")
    return body


def optional_mapping(body: object, path: str) -> dict[str, Any]:
    """Returns an empty mapping for None, else `mapping`."""
    return {} if body is None else mapping(body, path)


def check_names(body: Mapping[str, Any], allowed: typing.Iterable[str], path: str, owner: str = "") -> None:
    """Refuses the first unknown or unsupported field by name. Raises SpecError."""
    allowed = list(allowed)
    refused = NOT_YET.get(owner, {})
    for name in body:
        if name in allowed:
            continue
        where = f"{path}.{name}" if path else name
        if name in refused:
            raise SpecError(where, body[name], f"this field is not supported, leave it out: {refused[name]}")
        near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(sorted(allowed))}"
        raise SpecError(path or "the document", name, f"there is no field of that name; {hint}")


@functools.cache
def _hints(cls: typing.Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)  # compiles every annotation, at each call


def read(cls: type[T], body: object, path: str, given: Mapping[str, Any] | None = None) -> T:
    """Reads one `cls` from `body`. Raises SpecError.

    `given` holds fields (by dataclass name) that the caller has read itself.
    """
    given = given or {}
    values = dict(given)
    named = yaml_fields(cls)
    found = mapping(body, path)
    check_names(found, named, path, cls.__name__)
    hints = _hints(typing.cast(typing.Hashable, cls))
    for name, field in named.items():
        if field.name in given:
            continue
        value = found.get(name)
        if value is None:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise SpecError(f"{path}.{name}", None, "this field is required")
            continue
        instead = REFUSED_VALUES.get((cls.__name__, field.name), {}).get(value) if isinstance(value, str) else None
        if instead is not None:
            raise SpecError(f"{path}.{name}", value, instead)
        limit = LIMITS.get((cls.__name__, field.name), ANYTHING)
        values[field.name] = _value(hints[field.name], value, f"{path}.{name}", limit)
    return cls(**values)


def _value(hint: Any, value: Any, path: str, limit: Limit) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if limit.quantity:
        size = quantity(value, path)
        if not limit.holds(size):
            raise SpecError(path, value, limit.allowed)
        return size
    if origin in (Union, types.UnionType):
        return _one_of([a for a in arguments if a is not type(None)], value, path, limit)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            quoted = ", in quotes: without them YAML reads On, Off, Yes and No as true or false"
            allowed = f"allowed are {', '.join(map(str, arguments))}"
            raise SpecError(path, value, allowed + (quoted if isinstance(value, bool) else ""))
        return value
    if origin is tuple:
        return tuple(
            _value(arguments[0], item, f"{path}[{i}]", limit) for i, item in enumerate(items(value, path, limit))
        )
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type[Any], hint), value, path)
    if hint is str:
        return text(value, path, limit)
    if hint is bool:
        if not isinstance(value, bool):
            raise SpecError(path, value, "true or false is allowed")
        return value
    return number(value, path, limit, whole=hint is int)


def _one_of(hints: list[Any], value: Any, path: str, limit: Limit) -> Any:
    """A value of the first hint, or one of the words that stand beside it (a step, or `latest`)."""
    words = [word for hint in hints[1:] if get_origin(hint) is Literal for word in get_args(hint)]
    if words and isinstance(value, str):
        if value in words:
            return value
        raise SpecError(path, value, f"a number, or {' or '.join(words)}, is allowed")
    return _value(hints[0], value, path, limit)


def items(value: object, path: str, limit: Limit) -> list[Any]:
    """Returns `value` if it is a list within the limit. Raises SpecError."""
    if not isinstance(value, list):
        raise SpecError(path, value, "a list is allowed")
    if len(value) > limit.items:
        raise SpecError(path, Hidden(f"a list of {len(value)}"), f"at most {limit.items} are allowed")
    return value


def text(value: object, path: str, limit: Limit = ANYTHING) -> str:
    """Returns `value` if it is one line within `limit`. Raises SpecError."""
    if not isinstance(value, str) or not value:
        raise SpecError(path, value, "text that is not empty is allowed (numbers and true/false in quotes)")
    # an address may hold a password, in the wrong place
    told = Hidden() if "@" in value else value
    if _UNSEEN.search(value):
        raise SpecError(path, told, "text of one line is allowed, without control characters")
    if len(value) > limit.characters:
        raise SpecError(path, told, f"at most {limit.characters} characters are allowed")
    if limit.pattern is not None and not limit.pattern.fullmatch(value):
        raise SpecError(path, told, f"{limit.allowed} is allowed")
    return value


def number(value: object, path: str, limit: Limit, whole: bool) -> int | float:
    """Returns `value` if it is a number within `limit`. Raises SpecError."""
    kind = "a whole number" if whole else "a number"
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not fits or not limit.holds(typing.cast(float, value)):
        raise SpecError(path, value, f"{kind} {limit.sentence()} is allowed".replace("  ", " "))
    return typing.cast(int, value) if whole else float(typing.cast(float, value))


def quantity(value: object, path: str) -> int:
    """Reads bytes in Kubernetes' notation. Raises SpecError."""
    size = _bytes_of(value)
    if not size:
        raise SpecError(path, value, _QUANTITIES)
    return size


def _bytes_of(quantity: object) -> int | None:
    """The bytes that `quantity` says, or None where it is none. Fractions of a byte round up, as Kubernetes does."""
    if isinstance(quantity, bool) or not isinstance(quantity, int | str):
        return None
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        return None
    whole, fraction, suffix = match[1], match[2] or "", match[3]
    # in whole numbers: a float would lose bytes above 2**53
    scaled = int(whole + fraction) * _SUFFIX[suffix]
    return -(-scaled // int(10 ** len(fraction)))
