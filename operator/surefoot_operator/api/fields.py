"""Declares fields and rules of a mapping, and reads mappings into frozen dataclasses by these declarations.

Pure. `spec` declares each field of a TrainingJob once; `parse` reads by it, and the CRD and the tables of docs/api.md are
made from it. No value is ever converted: `"3"` is not a number and `1.0` not a whole number, because a wrong guess
becomes a world of the wrong size later.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from surefoot_operator.errors import Hidden, SpecError

T = TypeVar("T")

# ---- declarations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """Declares a field's unit, range and name, as the metadata of its annotation.

    The type and the default are the dataclass field's own, and its docstring is the text of the reference.
    """

    unit: str = ""
    least: float = 0
    most: float | None = None
    quantity: bool = False
    """Bytes in Kubernetes' notation: `8Gi`."""
    pattern: str = ""
    """Regular expression that a text, or each text of a list, matches as a whole."""
    allowed: str = ""
    """`pattern` in words."""
    characters: int = 1024
    least_items: int = 0
    items: int = 1000
    """Maximum length of a list."""
    unique: Literal["", "value", "name"] = ""
    """What occurs once in a list: each value, or the `name` of each item."""
    name: str | None = None
    """Name in YAML where it is not the attribute's in camelCase; empty: none."""
    foreign: tuple[str, ...] = ()
    """Values that neighbouring systems take in a field of this name, refused with `instead`."""
    instead: str = ""
    """Why `foreign` values are refused, and what to write."""

    def holds(self, value: float) -> bool:
        most = sys.float_info.max if self.most is None else self.most
        return self.least <= value <= most  # false for NaN; never converted: an int may be too large for a float

    def numbers(self, whole: bool) -> str:
        """The allowed numbers in words."""
        kind = f"a {'whole ' * whole}number{f' of {self.unit}' * bool(self.unit)}"
        high = "" if self.most is None else f" and at most {self.most:.15g}"
        return f"{kind}, at least {self.least:.15g}{high},"


ANYTHING = Field()


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """A rule between the fields of one mapping, enforced by the reader and, in CEL, by the API server.

    A class of the spec lists its rules in `RULES`. Both refuse with the same message.
    """

    fields: tuple[str, ...]
    """YAML names in the mapping, or paths below it; an error gives the path of the only one, else that of the mapping."""
    message: str
    holds: Callable[[T], bool]
    cel: str = ""
    """The same over `self`; empty where CEL cannot express it: the reader and the webhook alone refuse."""
    detail: Callable[[T], str] | None = None
    """Adds figures to the reader's message."""
    secret: bool = False
    """The value is long, or may hold a password, and is not repeated."""


@dataclass(frozen=True, slots=True)
class DeclaredField:
    """One field of a dataclass with everything that is declared of it."""

    attribute: str
    type: Any
    """Of the value, or of each item of a list: a scalar type, a `Literal` or a dataclass."""
    is_list: bool
    words: tuple[str, ...]
    """Texts that are taken in place of a number: `latest`."""
    field: Field
    default: Any
    """`dataclasses.MISSING` where the field is required."""

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def mapping(self) -> type[Any] | None:
        """The dataclass of the value or of each item; None: a scalar."""
        return typing.cast(type[Any], self.type) if dataclasses.is_dataclass(self.type) else None


def camel_case(name: str) -> str:
    """Converts `min_replicas` to `minReplicas`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


@functools.cache
def declared_fields(cls: typing.Hashable) -> dict[str, DeclaredField]:
    """Maps the YAML names of a class to its fields. Cached, as type hints are compiled at each call."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [_declared_field(field, hints[field.name]) for field in dataclasses.fields(typing.cast(Any, cls))]
    fields_by_name = {camel_case(f.attribute) if f.field.name is None else f.field.name: f for f in fields}
    return {name: field for name, field in fields_by_name.items() if name}


