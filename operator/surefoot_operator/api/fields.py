"""Declares fields and rules of a mapping, and reads mappings into frozen dataclasses by these declarations.

Pure. `spec` declares each field of a TrainingJob once. `parse` reads jobs by these declarations, and the CRD and the tables
of docs/api.md are generated from them. No value is ever converted: `"3"` is not a number and `1.0` is not a whole number,
because a wrong guess would train with the wrong number of ranks.
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

from surefoot_operator.errors import Redacted, SpecError

T = TypeVar("T")

# ---- declarations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """Declares a field's unit, range and name, as the metadata of its annotation.

    The type and the default are the dataclass field's own, and its docstring is the text of the reference.
    """

    unit: str = ""
    """Unit of a number, in the plural; empty: none."""
    min_value: float = 0
    """Smallest allowed number."""
    max_value: float | None = None
    """Largest allowed number; None: no limit."""
    quantity: bool = False
    """Whether the value is a number of bytes in Kubernetes' notation, such as `8Gi`."""
    pattern: str = ""
    """Regular expression that a text, or each text of a list, must match as a whole; empty: any text."""
    allowed: str = ""
    """`pattern` in words, for messages."""
    max_characters: int = 1024
    """Maximum length of a text."""
    min_items: int = 0
    """Minimum length of a list."""
    max_items: int = 1000
    """Maximum length of a list."""
    unique: Literal["", "value", "name"] = ""
    """Whether each value of a list, or the `name` of each item, must be unique; empty: neither."""
    name: str | None = None
    """Name in YAML. None: the attribute's name in camelCase; empty: the field is not in YAML."""
    rejected_values: tuple[str, ...] = ()
    """Values of this field in Kubeflow or other systems that Surefoot rejects, with `instead` as the reason."""
    rejection_hint: str = ""
    """Why `foreign` values are rejected, and what to write."""

    def allows(self, value: float) -> bool:
        """Whether a number is in the allowed range."""
        max_value = sys.float_info.max if self.max_value is None else self.max_value
        return (
            self.min_value <= value <= max_value
        )  # false for NaN; never converted: an int may be too large for a float

    def describe_numbers(self, is_integer: bool) -> str:
        """Describes the allowed numbers, for messages."""
        kind = f"a {'whole ' * is_integer}number{f' of {self.unit}' * bool(self.unit)}"
        high = "" if self.max_value is None else f" and at most {self.max_value:.15g}"
        return f"{kind}, at least {self.min_value:.15g}{high},"


ANYTHING = Field()


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """A rule about the fields of one mapping, enforced by the parser and, as CEL, by the API server.

    A class of the spec lists its rules in `RULES`. Parser and API server reject with the same message.
    """

    fields: tuple[str, ...]
    """YAML names in the mapping, or paths below it. An error has the path of the field if there is one, else of the mapping."""
    message: str
    """The rule as a sentence, shown when it is violated."""
    is_satisfied: Callable[[T], bool]
    """Returns whether the value satisfies the rule."""
    cel: str = ""
    """The same rule as a CEL expression over `self`; empty: CEL cannot express it, and only parser and webhook reject."""
    detail: Callable[[T], str] | None = None
    """Returns figures to append to the parser's message; None: nothing."""
    is_secret: bool = False
    """Whether the value is long or may contain a password, so that messages must not repeat it."""


@dataclass(frozen=True, slots=True)
class DeclaredField:
    """A field of a dataclass of the spec, with its type, limits and default."""

    attribute: str
    """Name of the attribute in Python."""
    type: Any
    """Type of the value, or of each item of a list: a scalar type, a `Literal` or a dataclass."""
    is_list: bool
    """Whether the value is a list."""
    words: tuple[str, ...]
    """Texts that are allowed instead of a number, such as `latest`."""
    field: Field
    """Unit, range and pattern."""
    default: Any
    """Default value; `dataclasses.MISSING`: the field is required."""

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def mapping_class(self) -> type[Any] | None:
        """The dataclass of the value or of each item; None: a scalar type."""
        return typing.cast(type[Any], self.type) if dataclasses.is_dataclass(self.type) else None


def camel_case(name: str) -> str:
    """Converts `min_replicas` to `minReplicas`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


@functools.cache
def declared_fields(cls: typing.Hashable) -> dict[str, DeclaredField]:
    """Returns the fields of a class by YAML name. Cached, because type hints are evaluated at each call."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [_declared_field(field, hints[field.name]) for field in dataclasses.fields(typing.cast(Any, cls))]
    by_yaml_name = {camel_case(f.attribute) if f.field.name is None else f.field.name: f for f in fields}
    return {name: field for name, field in by_yaml_name.items() if name}


