"""The bench of one job's lines runs with the operator and the protocol as they are."""

from __future__ import annotations

import asyncio

import pytest
from bench import scale_lines

WORKERS = 4


def test_scripted_agents_join_and_hear_the_orders_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_lines, "BEATING_SECONDS", 0.5)  # what it measures is not what is tested here
    row = asyncio.run(scale_lines.measured(WORKERS, lost=1, heartbeat_seconds=0.2))
    assert row["refusals"] == 0
    assert 0 < row["stopped_seconds"] < row["committed_seconds"]
    assert row["heartbeat_microseconds"] > 0
