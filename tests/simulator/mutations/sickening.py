"""Rules by which a sick node is left, and no healthy one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from simulator.judgement import FAILING, HANGING
from simulator.mutations.mutation import ROUGH, Mutation, constant, planning
from surefoot.protocol.hangs import Collective, CollectiveOutlier, RankStack, find_collective_outlier
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.failure import failure_detection, unhealthy_nodes
from surefoot_operator.policy.membership import node_exclusion

SICK = replace(ROUGH, nodes=4, steps=160, interval=4, step_seconds=0.25, faults=3, fault_span_seconds=6.0,
               kinds=("node is sick", "a program errs on its GPU", "all nodes find the same"))  # fmt: skip


FAILS_AGAIN = replace(FAILING, kinds=("trainers of one node fail again and again",), faults=1)
FAILS_WITH_ITS_RANK = replace(
    FAILING, kinds=("trainers of one rank fail wherever it runs", "pod is deleted"), least_workers=4
)


def _all_of_nodes(seen: JobSnapshot) -> JobSnapshot:
    """Whatever is found is taken for the node's."""
    told = (
        replace(one, findings=tuple(replace(f, blame="node") for f in one.findings)) if one.findings else one
        for one in seen.sessions
    )
    return replace(seen, sessions=tuple(told))


def _the_first(places: Iterable[RankStack]) -> tuple[int, str] | None:
    """Some rank is named, wherever it stands."""
    return next(((rank, place.text) for place in places for rank in place.ranks), None)


def _whoever_waits(told: Iterable[Collective]) -> CollectiveOutlier | None:
    """The first rank that waits holds all others up."""
    return next((CollectiveOutlier(one.ranks[0], f"is in {one}", False) for one in told if one.is_waiting), None)


def _of_its_node(told: Iterable[Collective]) -> CollectiveOutlier | None:
    """Whatever a rank does is its node's fault."""
    found = find_collective_outlier(told)
    return None if found is None else replace(found, is_program_fault=False)


SICKENING = (
    Mutation("some rank is named for a hang", settings=HANGING,
             patches=((failure_detection, "find_stack_outlier", _the_first), (failure_detection, "find_collective_outlier", constant(None)))),
    Mutation("who waits in a collective is named for the hang", patches=((failure_detection, "find_collective_outlier", _whoever_waits),),
             settings=replace(HANGING, workers=4)),
    Mutation("a node is blamed for unlike paths of a program", patches=((failure_detection, "find_collective_outlier", _of_its_node),),
             settings=replace(HANGING, workers=4)),
    Mutation("a node is left for what a program did", decisions=planning(_all_of_nodes),
             settings=replace(SICK, kinds=("a program errs on its GPU",))),
    Mutation("what most nodes find is taken for each one's own", patches=((unhealthy_nodes, "_is_shared", constant(False)),),
             settings=replace(SICK, kinds=("all nodes find the same",))),
    Mutation("a node that fails a job again and again is not left", patches=((node_exclusion, "find_exclusion_reason", constant(None)),),
             settings=FAILS_AGAIN),
    Mutation("a node is left for one failure", settings=replace(FAILING, kinds=("trainer dies", *FAILS_AGAIN.kinds), steps=120),
             patches=((node_exclusion, "_MIN_INCIDENTS_ELSEWHERE", 1), (node_exclusion, "MAX_CHANCE_PROBABILITY", 1.0))),
    Mutation("nodes are left for a rank that fails wherever it runs", patches=((node_exclusion, "_follows_rank", constant(False)),),
             settings=FAILS_WITH_ITS_RANK),
    Mutation("a finding is acted upon before others are heard", patches=((unhealthy_nodes, "CONFIRM_SECONDS", 0.0),),
             settings=replace(SICK, kinds=("all nodes find the same",))),
)  # fmt: skip
