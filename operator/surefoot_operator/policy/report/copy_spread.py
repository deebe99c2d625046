"""Says over how many racks, zones or nodes the copies of a checkpoint are spread.

Pure; part of the condition `CheckpointProtected`. A loss of the whole rack costs no checkpoint whose copies are in two.
"""

from __future__ import annotations

from surefoot.protocol.checkpoints.completeness import TierReading
from surefoot.protocol.checkpoints.placement import Topology
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.topology_levels import levels
from surefoot_operator.policy.core.kept import kept_while_same


@kept_while_same
def copy_spread(
    reading: TierReading, checkpoint: Checkpoint, copies: int, topology: Topology, topology_key: str
) -> str:
    """Returns "2 copies in 2 racks", by the rank whose copies are the closest together."""
    number = "1 copy" if copies == 1 else f"{copies} copies"
    holders = reading.having().get(checkpoint, {}).values()
    level = topology.highest_difference(holder.node for holder in reading.holders)
    if level is None or not holders:
        return f"{number} on {_plural(copies, 'node')}"
    paths = topology.differing(holder.node for holder in reading.holders)
    places = min(len({paths[holder.node][0] for holder in of_rank}) for of_rank in holders)
    where = _plural(places, levels(topology_key)[level].noun)
    return f"{number}, for some ranks all within {where}" if places < copies else f"{number} in {where}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
