"""Defines the errors that the operator raises on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.protocol.text import short_repr

if TYPE_CHECKING:
    from surefoot_operator.api.status import JobStatus


class Redacted:
    """Stands in an error for a value that must not be repeated, because it may be a secret or very long."""

    def __init__(self, replacement: str = "(not shown)") -> None:
        self._replacement = replacement

    def __repr__(self) -> str:
        return self._replacement


class OperatorError(Exception):
    """Base class of the errors that the operator raises on purpose."""


class SpecError(OperatorError):
    """A TrainingJob is not valid.

    Args:
        path: the field, such as `spec.replicas`.
        value: its value, or a `Redacted`.
        allowed: the allowed values, as the end of a sentence.
    """

    def __init__(self, path: str, value: object, allowed: str) -> None:
        super().__init__(f"{path}: {short_repr(value)} is not allowed; {allowed}")
        self.path = path
        self.value = value
        self.allowed = allowed


class StatusConflict(OperatorError):
    """The stored status is not the one that a write was to replace: observe and plan again.

    Another leader was faster, or an earlier write succeeded although its reply was lost.
    """


class PlatformError(OperatorError):
    """The platform could not carry out a call. The operator plans again later."""

    is_permanent = False
    """Whether the same call would be rejected again."""
    is_final = False
    """Whether the platform replied that it will not carry out the call. Otherwise it may have, or may still do so."""
    is_busy = False
    """Whether the platform was only too busy, and may accept the same call later."""
    is_namespace_deleted = False
    """Whether the job's namespace is being deleted, so that nothing can be created there."""


class NotLeader(PlatformError):
    """This operator does not have the lease, without which it must not decide or write anything."""


class ReadForbidden(PlatformError):
    """The operator may not read the objects that every plan needs, so that it cannot plan for the job."""

    status: JobStatus | None = None
    """The stored status of the job; None: it cannot be read."""


class JobRejected(PlatformError):
    """The stored job cannot be run until a user edits it: its spec is invalid or its status damaged."""

    def __init__(
        self, reason: str, metadata_generation: int, status: JobStatus | None, being_deleted: bool = False
    ) -> None:
        super().__init__(reason)
        self.being_deleted = being_deleted
        """Whether the job is being deleted and its finalizer waits for this operator."""
        self.reason = reason
        self.metadata_generation = metadata_generation
        self.status = status
        """The stored status; None: it is damaged, and must not be overwritten."""


class InvariantViolation(OperatorError):
    """A plan or a record violates an invariant and is rejected: a bug, never a fault of the environment."""
