"""Reads a TrainingJob as it is stored, also one of another version.

Pure; called by `cluster_reads` and `run_folder_reads`. A person looks at a job most of all when something is wrong with it: a spec or
a status that cannot be read is named beside what can, instead of an error in place of everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot_operator.api.moments import moment_seconds
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import TOTAL_STEPS, TrainingJob
from surefoot_operator.api.status import JobStatus
from surefoot_operator.api.status_json import status_from_json
from surefoot_operator.errors import InvariantBroken, SpecError

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredJob:
    """One stored job, as far as it can be read."""

    namespace: str
    name: str
    uid: str
    job: TrainingJob | None
    """None: its spec cannot be read."""
    status: JobStatus | None
    """None: its status cannot be read."""
    problems: tuple[str, ...] = ()
    """Why either is None."""
    phase: str = ""
    """As the column shows it, whatever version wrote it; empty: no operator has looked at the job yet."""
    ready: str = ""
    step: int | None = None
    restarts: int | None = None
    total_steps: int | None = None
    """What the job's annotation says that the program makes."""
    created_seconds: float | None = None
    checkpoint_seconds: float | None = None
    """When the newest complete checkpoint was first seen."""
    document: Object = field(default_factory=dict, compare=False, hash=False, repr=False)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def stored_job(document: Mapping[str, Any]) -> StoredJob:
    """Reads a stored object; never raises for what is in it."""
    metadata = _mapping(document.get("metadata"))
    columns = _mapping(document.get("status"))
    problems: list[str] = []
    job: TrainingJob | None = None
    status: JobStatus | None = None
    try:
        job = parse_job(document)
    except SpecError as error:
        problems.append(f"its spec cannot be read: {error}")
    try:
        status = status_from_json(columns)
    except InvariantBroken as error:
        problems.append(f"its status cannot be read by this version of surefoot: {error}")
    said = str(_mapping(metadata.get("annotations")).get(TOTAL_STEPS, ""))
    return StoredJob(
        namespace=str(metadata.get("namespace", "default")),
        name=str(metadata.get("name", "?")),
        uid=str(metadata.get("uid", "")),
        job=job,
        status=status,
        problems=tuple(problems),
        phase=str(columns.get("phase", "") or (status.phase if status is not None and columns else "")),
        ready=str(columns.get("ready", "")),
        step=_count(columns.get("step")) if columns else None,
        restarts=_count(columns.get("restarts", 0)) if columns else None,
        total_steps=int(said) if said.isascii() and said.isdigit() and 0 < len(said) < 16 else None,
        created_seconds=moment_seconds(metadata.get("creationTimestamp")),
        checkpoint_seconds=moment_seconds(columns.get("checkpointTime")),
        document=dict(document),
    )


def _mapping(value: object) -> Object:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
