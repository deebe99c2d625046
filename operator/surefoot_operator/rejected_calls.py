"""Tracks which calls to the API server are refused again and again.

Pure: times are arguments, in monotonic seconds. Fed by `platforms.kubernetes.api_client` with the outcome of every call; jobs,
`/readyz` and metrics report from here. A refusal that only the log hears leaves a job Running that nobody looks after.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Cause = Literal["forbidden", "quota", "closing", "absent", "invalid", "busy", "failed", "silent"]
"""Bounded, as it is a metric's label. `closing`: the namespace is being deleted; `silent`: no answer came."""

REFUSED_SECONDS = 15.0
"""A call that was refused more than once, and for so long, is reported: rights of a new release may come that late."""
FORGOTTEN_SECONDS = 90.0
"""One that is not made again for so long is no longer wanted. Backoffs are shorter."""
MOST_CALLS = 1024
"""Of jobs' statuses, and of all else. Of more the first ones are kept: each has to be refused a second time before it counts."""
MOST_OF_JOB = 32
"""A thousand pods that one job's quota refuses leave room for what is refused to others."""

STATUS = "trainingjobs/status"
WATCH = "watch"
_OF_EVERY_JOB = ("tokenreviews",)
"""What the operator asks for itself, and agents of every job depend on; its watches too."""
_OF_NO_JOB = ("controllerrevisions",)
"""Listed for the rollout of the memory tier, which waits for it; no job does."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """What one call asked for, without its content."""

    verb: str
    """`get`, `create`, `update`, `patch`, `delete`; `watch` is a list too."""
    resource: str
    """Plural, with a subresource: `trainingjobs/status`."""
    namespace: str = ""
    name: str = ""
    job: str = ""
    """The uid of the job that it was made for; empty: the operator's own."""

    def __str__(self) -> str:
        place = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.resource}{f' {place}' if place else ''}"


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call that was refused, every time since `first_seconds`."""

    call: ApiCall
    cause: Cause
    sentence: str
    """The API server's own."""
    answer: str
    """Its code and reason."""
    first_seconds: float
    last_seconds: float
    count: int = 1

    def __str__(self) -> str:
        """The same text as long as it is refused with the same words."""
        return f"{self.sentence} ({self.answer}: {self.call})"


class RefusedCalls:
    """The calls of one process that are refused at present; for `lasting_seconds` before they are reported."""

    def __init__(self, lasting_seconds: float = REFUSED_SECONDS) -> None:
        self._lasting_seconds = lasting_seconds
        self._refused: dict[ApiCall, RefusedCall] = {}
        self._accepted: dict[tuple[str, str], float] = {}
        """(verb, resource) -> when such a call was last accepted, of whatever object."""

    def accept(self, call: ApiCall, now: float) -> None:
        """Records that a call did what it asked for."""
        self._refused.pop(call, None)
        self._accepted[call.verb, call.resource] = now

    def refuse(self, call: ApiCall, cause: Cause, sentence: str, answer: str, now: float) -> None:
        """Records that a call was refused, or not answered."""
        before = self._refused.get(call)
        if before is None and not self._has_room(call, now):
            return
        if before is None or now - before.last_seconds > FORGOTTEN_SECONDS:
            before = RefusedCall(call, cause, sentence, answer, now, now, 0)
        self._refused[call] = replace(
            before, cause=cause, sentence=sentence, answer=answer, last_seconds=now, count=before.count + 1
        )

    def lasting(self, now: float, at_once: bool = False) -> tuple[RefusedCall, ...]:
        """Returns what was refused for long, more than once, and is still asked for; the longest first.

        `at_once`: what was refused more than once, however lately.
        """
        seconds = 0.0 if at_once else self._lasting_seconds
        self._forget(now)
        found = (r for r in self._refused.values() if r.count > 1 and now - r.first_seconds >= seconds)
        return tuple(sorted(found, key=lambda one: one.first_seconds))

    def of_job(self, job: str, now: float) -> tuple[RefusedCall, ...]:
        """Returns what is refused of this job's own calls, and of what every job depends on."""
        return tuple(r for r in self.lasting(now) if r.call.job == job or _is_of_every_job(r.call))

    def disabling(self, now: float, at_once: bool = False) -> tuple[RefusedCall, ...]:
        """Returns the refusals that keep the operator from looking after any job.

        It may not see the cluster, or write no job's status. One tenant's quota or broken policy is none of them.
        """
        return tuple(r for r in self.lasting(now, at_once) if r.cause != "silent" and self._disables(r))

    def _forget(self, now: float) -> None:
        for call in [c for c, one in self._refused.items() if now - one.last_seconds > FORGOTTEN_SECONDS]:
            del self._refused[call]

    def _has_room(self, call: ApiCall, now: float) -> bool:
        if _is_of_every_job(call):
            return True  # few, as they name no object
        self._forget(now)
        is_status = call.resource == STATUS
        alike = [one for one in self._refused if (one.resource == STATUS) == is_status]
        of_job = sum(one.job == call.job for one in alike) if call.job else 0
        return len(alike) < MOST_CALLS and of_job < MOST_OF_JOB

    def _disables(self, refused: RefusedCall) -> bool:
        call = refused.call
        if call.resource != STATUS:
            return _is_of_every_job(call)
        return self._accepted.get((call.verb, call.resource), -1.0) < refused.first_seconds


def counted(refused: Iterable[RefusedCall]) -> dict[tuple[str, str, str], int]:
    """Counts refused calls by verb, resource and cause."""
    counts: dict[tuple[str, str, str], int] = {}
    for one in refused:
        key = (one.call.verb, one.call.resource, one.cause)
        counts[key] = counts.get(key, 0) + 1
    return counts


def _is_of_every_job(call: ApiCall) -> bool:
    is_asked_for_all = call.verb == WATCH and call.resource not in _OF_NO_JOB
    return not call.job and (is_asked_for_all or call.resource in _OF_EVERY_JOB)
