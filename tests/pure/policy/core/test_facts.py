"""How far a job is in its data: what workers tell becomes passes and samples a second, with the step that is told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from support.builders import running, with_session
from surefoot.protocol.progress import Progress, merge_rank_progress
from surefoot_operator.api.status import DataProgress
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.planning.plan import plan


def reading(**each: float) -> JobSnapshot:
    """Three workers that told so of themselves, five steps behind what the status last said."""
    seen = running(step=42)
    seen = replace(seen, status=replace(seen.status, step=37, progress_seconds=0.0))
    for worker in range(3):
        seen = with_session(seen, worker, **each)
    return seen


def test_the_samples_of_all_workers_are_counted_at_the_pace_of_steps() -> None:
    status = plan(reading(epochs=1.25, step_samples=8, step_seconds=0.5)).status
    assert (status.step, status.data) == (42, DataProgress(1.25, 48.0))


def test_without_a_loader_that_tells_nothing_is_said_and_nothing_is_forgotten() -> None:
    assert plan(reading(step_seconds=0.5)).status.data is None
    seen = reading(step_seconds=0.5)
    known = DataProgress(0.5, 10.0)
    assert plan(replace(seen, status=replace(seen.status, data=known))).status.data == known


@pytest.mark.parametrize(
    ("told", "said"), [((2.0, 3.0, 4.0), 3.0), ((math.nan,), None), ((math.inf, 1.0), None), ((), 5.0)]
)
def test_the_loss_of_all_workers_is_told_once_it_is_a_number(told: tuple[float, ...], said: float | None) -> None:
    seen = reading(step_seconds=0.5)
    seen = replace(seen, status=replace(seen.status, loss=5.0))
    for worker, loss in enumerate(told):
        seen = with_session(seen, worker, loss=loss)
    assert plan(seen).status.loss == said


def test_a_pace_that_nobody_told_is_no_pace() -> None:
    assert plan(reading(epochs=0.25, step_samples=8, step_seconds=0.0)).status.data == DataProgress(0.25, None)


def test_ranks_of_one_worker_add_their_samples_and_share_their_passes() -> None:
    told = merge_rank_progress([Progress(epochs=1.0, step_samples=3), Progress(epochs=2.0, step_samples=4), Progress()])
    assert (told.epochs, told.step_samples) == (1.5, 7)
    assert Progress(step=1).merge_over(told).epochs == 1.5
