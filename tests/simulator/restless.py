"""An operator that changes its mind about intervals all the time: whatever levels are chosen, what must hold holds.

The real upkeep, with other levels in its status than the real policy would choose. A function of the time alone.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.world import Decisions
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import SaveInterval
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan, plan_maintenance
from surefoot_operator.policy.membership.restore_decisions import DropsInProgress

CHANGE_SECONDS = 0.7
LEVELS = (0, 2, 1, 3, 0, 1)


def restless(seen: JobSnapshot, pinned: Checkpoint | None, going: DropsInProgress) -> MaintenancePlan:
    """Another level for both tiers every `CHANGE_SECONDS`."""
    kept = plan_maintenance(seen, pinned, going)
    world = kept.status.membership
    if world is None or world.state != "Committed" or not world.members:
        return kept
    turn = int(seen.now_seconds / CHANGE_SECONDS)
    memory = LEVELS[turn % len(LEVELS)]
    above = memory + (turn % 2 if seen.job.spec.checkpoint.persistent is not None else 0)
    status = replace(kept.status, memory_interval=_interval(memory, turn), persistent_interval=_interval(above, turn))
    if seen.job.spec.checkpoint.persistent is None:
        status = replace(status, persistent_interval=None)
    return replace(kept, status=status)


def _interval(level: int, turn: int) -> SaveInterval:
    at = turn * CHANGE_SECONDS
    return SaveInterval(1 << level, level, f"turn {turn}", at, 0, at)


RESTLESS = Decisions(maintain=restless)
