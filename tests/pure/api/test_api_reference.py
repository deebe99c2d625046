"""docs/api.md says what the dataclasses say: every field, its default, and what is refused for now."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from surefoot_operator.api import spec
from surefoot_operator.api.fields import NOT_YET, REFUSED_VALUES, yaml_fields, yaml_name

DOCUMENT = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")

SECTIONS: dict[str, type[Any]] = {
    "spec": spec.TrainingJobSpec,
    "spec.elasticPolicy": spec.ElasticPolicy,
    "spec.runPolicy": spec.RunPolicy,
    "spec.schedulingPolicy": spec.SchedulingPolicy,
    "spec.failurePolicy": spec.FailurePolicy,
    "spec.failurePolicy.rules": spec.FailureRule,
    "spec.healthPolicy": spec.HealthPolicy,
    "spec.healthPolicy.numerics": spec.NumericsPolicy,
    "spec.healthPolicy.nodeSignals": spec.NodeSignals,
    "spec.checkpoint": spec.CheckpointPolicy,
    "spec.checkpoint.memory": spec.MemoryTierSpec,
    "spec.checkpoint.persistent": spec.PersistentTierSpec,
    "spec.checkpoint.restoreFrom": spec.RestoreFrom,
    "spec.template": spec.Template,
}
UNITS = {"Seconds": "seconds", "Steps": "steps", "Replicas": "workers", "Bytes": "bytes", "Restarts": "restarts"}


def rows(section: str) -> list[list[str]]:
    """The table rows under a heading, as cells."""
    text = re.split(rf"^## {re.escape(section)}$", DOCUMENT, flags=re.MULTILINE)[1]
    body = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    lines = [line for line in body.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "its defaults"
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_reference_lists_every_field_with_its_default(section: str) -> None:
    wanted = {name: default_of(field) for name, field in yaml_fields(SECTIONS[section]).items()}
    if section == "spec.failurePolicy.rules":
        wanted["onExitCodes"] = "required"
    found = {cells[0].strip("`"): cells[2] for cells in rows(section)}
    assert found == wanted


@pytest.mark.parametrize("section", SECTIONS)
def test_the_reference_names_the_unit_where_a_name_tells_it(section: str) -> None:
    for name, unit, *_ in rows(section):
        for ending, wanted in UNITS.items():
            if name.strip("`").endswith(ending):
                assert unit == wanted, name


def test_the_reference_lists_what_is_refused_for_now() -> None:
    paths = {cls.__name__: section for section, cls in SECTIONS.items()}
    wanted = {f"{paths[cls]}.{name}": why for cls, names in NOT_YET.items() for name, why in names.items()}
    assert {cells[0].strip("`"): cells[1] for cells in rows("Refused for now")} == wanted


def test_the_reference_lists_the_values_of_neighbours_that_are_refused() -> None:
    paths = {cls.__name__: section for section, cls in SECTIONS.items()}
    classes = {cls.__name__: cls for cls in SECTIONS.values()}
    wanted = {
        f"`{paths[cls]}.{yaml_name(classes[cls], field)}: {', '.join(values).replace(', ', '`, `')}`": why
        for (cls, field), values in REFUSED_VALUES.items()
        for why in set(values.values())
    }
    assert {cells[0]: cells[1] for cells in rows("Refused values")} == wanted


def test_every_class_of_the_spec_has_its_section() -> None:
    classes = {c for c in vars(spec).values() if isinstance(c, type) and dataclasses.is_dataclass(c)}
    classes -= {spec.TrainingJob, spec.GangScheduler}
    assert classes == set(SECTIONS.values())
