"""Counts what each tier has of a job, for its status.

Pure; called by `reconcile` when a status is about to be written. Saves come and go with every interval: a status written
for their bytes alone would be a stream of writes to the API server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from surefoot.protocol.checkpoints.completeness import TierReading, copies_of
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot_operator.api.status import JobStatus, StoredCheckpoints, TierContents
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.core.indexes import holder_domains, holders_reading


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
    """As it was listed, else as it was told and what was uploaded since: a listing comes once a minute at most."""
    known, listing, floor = status.checkpoints.persistent, seen.persistent, status.floor
    current = status.world is not None and listing.read_epoch == status.world.epoch
    listed = listing.entries if current else None
    if listed is not None and (floor is None or any(m.save.checkpoint == floor for m in listed)):
        return _counted(listed)
    if known is None and listed is not None:
        known = _counted(listed)
    if floor is None or floor == seen.status.floor:
        return known
    uploaded = _counted(copies[0] for copies in reading.manifests().get(floor, {}).values())
    return uploaded if known is None else _sum(known, uploaded)


def _sum(one: TierContents, other: TierContents) -> TierContents:
    return TierContents(one.bytes + other.bytes, one.checkpoints + other.checkpoints)


def _counted(saves: Iterable[RankManifest]) -> TierContents:
    size, found = 0, set()
    for one in saves:
        size += one.stream_bytes + one.digests_bytes + one.values_bytes
        found.add((one.save.epoch, one.save.step))
    return TierContents(size, len(found))
