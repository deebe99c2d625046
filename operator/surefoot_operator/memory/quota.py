"""Limits how much of one holder a job may use.

Pure; called by `memory.server_probe`. Without it one job, wrong or hostile, fills a holder, and every other job's saves
are refused. A job alone on a holder may use all of it, and so may each while there is enough for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.holder.provisioning import Memory
from surefoot.protocol.plain import amount

CROWDED = 0.85
"""Share of its limit from which a holder counts as too small for all."""

ROOMY = 0.75
"""And below which it does not any more: what was closed is opened."""

TOLERANCE = 64
"""A job may exceed its `sizeLimit` by one such part of it: digests, and what a server needs for each value."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The figures that determine a job's part of one holder."""

    jobs: int
    """That have an account there, this one too."""
    size_limit_bytes: int | None = None
    """`checkpoint.memory.sizeLimit`."""


def is_worth_measuring(memory: Memory, size_limit_bytes: int | None) -> bool:
    """Whether the server's own figures allow that a job exceeds its part.

    A measurement costs.
    """
    if size_limit_bytes is not None and memory.used_bytes > size_limit_bytes:
        return True
    return 0 < memory.limit_bytes * ROOMY <= memory.used_bytes


def overdraft(held_bytes: int, memory: Memory, terms: Terms, closed: bool) -> str:
    """Says why the job's account is closed here; empty: it is open.

    Args:
        held_bytes: Size of all keys of the job there.
        memory: Of the whole server.
        terms: The job's share and limit.
        closed: Whether it is closed now; then it stays so until there is room again.
    """
    limit = terms.size_limit_bytes
    if limit is not None and held_bytes > limit + limit // TOLERANCE:
        return (
            f"it holds {amount(held_bytes)} there, more than its sizeLimit of {amount(limit)}: raise"
            " checkpoint.memory.sizeLimit, keep fewer checkpoints or train with more workers"
        )
    part = memory.limit_bytes // max(1, terms.jobs)
    crowded = memory.used_bytes >= memory.limit_bytes * (ROOMY if closed else CROWDED)
    if terms.jobs > 1 and memory.limit_bytes and crowded and held_bytes > part:
        return (
            f"it holds {amount(held_bytes)} of the {amount(memory.limit_bytes)} that {terms.jobs} jobs share there, more"
            f" than its part of {amount(part)}, and there is not enough for all: raise the memory tier's maxMemory, keep"
            " fewer checkpoints, use fewer replicas or train with more workers"
        )
    return ""
