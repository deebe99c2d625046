"""Names the tiers that restored bytes came from, in one word.

Pure; for ranges, ranks and workers.
"""

from __future__ import annotations

from collections.abc import Iterable

STAGING = "staging"
"""A node's own staging memory: a trainer that starts where its predecessor saved."""
_STAGING_AND_MEMORY = f"{STAGING}+memory"
"""What ranks hold in common each saves a share of, so an ordinary restart in place takes its own share from staging and
the others' from holders."""


def joined(sources: Iterable[str]) -> str | None:
    """Joins sources: `staging+memory`, or `mixed` for other combinations."""
    found = {part for source in sources for part in source.split("+")} - {"none"}
    if len(found) <= 1:
        return next(iter(found), None)
    return _STAGING_AND_MEMORY if found == {STAGING, "memory"} else "mixed"
