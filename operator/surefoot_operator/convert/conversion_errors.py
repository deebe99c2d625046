"""The error of this room."""

from __future__ import annotations

from surefoot_operator.errors import OperatorError


class NotConvertible(OperatorError):
    """What a TrainingJob cannot be made of, and what to write instead."""
