"""Makes from `api.spec` what repeats its declarations: the schema of `spec` in the CRD, and the tables of docs/api.md.

`outputs` is what both files should say; `make manifests` writes it, and tests/pure/api/test_spec.py holds the files
equal. In the CRD, names and columns are kept by hand. `status_pages` makes the schema of `status`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

from chart.status_pages import docstrings, plain, status_schema
from surefoot_operator.api import parse, spec
from surefoot_operator.api.fields import QUANTITY, DeclaredField, Field, Rule, declared_fields, quantity_of

PROJECT = Path(__file__).parents[2]
CRD = PROJECT / "manifests" / "crd.yaml"
REFERENCE = PROJECT / "docs" / "api.md"
Schema = dict[str, Any]


def outputs() -> dict[Path, str]:
    """Maps each of the two files to the text that it should have."""
    return {CRD: crd(CRD.read_text(encoding="utf-8")), REFERENCE: reference(REFERENCE.read_text(encoding="utf-8"))}


# ---- texts -----------------------------------------------------------------------------------------------------------


def texts_of(path: str, cls: type[Any]) -> dict[str, str]:
    """Maps the YAML names of a mapping to their texts in Markdown: the docstring, and when the field may change."""
    declared = docstrings(cls)
    texts = {}
    for name, field in declared_fields(cls).items():
        text = declared.get(field.attribute)
        assert text, f"{cls.__name__}.{field.attribute} needs a docstring: the text of the reference"
        short = f"{path}.{name}".removeprefix("spec.")
        if short in spec.TrainingJobSpec.FIXED:
            text += " Cannot be changed."
        elif short in spec.TrainingJobSpec.FIXED_WHILE_RUNNING:
            text += " Can be changed only while `suspend` is true."
        texts[name] = text
    return texts


def default_of(field: DeclaredField) -> str:
    default = field.default
    if field.required:
        return "required"
    if default is None or default == ():
        return "none"
    if dataclasses.is_dataclass(default):
        return "its defaults"
    return str(default).lower() if isinstance(default, bool) else f"{default:g}" if _is_number(default) else default


def allowed_of(field: DeclaredField) -> str:
    """Returns the allowed values in Markdown; empty where any of the type is allowed."""
    declared = field.field
    if field.mapping_class is not None:
        return ""
    if declared.quantity:
        return f"≥ `{quantity_of(int(declared.min_value))}`" if declared.min_value else ""
    if field.type is bool:
        return "`true`, `false`"
    if field.type in (int, float):
        low, high = f"{declared.min_value:g}", declared.max_value
        numbers = f"≥ {low}" if high is None else f"{low} to {high:,.15g}"
        return ", ".join([numbers, *(f"`{word}`" for word in field.words)])
    return ", ".join(f"`{word}`" for word in get_args(field.type))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def classes(path: str = "spec", cls: type[Any] = spec.TrainingJobSpec) -> Iterator[tuple[str, type[Any]]]:
    """Lists each mapping of the spec with its path."""
    yield path, cls
    for name, field in declared_fields(cls).items():
        if field.mapping_class is not None:
            yield from classes(f"{path}.{name}", field.mapping_class)


# ---- CRD -------------------------------------------------------------------------------------------------------------

_START = "      openAPIV3Schema:\n"
_GENERATED = "        # Made from operator/surefoot_operator/api/spec.py and status.py by `make manifests`.\n"


def crd(current: str) -> str:
    """Replaces the schema, which is the last part of the file."""
    head, _, _ = current.partition(_START)
    text: str = yaml.dump(root_schema(), Dumper=_Dumper, sort_keys=False, width=150, allow_unicode=True)
    return head + _START + _GENERATED + re.sub("^(?=.)", " " * 8, text, flags=re.MULTILINE)


class _Dumper(yaml.SafeDumper):
    """Writes everything out: an anchor in a manifest helps no reader."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def root_schema() -> Schema:
    name_rule = f"self.metadata.name.matches('^{parse.NAME}$')"
    message = f"metadata.name: {parse.NAMES}, are allowed (pods are named after it)"
    return {
        "type": "object",
        "description": "A training job that goes on when nodes die.",
        "required": ["spec"],
        "x-kubernetes-validations": [{"rule": name_rule, "message": message}],
        "properties": {
            "apiVersion": {"description": spec.API_VERSION, "type": "string"},
            "kind": {"description": spec.KIND, "type": "string"},
            "metadata": {"type": "object"},
            "spec": {"description": "What the job should be.", **mapping_schema("spec", spec.TrainingJobSpec)},
            "status": status_schema(),
        },
    }


