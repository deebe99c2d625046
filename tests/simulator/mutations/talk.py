"""Rules of losses, halts, and of what operator and agents tell each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.mutations.mutation import (
    BROKEN,
    COLD,
    FORMER,
    LEFT,
    OUTLIVED,
    PAIRS,
    ROUGH,
    UNHEARD,
    Mutation,
    constant,
)
from surefoot.agent import agent_state as on
from surefoot.agent import state_machine as agent_life
from surefoot.agent.agent_state import AgentState
from surefoot.protocol import messages as said
from surefoot_operator.coordinator import (
    barrier,
    conversations,
    desired_messages,
    sessions,
)
from surefoot_operator.job_snapshot import ObservedBarrier
from surefoot_operator.policy.failure import failure_detection as failures
from surefoot_operator.policy.failure import restart_budget as budget
from surefoot_operator.policy.membership import planned_change as planned
from surefoot_operator.policy.membership import workers
from surefoot_operator.policy.planning import plan

_replied, _advance, _assigned = barrier.apply_barrier_reply, agent_life.next_state, agent_life._apply_assignment
_bound, _unsaid, _place = planned._complete_barrier, desired_messages.diff_messages, desired_messages._group_rank_of
_rank_answered, _claim, _start = (
    agent_life._apply_barrier_reply,
    agent_life._claim_generation,
    agent_life._start_generation,
)


def _one_will_do(before: ObservedBarrier | None, worker: Any, reply: said.BarrierReply) -> ObservedBarrier | None:
    """A barrier is bound after one acceptance."""
    after = _replied(before, worker, reply)
    if after is None or after is before or after.barrier.phase != "proposed":
        return after
    return replace(after, barrier=replace(after.barrier, phase="bound"), unanswered_by=frozenset())


def _one_rank_will_do(life: AgentState, mine: Any, reply: said.BarrierReply) -> Any:
    """An agent accepts a barrier once one of its ranks has."""
    after, said_now = _rank_answered(life, mine, reply)
    if reply.accepted and life.barrier is not None and life.barrier.step == reply.step:
        return after, (on.Send(reply),)
    return after, said_now


def _any_epoch(life: AgentState, assign: said.Assign) -> Any:
    """An agent follows whatever assignment it hears last, also one of an older epoch."""
    if assign.generation < life.claimed_generation:
        life = replace(
            life,
            claimed_generation=assign.generation,
            started_generation=min(life.started_generation, assign.generation - 1),
        )
    return _assigned(life, assign)


def _goes_on(life: AgentState, epoch: int) -> AgentState:
    """A claim does not take back what an agent was told before."""
    return replace(_claim(life, epoch), assign=life.assign)


def _tells_once(life: AgentState, event: on.Event) -> Any:
    """What an agent had to say is not said again to whoever answers next."""
    after, commands = _advance(life, event)
    return after, tuple(c for c in commands if not (isinstance(event, said.Welcome) and isinstance(c, on.Send)))


def _twice(life: AgentState) -> Any:
    """Trainers that ended are started again in the same epoch."""
    if (
        life.started_generation
        and life.started_generation == life.claimed_generation
        and not life.has_running_trainers
        and any(r.exit_code for r in life.ranks)
    ):
        life = replace(life, started_generation=life.started_generation - 1)
    return _start(life)


def _at_once(facts: Any, hold: Any, wanted: Any) -> Any:
    """A world that is to halt is claimed before it has halted."""
    return replace(_bound(facts, hold, wanted), must_claim=True)


def _every_worker(places: Any, session: Any) -> int | None:
    """Any agent of a member's worker takes its place."""
    mine = (session.observed.index, session.observed.attempt)
    return next((n for (index, attempt, _), n in places.items() if (index, attempt) == mine), None)


def _all_program(facts: Any, loss: Any, last_step: int) -> Any:
    """What a node did counts as what the program did."""
    return _allowance(facts, replace(loss, caused_by_program=True), last_step)


def _row_of_all(facts: Any, last_step: int) -> bool:
    """Steps that were made do not end a row of restarts."""
    return False


_allowance = budget.decide_restart


def _hasty(facts: Any, since_seconds: float) -> float | None:
    """Steps that others tell of are no sign of life."""
    return None


def _said_before(told: Any, wanted: Any) -> Any:
    """What was said once is not said again, changed or not."""
    send, now_told = _unsaid(told, wanted)
    return tuple(m for m in send if not isinstance(m, said.MemoryServers)), now_told


TALK = (
    Mutation("a hold binds after one acceptance", patches=((barrier, "apply_barrier_reply", _one_will_do),), settings=LEFT),
    Mutation("an agent accepts a halt once one of its ranks has",
             patches=((agent_life, "_apply_barrier_reply", _one_rank_will_do),), settings=PAIRS),
    Mutation("a world is claimed before its halt is reached", patches=((planned, "_complete_barrier", _at_once),), settings=LEFT),
    Mutation("an agent takes an older epoch's assignment", patches=((agent_life, "_apply_assignment", _any_epoch),), settings=FORMER),
    Mutation("a claim does not take back what an agent was told", patches=((agent_life, "_claim_generation", _goes_on),), settings=COLD),
    Mutation("trainers that ended are started again in the same epoch", patches=((agent_life, "_start_generation", _twice),)),
    Mutation("an agent says its facts once", patches=((agent_life, "next_state", _tells_once),), settings=OUTLIVED),
    Mutation("an agent's place is that of its worker, whoever it is", patches=((desired_messages, "_group_rank_of", _every_worker),),
             redundant="the store's address and the plan's own membership name the incarnation as well"),
    Mutation("agents do not hear when holders change", patches=((desired_messages, "diff_messages", _said_before),)),
    Mutation("what a node did counts as what the program did", patches=((plan, "decide_restart", _all_program),),
             settings=replace(ROUGH, kinds=("node dies", "agent dies"), step_seconds=2.0, steps=12, faults=14)),
    Mutation("steps that were made do not end a row of restarts", patches=((budget, "_has_new_steps", _row_of_all),),
             settings=replace(ROUGH, kinds=("trainer dies",), faults=10, steps=120, fault_span_seconds=25.0)),
    Mutation("steps that others tell of are no sign of life", patches=((failures, "progress_proof_end", _hasty),), settings=UNHEARD),
    Mutation("a line that breaks is a worker that is lost",
             patches=((failures, "RECONNECT_GRACE_SECONDS", 0.0), (failures, "progress_proof_end", _hasty)), settings=BROKEN),
    Mutation("requests of an older world are still answered", patches=((conversations, "drop_requests_of_other_generations", lambda order, *_: order),),
             redundant="answers bear the epoch that they were asked for, and whoever reads them compares it"),
    Mutation("a replaced agent may come back", patches=((sessions, "hello_rejection", constant(None)),),
             redundant="a fabric runs one agent of a worker at a time, and members are named by incarnation"),
    Mutation("workers that are lost are not replaced", patches=((workers, "_plan_index", lambda *_: workers._IndexPlan()),)),
)  # fmt: skip
