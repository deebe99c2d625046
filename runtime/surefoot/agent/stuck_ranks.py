"""Decides when to look at trainers without a step.

Pure; `state_machine` calls it for each tick, step, pause and look. Agents only tell what they see of their own ranks:
one that waits for a rank elsewhere looks like one that hangs, and only the operator hears all of them.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.agent import events as on
from surefoot.agent.agent_state import AgentState
from surefoot.agent.looks import Look, stands_still
from surefoot.protocol.messages import FromAgent
from surefoot.protocol.step_limit import learned_limit_seconds
from surefoot.protocol.stuck_message import StuckRanks

Step = tuple[AgentState, tuple[on.Command, ...]]


def look_if_due(state: AgentState, standing_seconds: float) -> Step:
    """Looks at each half of the suspect time."""
    limit = state.step_limit_seconds
    suspect = limit if state.paused else learned_limit_seconds(state.gaps, limit)
    if 2 * standing_seconds <= (state.looks + 1) * suspect:
        return state, ()
    # whoever finds the hang first kills its ranks, and all others end with them before they could be asked
    stacks = "" if state.stacks is None else state.stacks
    return replace(state, stacks=stacks, looks=state.looks + 1), (on.TakeStacks(state.started),)


def looked(state: AgentState, look: Look | None) -> Step:
    """Says where all local ranks are, or takes it back."""
    before = state.look
    stands = before is not None and look is not None and stands_still(before, look)
    if before is not None and look is not None and stands and not look.collectives:
        look = replace(
            look, collectives=before.collectives
        )  # a recorder that is late now was heard before, and nothing moved
    state = replace(state, look=look)
    if look is None or state.paused:
        return _taken_back(state)
    # of what moves, a collective made between two looks says nothing of where all ranks are at one moment
    known = stands or (before is not None and before.collectives == look.collectives)
    calls = look.collectives if known else ()
    fact = StuckRanks(state.started, state.step, look.places, moves=not stands, collectives=calls)
    if fact in state.facts:
        return state, ()
    return replace(state, facts=(*_without(state), fact)), (on.Send(fact),)


def moved(state: AgentState, at: float) -> Step:
    """Forgets what was seen, at a step or a pause."""
    return _taken_back(replace(state, progress_at=at, stacks=None, look=None, looks=0))


def _taken_back(state: AgentState) -> Step:
    facts = _without(state)
    if facts == state.facts:
        return state, ()
    return replace(state, facts=facts), (on.Send(StuckRanks(state.started, state.step)),)


def _without(state: AgentState) -> tuple[FromAgent, ...]:
    return tuple(fact for fact in state.facts if not isinstance(fact, StuckRanks))
