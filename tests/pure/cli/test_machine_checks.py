"""What this machine lacks, and what that keeps from working."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.stored import SPEC, stored_document
from surefoot.errors import ConfigurationError
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.cli import doctor
from surefoot_operator.cli.doctor import available_bytes, check_machine, memory_finding

MEMINFO = "MemTotal:       32000000 kB\nMemAvailable:   20000000 kB\n"


def job(limit: str | None) -> TrainingJob:
    memory = {} if limit is None else {"memory": {"sizeLimit": limit}}
    return parse_job({**stored_document(), "spec": {**SPEC, "checkpoint": memory}})


@pytest.fixture(autouse=True)
def whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing_module", lambda extra: None)
    monkeypatch.setattr(doctor, "find_server_program", lambda: "/usr/bin/redis-server")
    monkeypatch.setattr(doctor.metadata, "version", lambda package: "2.8.0")
    monkeypatch.setattr(doctor, "available_bytes", lambda *texts: 16 << 30)


def test_a_whole_machine_is_well() -> None:
    found = check_machine(None)
    assert [one.state for one in found] == ["ok"] * 5
    assert f"{doctor.__version__} on Python 3." in found[0].text
    assert [one.text for one in found[2:4]] == ["2.8.0", "/usr/bin/redis-server"]


def without(extra: str, said: str) -> Callable[[str], str | None]:
    return lambda asked: said if asked == extra else None


def no_program() -> str:
    raise ConfigurationError("no redis-server of version 7")


def no_package(package: str) -> str:
    raise doctor.metadata.PackageNotFoundError(package)


@pytest.mark.parametrize(
    ("name", "answer", "check", "state", "said"),
    [
        ("missing_module", without("cli", "the module rich is not installed; pip"), "commands", "warning", "rich"),
        ("missing_module", without("runtime", "the module boto3 is not installed"), "torch", "warning", "boto3"),
        ("metadata.version", no_package, "torch", "warning", "no torch"),
        ("find_server_program", no_program, "redis", "warning", "version 7"),
        ("available_bytes", lambda *texts: None, "memory", "unknown", "does not report"),
        ("available_bytes", lambda *texts: 1 << 30, "memory", "warning", "1.07 GB"),
    ],
)
def test_what_is_lacking_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, answer: object, check: str, state: str, said: str
) -> None:
    monkeypatch.setattr(f"surefoot_operator.cli.doctor.{name}", answer)
    found = {one.check: one for one in check_machine(None)}
    assert found[check].state == state
    assert said in found[check].text
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
