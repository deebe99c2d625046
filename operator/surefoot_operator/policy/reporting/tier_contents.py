"""Counts what each tier has of a job, for its status.

Pure; called by `reconcile` when a status is about to be written. Saves come and go with every interval: a status written
for their bytes alone would be a stream of writes to the API server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from surefoot.protocol.completeness import TierReading, copies_of
from surefoot.protocol.records import RankManifest
from surefoot_operator.api.status import JobStatus, StoredCheckpoints, TierContents
from surefoot_operator.observed import Observed
from surefoot_operator.policy.indexes import holder_domains, holders_reading


def with_contents(seen: Observed, status: JobStatus) -> JobStatus:
    """Adds the figures to a status that differs from the stored one.

    What was not read for its epoch stays as it was told before.
    """
    if status == seen.status:
        return status
    world, known = status.world, status.checkpoints
    if status.tidied:
        return replace(status, checkpoints=StoredCheckpoints(persistent=known.persistent))
    if world is None or world.state != "Committed":
        return status
    reading = holders_reading(seen.holders, world.epoch)
    if reading.holders:
        newest = status.last_complete
        copies = 0 if newest is None else copies_of(newest, reading, holder_domains(seen.holders))
        in_memory = _counted(m for entries in reading.holders.values() for m in entries)
        known = replace(known, memory=in_memory, copies=copies)
    return replace(status, checkpoints=replace(known, persistent=_persistent(seen, status, reading)))


def _persistent(seen: Observed, status: JobStatus, reading: TierReading) -> TierContents | None:
    """As it was listed; an upload that is newer than the listing as memory has it."""
    known, listing, floor = status.checkpoints.persistent, seen.persistent, status.floor
    listed = listing.entries if status.world is not None and listing.read_epoch == status.world.epoch else None
    if listed is None and known is not None:
        return known  # the listing that a new epoch begins with is on its way
    uploaded: list[RankManifest] = []
    if floor is not None and all(m.save.checkpoint != floor for m in listed or ()):
        uploaded = [copies[0] for copies in reading.manifests().get(floor, {}).values()]
    return _counted((*(listed or ()), *uploaded)) if listed is not None or uploaded else None


def _counted(saves: Iterable[RankManifest]) -> TierContents:
    size, found = 0, set()
    for one in saves:
        size += one.stream_bytes + one.digests_bytes + one.values_bytes
        found.add((one.save.epoch, one.save.step))
    return TierContents(size, len(found))
