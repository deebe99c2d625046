"""What a whole run on kind owes: nothing that was skipped, cut off or never compared reads as whole."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from images.build import PROJECT
from kind import verdict

SAME = {"samples_lost": 0, "samples_repeated": 0, "max_loss_difference": 1e-15, "max_parameter_difference": 0.0}
TIMES = {"detected_seconds": 0.1, "first_step_seconds": 2.0, "whole_again_seconds": None}
ROW = {"result": SAME, "steps_lost": 0, "worlds": [3, 2], **TIMES}
OWED = ["test_a.test_it_works"]
WHOLE: dict[str, Any] = {
    "first_hour": {"commands": {"to_its_end": True, "reached_seconds": {"images": 3.0}}},
    "scenarios": {name: copy.deepcopy(ROW) for name in verdict.SCENARIOS},
    "tests": {"test_a.test_it_works": {"outcome": "passed", "seconds": 2.0}},
}


def changed(path: tuple[str, ...], value: object) -> dict[str, Any]:
    told = copy.deepcopy(WHOLE)
    inner = told
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return told


CRASHED = ("scenarios", "node crashed, no spare")


def test_a_whole_run_lacks_nothing() -> None:
    assert verdict.lacking(WHOLE, OWED) == []
    assert len(verdict.table(WHOLE)) == 1 + len(verdict.SCENARIOS) + 1


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (changed(("first_hour", "commands", "to_its_end"), value=False), "the first hour did not run to its end"),
        (changed(("first_hour",), {}), "the first hour did not run to its end"),
        (changed(("tests", OWED[0], "outcome"), "skipped"), f"test {OWED[0]}: skipped"),
        (changed(("tests",), {}), f"test {OWED[0]}: not run"),
        (changed((*CRASHED, "result"), None), "not compared with the undisturbed job"),
        (changed((*CRASHED, "result", "samples_repeated"), 2), "0 samples lost, 2 repeated"),
        (changed((*CRASHED, "result", "max_parameter_difference"), None), "no parameter was compared"),
        (changed((*CRASHED, "result", "max_loss_difference"), 0.5), "a loss differs by 0.5"),
    ],
)
def test_what_lacks_is_named(told: dict[str, Any], sentence: str) -> None:
    [found] = verdict.lacking(told, OWED)
    assert found.endswith(sentence)


def test_a_scenario_that_did_not_run_is_named() -> None:
    assert len(verdict.lacking({}, OWED)) == 1 + len(verdict.SCENARIOS) + 1


def test_the_rows_owed_are_those_that_the_makefile_runs() -> None:
    """A scenario that is run and not owed could fail to write its row, and one that is owed and not run fails each run."""
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    [names] = re.findall(r"\$\(addprefix tests/cluster/test_scenario_,(.+?)\)\n", makefile)
    sources = [PROJECT / f"tests/cluster/test_scenario_{name.partition('::')[0]}" for name in names.split()]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    assert [name for name in verdict.SCENARIOS if f'"{name}"' not in text] == []
    assert "test_registry_pull.test_nodes_pull_by_digest_with_the_pull_secret_and_not_without" in verdict.tests()
