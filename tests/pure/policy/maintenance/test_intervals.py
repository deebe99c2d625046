"""Which interval each tier has: risk from a job's own record, choices kept in status, changes told, levels said."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, running
from support.talk import STATUS, A, talking, words
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import SaveLevel
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import Incident, Interval, JobStatus
from surefoot_operator.job_snapshot import FEWEST_STEPS, Observed
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.failure.failure_rate import Risk, risk_of
from surefoot_operator.policy.maintenance.maintenance_plan import Maintenance, maintain
from surefoot_operator.policy.maintenance.save_intervals import DWELL_SECONDS, REFRESH_SECONDS
from surefoot_operator.policy.maintenance.upload_plan import interval_of
from surefoot_operator.policy.report.status_conditions import protection
from surefoot_operator.reasons import INTERVAL_CHOSEN

NOW = BEGAN + 100
DAY = 86400.0
SECONDS = CheckpointPolicy(MemoryTierSpec(interval_seconds=2.0))
AUTO = CheckpointPolicy(MemoryTierSpec(interval="auto"), PersistentTierSpec("file:///there", interval="auto"))


def timed(seen: Observed, **figures: float) -> Observed:
    """Every member's steps, stalls or drains take so long."""
    given = {name: (seconds,) * FEWEST_STEPS for name, seconds in figures.items()}
    return replace(seen, sessions=tuple(replace(s, timings=replace(s.timings, **given)) for s in seen.sessions))


def later(seen: Observed, kept: Maintenance, seconds: float) -> Observed:
    """The same, `seconds` on, with that status; every agent was just heard."""
    now = seen.now + seconds
    sessions = tuple(replace(s, heard_seconds=now) for s in seen.sessions)
    return replace(seen, now=now, sessions=sessions, status=kept.status)


def incident(at: float, kind: str = "node-lost", source: str | None = "memory") -> Incident:
    return Incident(kind, "gone", 1, "n1", 1, at, last_step=40, parent_step=40, restored_from=source)


# ---- risk ----------------------------------------------------------------------------------------------------------


def test_a_young_job_has_the_prior() -> None:
    risk = risk_of(JobStatus(start_seconds=NOW), workers=8, replicas=2, now=NOW)
    assert risk.incidents_per_second == pytest.approx(8 / (100 * DAY))
    assert risk.memory_loss_odds == pytest.approx(0.05)


def test_a_few_incidents_of_its_own_soon_decide() -> None:
    status = JobStatus(start_seconds=NOW - DAY, incidents=(incident(NOW - 5000), incident(NOW - 500)))
    assert 0.9 < risk_of(status, 8, 2, NOW).incidents_per_second * DAY < 2


def test_planned_changes_are_no_incidents_and_ten_are_all_that_is_known() -> None:
    planned = JobStatus(start_seconds=NOW - DAY, incidents=(incident(NOW - 500, "planned"),) * 3)
    assert risk_of(planned, 8, 2, NOW) == risk_of(JobStatus(start_seconds=NOW - DAY), 8, 2, NOW)
    ten = JobStatus(start_seconds=NOW - 100 * DAY, incidents=tuple(incident(NOW - DAY + n) for n in range(10)))
    assert risk_of(ten, 8, 2, NOW).incidents_per_second * DAY > 2


def test_how_often_a_job_fails_is_told_within_a_factor_of_two_by_its_own_record() -> None:
    """From a spot fleet that loses a worker each two minutes to once a month."""
    rng, errors = random.Random(4), list[float]()
    for _ in range(400):
        mean = 10 ** rng.uniform(math.log10(120.0), math.log10(30 * DAY))
        at, times = 0.0, list[float]()
        for _ in range(rng.randint(5, 14)):
            at += rng.expovariate(1 / mean)
            times.append(at)
        now = at + rng.expovariate(1 / mean)
        status = JobStatus(start_seconds=0.0, incidents=tuple(incident(one) for one in times[-10:]))
        errors.append(abs(math.log(risk_of(status, 8, 2, now).incidents_per_second * mean)))
    assert statistics.median(errors) < math.log(1.5)
    assert statistics.quantiles(errors, n=10)[-1] < math.log(2.5)


