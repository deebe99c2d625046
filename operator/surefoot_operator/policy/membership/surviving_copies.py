"""Selects copies that survive when a paused world's nodes are left.

Pure; read by `planned_change` and `maintenance_plan`. A world that holds because a worker leaves continues elsewhere only once
its step survives the node: the copy in that node's holder is lost with it, and where two nodes of a placement group are
drained at once, both copies are.
"""

from __future__ import annotations

from surefoot.protocol.checkpoints import retention
from surefoot.protocol.checkpoints.completeness import TierReading, complete, copies_of
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.policy.core.availability import departure_reason
from surefoot_operator.policy.core.facts import (
    Facts,
    bad_of,
    domains_of,
    held_checkpoint,
    member_sessions,
    reading_at,
    sealed_holders,
    topology_of_job,
)
from surefoot_operator.policy.core.indexes import worker_id


def halted(facts: Facts) -> Checkpoint | None:
    """The step at which every rank holds because a worker leaves.

    None: no world does.
    """
    held = held_checkpoint(facts)
    return held if held is not None and any(departure_reason(facts, member) for member in facts.world.members) else None


def staying(facts: Facts) -> TierReading:
    """The memory reading without the failure domains that are being left."""
    domains, gone = domains_of(facts), going(facts)
    reading = reading_at(facts, facts.world.epoch)
    return TierReading({h: entries for h, entries in reading.holders.items() if domains[h] not in gone}, None)


def copies_wanted(facts: Facts, goes_on: bool) -> int:
    """The copies needed on nodes that stay.

    `goes_on`: a smaller world trains at once and makes the others meanwhile.
    """
    domains = domains_of(facts)
    live = {domains[h] for h in staying(facts).holders}
    return min(facts.spec.checkpoint.memory.replicas, len(live), 1 if goes_on else len(live))


def lacking(facts: Facts, goal: Checkpoint, goes_on: bool) -> str:
    """Says what a checkpoint lacks to survive the nodes being left."""
    floor = facts.status.floor
    if floor is not None and floor.step >= goal.step:
        return ""
    wanted = copies_wanted(facts, goes_on)
    if not wanted:
        text = f"{goal} has no copy on a node that stays"
        return text if facts.spec.checkpoint.persistent is None else f"{text}, and is not in the persistent tier yet"
    told = min((s.copies for _, s in member_sessions(facts) if s is not None), default=0)
    if told - _most_lost(facts) >= wanted:
        return ""
    domains, reading = domains_of(facts), staying(facts)
    there = goal in complete(reading, facts.status.lineage, goal.epoch, bad_of(facts), facts.seen.covers)
    found = copies_of(goal, reading, domains) if there else 0
    return "" if found >= wanted else f"{goal} has {found} of {wanted} copies on nodes that stay"


def needs_promotion(facts: Facts) -> bool:
    """Whether no holder stays: only the persistent tier can keep the step."""
    return halted(facts) is not None and not copies_wanted(facts, goes_on=False)


def can_be_brought(facts: Facts) -> bool:
    """Whether missing copies can be made, in memory or persistent tier."""
    return bool(copies_wanted(facts, goes_on=False)) or facts.spec.checkpoint.persistent is not None


def repairs(facts: Facts, goal: Checkpoint, goes_on: bool) -> list[retention.Repair]:
    """Plans copies onto nodes that stay; `goes_on` as in `copies_wanted`."""
    reading, domains = reading_at(facts, facts.world.epoch), domains_of(facts)
    wanted = copies_wanted(facts, goes_on)
    if not wanted:
        return []
    return retention.repairs(
        dict(reading.holders), domains, goal, wanted, frozenset(going(facts)), topology_of_job(facts)
    )


def going(facts: Facts) -> set[str]:
    """Returns the failure domains with a node that is being left."""
    domains = {h.endpoint.holder.node: h.endpoint.domain for h in facts.seen.holders}
    nodes = {name for name, n in facts.nodes.items() if n.signal or not n.schedulable or not n.ready}
    nodes |= {one.name for one in facts.status.sick_nodes if one.until_seconds > facts.now}
    for session in facts.sessions.values():
        worker = facts.workers.get(worker_id(session)) if session.leaving else None
        if session.leaving and (worker is None or not worker.deleting):
            nodes.add(session.node)
    return {domains[name] for name in nodes if name in domains}


def _most_lost(facts: Facts) -> int:
    """Copies that a save may lose with the nodes that are being left: one for each failure domain."""
    holders = {h.endpoint.domain for h in sealed_holders(facts, facts.world.epoch)}
    return len(holders & going(facts))
