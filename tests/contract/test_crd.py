"""manifests/crd.yaml says what the dataclasses say: every field of spec and status, its type, bounds and default."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml

from surefoot.protocol.identities import HolderEndpoint
from surefoot_operator.api import spec
from surefoot_operator.api.fields import LIMITS, Limit, camel_case, yaml_fields
from surefoot_operator.api.status import JobStatus, Member
from surefoot_operator.api.status_json import MOMENTS

CRD: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "manifests" / "crd.yaml").read_text(encoding="utf-8"))
VERSION = CRD["spec"]["versions"][0]
ROOT: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
SHOWN = frozenset({"replicas", "readyReplicas", "ready", "selector", "checkpointTime", "schemaVersion"})
"""Of the status: derived by the Kubernetes fabric for people and for the scale subresource, and which form it has."""
ROWS: dict[type[Any], set[str]] = {
    Member: {"indices", "attempts", "incarnations", "nodes"},
    HolderEndpoint: {"nodes", "others", "instances", "hosts", "ports", "domains", "secured", "servers"},
}
"""Columns in one item, where the former version had an item each: an API server drops what it does not know when it reads,
so both stay."""
IN_ROWS_ALONE: dict[type[Any], set[str]] = {HolderEndpoint: {"server"}}
"""Fields that no item of the former version ever had."""
UNITS = {"Seconds": "seconds", "Steps": "steps", "Replicas": "workers", "Bytes": "bytes", "Restarts": "restarts"}


def spec_classes() -> Iterator[tuple[str, type[Any], dict[str, Any]]]:
    """Every class of the spec with its path and its schema."""
    todo: list[tuple[str, type[Any], dict[str, Any]]] = [("spec", spec.TrainingJobSpec, ROOT["properties"]["spec"])]
    while todo:
        path, cls, schema = todo.pop()
        yield path, cls, schema
        hints = typing.get_type_hints(cls)
        for name, field in yaml_fields(cls).items():
            hint, inner = bare(hints[field.name]), schema["properties"].get(name, {})
            if get_origin(hint) is tuple and dataclasses.is_dataclass(get_args(hint)[0]):
                hint, inner = get_args(hint)[0], inner["items"]
            if dataclasses.is_dataclass(hint) and hint is not spec.Template:
                todo.append((f"{path}.{name}", typing.cast(type[Any], hint), inner))


def bare(hint: Any) -> Any:
    """Without `| None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(a for a in get_args(hint) if a is not type(None))
    return hint


CLASSES = [pytest.param(cls, schema, id=path) for path, cls, schema in spec_classes()]


@pytest.mark.parametrize(("cls", "schema"), CLASSES)
def test_a_mapping_of_the_spec_has_the_fields_of_its_class(cls: type[Any], schema: dict[str, Any]) -> None:
    assert set(schema["properties"]) == set(yaml_fields(cls))
    required = {name for name, f in yaml_fields(cls).items() if default_of(f) is dataclasses.MISSING}
    if cls is spec.FailureRule:
        required.add("onExitCodes")  # its default in the class is a part of it
    assert set(schema.get("required", [])) == required


@pytest.mark.parametrize(("cls", "schema"), CLASSES)
def test_a_field_of_the_spec_has_its_default_and_its_bounds(cls: type[Any], schema: dict[str, Any]) -> None:
    hints = typing.get_type_hints(cls)
    for name, field in yaml_fields(cls).items():
        found, hint, default = schema["properties"][name], bare(hints[field.name]), default_of(field)
        if dataclasses.is_dataclass(hint):
            assert found["type"] == "object"
            inner = {n: s["default"] for n, s in found["properties"].items() if "default" in s}
            assert found.get("default") == (None if default in (None, dataclasses.MISSING) else inner), name
            continue
        assert found.get("default") == (None if default in (None, (), dataclasses.MISSING) else default), name
        if (cls, name) != (spec.FailureRule, "onExitCodes"):
            check_values(hint, found, LIMITS.get((cls.__name__, field.name), Limit()), name)


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_values(hint: Any, found: dict[str, Any], limit: Limit, name: str) -> None:
    if limit.quantity or (isinstance(found.get("default"), str) and hint is int):
        assert found["x-kubernetes-int-or-string"], name
    elif get_origin(hint) is tuple:
        assert found["type"] == "array", name
        assert "maxItems" in found, name
        if not dataclasses.is_dataclass(get_args(hint)[0]):
            check_values(get_args(hint)[0], found["items"], limit, name)
    elif get_origin(hint) is Literal:
        assert (found["type"], tuple(found["enum"])) == ("string", get_args(hint)), name
    elif hint in (bool, str):
        assert found["type"] == {bool: "boolean", str: "string"}[hint], name
    else:
        assert found["type"] == ("integer" if hint is int else "number"), name
        assert (found["minimum"], found.get("maximum")) == (limit.least, limit.most), name
        assert "exclusiveMinimum" not in found, name


def test_exit_codes_have_the_bounds_that_the_parser_has() -> None:
    rules = ROOT["properties"]["spec"]["properties"]["failurePolicy"]["properties"]["rules"]
    codes = rules["items"]["properties"]["onExitCodes"]["properties"]
    limit = LIMITS["FailureRule", "exit_codes"]
    assert codes["values"]["items"].items() >= {"minimum": limit.least, "maximum": limit.most}.items()
    assert (codes["operator"]["enum"], codes["operator"]["default"]) == (["In", "NotIn"], "In")


@pytest.mark.parametrize(("cls", "schema"), CLASSES)
def test_a_field_of_the_spec_is_described_with_unit_and_default(cls: type[Any], schema: dict[str, Any]) -> None:
    for name in yaml_fields(cls):
        text = schema["properties"][name]["description"]
        assert "Default: " in text or text.endswith("Required."), name
        for ending, unit in UNITS.items():
            if name.endswith(ending):
                assert f"Unit: {unit}." in text, name


def test_the_status_has_the_fields_of_its_class() -> None:
    check_status(JobStatus, ROOT["properties"]["status"], "status", SHOWN)


def check_status(cls: Any, schema: dict[str, Any], path: str, besides: frozenset[str] = frozenset()) -> None:
    hints, fields = typing.get_type_hints(cls), {camel_case(f.name): f for f in dataclasses.fields(cls)}
    fields = {name: field for name, field in fields.items() if name not in IN_ROWS_ALONE.get(cls, set())}
    times = {f"{name}Time": f"{name}Seconds" for name in MOMENTS if f"{name}Seconds" in fields}
    assert set(schema["properties"]) == set(fields) | besides | set(times) | ROWS.get(cls, set()), path
    for name, former in times.items():
        assert (schema["properties"][name]["type"], schema["properties"][name]["format"]) == ("string", "date-time")
        assert former not in schema.get("required", []), "one of the two stands there"
    for name, field in fields.items():
        found, hint, where = schema["properties"][name], hints[field.name], f"{path}.{name}"
        required = default_of(field) is dataclasses.MISSING and cls not in ROWS and name not in times.values()
        assert found["description"], where
        assert required == (name in schema.get("required", [])), where
        # a field at its default is not written; a required one that may be None is written as null
        assert found.get("nullable", False) == (required and type(None) in get_args(hint)), where
        check_status_value(bare(hint), found, where)


def check_status_value(hint: Any, found: dict[str, Any], where: str) -> None:
    if get_origin(hint) is tuple:
        assert found["type"] == "array", where
        assert "maxItems" in found, where
        check_status_value(get_args(hint)[0], found["items"], where)
    elif dataclasses.is_dataclass(hint):
        check_status(hint, found, where)
    elif get_origin(hint) is Literal:
        assert tuple(found["enum"]) == get_args(hint), where
    else:
        kinds = {int: "integer", float: "number", str: "string", bool: "boolean", dict: "object"}
        assert found["type"] == kinds[get_origin(hint) or hint], where


def test_conditions_are_a_map_by_type() -> None:
    found = ROOT["properties"]["status"]["properties"]["conditions"]
    assert (found["x-kubernetes-list-type"], found["x-kubernetes-list-map-keys"]) == ("map", ["type"])


def test_people_see_what_they_look_for_first() -> None:
    columns = {column["name"]: column for column in VERSION["additionalPrinterColumns"]}
    first = [name for name, column in columns.items() if not column.get("priority")]
    assert first == ["State", "Ready", "World", "Step", "Restarts", "Checkpoint", "Age"]
    assert list(columns) == [*first, "Memory-Bytes", "Persistent-Bytes"]  # `-o wide`
    assert columns["Checkpoint"]["type"] == "date"
    assert CRD["spec"]["names"]["shortNames"] == ["tj"]
    assert set(VERSION["subresources"]) == {"status", "scale"}


def test_unknown_fields_are_kept_in_the_template_alone() -> None:
    def free(schema: Any, path: str) -> Iterator[str]:
        if isinstance(schema, dict):
            if schema.get("x-kubernetes-preserve-unknown-fields"):
                yield path
            for name, inner in schema.items():
                yield from free(inner, f"{path}.{name}")

    assert all(path.startswith(".properties.spec.properties.template.") for path in free(ROOT, ""))