def mapping_schema(path: str, cls: type[Any]) -> Schema:
    """Returns the schema of one dataclass of the spec."""
    if cls is spec.Template:
        return template_schema()
    fields = declared_fields(cls)
    meanings = texts_of(path, cls)
    properties = {name: field_schema(f"{path}.{name}", field, meanings[name]) for name, field in fields.items()}
    rules = [rule_schema(rule) for rule in getattr(cls, "RULES", ()) if rule.cel]
    if cls is spec.TrainingJobSpec:
        rules += fixed_rules()
    required = [name for name, field in fields.items() if field.required]
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        **({"x-kubernetes-validations": rules} if rules else {}),
    }


def rule_schema(rule: Rule[Any]) -> Schema:
    path = {"fieldPath": f".{rule.fields[0]}"} if len(rule.fields) == 1 else {}
    return {"rule": rule.cel, "message": rule.message, **path}


def fixed_rules() -> Iterator[Schema]:
    """Refuses changes of fields that are fixed, or fixed while the job runs."""
    until = "set suspend to true first, change it, then set suspend to false"
    for path in spec.TrainingJobSpec.FIXED_WHILE_RUNNING:
        new, old = _given("self", path), _given("oldSelf", path)
        same = f"self.{path} == oldSelf.{path}"
        if new:
            same = f"({new}) == ({old}) && (!({new}) || {same})"
        message = f"{path} cannot be changed while the job runs: {until}"
        yield {"rule": f"oldSelf.suspend || {same}", "message": message}
    for path in spec.TrainingJobSpec.FIXED:
        new, old = _given("self", path), _given("oldSelf", path)
        same = f"self.{path} == oldSelf.{path}"
        rule = f"!({old}) || ({new} && {same})" if new else same
        yield {"rule": rule, "message": f"{path} cannot be changed: make a new job"}


def _given(side: str, path: str) -> str:
    """Returns the condition that a path is there; empty where it always is.

    Not `self.?a.?b`: of an optional value the API server estimates no size, and refuses the rule as too expensive.
    """
    cls: type[Any] | None = spec.TrainingJobSpec
    conditions = []
    for name in path.split("."):
        assert cls is not None
        side, field = f"{side}.{name}", declared_fields(cls)[name]
        if not field.required and field.default is None:
            conditions.append(f"has({side})")
        cls = field.mapping_class
    return " && ".join(conditions)


def field_schema(path: str, field: DeclaredField, text: str) -> Schema:
    """Returns the schema of one field, with its text, unit and default as the description."""
    unit = f" Unit: {field.field.unit}." if field.field.unit else ""
    default = " Required." if field.required else f" Default: {default_of(field)}."
    described = {"description": plain(text) + unit + default}
    value = item_schema(path, field)
    if field.is_list:
        unique = {"value": {"x-kubernetes-list-type": "set"}, "": {}}
        unique["name"] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
        least = {"minItems": field.field.min_items} if field.field.min_items else {}
        return {
            **described,
            "type": "array",
            **least,
            "maxItems": field.field.max_items,
            **unique[field.field.unique],
            "items": value,
        }
    if dataclasses.is_dataclass(field.default):
        inner = value["properties"].items()
        return {**described, **value, "default": {name: part["default"] for name, part in inner if "default" in part}}
    has_default = not field.required and field.default is not None
    return {**described, **value, **({"default": _number(field.default)} if has_default else {})}


