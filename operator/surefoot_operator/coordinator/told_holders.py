"""Chooses the holders that each agent is told of.

Pure; part of `desired_messages`. Each is told of those that its worker needs: a list of two thousand holders for each of
two thousand agents takes seconds of the operator, whenever a job begins or another operator leads. A worker writes to its
targets, and most read after a failure what their own ranks and the first one saved. Who needs more asks (`HoldersWanted`);
until then what it was not told of is silent to it, and never absent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from surefoot.protocol.checkpoints.placement import RankTargets
from surefoot.protocol.identities import ENDPOINT_ORDER, HolderEndpoint, HolderId
from surefoot_operator.api.status import JobStatus, World
from surefoot_operator.coordinator.sessions import Session
from surefoot_operator.observed_tiers import HolderSeen

FEW_HOLDERS = 32
"""So many are told to everybody: three kilobytes, and nobody waits for an answer in a restore."""

Copies = Mapping[int, tuple[HolderId, ...]]
"""Rank → the holders that have its save."""


@dataclass(frozen=True, slots=True)
class HolderScope:
    """Bounds what the agents of one world are told of."""

    world: World | None = None
    copies: Copies = field(default_factory=dict)
    """Of the restore point, as far as it was read when the world began: a hint, as nobody takes it for all."""
    few: int = FEW_HOLDERS


def scope_after(
    before: HolderScope | None,
    status: JobStatus,
    seen: Callable[[], Sequence[HolderSeen]],
    few: int | None = None,
) -> HolderScope:
    """Returns the stored world's scope, the same while it stands.

    Indexes change with every save; what a world restores does not, and no agent is to hear of their changes.
    """
    world, few = status.world, FEW_HOLDERS if few is None else few
    if before is not None and before.world == world:
        return before
    if world is None or world.state != "Committed" or world.parent is None or world.parent.imported:
        return HolderScope(world, few=few)
    found: dict[int, list[HolderId]] = defaultdict(list)
    for holder in seen():
        if holder.state == "Ready":
            for manifest in holder.entries:
                if (manifest.save.step, manifest.save.epoch) == (world.parent.step, world.parent.epoch):
                    found[manifest.save.rank].append(holder.endpoint.holder)
    return HolderScope(world, {rank: tuple(having) for rank, having in found.items()}, few)


def needed_holders(
    status: JobStatus,
    holders: Sequence[HolderEndpoint],
    targets: Mapping[int, RankTargets],
    scope: HolderScope,
) -> Mapping[int, tuple[HolderEndpoint, ...]] | None:
    """Maps worker index to the holders that it needs; None: all.

    All where there are few.
    """
    world = status.world
    if world is None or len(holders) <= scope.few:
        return None
    endpoints = {endpoint.holder: endpoint for endpoint in holders}
    local = world.size // max(1, len(world.members))
    needed: dict[int, tuple[HolderEndpoint, ...]] = {}
    for place, member in enumerate(world.members):
        own = {endpoint.holder: endpoint for endpoint in chain(*targets.get(member.index, ()))}
        for rank in (0, *range(place * local, (place + 1) * local)):
            own |= {one: endpoints[one] for one in scope.copies.get(rank, ()) if one in endpoints}
        needed[member.index] = tuple(sorted(own.values(), key=ENDPOINT_ORDER))
    return needed


def keeps_house(place: int) -> bool:
    """Whether this member drops old saves where nobody leads.

    It must know of every holder.
    """
    return place == 0


def is_asked_for(session: Session) -> bool:
    """Whether this line's agent asked to be told of every holder."""
    return session.wants_holders
