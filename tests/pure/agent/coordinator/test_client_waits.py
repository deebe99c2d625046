"""How long an agent waits before it looks for its coordinator again."""

from __future__ import annotations

from surefoot.agent.coordinator.coordinator_client import next_wait


def waits(tries: int, answered: bool) -> list[float]:
    found = [0.05]
    for _ in range(tries):
        found.append(next_wait(found[-1], answered))
    return found


def test_where_nobody_answers_a_leader_is_found_soon_and_who_refuses_is_not_run_down() -> None:
    assert max(waits(20, answered=False)) == 0.33
    refused = waits(20, answered=True)
    assert refused[:4] == [0.05, 0.1, 0.2, 0.4]
    assert max(refused) == 5.0