def item_schema(path: str, field: DeclaredField) -> Schema:
    """Returns the schema of the value, or of each item of a list."""
    declared = field.field
    if field.mapping_class is not None:
        return mapping_schema(path, field.mapping_class)
    if declared.quantity:
        return {**_either(), "pattern": f"^{QUANTITY}$", "maxLength": 32, "x-kubernetes-validations": [_size(declared)]}
    if field.type is bool:
        return {"type": "boolean"}
    if field.type is str:
        pattern = {"pattern": f"^({declared.pattern})$" if "|" in declared.pattern else f"^{declared.pattern}$"}
        characters = {"minLength": 1, "maxLength": declared.max_characters}
        return {"type": "string", **characters, **(pattern if declared.pattern else {})}
    if field.type in (int, float):
        most = {} if declared.max_value is None else {"maximum": _number(declared.max_value)}
        numbers = {"minimum": _number(declared.min_value), **most}
        if field.words:
            return {**_either(), **numbers, "pattern": f"^{'|'.join(field.words)}$"}
        if field.type is int:
            return {"type": "integer", "format": "int64", **numbers}
        if float(declared.min_value).is_integer():
            return {"type": "number", **numbers}
        # for a value without a fraction the API server cuts that of `minimum` off: 0 would pass for at least 0.001
        rule = {
            "rule": f"self >= {declared.min_value}",
            "message": f"{declared.describe_numbers(is_integer=False)} is allowed",
        }
        return {"type": "number", **numbers, "x-kubernetes-validations": [rule]}
    return {"type": "string", "enum": list(get_args(field.type))}


def _either() -> Schema:
    return {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}


def _size(declared: Field) -> Schema:
    """Requires the smallest allowed quantity; 1 byte where none is declared."""
    least = max(1, int(declared.min_value))
    of_text = f"quantity(self).compareTo(quantity('{quantity_of(least)}')) >= 0"
    message = f"at least {quantity_of(least)}, in {declared.unit}, is allowed"
    return {"rule": f"type(self) == int ? self >= {least} : {of_text}", "message": message}


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def template_schema() -> Schema:
    """Returns the schema of the pod template: Kubernetes' own, of which only what the operator reads is described."""
    kept = {"x-kubernetes-preserve-unknown-fields": True}
    name = {
        "type": "string",
        "maxLength": parse.CONTAINER_NAME.max_characters,
        "pattern": f"^{parse.CONTAINER_NAME.pattern}$",
    }
    variable_name = {
        "description": "Name. Required.",
        "type": "string",
        "minLength": 1,
        "maxLength": parse.VARIABLE_NAME.max_characters,
        "pattern": f"^{parse.VARIABLE_NAME.pattern}$",
    }
    container: Schema = {
        "type": "object",
        "required": ["name"],
        **kept,
        "properties": {
            "name": {"description": f"Unique in the pod; {parse.TRAINER} is the one that trains. Required.", **name},
            "env": {
                "description": f"Names and values; names that begin with {parse.RESERVED_VARIABLES} are the operator's.",
                "type": "array",
                "maxItems": parse.MAX_VARIABLES,
                "items": {"type": "object", "required": ["name"], **kept, "properties": {"name": variable_name}},
            },
            "command": {
                "description": f"The program and its first arguments. Required of the container {parse.TRAINER}.",
                "type": "array",
                "maxItems": parse.MAX_COMMAND_WORDS,
                "items": {"type": "string"},
            },
        },
    }
    trainer = f"c.name != '{parse.TRAINER}'"
    reserved = f"c.env.all(e, !e.name.startsWith('{parse.RESERVED_VARIABLES}'))"
    stated = "(has(c.command) && size(c.command) > 0 && size(c.command[0]) > 0)"
    grace = {"minimum": int(parse.GRACE_PERIOD.min_value), "maximum": int(parse.GRACE_PERIOD.max_value or 0)}
    pod: Schema = {
        "description": "Kubernetes' PodSpec. Required.",
        "type": "object",
        "required": ["containers"],
        **kept,
        "properties": {
            "restartPolicy": {"description": "Never, or left out. Default: Never.", "type": "string"},
            "terminationGracePeriodSeconds": {
                "description": "How long a pod that is deleted may take; up to a half of it lets its world stop in order at a"
                " step that is saved. Unit: seconds. Default: 30.",
                "type": "integer",
                "format": "int64",
                **grace,
            },
            "containers": {
                "description": f"Containers of the pod; one is named {parse.TRAINER}. Required.",
                "type": "array",
                "minItems": 1,
                "maxItems": parse.MAX_CONTAINERS,
                "items": container,
            },
        },
        "x-kubernetes-validations": [
            *map(rule_schema, parse.POD_RULES),
            {
                "rule": f"self.containers.all(c, {trainer} || !has(c.env) || {reserved})",
                "message": parse.VARIABLES_RESERVED,
            },
            {"rule": f"self.containers.all(c, {trainer} || {stated})", "message": parse.COMMAND_NEEDED},
        ],
    }
    labels = {"description": "Labels and annotations of the pods; the operator adds its own. Default: none."}
    return {
        "type": "object",
        "required": ["spec"],
        "properties": {"metadata": {**labels, "type": "object", **kept}, "spec": pod},
    }


