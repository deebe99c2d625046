"""Defines the operator's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.protocol.text import short_repr

if TYPE_CHECKING:
    from surefoot_operator.api.status import JobStatus


class Redacted:
    """Replaces a value that an error must not repeat.

    It may be a secret, or be unbounded.
    """

    def __init__(self, said: str = "(not shown)") -> None:
        self._replacement = said

    def __repr__(self) -> str:
        return self._replacement


class OperatorError(Exception):
    """Anything the operator raises on purpose."""


class SpecError(OperatorError):
    """A TrainingJob is not valid: the path, the value, what is allowed."""

    def __init__(self, path: str, value: object, allowed: str) -> None:
        super().__init__(f"{path}: {short_repr(value)} is not allowed; {allowed}")
        self.path = path
        self.value = value
        self.allowed = allowed


class StatusConflict(OperatorError):
    """The status changed under a write that tested it.

    Another leader was faster, or an earlier write of our own succeeded although its answer was lost. Observe again.
    """


class PlatformError(OperatorError):
    """The fabric could not do what was asked; planned again later."""

    permanent = False
    """What was asked is never right: asked again unchanged it is refused again."""
    decided = False
    """The fabric answered, and will not do what was asked. Else it may have, or may do so late."""
    busy = False
    """It was too busy: the same is accepted at a quieter moment."""
    closing = False
    """The job's namespace is being deleted: nothing is created there any more."""


class NotLeader(PlatformError):
    """Without the lease nothing is decided or written."""


class ViewRefused(PlatformError):
    """The fabric may not show what every plan needs: nothing is planned, whatever happens to the job."""

    status: JobStatus | None = None
    """The job's, as it is stored; None: it cannot be read."""


class JobRejected(PlatformError):
    """The job cannot be run as it is stored.

    Its spec is invalid, or somebody edited its status. Only another edit helps.
    """

    def __init__(self, reason: str, generation: int, status: JobStatus | None, leaving: bool = False) -> None:
        super().__init__(reason)
        self.being_deleted = leaving
        """It is being deleted, and waits for this operator."""
        self.reason = reason
        self.metadata_generation = generation
        self.status = status
        """None: it is the status that cannot be read; nothing may be written over it."""


class InvariantViolation(OperatorError):
    """A plan or a record breaks an invariant and is refused.

    Always a bug, never a fault of the environment.
    """
