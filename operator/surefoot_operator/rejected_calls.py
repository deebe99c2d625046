"""Tracks which calls to the API server are rejected again and again.

Pure: times are arguments, in monotonic seconds. `platforms.kubernetes.api_client` records the outcome of every call here; jobs,
`/readyz` and metrics report from here. If only the log had it, a job whose operator cannot manage it would stay Running.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Cause = Literal["forbidden", "quota", "closing", "absent", "invalid", "busy", "failed", "silent"]
"""Few words, because this is a label of a metric. `closing`: the namespace is being deleted; `silent`: no reply came."""

REFUSED_SECONDS = 15.0
"""Time for which a call must be rejected, more than once, before it is reported: after an upgrade, permissions may come late."""
FORGOTTEN_SECONDS = 90.0
"""Time without a repetition after which a rejected call is forgotten. Every backoff is shorter."""
MAX_CALLS = 1024
"""Maximum number of tracked calls, for status writes and for all others. The first ones are kept, because a call must be
rejected a second time before it counts."""
MAX_JOB_CALLS = 32
"""Maximum number of tracked calls of one job, so that a thousand pods beyond its quota leave room for other jobs' calls."""

STATUS = "trainingjobs/status"
WATCH = "watch"
_SHARED_RESOURCES = ("tokenreviews",)
"""Resources, in addition to watches, that the operator calls for itself and that every job depends on."""
_ROLLOUT_RESOURCES = ("controllerrevisions",)
"""Resources that only the rollout of the memory tier needs, and no job."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """Identity of a call to the API server: its verb and object, without its content."""

    verb: str
    """`get`, `create`, `update`, `patch`, `delete`, or `watch`, which includes the list before it."""
    resource: str
    """Plural name with the subresource: `trainingjobs/status`."""
    namespace: str = ""
    """Namespace of the object; empty: none."""
    name: str = ""
    """Name of the object; empty: all of them."""
    job: str = ""
    """Uid of the job for which the call was made; empty: for the operator itself."""

    def __str__(self) -> str:
        object_name = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.resource}{f' {object_name}' if object_name else ''}"


@dataclass(frozen=True, slots=True)
class RejectedCall:
    """A call that was rejected every time since `first_seconds`."""

    call: ApiCall
    cause: Cause
    message: str
    """Message of the API server."""
    status: str
    """Status code and reason of the API server."""
    first_seconds: float
    """When the first of these calls was rejected."""
    last_seconds: float
    """When the last of them was rejected."""
    count: int = 1
    """Number of rejections."""

    def __str__(self) -> str:
        """Returns the message with the call: the same text as long as the API server gives the same message."""
        return f"{self.message} ({self.status}: {self.call})"


class RejectedCalls:
    """The calls of one process that are rejected now.

    Args:
        lasting_seconds: how long a call must be rejected before it is reported.
    """

    def __init__(self, lasting_seconds: float = REFUSED_SECONDS) -> None:
        self._lasting_seconds = lasting_seconds
        self._refused: dict[ApiCall, RejectedCall] = {}
        self._accepted: dict[tuple[str, str], float] = {}
        """When a call with this (verb, resource) was last accepted, for any object."""

    def record_accepted(self, call: ApiCall, now: float) -> None:
        """Records that a call succeeded."""
        self._refused.pop(call, None)
        self._accepted[call.verb, call.resource] = now

    def record_rejected(self, call: ApiCall, cause: Cause, sentence: str, answer: str, now: float) -> None:
        """Records that a call was rejected or not answered.

        Args:
            sentence: the message of the API server.
            answer: its status code and reason.
        """
        record = self._refused.get(call)
        if record is None and not self._has_room(call, now):
            return
        # a call that was not repeated for so long starts a new series
        if record is None or now - record.last_seconds > FORGOTTEN_SECONDS:
            record = RejectedCall(call, cause, sentence, answer, now, now, 0)
        self._refused[call] = replace(
            record, cause=cause, message=sentence, status=answer, last_seconds=now, count=record.count + 1
        )

    def long_rejected(self, now: float, at_once: bool = False) -> tuple[RejectedCall, ...]:
        """Returns the calls that were rejected more than once, for long, and are still repeated; the oldest first.

        Args:
            at_once: includes calls that were rejected more than once only recently.
        """
        seconds = 0.0 if at_once else self._lasting_seconds
        self._forget(now)
        long_rejected = (r for r in self._refused.values() if r.count > 1 and now - r.first_seconds >= seconds)
        return tuple(sorted(long_rejected, key=lambda refused: refused.first_seconds))

    def rejected_for_job(self, job: str, now: float) -> tuple[RejectedCall, ...]:
        """Returns the rejected calls of this job, and those on which every job depends."""
        return tuple(r for r in self.long_rejected(now) if r.call.job == job or _affects_every_job(r.call))

    def disabling(self, now: float, at_once: bool = False) -> tuple[RejectedCall, ...]:
        """Returns the rejections that keep the operator from managing any job.

        It may not read the cluster, or cannot write the status of any job. The quota or a broken policy of one tenant does not
        count.
        """
        return tuple(r for r in self.long_rejected(now, at_once) if r.cause != "silent" and self._disables_operator(r))

    def _forget(self, now: float) -> None:
        for call in [c for c, refused in self._refused.items() if now - refused.last_seconds > FORGOTTEN_SECONDS]:
            del self._refused[call]

    def _has_room(self, call: ApiCall, now: float) -> bool:
        """Whether another rejected call may be tracked."""
        if _affects_every_job(call):
            return True  # there are few of them, because they name no object
        self._forget(now)
        is_status = call.resource == STATUS
        same_kind = [other for other in self._refused if (other.resource == STATUS) == is_status]
        job_call_count = sum(other.job == call.job for other in same_kind) if call.job else 0
        return len(same_kind) < MAX_CALLS and job_call_count < MAX_JOB_CALLS

    def _disables_operator(self, refused: RejectedCall) -> bool:
        """Whether the rejection keeps the operator from managing any job."""
        call = refused.call
        # one job's status may be rejected for its content: only if no status was accepted since, all are affected
        if call.resource != STATUS:
            return _affects_every_job(call)
        return self._accepted.get((call.verb, call.resource), -1.0) < refused.first_seconds


def count_by_cause(refused: Iterable[RejectedCall]) -> dict[tuple[str, str, str], int]:
    """Counts rejected calls by (verb, resource, cause)."""
    counts: dict[tuple[str, str, str], int] = {}
    for rejection in refused:
        key = (rejection.call.verb, rejection.call.resource, rejection.cause)
        counts[key] = counts.get(key, 0) + 1
    return counts


def _affects_every_job(call: ApiCall) -> bool:
    is_shared_watch = call.verb == WATCH and call.resource not in _ROLLOUT_RESOURCES
    return not call.job and (is_shared_watch or call.resource in _SHARED_RESOURCES)
