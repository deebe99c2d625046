"""Rules by which what was announced costs no step: a worker, a node or a whole world that is left in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator import announced
from simulator.agents import Agent
from simulator.mutations.mutation import ROUGH, Mutation, constant
from simulator.trainers import Trainer
from surefoot.agent import agent_state as on
from surefoot.agent import state_machine as agent_life
from surefoot_operator.policy.core import availability
from surefoot_operator.policy.core.facts import Facts, has_stepped
from surefoot_operator.policy.membership import planned_change

ANNOUNCED = replace(ROUGH, nodes=4, steps=60, faults=4, fault_span_seconds=12.0, interval=50, replicas=1,
                    kinds=tuple(announced.KINDS))  # fmt: skip
ELASTIC = replace(ANNOUNCED, least_workers=2)
FIXED = replace(ANNOUNCED, least_workers=3)
RECLAIMED = replace(FIXED, nodes=3, kinds=("node is reclaimed",))
STARTING = replace(FIXED, nodes=5, faults=12, kinds=("pod is deleted", "pod is preempted"))
UNANSWERED = replace(FIXED, nodes=3, least_workers=2, workers=2, replicas=2, interval=3, faults=6,
                     kinds=("job is suspended", "answers about pods are lost", "pod is deleted"))  # fmt: skip

_transition = agent_life.next_state


def _at_once(life: Any, event: Any) -> Any:
    """An agent that is told to end ends its trainers before anybody can halt them."""
    return _transition(
        life, on.ShutdownRequested(event.exit_code) if isinstance(event, on.TerminationRequested) else event
    )


def _not_halted(facts: Facts) -> Any:
    """Of whoever leaves no world behind, nothing is known in advance."""
    wanted = _desired(facts)
    return (
        None
        if wanted is not None
        and "is being deleted" in wanted.reason
        and not planned_change._can_continue_without(facts)
        else wanted
    )


def _before_a_step(facts: Facts, hold: Any) -> bool:
    """A world that has told of no step yet is ended without a halt."""
    return not has_stepped(facts, facts.membership.generation)


_desired, _stage = planned_change.desired_change, Trainer._stage


def _only_when_due(trainer: Trainer, step: int) -> bool:
    """A halt's step is saved only where it was due anyway."""
    return _stage(trainer, step) if trainer._due(step) else True


LEAVING = (
    Mutation("an agent that is told to end ends its trainers at once", patches=((agent_life, "next_state", _at_once),), settings=FIXED),
    Mutation("who leaves no world behind is not halted", patches=((planned_change, "desired_change", _not_halted),), settings=FIXED),
    Mutation("a deleted worker is noticed when it is gone", patches=((planned_change, "termination_reason", constant("")),), settings=ELASTIC),
    Mutation("a world that told of no step is ended without a halt", patches=((planned_change, "_makes_no_step", _before_a_step),),
             settings=STARTING),
    Mutation("copies on a node that is left count", patches=((planned_change, "domains_being_evacuated", constant(set())),),
             settings=RECLAIMED),
    Mutation("a halted world does not wait for its copies", patches=((planned_change, "describe_missing_copies", constant("")),),
             settings=RECLAIMED),
    Mutation("agents do not say that they are leaving", patches=((Agent, "leaving", property(constant(False))),),
             settings=RECLAIMED),
    Mutation("who was asked to be deleted is chosen", patches=((availability, "_requested_deletions", constant({})),), settings=UNANSWERED),
    Mutation("a halt's step is saved only where it was due", patches=((Trainer, "_stage", _only_when_due),), settings=FIXED),
)  # fmt: skip