def _declared_field(field: dataclasses.Field[Any], hint: Any) -> DeclaredField:
    """Reads type, limits and default of a field from its annotation."""
    declared, is_list, words = ANYTHING, False, ()
    # unwraps Annotated[...], X | None, X | Literal[...] and tuple[X, ...], whatever their nesting
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


def require_mapping(body: object, path: str) -> dict[str, Any]:
    """Returns `body` if it is a mapping whose keys are text. Raises SpecError."""
    if not isinstance(body, dict):
        raise SpecError(path, Redacted() if isinstance(body, str) else body, "a mapping of fields is allowed")
    for key in body:
        if not isinstance(key, str):
            raise SpecError(path, key, "only text is allowed as the name of a field")
    return body


def optional_mapping(body: object, path: str) -> dict[str, Any]:
    """Returns an empty mapping for None, and checks anything else as `require_mapping` does. Raises SpecError."""
    return {} if body is None else require_mapping(body, path)


def check_names(
    body: Mapping[str, Any], allowed: typing.Iterable[str], path: str, unsupported: Mapping[str, str] | None = None
) -> None:
    """Raises SpecError for the first field whose name is not allowed.

    Args:
        unsupported: names that users of other systems may expect, with the replacement to suggest.
    """
    allowed = list(allowed)
    for name in body:
        if name in allowed:
            continue
        field_path = f"{path}.{name}" if path else name
        if unsupported and name in unsupported:
            raise SpecError(field_path, body[name], f"this field is not supported, remove it: {unsupported[name]}")
        near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(sorted(allowed))}"
        raise SpecError(path or "the document", name, f"there is no field of that name; {hint}")


def read_dataclass(cls: type[T], body: object, path: str, values: Mapping[str, Any] | None = None) -> T:
    """Reads an instance of the dataclass `cls` from a mapping and checks its rules. Raises SpecError.

    Args:
        values: attributes that the caller has already read, by name.
    """
    attributes = dict(values or {})
    declared = declared_fields(typing.cast(typing.Hashable, cls))
    fields = require_mapping(body, path)
    check_names(fields, declared, path, getattr(cls, "UNSUPPORTED", None))
    for name, field in declared.items():
        if field.attribute in attributes:
            continue
        value = fields.get(name)
        # null is the same as a missing field, as for an API server
        if value is not None:
            attributes[field.attribute] = _read_value(field, value, f"{path}.{name}")
        elif field.required:
            raise SpecError(f"{path}.{name}", None, "this field is required")
    instance = cls(**attributes)
    check_rules(getattr(cls, "RULES", ()), instance, fields, path)
    return instance


def check_rules(rules: tuple[Rule[T], ...], instance: T, body: Mapping[str, Any], path: str) -> None:
    """Raises SpecError for the first violated rule, with the values as the user wrote them.

    Args:
        instance: the value to check.
        body: the mapping from which it was read.
    """
    for rule in rules:
        if rule.is_satisfied(instance):
            continue
        values = {name: _value_at(body, name) for name in rule.fields}
        set_values = {name: value for name, value in values.items() if value is not None}
        displayed: object = (
            Redacted(" and ".join(f"{name} {value!r:.100}" for name, value in set_values.items()))
            if set_values
            else None
        )
        if len(rule.fields) == 1:
            path = f"{path}.{rule.fields[0]}"
            displayed = next(iter(set_values.values()), Redacted("its default"))
        is_hidden = rule.is_secret or any("@" in str(value) for value in set_values.values())  # user:password@host
        detail = "" if rule.detail is None else f": {rule.detail(instance)}"
        raise SpecError(path, Redacted() if is_hidden else displayed, rule.message + detail)


def _value_at(body: Any, path: str) -> Any:
    """Returns the value at a dotted path such as `persistent.uri`; None if a part of the path is missing."""
    for name in path.split("."):
        body = body.get(name) if isinstance(body, dict) else None
    return body


# ---- values ----------------------------------------------------------------------------------------------------------

# characters that change how a terminal shows the rest: C0, C1, and overrides of the text direction
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_SUFFIX_FACTORS: dict[str, int] = {s: 1000**n for n, s in enumerate(["", *"kMGTP"])} | {
    f"{s}i": 1024**n for n, s in enumerate("KMGTP", 1)
}
QUANTITY = r"([0-9]{1,18})(\.[0-9]{1,9})?([kMGTP]?|[KMGTP]i)"


