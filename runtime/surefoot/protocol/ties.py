"""What ties a checkpoint to its number of ranks: objects whose state is each rank's own. Pure.

Said by every rank in its manifest, without asking another; compared by whoever decides about the size of a world, and
again by each restoring rank. Rank 0's state would else be given to all, and the others' samples lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from surefoot.protocol.records import RankManifest

OWN = ""
"""In a manifest, in place of a digest: each rank's own, and not divisible."""


def tied_objects(manifests: Iterable[RankManifest]) -> tuple[str, ...]:
    """Names of the objects that cannot be divided anew: each rank's own, or of values that are not the same on all.

    `manifests`: one of each rank of one checkpoint, or of the ranks that are known.
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