def _declared_field(field: dataclasses.Field[Any], hint: Any) -> DeclaredField:
    declared, is_list, words = ANYTHING, False, ()
    while (origin := get_origin(hint)) in (Annotated, Union, types.UnionType, tuple):
        if origin is Annotated:
            declared, hint = hint.__metadata__[0], hint.__origin__
        elif origin is tuple:
            hint, is_list = get_args(hint)[0], True
        else:
            hint, *others = [part for part in get_args(hint) if part is not type(None)]
            words = tuple(word for other in others for word in get_args(other))
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return DeclaredField(field.name, hint, is_list, words, declared, default)


# ---- mappings --------------------------------------------------------------------------------------------------------


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


def check_names(
    body: Mapping[str, Any], allowed: typing.Iterable[str], path: str, unsupported: Mapping[str, str] | None = None
) -> None:
    """Refuses the first unknown or unsupported field by name. Raises SpecError.

    `unsupported` maps names that a user may expect to what to do instead.
    """
    allowed = list(allowed)
    for name in body:
        if name in allowed:
            continue
        where = f"{path}.{name}" if path else name
        if unsupported and name in unsupported:
            raise SpecError(where, body[name], f"this field is not supported, leave it out: {unsupported[name]}")
        near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(sorted(allowed))}"
        raise SpecError(path or "the document", name, f"there is no field of that name; {hint}")


def read(cls: type[T], body: object, path: str, given: Mapping[str, Any] | None = None) -> T:
    """Reads one `cls` from `body` and checks its rules. Raises SpecError.

    `given` holds fields (by dataclass name) that the caller has read itself.
    """
    values = dict(given or {})
    declared = declared_fields(typing.cast(typing.Hashable, cls))
    fields = mapping(body, path)
    check_names(fields, declared, path, getattr(cls, "UNSUPPORTED", None))
    for name, field in declared.items():
        if field.attribute in values:
            continue
        value = fields.get(name)
        if value is not None:
            values[field.attribute] = _read_value(field, value, f"{path}.{name}")
        elif field.required:
            raise SpecError(f"{path}.{name}", None, "this field is required")
    made = cls(**values)
    check_rules(getattr(cls, "RULES", ()), made, fields, path)
    return made


def check_rules(rules: tuple[Rule[T], ...], made: T, body: Mapping[str, Any], path: str) -> None:
    """Raises SpecError for the first rule that does not hold, with the values as the user wrote them."""
    for rule in rules:
        if rule.holds(made):
            continue
        values = {name: _value_at(body, name) for name in rule.fields}
        given = {name: value for name, value in values.items() if value is not None}
        shown: object = (
            Hidden(" and ".join(f"{name} {value!r:.100}" for name, value in given.items())) if given else None
        )
        if len(rule.fields) == 1:
            path = f"{path}.{rule.fields[0]}"
            shown = next(iter(given.values()), Hidden("its default"))
        hidden = rule.secret or any("@" in str(value) for value in given.values())  # a password in an address
        detail = "" if rule.detail is None else f": {rule.detail(made)}"
        raise SpecError(path, Hidden() if hidden else shown, rule.message + detail)


def _value_at(body: Any, path: str) -> Any:
    """Returns the value at `persistent.uri`, or None where a part of the path is not given."""
    for name in path.split("."):
        body = body.get(name) if isinstance(body, dict) else None
    return body


# ---- values ----------------------------------------------------------------------------------------------------------

# what changes how a terminal shows the rest: C0, C1, and overrides of the direction of text
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_SUFFIX: dict[str, int] = {s: 1000**n for n, s in enumerate(["", *"kMGTP"])} | {
    f"{s}i": 1024**n for n, s in enumerate("KMGTP", 1)
}
QUANTITY = r"([0-9]{1,18})(\.[0-9]{1,9})?([kMGTP]?|[KMGTP]i)"


def _read_value(declared: DeclaredField, value: Any, path: str) -> Any:
    field = declared.field
    if isinstance(value, str) and value in field.foreign:
        raise SpecError(path, value, field.instead)
    if not declared.is_list:
        return _read_item(declared, value, path)
    values = tuple(_read_item(declared, item, f"{path}[{i}]") for i, item in enumerate(items(value, path, field)))
    keys = [item.name if field.unique == "name" else item for item in values]
    for place, key in enumerate(keys):
        if field.unique and key in keys[:place]:
            raise SpecError(path, key, f"each {field.unique} may occur once in the list")
    return values


