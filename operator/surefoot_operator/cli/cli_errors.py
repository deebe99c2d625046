"""Defines the errors that end a command, and its exit codes."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
"""The job, or the run under it, failed."""
EXIT_USAGE = 2
"""What was asked cannot be: nothing was started."""
EXIT_DIFFERS = 3
"""The job completed, and samples were lost, repeated or not recorded, or the comparison could not be made."""
EXIT_INTERRUPTED = 130


class RunError(Exception):
    """The run cannot continue; its processes have ended before this is printed."""


class UsageError(Exception):
    """The request cannot be met; nothing was started."""
