"""Finds what ties a checkpoint to its number of ranks.

Pure. Objects whose state is each rank's own: reported by every rank in its manifest, compared by whoever decides about
the size of a world, and again by each restoring rank. Rank 0's state would else be given to all, and the others'
samples lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from surefoot.protocol.checkpoints.records import RankManifest

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