def _read_item(declared: DeclaredField, value: Any, path: str) -> Any:
    field, wanted = declared.field, declared.type
    if declared.mapping is not None:
        return read(declared.mapping, value, path)
    if declared.words and isinstance(value, str):
        if value in declared.words:
            return value
        raise SpecError(path, value, f"a number, or {' or '.join(declared.words)}, is allowed")
    if get_origin(wanted) is Literal:
        words = get_args(wanted)
        if value not in words or isinstance(value, bool):
            quoted = ", in quotes: without them YAML reads On, Off, Yes and No as true or false"
            raise SpecError(path, value, f"allowed are {', '.join(words)}" + quoted * isinstance(value, bool))
        return value
    if field.quantity:
        return quantity(value, path, field)
    if wanted is str:
        return text(value, path, field)
    if wanted is bool:
        if not isinstance(value, bool):
            raise SpecError(path, value, "true or false is allowed")
        return value
    return number(value, path, field, whole=wanted is int)


def items(value: object, path: str, field: Field) -> list[Any]:
    """Returns `value` if it is a list of an allowed length. Raises SpecError."""
    if not isinstance(value, list):
        raise SpecError(path, value, "a list is allowed")
    if not field.least_items <= len(value) <= field.items:
        raise SpecError(path, Hidden(f"a list of {len(value)}"), f"{field.least_items} to {field.items} are allowed")
    return value


def text(value: object, path: str, field: Field = ANYTHING) -> str:
    """Returns `value` if it is one line as `field` declares it. Raises SpecError."""
    if not isinstance(value, str) or not value:
        raise SpecError(path, value, "text that is not empty is allowed (numbers and true/false in quotes)")
    # an address may hold a password, in the wrong place
    shown = Hidden() if "@" in value else value
    if _UNSEEN.search(value):
        raise SpecError(path, shown, "text of one line is allowed, without control characters")
    if len(value) > field.characters:
        raise SpecError(path, shown, f"at most {field.characters} characters are allowed")
    if field.pattern and not re.fullmatch(field.pattern, value):
        raise SpecError(path, shown, f"{field.allowed} is allowed")
    return value


def number(value: object, path: str, field: Field, whole: bool) -> int | float:
    """Returns `value` if it is a number in the range of `field`. Raises SpecError."""
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not fits or not field.holds(typing.cast(float, value)):
        raise SpecError(path, value, f"{field.numbers(whole)} is allowed")
    return typing.cast(int, value) if whole else float(typing.cast(float, value))


def quantity(value: object, path: str, field: Field = ANYTHING) -> int:
    """Reads bytes in Kubernetes' notation. Raises SpecError."""
    size = _bytes_of(value)
    if not size:
        raise SpecError(path, value, "a positive number of bytes is allowed, such as 8Gi, 500M or 1048576")
    if not field.holds(size):
        raise SpecError(path, value, f"at least {quantity_of(int(field.least))}, in {field.unit}, is allowed")
    return size


def _bytes_of(quantity: object) -> int | None:
    """The bytes that `quantity` says, or None where it is none. Fractions of a byte round up, as Kubernetes does."""
    if isinstance(quantity, bool) or not isinstance(quantity, int | str):
        return None
    match = re.fullmatch(QUANTITY, str(quantity))
    if match is None:
        return None
    whole, fraction, suffix = match[1], (match[2] or ".")[1:], match[3]
    # in whole numbers: a float would lose bytes above 2**53
    scaled = int(whole + fraction) * _SUFFIX[suffix]
    return -(-scaled // int(10 ** len(fraction)))


def quantity_of(size_bytes: int) -> str:
    """Writes bytes as Kubernetes does, in the largest unit that leaves no rest: `3200Mi`."""
    for exponent, unit in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if size_bytes and size_bytes % (1 << exponent) == 0:
            return f"{size_bytes >> exponent}{unit}"
    return str(size_bytes)
