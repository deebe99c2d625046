"""Defines the operator's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.protocol.plain import shown

if TYPE_CHECKING:
    from surefoot_operator.api.status import JobStatus


class Hidden:
    """Stands for a value that an error does not repeat.

    It may be a secret, or be without bound.
    """

    def __init__(self, said: str = "(not shown)") -> None:
        self._said = said

    def __repr__(self) -> str:
        return self._said


class OperatorError(Exception):
    """Anything the operator raises on purpose."""


class SpecError(OperatorError):
    """A TrainingJob is not possible.

    Names the path, the value and what is allowed.
    """

    def __init__(self, path: str, value: object, allowed: str) -> None:
        super().__init__(f"{path}: {shown(value)} is not allowed; {allowed}")
        self.path = path
        self.value = value
        self.allowed = allowed


class WorldMoved(OperatorError):
    """The status changed under a write that tested it.

    Another leader was faster, or an own write had got through unheard. Observe again.
    """


class FabricError(OperatorError):
    """The fabric could not do what was asked; planned again later."""

    lasting = False
    """What was asked is never right: asked again unchanged it is refused again."""


class JobRefused(FabricError):
    """The job cannot be carried as it is stored.

    Its spec, or a status that somebody edited. Only an edit helps.
    """

    def __init__(self, reason: str, generation: int, status: JobStatus | None, leaving: bool = False) -> None:
        super().__init__(reason)
        self.leaving = leaving
        """It is being deleted, and waits for this operator."""
        self.reason = reason
        self.generation = generation
        self.status = status
        """None: it is the status that cannot be read; nothing may be written over it."""


class InvariantBroken(OperatorError):
    """A plan or a record breaks an invariant.

    It is refused, and which one is said. A bug, never an environment's fault.
    """
