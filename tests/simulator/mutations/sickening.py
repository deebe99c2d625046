"""Rules by which a sick node is left, and no healthy one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from simulator.judgement import HANGING
from simulator.mutations.mutation import ROUGH, Mutation, constant, planning
from surefoot.protocol.rank_places import RankPlace
from surefoot_operator.observed import Observed
from surefoot_operator.policy.failure import sick_nodes, standstill

SICK = replace(ROUGH, nodes=4, steps=160, interval=4, step_seconds=0.25, faults=3, fault_span_seconds=6.0,
               kinds=("node is sick", "a program errs on its GPU", "all nodes find the same"))  # fmt: skip


def _all_of_nodes(seen: Observed) -> Observed:
    """Whatever is found is taken for the node's."""
    told = (
        replace(one, findings=tuple(replace(f, blame="node") for f in one.findings)) if one.findings else one
        for one in seen.sessions
    )
    return replace(seen, sessions=tuple(told))


def _the_first(places: Iterable[RankPlace]) -> tuple[int, str] | None:
    """Some rank is named, wherever it stands."""
    return next(((rank, place.text) for place in places for rank in place.ranks), None)


SICKENING = (
    Mutation("some rank is named for a hang", patches=((standstill, "odd_rank", _the_first),), settings=HANGING),
    Mutation("a node is left for what a program did", decisions=planning(_all_of_nodes),
             settings=replace(SICK, kinds=("a program errs on its GPU",))),
    Mutation("what most nodes find is taken for each one's own", patches=((sick_nodes, "_is_shared", constant(False)),),
             settings=replace(SICK, kinds=("all nodes find the same",))),
    Mutation("a finding is acted upon before others are heard", patches=((sick_nodes, "SETTLE_SECONDS", 0.0),),
             settings=replace(SICK, kinds=("all nodes find the same",))),
)  # fmt: skip
