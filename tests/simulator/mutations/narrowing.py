"""Rules by which an agent is told of the holders that it needs, and nothing of the others is taken for absent."""

from __future__ import annotations

from dataclasses import replace

from simulator import trainers
from simulator.engine import Line
from simulator.mutations.mutation import ROUGH, Mutation, constant
from simulator.mutations.versions import ROLLED
from surefoot.agent import state_machine
from surefoot_operator.coordinator import desired_messages

NARROWED = replace(ROUGH, nodes=4, replicas=1, faults=6, kinds=("trainer dies", "agent dies"))


NARROWING = (
    Mutation("a restoring rank takes some holders for all", patches=((trainers, "knows_all", constant(True)),),
             settings=NARROWED),
    Mutation("who seeks holders asks nobody", patches=((state_machine, "request_all_servers", constant(())),), settings=NARROWED),
    Mutation("who asks for all holders is told of some", patches=((desired_messages, "wants_all_servers", constant(False)),),
             settings=NARROWED),
    Mutation("an agent of a former version is told of some holders", patches=((Line, "lists_holders", True),), settings=ROLLED),
)  # fmt: skip
