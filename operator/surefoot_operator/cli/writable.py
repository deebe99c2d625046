"""Checks that output files and folders are writable before a run.

A run of hours must not fail at its end because its report cannot be written. Leaves the file system as it was.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from surefoot_operator.cli.cli_errors import UsageError


def try_file(option: str, path: Path) -> None:
    """Checks that `path` can be written, keeping its content. Raises UsageError."""
    try:
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        if path.is_dir():
            raise UsageError(f"{option} {path} is a folder; name a file")
        with open(path, "ab"):
            pass
        if not there:
            path.unlink()
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {path} cannot be written: {_why(error)}; name another file") from error


def try_folder(option: str, path: Path) -> None:
    """Creates a writable folder, or checks an existing one. Raises UsageError."""
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"{option} {path} is a file; name a folder, new or of a former run")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {path} cannot be written to: {_why(error)}; name another folder") from error


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
