"""An agent's life to try decisions on: begun, running, and what it said."""

from __future__ import annotations

from dataclasses import replace

from support.fakes.fake_coordinator import assignment
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import AgentState, Command, Event
from surefoot.agent.state_machine import transition
from surefoot.protocol.messages import Assign
from surefoot.protocol.progress import Progress


def assign(epoch: int, hosts: bool = True, store: str | None = None, ranks: int = 2) -> Assign:
    return replace(assignment(epoch, 0, 1, local_ranks=ranks), hosts_store=hosts, store=store)


def live(*events: Event, life: AgentState | None = None) -> tuple[AgentState, list[Command]]:
    """The life after these events, and everything it decided."""
    life = life or AgentState()
    said: list[Command] = []
    for event in events:
        life, commands = transition(life, event)
        said += commands
    return life, said


def sent(commands: list[Command]) -> list[object]:
    return [c.message for c in commands if isinstance(c, on.Send)]


def running(epoch: int = 1, ranks: int = 2) -> AgentState:
    life, _ = live(on.WarmChanged(True), on.Assigned(assign(epoch, ranks=ranks)), on.StoreUp(epoch, "h:1"))
    life, _ = live(*(on.TrainerAttached(epoch, i) for i in range(ranks)), life=life)
    assert life.alive
    return life


def step(epoch: int, local: int, number: int, at: float = 0.0) -> on.StepDone:
    return on.StepDone(epoch, local, Progress(number, 0.5, 0.1), at)