def test_incidents_that_took_the_copies_in_memory_raise_the_odds_that_the_next_does() -> None:
    def odds(*sources: str | None) -> float:
        incidents = tuple(incident(NOW - 100, source=source) for source in sources)
        return risk_of(JobStatus(start_seconds=BEGAN, incidents=incidents), 8, 2, NOW).memory_loss_odds

    assert odds("memory", "memory") < odds() < odds("memory", "persistent") < odds("mixed", "persistent")


@given(st.integers(1, 100), st.integers(1, 4), st.integers(0, 10), st.integers(0, 10), st.floats(0, 1e7))
def test_risk_grows_with_incidents_and_workers(workers: int, replicas: int, count: int, lost: int, age: float) -> None:
    def risk(count: int, workers: int = workers) -> Risk:
        sources = ["persistent" if n < lost else "memory" for n in range(count)]
        incidents = tuple(incident(NOW - age, source=s) for s in sources)
        return risk_of(JobStatus(start_seconds=NOW - age, incidents=incidents), workers, replicas, NOW)

    now = risk(count)
    assert 0 < now.memory_loss_odds < 1
    assert now.from_persistent_seconds > 0 < now.from_memory_seconds
    assert now.incidents_per_second <= risk(min(10, count + 1)).incidents_per_second
    assert now.incidents_per_second <= risk(count, workers + 1).incidents_per_second


# ---- what is chosen, kept and told ---------------------------------------------------------------------------------


def test_a_job_that_says_steps_has_no_choice() -> None:
    kept = maintain(timed(running(), steps=0.1))
    assert (kept.status.memory_interval, kept.status.persistent_interval) == (None, None)


def test_seconds_become_steps_once_steps_were_timed() -> None:
    assert maintain(running(checkpoint=SECONDS)).status.memory_interval is None
    kept = maintain(timed(running(checkpoint=SECONDS), steps=0.1))
    found = kept.status.memory_interval
    assert found is not None
    assert (found.steps, found.level, found.since_step, found.since_seconds) == (16, 4, 42, NOW)
    assert (found.wanted_seconds, found.step_seconds) == (2.0, 0.1)
    told = [e.message for e in kept.events if e.reason == INTERVAL_CHOSEN]
    assert told == ["the memory tier is saved to every 16 steps (1.6 s): at most every 2 s was requested"]


def test_the_slowest_member_decides() -> None:
    seen = timed(running(checkpoint=SECONDS), steps=0.1)
    slow = replace(seen, sessions=(*timed(seen, steps=0.4).sessions[:1], *seen.sessions[1:]))
    found = maintain(slow).status.memory_interval
    assert found is not None
    assert found.steps == 4


def test_a_choice_stands_for_a_while_and_is_told_when_it_changes() -> None:
    seen = timed(running(checkpoint=SECONDS), steps=0.1)
    first = maintain(seen)
    slower = timed(seen, steps=0.8)
    again = maintain(later(slower, first, DWELL_SECONDS / 2))
    assert again.status == first.status
    assert again.events == ()
    changed = maintain(later(slower, first, DWELL_SECONDS))
    assert changed.status.memory_interval is not None
    assert changed.status.memory_interval.steps == 2
    assert "every 2 steps (1.6 s) instead of 16:" in changed.events[0].message


def test_a_drain_that_became_slow_is_followed_at_once() -> None:
    seen = timed(running(checkpoint=SECONDS), steps=0.1)
    kept = maintain(later(timed(seen, drains=5.0), maintain(seen), 1.0))
    assert kept.status.memory_interval is not None
    assert kept.status.memory_interval.steps == 64
    assert "a save takes 5 s to arrive" in kept.status.memory_interval.reason


def test_inputs_are_written_anew_when_they_moved_and_not_with_every_round() -> None:
    seen = timed(running(checkpoint=AUTO), steps=1.0, stalls=0.02, drains=0.5)
    first = maintain(seen)
    moved = timed(seen, drains=0.7)
    assert maintain(later(moved, first, REFRESH_SECONDS / 2)).status == first.status
    again = maintain(later(moved, first, REFRESH_SECONDS))
    before, after = first.status.memory_interval, again.status.memory_interval
    assert before is not None
    assert after is not None
    assert (after.drain_seconds, after.measured_seconds) == (0.7, NOW + REFRESH_SECONDS)
    assert (after.steps, after.since_seconds) == (before.steps, before.since_seconds)
    assert again.events == ()


