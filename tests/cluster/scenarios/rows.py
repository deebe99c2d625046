"""What a scenario showed, as one row of build/cluster.json, or of build/kind.json on kind. Rows of scenarios that did not run this time stay."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster import kind, layout, own, state
from cluster.scenarios.ledger import Account

REPORTS = {own.NAME: layout.PROJECT / "build" / "cluster.json", kind.NAME: layout.PROJECT / "build" / "kind.json"}


@dataclass
class Row:
    """Seconds count from the fault, by this machine's clock; None: does not apply. `result`: against the undisturbed job."""

    scenario: str
    detected_seconds: float | None = None
    """The operator's first sign of it."""
    decided_seconds: float | None = None
    """The new epoch was claimed."""
    pods_asked_seconds: float | None = None
    """The first pod that answers it was heard of from the API server."""
    committed_seconds: float | None = None
    first_step_seconds: float | None = None
    """Every rank of the new world had finished a step, as the trainers wrote it down."""
    whole_again_seconds: float | None = None
    """The world had its full size again and made a step."""
    steps_lost: int | None = None
    restored_from: str | None = None
    kind: str | None = None
    worlds: list[int] = field(default_factory=list)
    """Before the fault, and each one after it."""
    result: Account | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def report_of_cluster() -> Path:
    """Where rows of the cluster that stands go: figures of one engine never overwrite those of the other."""
    return REPORTS[state.required().engine]


def write(row: Row, report: Path | None = None) -> None:
    """Puts the row in place of its predecessor."""
    body = {name: value for name, value in asdict(row).items() if name != "scenario"}
    body["at"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    update("scenarios", row.scenario, _rounded(body), report)


def update(part: str, name: str, value: Any, report: Path | None = None) -> None:
    """One entry of one part; several test runs may write at once."""
    report = report or report_of_cluster()
    report.parent.mkdir(exist_ok=True)
    with report.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(report.read_text()) if report.exists() else {}
        known.setdefault(part, {})[name] = value
        fresh = report.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(known, indent=1) + "\n")
        os.replace(fresh, report)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) if "difference" not in name else one for name, one in value.items()}
    return round(value, 3) if isinstance(value, float) else value
