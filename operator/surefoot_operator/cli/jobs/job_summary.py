"""Summarises one job in a row of `surefoot list`.

Pure; called by `list_jobs` and `describe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.protocol.plain import amount
from surefoot_operator.api.status import JobStatus, StoredCheckpoints
from surefoot_operator.cli.jobs.read_jobs import Pace, pace_of
from surefoot_operator.cli.jobs.stored_job import StoredJob
from surefoot_operator.cli.tables import UNKNOWN, TextTable, age, number


@dataclass(frozen=True, slots=True)
class JobSummary:
    """What a person asks first of one job."""

    namespace: str
    name: str
    state: str
    ready: str
    world_ranks: int | None
    epoch: int | None
    pace: Pace
    restarts: int | None
    age_seconds: float | None
    message: str
    memory_bytes: int | None = None
    """Of its checkpoints in memory, every copy counted."""
    persistent_bytes: int | None = None


def summary(stored: StoredJob, now: float) -> JobSummary:
    """Summarises a job; what cannot be read is its message."""
    status = stored.status
    world = status.world if status is not None else None
    there = StoredCheckpoints() if status is None else lasting(status)
    began = stored.created_seconds or (status.start_seconds if status is not None else None)
    return JobSummary(
        namespace=stored.namespace,
        name=stored.name,
        state=stored.phase or "Unseen",
        ready=stored.ready,
        world_ranks=None if world is None else world.size,
        epoch=None if world is None else world.epoch,
        pace=pace_of(stored, now),
        restarts=stored.restarts,
        age_seconds=None if began is None else max(0.0, now - began),
        message="; ".join(stored.problems) or _message(stored),
        memory_bytes=None if there.memory is None else there.memory.bytes,
        persistent_bytes=None if there.persistent is None else there.persistent.bytes,
    )


def lasting(status: JobStatus) -> StoredCheckpoints:
    """What each tier keeps: nothing in memory once a job is over."""
    over = status.phase in ("Complete", "Failed")
    return StoredCheckpoints(persistent=status.checkpoints.persistent) if over else status.checkpoints


def _message(stored: StoredJob) -> str:
    if not stored.phase:
        return "no operator has looked at this job yet: is surefoot-operator running?"
    return stored.status.message if stored.status is not None else ""


def summary_table(found: Sequence[JobSummary], wide: bool, everywhere: bool) -> TextTable:
    """Lays summaries out; namespaces where several may be, messages where `wide`."""
    columns = ("NAME", "STATE", "READY", "WORLD", "STEP", "LEFT", "CHECKPOINT", "RESTARTS", "AGE")
    more = ("EPOCH", "RATE", "EXPOSED", "IN-MEMORY", "PERSISTENT", "MESSAGE") if wide else ()
    rows = []
    for one in found:
        row = (
            one.name,
            one.state,
            one.ready or UNKNOWN,
            number(one.world_ranks),
            progressed(one.pace),
            age(one.pace.left_seconds),
            saved(one.pace),
            number(one.restarts),
            age(one.age_seconds),
        )
        rate = one.pace.steps_per_second
        rest = (
            number(one.epoch),
            UNKNOWN if rate is None else f"{rate:.3g}/s",
            exposed(one.pace),
            *(UNKNOWN if size is None else amount(size) for size in (one.memory_bytes, one.persistent_bytes)),
            one.message,
        )
        rows.append((*((one.namespace,) if everywhere else ()), *row, *(rest if wide else ())))
    return TextTable((*(("NAMESPACE",) if everywhere else ()), *columns, *more), tuple(rows))


def progressed(pace: Pace) -> str:
    """`420/1000 (42%)`, or the step alone."""
    if pace.step is None or pace.total_steps is None:
        return number(pace.step)
    return f"{pace.step}/{pace.total_steps} ({min(100, 100 * pace.step // pace.total_steps)}%)"


def saved(pace: Pace) -> str:
    """The newest complete checkpoint and its age: `420 (12s)`."""
    if pace.checkpoint_step is None:
        return UNKNOWN
    aged = pace.checkpoint_age_seconds
    return str(pace.checkpoint_step) if aged is None else f"{pace.checkpoint_step} ({age(aged)})"


def exposed(pace: Pace) -> str:
    """What a failure now would repeat: `5 steps (2s)`."""
    if pace.exposed_steps is None:
        return UNKNOWN
    steps = f"{pace.exposed_steps} step{'' if pace.exposed_steps == 1 else 's'}"
    return steps if pace.exposed_seconds is None else f"{steps} ({age(pace.exposed_seconds)})"
