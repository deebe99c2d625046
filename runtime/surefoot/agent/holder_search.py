"""Decides what follows where a trainer needs all holders.

Pure; part of `state_machine`. Whoever seeks waits: a rank that took the holders that it knows for all there are would
call a checkpoint lost that others hold.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.agent import events as on
from surefoot.agent.agent_state import AgentState
from surefoot.agent.events import Command
from surefoot.protocol.holders_wanted import HoldersWanted
from surefoot.protocol.messages import Assign

Step = tuple[AgentState, tuple[Command, ...]]


def foreseen(assign: Assign) -> tuple[Command, ...]:
    """Asks at once where ranks will need all holders anyway.

    In a world of another size than its restore point's every rank reads of every other's; the answer comes while trainers
    begin.
    """
    parent = assign.parent
    if not assign.partial or parent is None or parent.imported:
        return ()
    size = next((size for epoch, _, size in assign.lineage if epoch == parent.epoch), assign.world)
    return asked_again(assign.epoch) if size != assign.world else ()


def sought(state: AgentState, local: int) -> Step:
    """A trainer asks for every holder of the epoch."""
    assign = state.assign
    if assign is None or assign.epoch != state.started:
        return state, ()  # overtaken: its trainers are being ended
    if not assign.partial:
        return state, (on.TellHolders(local, assign.holders),)
    return replace(state, seeking=state.seeking | {local}), asked_again(assign.epoch)


def told(state: AgentState) -> Step:
    """Tells the ranks that sought all holders, once those are known."""
    assign = state.assign
    if not state.seeking or assign is None or assign.partial or assign.epoch != state.started:
        return state, ()
    found = tuple(on.TellHolders(local, assign.holders) for local in sorted(state.seeking))
    return replace(state, seeking=frozenset()), found


def welcomed(state: AgentState) -> tuple[Command, ...]:
    """Asks a coordinator that has just begun what the former was asked."""
    return asked_again(state.assign.epoch) if state.seeking and state.assign is not None else ()


def asked_again(epoch: int) -> tuple[Command, ...]:
    """Asks the coordinator, once more if need be."""
    return (on.Send(HoldersWanted(epoch)),)
