"""Says what a job would lose with a node.

Pure; called by the eviction review through the reconciler. A drain ends, and the machine is switched off, as soon as its
pods are gone: the holder on it, which no drain evicts, goes with whatever only it keeps.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.checkpoints.completeness import complete
from surefoot.protocol.checkpoints.lineage import newest
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.core.facts import Facts, bad_of, domains_of, gather, reading_at, saving_steps
from surefoot_operator.policy.membership.surviving_copies import going, staying

STALE_SECONDS = 15.0
"""What was observed so long ago says nothing about now."""

COPIES_BEHIND = 2
"""Intervals: while the newest checkpoint is copied the next ones are made."""


def departure(seen: Observed, status: JobStatus, node: str, now: float) -> str:
    """Says what is lost of a job once `node` is gone too.

    Args:
        seen: the job's last round.
        status: what was decided in it.
        node: is being left, whether or not that round knew it.
        now: seconds of the same clock as `seen.now`.

    Returns:
        A sentence for whoever drains the node; empty: nothing is lost that is not elsewhere.
    """
    if status.phase in ("Complete", "Failed") or seen.job.deleted or not _keeps_some(seen, node):
        return ""
    if now - seen.now > STALE_SECONDS:
        return f"it was not reconciled for {now - seen.now:.0f} s"
    world = status.world
    if world is None or status.last_complete is None:
        return ""  # it has nothing to lose yet
    last = status.last_complete
    if status.floor is not None and status.floor.step >= last.step:
        return ""
    left = tuple(replace(one, schedulable=False) if one.name == node else one for one in seen.nodes)
    facts = gather(replace(seen, nodes=left, status=status))
    reading = reading_at(facts, world.epoch)
    if not reading.holders:
        return f"no holder says at present where the copies of {last} are"
    known, covers = (facts.status.lineage, world.epoch, bad_of(facts)), facts.seen.covers
    there = newest(complete(reading, *known, covers))
    stays = newest(complete(staying(facts), *known, covers))
    kept = max((one.step for one in (stays, status.floor) if one is not None), default=None)
    if there is None or (kept is not None and kept + _copied_meanwhile(facts) >= there.step):
        return ""
    return f"{there} has no copy on a node that stays{_way_out(facts)}"


def _copied_meanwhile(facts: Facts) -> int:
    """Steps by which copies may be behind a world that trains: it halts before its worker leaves, and what it saves then is
    copied before that worker ends. One that does not train makes no newer copies."""
    trains = facts.world.state == "Committed" and facts.world.members
    return COPIES_BEHIND * saving_steps(facts) if trains else 0


def _keeps_some(seen: Observed, node: str) -> bool:
    """Whether a holder on that node has, or may have, anything of the job: of a thousand jobs few do."""
    here = (h for h in seen.holders if h.endpoint.holder.node == node and h.state != "Gone")
    return any(h.entries or h.read_epoch is None for h in here)


def _way_out(facts: Facts) -> str:
    """What happens next, and what a person may do where nothing will."""
    if facts.status.world is not None and facts.status.world.members and set(domains_of(facts).values()) - going(facts):
        return ", and is being copied to one"
    if facts.spec.checkpoint.persistent is not None:
        return ", and is on its way to the persistent tier"
    return "; leave one that runs the job, or give it spec.checkpoint.persistent"
