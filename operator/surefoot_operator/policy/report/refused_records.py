"""Reports records of a job that break a bound.

Pure. Such a record is not read, and nothing is planned from it: as a damaged copy, of which another is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot_operator import reasons
from surefoot_operator.api.status import Condition, JobStatus, condition_of

REASON = "OutOfBounds"


def refused_message(sentences: Sequence[str]) -> str:
    """The first record in full, and how many others there are."""
    others = len(sentences) - 1
    return f"{sentences[0]} (and {others} more)" if others else sentences[0]


def with_refused_records(status: JobStatus, sentences: Sequence[str], now: float) -> JobStatus:
    """Sets the condition in a status that no plan can be made from."""
    old = condition_of(status, reasons.RECORDS_REFUSED)
    message = refused_message(sentences)
    if old is not None and old.message == message:
        return status
    since = old.last_transition_seconds if old is not None else now
    others = tuple(c for c in status.conditions if c.type != reasons.RECORDS_REFUSED)
    condition = Condition(reasons.RECORDS_REFUSED, "True", REASON, message, since)
    return replace(status, conditions=(*others, condition))
