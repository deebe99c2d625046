"""Rules by which a straggler is named, and its worker moved."""

from __future__ import annotations

from dataclasses import replace

from simulator.judgement import SLOW
from simulator.mutations.mutation import Mutation, constant
from surefoot_operator.policy.failure import stragglers
from surefoot_operator.policy.membership import node_exclusion

MOVED = replace(SLOW, faults=1, on_straggler="Replace")

SLOWING = (
    Mutation("a rank is named for one window", patches=((stragglers, "MAX_WINDOWS", 1),),
             settings=replace(SLOW, kinds=("node is slow for a moment",))),
    Mutation("a name outlives its place", patches=((stragglers, "_is_same_worker", constant(True)),),
             settings=replace(MOVED, kinds=("node is slow",))),
    Mutation("who is slow wherever it runs is moved again", patches=((node_exclusion, "_reason_to_stay", constant("")),),
             settings=replace(MOVED, kinds=("a rank is slow wherever it runs",), steps=200)),
    Mutation("what one rank alone does counts against its node", patches=((stragglers, "_divergent_line", constant(None)),),
             settings=replace(MOVED, kinds=("a rank does more than the others",))),
    Mutation("what all ranks do counts as one rank's own",
             patches=((stragglers, "MIN_LINE_SHARE", 1.0),),
             settings=replace(MOVED, kinds=("node is slow",))),
)  # fmt: skip