def _read_value(declared: DeclaredField, value: Any, path: str) -> Any:
    """Reads the value of a field, or each item of its list. Raises SpecError."""
    field = declared.field
    if isinstance(value, str) and value in field.rejected_values:
        raise SpecError(path, value, field.rejection_hint)
    if not declared.is_list:
        return _read_item(declared, value, path)
    values = tuple(
        _read_item(declared, item, f"{path}[{i}]") for i, item in enumerate(require_list(value, path, field))
    )
    keys = [item.name if field.unique == "name" else item for item in values]
    for index, key in enumerate(keys):
        if field.unique and key in keys[:index]:
            raise SpecError(path, key, f"each {field.unique} may occur once in the list")
    return values


def _read_item(declared: DeclaredField, value: Any, path: str) -> Any:
    """Reads one value by the type of its field. Raises SpecError."""
    field, value_type = declared.field, declared.type
    if declared.mapping_class is not None:
        return read_dataclass(declared.mapping_class, value, path)
    if declared.words and isinstance(value, str):
        if value in declared.words:
            return value
        raise SpecError(path, value, f"a number, or {' or '.join(declared.words)}, is allowed")
    if get_origin(value_type) is Literal:
        words = get_args(value_type)
        if value not in words or isinstance(value, bool):
            quoted = ", in quotes: without them YAML reads On, Off, Yes and No as true or false"
            raise SpecError(path, value, f"allowed are {', '.join(words)}" + quoted * isinstance(value, bool))
        return value
    if field.quantity:
        return parse_quantity(value, path, field)
    if value_type is str:
        return require_text(value, path, field)
    if value_type is bool:
        if not isinstance(value, bool):
            raise SpecError(path, value, "true or false is allowed")
        return value
    return require_number(value, path, field, is_integer=value_type is int)


def require_list(value: object, path: str, field: Field) -> list[Any]:
    """Returns `value` if it is a list of an allowed length. Raises SpecError."""
    if not isinstance(value, list):
        raise SpecError(path, value, "a list is allowed")
    if not field.min_items <= len(value) <= field.max_items:
        raise SpecError(
            path, Redacted(f"a list of {len(value)}"), f"{field.min_items} to {field.max_items} are allowed"
        )
    return value


def require_text(value: object, path: str, field: Field = ANYTHING) -> str:
    """Returns `value` if it is a non-empty line of text within the limits of `field`. Raises SpecError."""
    if not isinstance(value, str) or not value:
        raise SpecError(path, value, "non-empty text is allowed (numbers and true/false in quotes)")
    # a URL may contain a password
    displayed = Redacted() if "@" in value else value
    if _CONTROL_CHARACTER.search(value):
        raise SpecError(path, displayed, "one line of text without control characters is allowed")
    if len(value) > field.max_characters:
        raise SpecError(path, displayed, f"at most {field.max_characters} characters are allowed")
    if field.pattern and not re.fullmatch(field.pattern, value):
        raise SpecError(path, displayed, f"{field.allowed} is allowed")
    return value


def require_number(value: object, path: str, field: Field, is_integer: bool) -> int | float:
    """Returns `value` if it is a number in the range of `field`. Raises SpecError."""
    is_number = isinstance(value, int if is_integer else (int, float)) and not isinstance(value, bool)
    if not is_number or not field.allows(typing.cast(float, value)):
        raise SpecError(path, value, f"{field.describe_numbers(is_integer)} is allowed")
    return typing.cast(int, value) if is_integer else float(typing.cast(float, value))


def parse_quantity(value: object, path: str, field: Field = ANYTHING) -> int:
    """Reads a number of bytes in Kubernetes' notation, such as `8Gi`. Raises SpecError."""
    size = _bytes_of(value)
    if not size:
        raise SpecError(path, value, "a positive number of bytes is allowed, such as 8Gi, 500M or 1048576")
    if not field.allows(size):
        raise SpecError(path, value, f"at least {quantity_of(int(field.min_value))}, in {field.unit}, is allowed")
    return size


def _bytes_of(quantity: object) -> int | None:
    """Returns the bytes of a quantity, rounded up as Kubernetes does; None if it is not a quantity."""
    # bool is a subclass of int, but `true` is no size
    if isinstance(quantity, bool) or not isinstance(quantity, int | str):
        return None
    match = re.fullmatch(QUANTITY, str(quantity))
    if match is None:
        return None
    integer, fraction, suffix = match[1], (match[2] or ".")[1:], match[3]
    # integer arithmetic: a float would lose bytes above 2**53
    scaled = int(integer + fraction) * _SUFFIX_FACTORS[suffix]
    return -(-scaled // int(10 ** len(fraction)))


def quantity_of(size_bytes: int) -> str:
    """Writes bytes in Kubernetes' notation, in the largest unit that divides them: `3200Mi`."""
    for exponent, unit in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if size_bytes and size_bytes % (1 << exponent) == 0:
            return f"{size_bytes >> exponent}{unit}"
    return str(size_bytes)
