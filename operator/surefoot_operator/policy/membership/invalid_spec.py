"""Reports an invalid spec in the job's status.

Pure; called by `reconcile`, which cannot plan such a job. It is not final: it ends once the spec can be read.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot_operator import reasons
from surefoot_operator.api.status import Condition, JobStatus, condition_of

INVALID = "Invalid"


def refused(status: JobStatus, reason: str, generation: int, now: float) -> JobStatus:
    """The status of a job whose spec cannot be read.

    One that never began has failed; of any other only the refusal is reported.
    """
    if status.phase in ("Complete", "Failed") and not _is_refused(status):
        return status
    kind = reasons.FAILED if status.world is None else reasons.SPEC_REFUSED
    old = condition_of(status, kind)
    since = old.last_transition_seconds if old is not None and old.status == "True" else now
    others = tuple(c for c in status.conditions if c.type not in (reasons.FAILED, reasons.SPEC_REFUSED))
    return replace(
        status,
        phase="Failed" if status.world is None else status.phase,
        observed_generation=generation,
        message=reason,
        conditions=(*others, Condition(kind, "True", INVALID, reason, since)),
    )


def accepted(status: JobStatus) -> JobStatus:
    """The status without the refusal, once the spec can be read.

    A job that was only refused has not failed.
    """
    if not _is_refused(status):
        return status
    left = tuple(c for c in status.conditions if c.type != reasons.FAILED)
    return replace(status, phase="Pending", message="", conditions=left)


def _is_refused(status: JobStatus) -> bool:
    return any(c.type == reasons.FAILED and c.status == "True" and c.reason == INVALID for c in status.conditions)
