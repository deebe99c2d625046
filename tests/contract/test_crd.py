"""The status in manifests/crd.yaml has the fields of its dataclasses, with their types."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from surefoot.protocol.identities import MemoryServerEndpoint
from surefoot_operator.api.fields import camel_case
from surefoot_operator.api.status import JobStatus, Member
from surefoot_operator.api.status_json import MOMENTS

CRD: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "manifests" / "crd.yaml").read_text(encoding="utf-8"))
VERSION = CRD["spec"]["versions"][0]
ROOT: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
SHOWN = frozenset({"replicas", "readyReplicas", "ready", "selector", "checkpointTime", "schemaVersion"})
"""Of the status: derived by the Kubernetes fabric for people and for the scale subresource, and which form it has."""
AS_TEXTS: tuple[type[Any], ...] = (Member, MemoryServerEndpoint)
"""Written as one text each (`api.status_json`)."""
MOMENT_NAMES = {f"{name}Seconds": f"{name}Time" for name in MOMENTS}


def bare(hint: Any) -> Any:
    """Without `| None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(a for a in get_args(hint) if a is not type(None))
    return hint


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def test_the_status_has_the_fields_of_its_class() -> None:
    check_status(JobStatus, ROOT["properties"]["status"], "status", SHOWN)


def check_status(cls: Any, schema: dict[str, Any], path: str, besides: frozenset[str] = frozenset()) -> None:
    hints = typing.get_type_hints(cls)
    fields = {MOMENT_NAMES.get(camel_case(f.name), camel_case(f.name)): f for f in dataclasses.fields(cls)}
    assert set(schema["properties"]) == set(fields) | besides, path
    for name, field in fields.items():
        found, hint, where = schema["properties"][name], hints[field.name], f"{path}.{name}"
        required = default_of(field) is dataclasses.MISSING and name not in MOMENT_NAMES.values()
        assert found["description"], where
        assert required == (name in schema.get("required", [])), where
        # a field at its default is not written; a required one that may be None is written as null
        assert found.get("nullable", False) == (required and type(None) in get_args(hint)), where
        if name in MOMENT_NAMES.values():
            assert (found["type"], found["format"]) == ("string", "date-time"), where
        else:
            check_status_value(bare(hint), found, where)


def check_status_value(hint: Any, found: dict[str, Any], where: str) -> None:
    if get_origin(hint) is tuple:
        assert found["type"] == "array", where
        assert "maxItems" in found, where
        check_status_value(get_args(hint)[0], found["items"], where)
    elif hint in AS_TEXTS:
        assert found == {"type": "string"}, where
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
