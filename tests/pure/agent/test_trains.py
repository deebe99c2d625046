"""When copies have to spare the network: while trainers here go on with steps, and not a moment longer."""

from __future__ import annotations

import pytest

from support.lives import assign, live, running
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import Departure
from surefoot.protocol.messages import Barrier, Stop


def test_who_runs_trains() -> None:
    assert running().trains


@pytest.mark.parametrize(
    "ended",
    [
        Stop(2, ""),
        on.LeaveAsked(143),
        on.DepartureAsked(143, Departure(1.0, 9.0)),
        Barrier(1, 40, "proposed"),
        on.TrainerExited(1, 0, 1, "a fault"),
    ],
    ids=["stopped", "leaves", "is to leave", "holds", "failed"],
)
def test_where_a_world_ends_or_halts_nothing_is_spared(ended: on.Event) -> None:
    life, _ = live(ended, life=running(ranks=1))
    assert not life.trains


def test_an_assignment_alone_trains_nothing() -> None:
    life, _ = live(on.WarmChanged(True), assign(1))
    assert not life.trains
