"""Reports which of a worker's saves can never come any more.

Pure. The leader learns from it which checkpoints can never become complete. A save that a rank never handed over (no
staging memory, no free slot, a failed copy), or that was given up before any holder was asked to commit it, is nowhere
and will be nowhere, whatever holders that nobody reaches may have. So the report is true for ever, however late it is
read and whoever leads then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surefoot.protocol.checkpoints.records import RankManifest


@dataclass(frozen=True, slots=True)
class ClosedSteps:
    """The closed steps of one worker's saves in its epoch.

    Made by `surefoot.agent.staging_memory`, sent in every heartbeat.
    """

    closed_up_to: int = 0
    """Newest step that none of its ranks can come to save any more."""
    handed_over: tuple[int, ...] = ()
    """Those of which every rank handed its save over: they may be on holders."""
    unknown_up_to: int = 0
    """`steps` says nothing of this one and older ones."""

    def is_missing(self, step: int) -> bool:
        """Whether some rank's save of `step` is missing for ever."""
        return self.unknown_up_to < step <= self.closed_up_to and step not in self.handed_over


NO_CLOSED_STEPS = ClosedSteps()
"""Of a worker that has not said anything yet."""


# ---- source of a restore ---------------------------------------------------------------------------------------------
# Names the tiers that restored bytes came from, in one word. Pure; for ranges, ranks and workers.

STAGING = "staging"
"""A node's own staging memory: a trainer that starts where its predecessor saved."""
_STAGING_AND_MEMORY = f"{STAGING}+memory"
"""What ranks hold in common each saves a share of, so an ordinary restart in place takes its own share from staging and
the others' from holders."""


def join_sources(sources: Iterable[str]) -> str | None:
    """Joins sources: `staging+memory`, or `mixed` for other combinations."""
    found = {part for source in sources for part in source.split("+")} - {"none"}
    if len(found) <= 1:
        return next(iter(found), None)
    return _STAGING_AND_MEMORY if found == {STAGING, "memory"} else "mixed"


# ---- world sizes that a checkpoint fits ------------------------------------------------------------------------------
# Finds what ties a checkpoint to its number of ranks. Objects whose state is each rank's own: reported by every rank in
# its manifest, compared by whoever decides about the size of a world, and again by each restoring rank. Rank 0's state
# would else be given to all, and the others' samples lost.

OWN = ""
"""In a manifest, in place of a digest: each rank's own, and not divisible."""


def tied_objects(manifests: Iterable[RankManifest]) -> tuple[str, ...]:
    """Names the objects that cannot be divided anew.

    Each rank's own, or with values that differ between ranks. `manifests`: one of each rank of one checkpoint, or of
    the ranks that are known.
    """
    first: Mapping[str, str] | None = None
    tied: dict[str, None] = {}
    for manifest in manifests:
        told = dict(manifest.objects)
        first = told if first is None else first
        tied |= {name: None for name, value in told.items() if value == OWN}
        if told != first:
            tied |= {name: None for name in first.keys() | told.keys() if first.get(name) != told.get(name)}
    return tuple(sorted(tied))
