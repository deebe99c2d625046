"""A loss that is no number is a condition from its heartbeat on; two runs that both lost theirs are alike."""

import math
import sys
from dataclasses import replace

from support.builders import running, with_session
from surefoot_operator.api.status import Condition
from surefoot_operator.cli.local.progress import largest_difference
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.planning.plan import plan


def losses(seen: Observed) -> Condition | None:
    return next((c for c in plan(seen).status.conditions if c.type == "LossFinite"), None)


def test_it_is_told_with_the_first_step_and_stays_told_until_a_loss_is_a_number_again() -> None:
    seen = running()
    assert losses(seen) is None
    assert losses(with_session(seen, 0, loss_is_finite=True)) is None
    bad = with_session(seen, 1, loss_is_finite=False, step=43)
    found = losses(bad)
    assert found is not None
    assert (found.status, found.reason) == ("False", "NotFinite")
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
