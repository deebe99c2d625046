"""Reports on a job what the API server refuses again and again.

Pure. Called by `status_conditions`, and by `reconcile` where nothing can be planned or written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from surefoot_operator import reasons
from surefoot_operator.api.status import Condition, JobStatus, condition_of
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.rejected_calls import ApiCall, RefusedCall

AGAIN_SECONDS = 600.0
"""An event about a call that is still refused is repeated after this: the first one is forgotten in an hour."""
_MOST_NAMED = 3
_REASON = "Refused"


def acceptance(
    refused: tuple[RefusedCall, ...], known: Condition | None
) -> tuple[Literal["True", "False"], str, str] | None:
    """Returns (truth, reason, message) of the condition; None: nothing was ever refused for long."""
    if refused:
        return "False", _REASON, _named(refused)
    return None if known is None else ("True", "Accepted", "the API server accepts the calls for this job")


def unplanned(status: JobStatus, refused: tuple[RefusedCall, ...], now: float) -> JobStatus:
    """The status of a job that no plan is made for, as its operator may not see the cluster."""
    if not refused or status.tidied:
        return status
    text, old = _named(refused), condition_of(status, reasons.API_ACCEPTED)
    since = old.last_transition_seconds if old is not None and old.status == "False" else now
    others = tuple(c for c in status.conditions if c.type != reasons.API_ACCEPTED)
    condition = Condition(reasons.API_ACCEPTED, "False", _REASON, text, since)
    return replace(
        status,
        message=f"{text}; until the server accepts it, Surefoot plans nothing for this job",
        conditions=(*others, condition),
    )


@dataclass(frozen=True, slots=True)
class RefusalEvents:
    """The events to record now, and when each refused call was last told of."""

    events: tuple[Event, ...]
    told: Mapping[ApiCall, float]


def refusal_events(refused: tuple[RefusedCall, ...], told: Mapping[ApiCall, float], now: float) -> RefusalEvents:
    """Derives an event for each call whose refusal is news; `now` is of any clock that never goes back."""
    due = [r for r in refused if now - told.get(r.call, float("-inf")) >= AGAIN_SECONDS]
    still = {r.call: told[r.call] for r in refused if r.call in told}
    events = tuple(Event(reasons.API_REFUSED, f"{one}; the operator retries this call", warning=True) for one in due)
    return RefusalEvents(events, still | {r.call: now for r in due})


def _named(refused: Iterable[RefusedCall]) -> str:
    sentences = sorted({str(one) for one in refused})
    more = f"; and {len(sentences) - _MOST_NAMED} more" if len(sentences) > _MOST_NAMED else ""
    return "; ".join(sentences[:_MOST_NAMED]) + more