def test_auto_weighs_what_a_save_costs_against_what_a_failure_costs() -> None:
    seen = timed(running(checkpoint=AUTO), steps=1.0, stalls=0.02, drains=0.5)
    calm = maintain(seen).status.memory_interval
    often = replace(seen.status, incidents=tuple(incident(NOW - 90 + n) for n in range(4)))
    rough = maintain(replace(seen, status=often)).status.memory_interval
    assert calm is not None
    assert rough is not None
    assert calm.steps == 512
    assert rough.steps < calm.steps
    assert calm.cost_seconds == pytest.approx(0.02 + 0.05 * 0.5)
    assert calm.memory_loss_odds == pytest.approx(0.05)


def test_the_persistent_tier_waits_for_its_first_upload_then_is_rarer_than_memory() -> None:
    seen = timed(running(checkpoint=AUTO), steps=1.0, stalls=0.02, drains=0.5)
    first = maintain(seen)
    assert first.status.persistent_interval is None
    assert first.pinned == Checkpoint(1, 40)
    kept = maintain(replace(later(seen, first, 1.0), promotion_seconds=20.0))
    memory, persistent = kept.status.memory_interval, kept.status.persistent_interval
    assert memory is not None
    assert persistent is not None
    assert persistent.steps > memory.steps
    assert persistent.steps % memory.steps == 0
    assert interval_of(gather(replace(seen, status=kept.status))) == persistent.steps
    assert persistent.drain_seconds == 20.0


def test_what_is_persistent_was_saved_to_memory_also_while_nothing_is_measured() -> None:
    seen = timed(running(checkpoint=AUTO), steps=1.0, stalls=0.02, drains=0.5)
    old = Interval(8, 3, "as it was", BEGAN, 0, BEGAN)
    kept = maintain(replace(seen, status=replace(seen.status, persistent_interval=old)))
    assert kept.status.memory_interval is not None
    assert kept.status.persistent_interval is not None
    assert kept.status.persistent_interval.steps == kept.status.memory_interval.steps


def test_seconds_of_the_persistent_tier_count_in_steps_that_memory_has() -> None:
    policy = CheckpointPolicy(
        MemoryTierSpec(interval_steps=10), PersistentTierSpec("file:///there", interval_seconds=30.0)
    )
    kept = maintain(timed(running(checkpoint=policy), steps=0.1))
    assert kept.status.memory_interval is None
    assert kept.status.persistent_interval is not None
    assert kept.status.persistent_interval.steps == 160


def test_a_choice_of_another_spec_counts_no_more() -> None:
    seen = timed(running(checkpoint=SECONDS), steps=0.1)
    stale = replace(seen.status, memory_interval=Interval(40, 2, "of ten", NOW, 42, NOW))
    kept = maintain(replace(seen, status=stale))
    assert kept.status.memory_interval is not None
    assert kept.status.memory_interval.steps == 16


def test_short_intervals_are_late_after_seconds_not_after_steps() -> None:
    each = CheckpointPolicy(MemoryTierSpec(interval_steps=1))
    soon = running(step=75, checkpoint=each)
    assert protection(gather(soon))[1] == "Protected"
    assert protection(gather(running(step=95, checkpoint=each)))[1] == "Stalled"
    # a training that stands lets no save arrive later than one that goes on
    stands = replace(soon, sessions=tuple(replace(s, step_at_seconds=NOW - 3) for s in soon.sessions))
    assert protection(gather(stands))[1] == "Stalled"


def test_nothing_is_late_by_an_interval_that_did_not_count_yet() -> None:
    seen = running(step=120, checkpoint=SECONDS)
    before = replace(seen.status, memory_interval=Interval(8, 3, "shorter now", NOW, 100, NOW))
    assert protection(gather(replace(seen, status=before)))[1] == "Protected"
    past = replace(seen.status, memory_interval=Interval(8, 3, "shorter long since", NOW, 41, NOW))
    assert protection(gather(replace(seen, status=past)))[1] == "Stalled"


# ---- what agents hear ----------------------------------------------------------------------------------------------


def test_members_hear_the_level_also_when_it_comes_down_to_nought() -> None:
    assert not any(isinstance(w, SaveLevel) for w in words(talking(), A))
    for level in (3, 0):
        status = replace(STATUS, memory_interval=Interval(1 << level, level, "", NOW, 1, NOW))
        assert SaveLevel(2, level) in words(talking(status=status), A, status)
