"""Tests of `policy.failure.loss_anomalies`."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest

from support.builders import running, with_session
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import HealthPolicy, NumericsPolicy
from surefoot_operator.api.status import Condition
from surefoot_operator.cli.local.progress import largest_difference
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.loss_anomalies import find_loss_anomaly, summarize_loss_history
from surefoot_operator.policy.planning.plan import plan

# ---- numerics --------------------------------------------------------------------------------------------------------
# What an odd loss leads to: weighed over ranks and steps, by the policy, and never for one rank's batch alone.


def watched(**policy: Any) -> JobSnapshot:
    return running(health_policy=HealthPolicy(numerics=NumericsPolicy(**policy)))


def odd(seen: JobSnapshot, index: int, since: int, last: int = 42, kind: str = "spike") -> JobSnapshot:
    told = {
        "anomaly_step": last,
        "anomaly_since_step": since,
        "anomaly_kind": kind,
        "anomaly_text": f"step {last} is odd",
    }
    return with_session(seen, index, **told)


def test_without_a_policy_nobody_judges() -> None:
    assert find_loss_anomaly(build_facts(odd(running(), 1, 42, kind="not-finite"))) is None
    assert summarize_loss_history(build_facts(running())) is None


def test_one_rank_without_a_number_is_enough_while_it_lasts() -> None:
    found = find_loss_anomaly(build_facts(odd(watched(), 1, 41, kind="not-finite")))
    assert found is not None
    assert (found.kind, found.since_step, found.action) == ("not-finite", 41, "Rollback")
    assert found.reason == "step 42 is odd (worker 1, since step 41)"
    over = odd(watched(), 1, 41, last=41, kind="not-finite")
    assert find_loss_anomaly(build_facts(over)) is None, (
        "the step behind it was well: the program had left that one out"
    )


@pytest.mark.parametrize(("last", "found"), [(40, True), (39, False), (0, False)])
def test_before_its_first_step_an_epoch_is_as_odd_as_what_it_restored(last: int, found: bool) -> None:
    seen = watched()
    world = seen.status.membership
    assert world is not None
    seen = replace(seen, status=replace(seen.status, membership=replace(world, parent=Checkpoint(1, 40))))
    for one in seen.sessions:
        seen = with_session(seen, one.index, step=0)
    restored = odd(seen, 1, last, last=last, kind="not-finite")
    assert (find_loss_anomaly(build_facts(restored)) is not None) == found


@pytest.mark.parametrize(
    ("workers", "since", "found"), [(1, 30, False), (2, 41, False), (2, 40, True), (3, 40, True), (3, 41, False)]
)
def test_a_spike_takes_half_of_the_workers_and_so_many_steps(workers: int, since: int, found: bool) -> None:
    seen = watched(on_spike="Rollback")
    for index in range(workers):
        seen = odd(seen, index, since)
    assert (find_loss_anomaly(build_facts(seen)) is not None) == found


def test_steps_count_once_every_worker_has_told_of_them() -> None:
    seen = with_session(watched(good_after_steps=7), 2, step=40)
    sound = summarize_loss_history(build_facts(odd(seen, 1, 12, last=13)))
    assert sound is not None
    assert (sound.step, sound.anomaly_step, sound.later_steps) == (40, 13, 7)
    gone = replace(seen, sessions=seen.sessions[:2])
    assert summarize_loss_history(build_facts(gone)).step == 0  # type: ignore[union-attr]


# ---- loss finite -----------------------------------------------------------------------------------------------------
# A loss that is no number is a condition from its heartbeat on; two runs that both lost theirs are alike.


def losses(seen: JobSnapshot) -> Condition | None:
    return next((c for c in plan(seen).status.conditions if c.type == "LossFinite"), None)


def test_it_is_told_with_the_first_step_and_stays_told_until_a_loss_is_a_number_again() -> None:
    seen = running()
    assert losses(seen) is None
    assert losses(with_session(seen, 0, loss_is_finite=True)) is None
    bad = with_session(seen, 1, loss_is_finite=False, step=43)
    found = losses(bad)
    assert found is not None
    assert (found.status, found.reason) == ("False", "NonFinite")
    assert "worker 1 is NaN or infinite at step 43" in found.message
    later = replace(with_session(bad, 1, loss_is_finite=False, step=50), status=plan(bad).status)
    assert losses(later) == found
    silent = replace(seen, status=plan(bad).status)
    assert losses(silent) == found, "a new epoch that has not told anything is no better"
    again = losses(with_session(silent, 1, loss_is_finite=True))
    assert again is not None
    assert again.status == "True"


def test_curves_that_are_no_number_at_the_same_steps_are_alike() -> None:
    assert largest_difference({1: 2.0, 2: math.nan, 3: math.inf}, {1: 2.0, 2: math.nan, 3: math.inf}) == 0.0
    assert largest_difference({1: 2.0, 2: math.nan}, {1: 2.0, 2: 3.0}) == sys.float_info.max
