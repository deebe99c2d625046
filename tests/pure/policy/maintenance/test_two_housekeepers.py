"""Where an agent may keep house beside the operator, neither drops what is the other's last good checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, running, with_session
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import HealthPolicy, NumericsPolicy
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.maintenance.last_good import spared_in_memory
from surefoot_operator.policy.membership.restore_decisions import DROP_SECONDS

WHOLE = [Checkpoint(1, step) for step in (18, 22, 24, 26)]
LONG_AGO = BEGAN - 1000


def heard_of(seen: Observed) -> Observed:
    """Every line has stood for long, and nobody has told of a step that proves one of them."""
    for one in seen.sessions:
        seen = with_session(seen, one.index, step=10, since_seconds=LONG_AGO)
    return seen


def spared(seen: Observed) -> set[int]:
    return {one.step for one in spared_in_memory(gather(seen), WHOLE, [])}


def watched() -> Observed:
    return heard_of(running(health_policy=HealthPolicy(numerics=NumericsPolicy())))


def test_who_keeps_house_alone_spares_the_next_to_be_proven() -> None:
    assert spared(watched()) == {18}
    assert spared(with_session(watched(), 1, connected=False)) == {18}, "another member drops nothing"


@pytest.mark.parametrize(
    "line",
    [{"connected": False}, {"heard_seconds": BEGAN}, {"incarnation": "another"}],
    ids=["broken", "silent", "another agent's"],
)
def test_while_the_first_member_s_line_does_not_stand_all_are_spared(line: dict[str, object]) -> None:
    assert spared(with_session(watched(), 0, **line)) == {18, 22, 24, 26}


def test_what_it_dropped_while_it_was_away_is_read_before_anything_goes() -> None:
    back = with_session(watched(), 0, since_seconds=watched().now - DROP_SECONDS + 0.1)
    assert spared(back) == {18, 22, 24, 26}
    assert spared(with_session(watched(), 0, since_seconds=watched().now - DROP_SECONDS)) == {18}


def test_a_job_that_goes_back_to_nothing_keeps_what_it_kept() -> None:
    seen = heard_of(running())
    assert spared(with_session(seen, 0, connected=False)) == spared(seen) == set()


def test_a_world_without_members_has_no_other_housekeeper() -> None:
    seen = watched()
    assert seen.status.world is not None
    empty = replace(seen, status=replace(seen.status, world=replace(seen.status.world, members=())))
    assert spared(empty) == {18}
