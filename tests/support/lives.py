"""An agent's life to try decisions on: begun, running, and what it said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.fakes.fake_coordinator import assignment
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import AgentState, Command, Event
from surefoot.agent.state_machine import next_state
from surefoot.ipc.trainer_messages import Attach, StepReport
from surefoot.protocol.messages import Assign, Welcome
from surefoot.protocol.progress import Progress


def assign(epoch: int, hosts: bool = True, store: str | None = None, ranks: int = 2) -> Assign:
    return replace(assignment(epoch, 0, 1, local_ranks=ranks), hosts_store=hosts, store=store)


WELCOME = Welcome("term", 1.0)


def from_rank(generation: int, local: int, message: Any, at: float = 0.0) -> on.TrainerMessage:
    return on.TrainerMessage(generation, local, message, at)


def live(*events: Event, life: AgentState | None = None) -> tuple[AgentState, list[Command]]:
    """The life after these events, and everything it decided."""
    life = life or AgentState()
    said: list[Command] = []
    for event in events:
        life, commands = next_state(life, event)
        said += commands
    return life, said


def sent(commands: list[Command]) -> list[object]:
    return [c.message for c in commands if isinstance(c, on.Send)]


def running(epoch: int = 1, ranks: int = 2) -> AgentState:
    life, _ = live(on.WarmChanged(True), assign(epoch, ranks=ranks), on.StoreStarted(epoch, "h:1"))
    life, _ = live(*(from_rank(epoch, i, Attach(i, epoch, 0)) for i in range(ranks)), life=life)
    assert life.has_running_trainers
    return life


def step(epoch: int, local: int, number: int, at: float = 0.0) -> on.TrainerMessage:
    return from_rank(epoch, local, StepReport(Progress(number, 0.5, 0.1), None, False), at)
