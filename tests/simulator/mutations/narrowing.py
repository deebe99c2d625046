"""Rules by which an agent is told of the holders that it needs, and nothing of the others is taken for absent."""

from __future__ import annotations

from dataclasses import replace

from simulator import rollout, trainers, wiring
from simulator.mutations.mutation import ROUGH, Mutation, constant
from surefoot.agent import state_machine
from surefoot.protocol.memory_server_list import SentServers, list_changes
from surefoot.protocol.messages import MemoryServerChanges
from surefoot_operator.coordinator import desired_messages

NARROWED = replace(ROUGH, nodes=4, replicas=1, faults=6, kinds=("trainer dies", "agent dies"))
ROLLED = replace(ROUGH, nodes=4, steps=60, faults=4, fault_span_seconds=12.0, encoded=True,
                 kinds=(*rollout.KINDS, "trainer dies"))  # fmt: skip


def _changes_alone(told: SentServers, wanted: SentServers) -> MemoryServerChanges | None:
    """A new line is told what changed since it began, and never what there was."""
    return list_changes(told, wanted) if told else None


NARROWING = (
    Mutation("a restoring rank takes some holders for all", patches=((trainers, "knows_all_servers", constant(True)),),
             settings=NARROWED),
    Mutation("who seeks holders asks nobody", patches=((state_machine, "request_all_servers", constant(())),), settings=NARROWED),
    Mutation("who asks for all holders is told of some", patches=((desired_messages, "wants_all_servers", constant(False)),),
             settings=NARROWED),
    Mutation("a new line is not told which holders there are", patches=((wiring, "list_changes", _changes_alone),), settings=ROLLED),
)  # fmt: skip
