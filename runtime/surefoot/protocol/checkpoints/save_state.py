"""Reports which saves of a worker can no longer appear.

Pure. From these reports the leader learns which checkpoints can never become complete. A save is certainly missing if
its rank never handed it over (no staging memory, no free slot, a failed copy), or if it was abandoned before any memory
server was asked to commit it; then no unreachable server can have it. So a report stays true for ever, however late it
is read, and which replica leads then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surefoot.protocol.checkpoints.records import RankManifest


@dataclass(frozen=True, slots=True)
class ClosedSteps:
    """The steps of a worker's generation for which it can make no further save.

    Made by `surefoot.agent.staging_memory` and sent in every heartbeat.
    """

    closed_up_to: int = 0
    """Newest step that none of its ranks can still save; 0: none is closed."""
    handed_over: tuple[int, ...] = ()
    """Closed steps whose save every rank handed over, so that it may be on memory servers; ascending."""
    unknown_up_to: int = 0
    """`handed_over` lists only steps above this one; about older ones nothing is known."""

    def is_missing(self, step: int) -> bool:
        """Whether some rank's save of `step` will be missing for ever."""
        return self.unknown_up_to < step <= self.closed_up_to and step not in self.handed_over


NO_CLOSED_STEPS = ClosedSteps()
"""The report of a worker that has not closed any step."""


# ---- source of a restore ---------------------------------------------------------------------------------------------
# Names the tiers that restored bytes came from, for a range, a rank or a worker.

STAGING = "staging"
"""The node's own staging memory, for a trainer that starts where its predecessor saved."""
_STAGING_AND_MEMORY = f"{STAGING}+memory"
"""Usual source of a restart in place: each rank saves a share of the tensors that ranks have in common, so it reads its
own share from staging and the other ranks' shares from memory servers."""


def join_sources(sources: Iterable[str]) -> str | None:
    """Joins sources to one word: `staging+memory`, `mixed` for other combinations, None if there is none."""
    tiers = {part for source in sources for part in source.split("+")} - {"none"}
    if len(tiers) <= 1:
        return next(iter(tiers), None)
    return _STAGING_AND_MEMORY if tiers == {STAGING, "memory"} else "mixed"


# ---- world sizes that a checkpoint fits ------------------------------------------------------------------------------
# Finds objects that tie a checkpoint to its number of ranks, because each rank has its own state of them. Every rank
# reports its objects in its manifest; the code that chooses a world size and each restoring rank compare them.
# Otherwise all ranks would restore rank 0's state, and the samples of the others would be lost.

OWN_STATE = ""
"""Replaces an object's digest in a manifest: its state is this rank's own and cannot be divided between ranks."""


def tied_objects(manifests: Iterable[RankManifest]) -> tuple[str, ...]:
    """Returns the names of the objects whose state cannot be divided between another number of ranks, sorted.

    These are objects that a rank marked as its own, and those whose values differ between ranks.

    Args:
        manifests: One of each rank of one checkpoint, or of the ranks that are known.
    """
    first_objects: Mapping[str, str] | None = None
    tied: dict[str, None] = {}
    for manifest in manifests:
        objects = dict(manifest.objects)
        first_objects = objects if first_objects is None else first_objects
        tied |= {name: None for name, value in objects.items() if value == OWN_STATE}
        if objects != first_objects:
            tied |= {
                name: None
                for name in first_objects.keys() | objects.keys()
                if first_objects.get(name) != objects.get(name)
            }
    return tuple(sorted(tied))
