"""How long an agent waits before it looks for its coordinator again."""

from __future__ import annotations

from surefoot.agent.coordinator_client import ANSWERED, UNANSWERED


def test_where_nobody_answers_a_leader_is_found_soon_and_who_refuses_is_not_run_down() -> None:
    assert UNANSWERED.longest_seconds <= 0.5
    assert ANSWERED.seconds(20) >= 5.0
    assert ANSWERED.seconds(20, drawn=1.0) >= 2.5
