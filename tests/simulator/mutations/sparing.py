"""Rules by which spares answer losses: who is ready trains, nobody's rank moves, and what was taken is made again."""

from __future__ import annotations

from dataclasses import replace

from simulator.mutations.mutation import ROUGH, Mutation
from surefoot_operator.job_snapshot import ObservedSession
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.policy.failure.spare_workers import newest_responsive_sessions, required_indexes
from surefoot_operator.policy.membership import claim
from surefoot_operator.policy.planning import plan

SPARED = replace(ROUGH, nodes=5, spares=1, steps=60, faults=4, fault_span_seconds=12.0,
                 kinds=("node dies", "agent dies", "trainer dies"))  # fmt: skip
TAKEN = replace(SPARED, least_workers=3, faults=1, fault_span_seconds=4.0, steps=80)


def _by_number(facts: Facts) -> list[ObservedSession]:
    """Spares are whoever has the highest numbers, and stay it."""
    return [s for s in newest_responsive_sessions(facts) if s.index < facts.spec.replicas]


def _sorted(facts: Facts, chosen: list[ObservedSession]) -> list[ObservedSession]:
    return sorted(chosen, key=lambda s: s.index)


def _enough(facts: Facts) -> frozenset[int]:
    """A world that lost somebody and is whole again wants nobody else."""
    world = facts.status.membership
    whole = world is not None and world.state == "Committed" and len(world.members) == facts.spec.replicas
    whole = whole and facts.running_generation > 1
    return frozenset(m.index for m in facts.members.values()) if whole else required_indexes(facts)


SPARING = (
    Mutation("spares get no rank", patches=((claim, "newest_responsive_sessions", _by_number),), settings=SPARED),
    Mutation("ranks follow the numbers of workers", patches=((claim, "_order_by_rank", _sorted),), settings=SPARED),
    Mutation("a spare that was taken is not made again", patches=((plan, "required_indexes", _enough),), settings=TAKEN),
)  # fmt: skip
