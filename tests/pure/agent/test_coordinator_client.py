"""Tests of `agent.coordinator_client`."""

from __future__ import annotations

from functools import reduce

import pytest

from surefoot.agent.coordinator_client import (
    MAX_FAILURES_PER_ADDRESS,
    REJECTED_BACKOFF,
    UNREACHABLE_BACKOFF,
    CoordinatorAddresses,
    first_address,
    follow_referral,
    with_failure,
    with_welcome,
)

# ---- addresses -------------------------------------------------------------------------------------------------------
# Where an agent looks for the coordinator: where it was sent, and where it began if nobody is there.

OWN, BASE, ELSEWHERE = "wss://c-2.ns.svc:8443/v1/agents", "wss://c.ns.svc:8443/v1/agents", "wss://c-1.ns.svc:8443/v1/a"


def failing(known: CoordinatorAddresses, times: int) -> CoordinatorAddresses:
    return reduce(lambda one, _: with_failure(one), range(times), known)


def test_an_agent_goes_where_it_is_sent_and_stays_where_it_was_let_in() -> None:
    known = follow_referral(first_address(BASE), ELSEWHERE)
    assert known.current_url == ELSEWHERE
    assert with_welcome(failing(known, MAX_FAILURES_PER_ADDRESS - 1)) == known


def test_after_many_failures_its_own_addresses_are_tried_in_turn() -> None:
    known = first_address(OWN, BASE)
    assert failing(known, MAX_FAILURES_PER_ADDRESS - 1).current_url == OWN
    assert failing(known, MAX_FAILURES_PER_ADDRESS).current_url == BASE
    assert failing(known, 2 * MAX_FAILURES_PER_ADDRESS).current_url == OWN
    assert failing(follow_referral(known, ELSEWHERE), MAX_FAILURES_PER_ADDRESS).current_url == OWN
    assert failing(first_address(BASE), 5 * MAX_FAILURES_PER_ADDRESS).current_url == BASE


@pytest.mark.parametrize("address", ["ws://c-1.ns.svc:8443/v1/agents", "https://c-1", "wss:///v1/agents", "c-1"])
def test_a_token_is_carried_nowhere_without_tls(address: str) -> None:
    assert follow_referral(first_address(BASE), address).current_url == BASE


# ---- client waits ----------------------------------------------------------------------------------------------------
# How long an agent waits before it looks for its coordinator again.


def test_where_nobody_answers_a_leader_is_found_soon_and_who_refuses_is_not_run_down() -> None:
    assert UNREACHABLE_BACKOFF.max_seconds <= 0.5
    assert REJECTED_BACKOFF.wait_seconds(20) >= 5.0
    assert REJECTED_BACKOFF.wait_seconds(20, jitter=1.0) >= 2.5
