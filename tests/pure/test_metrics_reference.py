"""docs/operations.md says what the code exports: every metric of workers, jobs and the operator, with its type and labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram

from surefoot import metrics as of_workers
from surefoot_operator import metrics as of_operator
from surefoot_operator.controller import process_metrics
from surefoot_operator.reconcile.job_metrics import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (`surefoot_[^|]+`) \| (\w+) \|([^|]*)\| ", re.MULTILINE)
NAMED_BY_ITS_TABLE = {
    "### Of workers": {"namespace", "job", "worker"},
    "### Of jobs, by the operator that leads": {"namespace", "job"},
    "### Of the operator": set[str](),
}


def exported() -> dict[str, tuple[str, set[str]]]:
    found = {}
    for one in (one for module in (of_workers, of_operator, process_metrics) for one in vars(module).values()):
        if isinstance(one, Counter | Gauge | Histogram):
            kind = type(one).__name__.lower()
            found[f"{one._name}_total" if kind == "counter" else one._name] = (kind, set(one._labelnames))
    return found | {family.name: (family.kind, set(family.labels)) for family in FAMILIES}


def told() -> dict[str, tuple[str, set[str]]]:
    found = {}
    for heading, given in NAMED_BY_ITS_TABLE.items():
        part = re.split(r"^###? ", PAGE.partition(f"{heading}\n")[2], flags=re.MULTILINE)[0]
        for names, kind, labels in ROW.findall(part):
            own = set(re.findall(r"[a-z_]+", labels))
            for name in re.findall(r"`(\w+)`", names):
                found[name] = (kind, own | given)
    return found


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    assert set(told()) == set(exported())


@pytest.mark.parametrize("name", sorted(exported()))
def test_type_and_labels_are_the_code_s(name: str) -> None:
    kind, labels = exported()[name]
    said, named = told()[name]
    assert said == kind
    # a worker's own are laid over each of its figures when they are read
    assert named - {"namespace", "job", "worker"} == labels - {"namespace", "job", "worker"}
