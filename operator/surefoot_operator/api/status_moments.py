"""Turns a status' moments into times, and back.

Pure. Plans count in Unix seconds. In a status they would be numbers that nobody can hold against a log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.protocol.strict import Misfit
from surefoot_operator.api.moments import moment, moment_seconds

MOMENTS = (
    "changed",
    "detected",
    "claimed",
    "stopped",
    "sealed",
    "assigned",
    "firstStep",
    "replaced",
    "since",
    "measured",
    "at",
    "lastTransition",
    "until",
    "start",
    "completion",
    "progress",
)
"""Names in JSON, before `Seconds` in the former version and `Time` in this one. All other seconds are durations."""

_WRITTEN = {f"{name}Seconds": f"{name}Time" for name in MOMENTS}
_READ = {written: plain for plain, written in _WRITTEN.items()}


def with_moments(body: Any) -> Any:
    """The body of a status with its moments as times."""
    return _renamed(body, _WRITTEN, lambda value, path: moment(value), "")


def with_seconds(body: Any) -> Any:
    """The inverse of `with_moments`; seconds of the former version stay. Raises Misfit."""
    return _renamed(body, _READ, _seconds, "")


def _seconds(value: Any, path: str) -> float:
    found = moment_seconds(value)
    if found is None:
        raise Misfit(path, f"is {value!r}, which is no time as 2026-01-31T12:00:00.000000Z")
    return found


def _renamed(body: Any, names: Mapping[str, str], change: Callable[[Any, str], Any], path: str) -> Any:
    if isinstance(body, list):
        return [_renamed(item, names, change, f"{path}[{place}]") for place, item in enumerate(body)]
    if not isinstance(body, dict):
        return body
    found: dict[str, Any] = {}
    for name, value in body.items():
        where = f"{path}.{name}"
        if name in names:
            found[names[name]] = None if value is None else change(value, where)
        elif name == "extra":  # free words: none of them is ours
            found[name] = value
        else:
            found[name] = _renamed(value, names, change, where)
    return found
