"""Conditions and printer columns in manifests/crd.yaml are what users and clients need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CRD: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "manifests" / "crd.yaml").read_text(encoding="utf-8"))
VERSION = CRD["spec"]["versions"][0]
ROOT: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]


def test_conditions_are_a_map_by_type() -> None:
    found = ROOT["properties"]["status"]["properties"]["conditions"]
    assert (found["x-kubernetes-list-type"], found["x-kubernetes-list-map-keys"]) == ("map", ["type"])


def test_people_see_what_they_look_for_first() -> None:
    columns = {column["name"]: column for column in VERSION["additionalPrinterColumns"]}
    first = [name for name, column in columns.items() if not column.get("priority")]
    assert first == ["State", "Ready", "Ranks", "Step", "Restarts", "Checkpoint", "Age"]
    assert list(columns) == [*first, "Memory-Bytes", "Persistent-Bytes"]  # `-o wide`
    assert columns["Checkpoint"]["type"] == "date"
    assert CRD["spec"]["names"]["shortNames"] == ["tj"]
    assert set(VERSION["subresources"]) == {"status", "scale"}
