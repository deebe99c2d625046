"""Writes and reads moments as RFC 3339.

Pure. Plans count in Unix seconds; Kubernetes and a status write times. One reader for all of them: three of their own differed in what
they took for a time.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

_RFC3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
"""`datetime` reads far more: dates alone, weeks, times that name no zone."""

_LONGEST = 64


def moment(seconds: float) -> str:
    """Unix seconds as RFC 3339 in UTC, with microseconds."""
    return datetime.fromtimestamp(round(seconds, 6), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def moment_seconds(text: object) -> float | None:
    """Unix seconds of an RFC 3339 time; None for anything else."""
    if not isinstance(text, str) or len(text) > _LONGEST or _RFC3339.fullmatch(text) is None:
        return None
    try:
        return datetime.fromisoformat(text.upper()).timestamp()
    except ValueError:  # the 31st of February
        return None
