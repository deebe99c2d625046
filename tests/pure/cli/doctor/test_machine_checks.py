"""What this machine lacks, and what that keeps from working."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.stored import SPEC, stored_document
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.cli.doctor import MachineLook, available_bytes, look_here, machine_findings, memory_finding

WHOLE = MachineLook("1.2.3", "3.11.7", "2.8.0", "/usr/bin/redis-server", "", {}, 16 << 30)
MEMINFO = "MemTotal:       32000000 kB\nMemAvailable:   20000000 kB\n"


def job(limit: str | None) -> TrainingJob:
    memory = {} if limit is None else {"memory": {"sizeLimit": limit}}
    return parse_job({**stored_document(), "spec": {**SPEC, "checkpoint": memory}})


def test_a_whole_machine_is_well() -> None:
    found = machine_findings(WHOLE, None)
    assert [one.state for one in found] == ["ok"] * 5
    assert "1.2.3 on Python 3.11.7" in found[0].said


@pytest.mark.parametrize(
    ("look", "check", "state", "said"),
    [
        (replace(WHOLE, lacking={"cli": "the module rich is not installed; pip"}), "commands", "warning", "rich"),
        (
            replace(WHOLE, torch=None, lacking={"runtime": "the module torch is not installed"}),
            "torch",
            "warning",
            "local",
        ),
        (replace(WHOLE, lacking={"runtime": "the module boto3 is not installed"}), "torch", "warning", "boto3"),
        (replace(WHOLE, redis=None, redis_problem="no redis-server of version 7"), "redis", "warning", "version 7"),
        (replace(WHOLE, available_bytes=None), "memory", "unknown", "does not say"),
        (replace(WHOLE, available_bytes=1 << 30), "memory", "warning", "1.07 GB"),
    ],
)
def test_what_is_lacking_is_named(look: MachineLook, check: str, state: str, said: str) -> None:
    found = {one.check: one for one in machine_findings(look, None)}
    assert found[check].state == state
    assert said in found[check].said
    assert [one.state for one in found.values() if one.check != check] == ["ok"] * 4


@pytest.mark.parametrize(("limit", "state"), [(None, "ok"), ("1Gi", "ok"), ("8Gi", "warning")])
def test_the_holders_of_a_job_must_fit_the_machine(limit: str | None, state: str) -> None:
    assert memory_finding(16 << 30, job(limit)).state == state


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ((MEMINFO, "max\n", "1000\n"), 20000000 * 1024),
        ((MEMINFO, "5000\n", "1000\n"), 4000),
        ((MEMINFO, "1000\n", "5000\n"), 0),
        (("", "5000", "1000"), 4000),
        (("", "", ""), None),
        (("MemAvailable: what kB", "", ""), None),
    ],
)
def test_a_containers_limit_counts_where_it_is_less(texts: tuple[str, str, str], found: int | None) -> None:
    assert available_bytes(*texts) == found


def test_this_machine_can_be_looked_at() -> None:
    assert look_here().python.startswith("3.")
