"""Rules by which a sick node is left, and no healthy one."""

from __future__ import annotations

from dataclasses import replace

from simulator.mutations.mutation import ROUGH, Mutation, constant, planning
from surefoot_operator.observed import Observed
from surefoot_operator.policy.failure import sick_nodes

SICK = replace(ROUGH, nodes=4, steps=160, interval=4, step_seconds=0.25, faults=3, fault_span_seconds=6.0,
               kinds=("node is sick", "a program errs on its GPU", "all nodes find the same"))  # fmt: skip


def _all_of_nodes(seen: Observed) -> Observed:
    """Whatever is found is taken for the node's."""
    told = (
        replace(one, findings=tuple(replace(f, blame="node") for f in one.findings)) if one.findings else one
        for one in seen.sessions
    )
    return replace(seen, sessions=tuple(told))


SICKENING = (
    Mutation("a node is left for what a program did", decisions=planning(_all_of_nodes),
             settings=replace(SICK, kinds=("a program errs on its GPU",))),
    Mutation("what most nodes find is taken for each one's own", patches=((sick_nodes, "_is_shared", constant(False)),),
             settings=replace(SICK, kinds=("all nodes find the same",))),
    Mutation("a finding is acted upon before others are heard", patches=((sick_nodes, "SETTLE_SECONDS", 0.0),),
             settings=replace(SICK, kinds=("all nodes find the same",))),
)  # fmt: skip
