"""Rules by which who fails the trial of its node gets no rank, and no job waits for ever."""

from __future__ import annotations

from dataclasses import replace

from simulator.mutations.mutation import ROUGH, Mutation, constant
from surefoot_operator.policy.failure import unhealthy_nodes
from surefoot_operator.policy.membership import claim, workers

TRIED = replace(ROUGH, nodes=5, steps=40, interval=4, step_seconds=0.25, faults=0, pre_join_check="Enforce")

JOINING = (
    Mutation("who fails its trial gets a rank", patches=((claim, "_is_on_unhealthy_node", constant(False)),),
             settings=replace(TRIED, least_workers=2)),
    Mutation("no other worker is waited for than one that failed", patches=((claim, "REPLACEMENT_WAIT_SECONDS", 0.0),),
             settings=replace(TRIED, least_workers=3)),
    Mutation("a worker on a node that passes is waited for without limit", patches=((claim, "REPLACEMENT_WAIT_SECONDS", 1e9),),
             settings=replace(TRIED, workers=1, nodes=3)),
    Mutation("nobody is made in place of a worker that failed", patches=((workers, "_worker_on_unhealthy_node", constant(None)),),
             settings=replace(TRIED, least_workers=3)),
    Mutation("what nodes were left for counts no more", patches=((unhealthy_nodes, "NODE_TEST_REASONS", frozenset()),),
             settings=replace(TRIED, workers=1, nodes=4, steps=200)),
)  # fmt: skip
