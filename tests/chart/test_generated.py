"""What is made from the chart is as the chart is now, and says everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from chart import documented, generated
from chart.helm import CHART, PROJECT, Object, objects
from golden import rendered
from golden.__main__ import HINT, RECORDED

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(generated.outputs()), ids=lambda path: str(path.relative_to(PROJECT)))
def test_is_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generated.outputs()[path], "run `make manifests`"


def test_the_chart_renders_as_it_was_recorded() -> None:
    assert rendered.chart() == (RECORDED / "chart.txt").read_text(encoding="utf-8"), HINT


def test_every_value_is_documented() -> None:
    assert documented.undocumented(VALUES) == []


def test_an_undocumented_value_is_noticed() -> None:
    assert documented.undocumented("# Said.\na: 1\nb:\n  # Said.\n  c: {d: 1}\n  e: 2\n") == ["b.e"]


def test_a_comment_that_stands_apart_documents_nothing() -> None:
    assert documented.undocumented("# About the file.\n\na: 1\n") == ["a"]


def test_schema_and_values_name_the_same() -> None:
    def same(node: object, schema: Object, path: str) -> None:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if schema.get("additionalProperties") is not False or not isinstance(node, dict):
            return
        if path.endswith(("resources", "ontext", "affinity")):
            assert node.keys() <= schema["properties"].keys(), path  # Kubernetes' own, of which the values set some
            return
        assert node.keys() | {"global"} == schema["properties"].keys() | {"global"}, path
        for name, child in node.items():
            same(child, schema["properties"][name], f"{path}.{name}")

    same(yaml.safe_load(VALUES), SCHEMA, "values")


def test_no_schema_lets_unknown_names_in() -> None:
    """But for Kubernetes' own mappings (labels, volumes, affinity terms) that the API server checks."""

    def walk(schema: Object, path: str) -> list[str]:
        open_here = "properties" in schema and schema.get("additionalProperties") is not False
        children = {**schema.get("properties", {}), **schema.get("definitions", {})}
        return [path] * open_here + [gap for name, child in children.items() for gap in walk(child, f"{path}.{name}")]

    assert walk(SCHEMA, "") == []


def test_manifests_hold_what_the_chart_renders_and_the_namespace_first() -> None:
    text = (PROJECT / "manifests" / "install.yaml").read_text(encoding="utf-8")
    found = [(one["kind"], one["metadata"]["name"]) for one in yaml.safe_load_all(text)]
    assert found[0] == ("Namespace", "surefoot-system")
    rendered = {
        (one["kind"], one["metadata"]["name"]) for one in objects() if one["kind"] != "CustomResourceDefinition"
    }
    hooks = {(kind, "surefoot-test") for kind in ("Pod", "ServiceAccount", "Role", "RoleBinding")}
    assert set(found[1:]) == rendered - hooks
