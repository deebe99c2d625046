"""Rules by which operator and agents of two versions understand each other."""

from __future__ import annotations

from dataclasses import replace

from simulator import rollout, wiring
from simulator.mutations.mutation import ROUGH, Mutation
from surefoot.protocol.memory_server_list import HoldersTold, changes
from surefoot.protocol.messages import HolderChanges
from surefoot.protocol.wire import OLDEST

ROLLED = replace(ROUGH, nodes=4, steps=60, faults=4, fault_span_seconds=12.0, version=OLDEST,
                 kinds=(*rollout.KINDS, "trainer dies"))  # fmt: skip


def _changes_alone(told: HoldersTold, wanted: HoldersTold) -> HolderChanges | None:
    """A new line is told what changed since it began, and never what there was."""
    return changes(told, wanted) if told else None


VERSION_MUTATIONS = (
    Mutation("a line speaks the newer version of its ends", patches=((wiring, "picked", max),), settings=ROLLED),
    Mutation("an agent is told of holders as its version does not know", patches=((HolderChanges, "SINCE", OLDEST),), settings=ROLLED),
    Mutation("a new line is not told which holders there are", patches=((wiring, "changes", _changes_alone),), settings=ROLLED),
)  # fmt: skip