# ---- docs/api.md -----------------------------------------------------------------------------------------------------

FIELDS_HEAD = "| field | default | allowed | meaning |\n|---|---|---|---|\n"


def reference(current: str) -> str:
    """Replaces the tables under the headings that name a mapping of the spec."""
    tables = {path: FIELDS_HEAD + "".join(field_rows(path, cls)) for path, cls in classes()}
    sections = re.split(r"^(?=## )", current, flags=re.MULTILINE)
    headings = [section.partition("\n")[0].removeprefix("## ") for section in sections]
    missing = tables.keys() - set(headings)
    assert not missing, f"docs/api.md needs a section for each of {sorted(missing)}, with a line `| field |`"
    return "".join(
        _with_table(section, tables[heading]) if heading in tables else section
        for heading, section in zip(headings, sections, strict=True)
    )


def _with_table(section: str, table: str) -> str:
    """Replaces the first table of a section."""
    before, line, rest = section.partition("\n|")
    return before + "\n" + table + re.sub(r"\A(.*\n)(\|.*\n?)*", "", line[1:] + rest)


MEANING_CHARACTERS = 240
"""After so many a meaning ends with its sentence: `kubectl explain` has all of it."""


def field_rows(path: str, cls: type[Any]) -> Iterator[str]:
    declared = docstrings(cls)
    for name, field in declared_fields(cls).items():
        short = f"{path}.{name}".removeprefix("spec.")
        fixed, fixed_while_running = spec.TrainingJobSpec.FIXED, spec.TrainingJobSpec.FIXED_WHILE_RUNNING
        mark = "‡" if short in fixed else "†" if short in fixed_while_running else ""
        allowed = " ".join(part for part in (allowed_of(field), field.field.unit) if part)
        cells = (f"`{name}`{mark}", default_of(field), allowed, first_sentences(declared[field.attribute]))
        yield f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def first_sentences(text: str) -> str:
    """Returns the sentences of a meaning up to the first that ends beyond the limit, but at least one."""
    sentences = re.split(r"(?<=\.\)) (?=[A-Z`\[])|(?<=\.) (?=[A-Z`\[])", text)
    result = sentences[0]
    for sentence in sentences[1:]:
        if len(result) + len(sentence) > MEANING_CHARACTERS:
            break
        result += f" {sentence}"
    return result
