"""Where restored bytes came from, in one word for several: of ranges, of ranks, of workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable

STAGING = "staging"
"""A node's own staging memory: a trainer that starts where its predecessor saved."""


def joined(sources: Iterable[str]) -> str | None:
    """`staging` if all of it was there; `memory` if it took a holder too; `mixed` if the persistent tier and others."""
    found = set(sources) - {"none"}
    if len(found) <= 1:
        return next(iter(found), None)
    return "memory" if found <= {STAGING, "memory"} else "mixed"
