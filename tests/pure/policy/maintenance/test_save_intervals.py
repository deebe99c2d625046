"""Tests of `policy.maintenance.save_intervals`."""

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
from surefoot.protocol.messages import IntervalExponent
from surefoot.save_schedule import MAX_EXPONENT as TRAINERS_HIGHEST
from surefoot.save_schedule import SaveSchedule
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import MIN_STEPS, Incident, JobStatus, SaveInterval
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.failure_rate import Risk, estimate_risk
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan, plan_maintenance
from surefoot_operator.policy.maintenance.save_intervals import (
    EXPONENT_HYSTERESIS,
    MAX_EXPONENT,
    MIN_INTERVAL_LIFETIME_SECONDS,
    REFRESH_SECONDS,
    IntervalDecision,
    IntervalInputs,
    IntervalRequest,
    cheapest_interval_seconds,
    choose_exponent,
    format_seconds,
)
from surefoot_operator.policy.maintenance.upload_plan import upload_interval_steps
from surefoot_operator.policy.report.status_conditions import evaluate_checkpoint_protected

# ---- intervals -------------------------------------------------------------------------------------------------------
# Which interval each tier has: risk from a job's own record, choices kept in status, changes told, levels said.

NOW = BEGAN + 100
DAY = 86400.0
SECONDS = CheckpointPolicy(MemoryTierSpec(interval_seconds=2.0))
AUTO = CheckpointPolicy(MemoryTierSpec(interval="auto"), PersistentTierSpec("file:///there", interval="auto"))


def timed(seen: JobSnapshot, **figures: float) -> JobSnapshot:
    """Every member's steps, stalls or drains take so long."""
    given = {name: (seconds,) * MIN_STEPS for name, seconds in figures.items()}
    return replace(seen, sessions=tuple(replace(s, timings=replace(s.timings, **given)) for s in seen.sessions))


def later(seen: JobSnapshot, kept: MaintenancePlan, seconds: float) -> JobSnapshot:
    """The same, `seconds` on, with that status; every agent was just heard."""
    now = seen.now_seconds + seconds
    sessions = tuple(replace(s, last_message_seconds=now) for s in seen.sessions)
    return replace(seen, now_seconds=now, sessions=sessions, status=kept.status)


def incident(at: float, kind: str = "node-lost", source: str | None = "memory") -> Incident:
    return Incident(kind, "gone", 1, "n1", 1, at, last_step=40, restored_step=40, restored_from=source)


# ---- risk ----------------------------------------------------------------------------------------------------------


def test_a_young_job_has_the_prior() -> None:
    risk = estimate_risk(JobStatus(start_seconds=NOW), workers=8, replicas=2, now=NOW)
    assert risk.incidents_per_second == pytest.approx(8 / (100 * DAY))
    assert risk.memory_loss_probability == pytest.approx(0.05)


def test_a_few_incidents_of_its_own_soon_decide() -> None:
    status = JobStatus(start_seconds=NOW - DAY, incidents=(incident(NOW - 5000), incident(NOW - 500)))
    assert 0.9 < estimate_risk(status, 8, 2, NOW).incidents_per_second * DAY < 2


def test_planned_changes_are_no_incidents_and_ten_are_all_that_is_known() -> None:
    planned = JobStatus(start_seconds=NOW - DAY, incidents=(incident(NOW - 500, "planned"),) * 3)
    assert estimate_risk(planned, 8, 2, NOW) == estimate_risk(JobStatus(start_seconds=NOW - DAY), 8, 2, NOW)
    ten = JobStatus(start_seconds=NOW - 100 * DAY, incidents=tuple(incident(NOW - DAY + n) for n in range(10)))
    assert estimate_risk(ten, 8, 2, NOW).incidents_per_second * DAY > 2


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
        errors.append(abs(math.log(estimate_risk(status, 8, 2, now).incidents_per_second * mean)))
    assert statistics.median(errors) < math.log(1.5)
    assert statistics.quantiles(errors, n=10)[-1] < math.log(2.5)


def test_incidents_that_took_the_copies_in_memory_raise_the_odds_that_the_next_does() -> None:
    def odds(*sources: str | None) -> float:
        incidents = tuple(incident(NOW - 100, source=source) for source in sources)
        return estimate_risk(JobStatus(start_seconds=BEGAN, incidents=incidents), 8, 2, NOW).memory_loss_probability

    assert odds("memory", "memory") < odds() < odds("memory", "persistent") < odds("mixed", "persistent")


@given(st.integers(1, 100), st.integers(1, 4), st.integers(0, 10), st.integers(0, 10), st.floats(0, 1e7))
def test_risk_grows_with_incidents_and_workers(workers: int, replicas: int, count: int, lost: int, age: float) -> None:
    def risk(count: int, workers: int = workers) -> Risk:
        sources = ["persistent" if n < lost else "memory" for n in range(count)]
        incidents = tuple(incident(NOW - age, source=s) for s in sources)
        return estimate_risk(JobStatus(start_seconds=NOW - age, incidents=incidents), workers, replicas, NOW)

    now = risk(count)
    assert 0 < now.memory_loss_probability < 1
    assert now.persistent_recovery_interval_seconds > 0 < now.memory_recovery_interval_seconds
    assert now.incidents_per_second <= risk(min(10, count + 1)).incidents_per_second
    assert now.incidents_per_second <= risk(count, workers + 1).incidents_per_second


# ---- what is chosen, kept and told ---------------------------------------------------------------------------------


def test_a_job_that_says_steps_has_no_choice() -> None:
    kept = plan_maintenance(timed(running(), steps=0.1))
    assert (kept.status.memory_interval, kept.status.persistent_interval) == (None, None)


def test_seconds_become_steps_once_steps_were_timed() -> None:
    assert plan_maintenance(running(checkpoint=SECONDS)).status.memory_interval is None
    kept = plan_maintenance(timed(running(checkpoint=SECONDS), steps=0.1))
    found = kept.status.memory_interval
    assert found is not None
    assert (found.steps, found.exponent, found.since_step, found.since_seconds) == (16, 4, 42, NOW)
    assert (found.target_seconds, found.step_seconds) == (2.0, 0.1)
    told = [e.message for e in kept.events if e.reason == "SaveIntervalChanged"]
    assert told == ["the memory tier is saved to every 16 steps (1.6 s): at most every 2 s was requested"]


def test_the_slowest_member_decides() -> None:
    seen = timed(running(checkpoint=SECONDS), steps=0.1)
    slow = replace(seen, sessions=(*timed(seen, steps=0.4).sessions[:1], *seen.sessions[1:]))
    found = plan_maintenance(slow).status.memory_interval
    assert found is not None
    assert found.steps == 4


def test_a_choice_stands_for_a_while_and_is_told_when_it_changes() -> None:
    seen = timed(running(checkpoint=SECONDS), steps=0.1)
    first = plan_maintenance(seen)
    slower = timed(seen, steps=0.8)
    again = plan_maintenance(later(slower, first, MIN_INTERVAL_LIFETIME_SECONDS / 2))
    assert again.status == first.status
    assert again.events == ()
    changed = plan_maintenance(later(slower, first, MIN_INTERVAL_LIFETIME_SECONDS))
    assert changed.status.memory_interval is not None
    assert changed.status.memory_interval.steps == 2
    assert "every 2 steps (1.6 s) instead of 16:" in changed.events[0].message


def test_a_drain_that_became_slow_is_followed_at_once() -> None:
    seen = timed(running(checkpoint=SECONDS), steps=0.1)
    kept = plan_maintenance(later(timed(seen, flushes=5.0), plan_maintenance(seen), 1.0))
    assert kept.status.memory_interval is not None
    assert kept.status.memory_interval.steps == 64
    assert "a save takes 5 s to be flushed" in kept.status.memory_interval.reason


def test_inputs_are_written_anew_when_they_moved_and_not_with_every_round() -> None:
    seen = timed(running(checkpoint=AUTO), steps=1.0, stalls=0.02, flushes=0.5)
    first = plan_maintenance(seen)
    moved = timed(seen, flushes=0.7)
    assert plan_maintenance(later(moved, first, REFRESH_SECONDS / 2)).status == first.status
    again = plan_maintenance(later(moved, first, REFRESH_SECONDS))
    before, after = first.status.memory_interval, again.status.memory_interval
    assert before is not None
    assert after is not None
    assert (after.flush_seconds, after.measured_seconds) == (0.7, NOW + REFRESH_SECONDS)
    assert (after.steps, after.since_seconds) == (before.steps, before.since_seconds)
    assert again.events == ()


def test_auto_weighs_what_a_save_costs_against_what_a_failure_costs() -> None:
    seen = timed(running(checkpoint=AUTO), steps=1.0, stalls=0.02, flushes=0.5)
    calm = plan_maintenance(seen).status.memory_interval
    often = replace(seen.status, incidents=tuple(incident(NOW - 90 + n) for n in range(4)))
    rough = plan_maintenance(replace(seen, status=often)).status.memory_interval
    assert calm is not None
    assert rough is not None
    assert calm.steps == 512
    assert rough.steps < calm.steps
    assert calm.cost_seconds == pytest.approx(0.02 + 0.05 * 0.5)
    assert calm.memory_loss_probability == pytest.approx(0.05)


def test_the_persistent_tier_waits_for_its_first_upload_then_is_rarer_than_memory() -> None:
    seen = timed(running(checkpoint=AUTO), steps=1.0, stalls=0.02, flushes=0.5)
    first = plan_maintenance(seen)
    assert first.status.persistent_interval is None
    assert first.pinned == Checkpoint(1, 40)
    kept = plan_maintenance(replace(later(seen, first, 1.0), upload_seconds=20.0))
    memory, persistent = kept.status.memory_interval, kept.status.persistent_interval
    assert memory is not None
    assert persistent is not None
    assert persistent.steps > memory.steps
    assert persistent.steps % memory.steps == 0
    assert upload_interval_steps(build_facts(replace(seen, status=kept.status))) == persistent.steps
    assert persistent.flush_seconds == 20.0


def test_what_is_persistent_was_saved_to_memory_also_while_nothing_is_measured() -> None:
    seen = timed(running(checkpoint=AUTO), steps=1.0, stalls=0.02, flushes=0.5)
    old = SaveInterval(8, 3, "as it was", BEGAN, 0, BEGAN)
    kept = plan_maintenance(replace(seen, status=replace(seen.status, persistent_interval=old)))
    assert kept.status.memory_interval is not None
    assert kept.status.persistent_interval is not None
    assert kept.status.persistent_interval.steps == kept.status.memory_interval.steps


def test_seconds_of_the_persistent_tier_count_in_steps_that_memory_has() -> None:
    policy = CheckpointPolicy(
        MemoryTierSpec(interval_steps=10), PersistentTierSpec("file:///there", interval_seconds=30.0)
    )
    kept = plan_maintenance(timed(running(checkpoint=policy), steps=0.1))
    assert kept.status.memory_interval is None
    assert kept.status.persistent_interval is not None
    assert kept.status.persistent_interval.steps == 160


def test_a_choice_of_another_spec_counts_no_more() -> None:
    seen = timed(running(checkpoint=SECONDS), steps=0.1)
    stale = replace(seen.status, memory_interval=SaveInterval(40, 2, "of ten", NOW, 42, NOW))
    kept = plan_maintenance(replace(seen, status=stale))
    assert kept.status.memory_interval is not None
    assert kept.status.memory_interval.steps == 16


def test_short_intervals_are_late_after_seconds_not_after_steps() -> None:
    each = CheckpointPolicy(MemoryTierSpec(interval_steps=1))
    soon = running(step=75, checkpoint=each)
    assert evaluate_checkpoint_protected(build_facts(soon))[1] == "SufficientCopies"
    assert evaluate_checkpoint_protected(build_facts(running(step=95, checkpoint=each)))[1] == "Overdue"
    # a training that stands lets no save arrive later than one that goes on
    stands = replace(soon, sessions=tuple(replace(s, step_at_seconds=NOW - 3) for s in soon.sessions))
    assert evaluate_checkpoint_protected(build_facts(stands))[1] == "Overdue"


def test_nothing_is_late_by_an_interval_that_did_not_count_yet() -> None:
    seen = running(step=120, checkpoint=SECONDS)
    before = replace(seen.status, memory_interval=SaveInterval(8, 3, "shorter now", NOW, 100, NOW))
    assert evaluate_checkpoint_protected(build_facts(replace(seen, status=before)))[1] == "SufficientCopies"
    past = replace(seen.status, memory_interval=SaveInterval(8, 3, "shorter long since", NOW, 41, NOW))
    assert evaluate_checkpoint_protected(build_facts(replace(seen, status=past)))[1] == "Overdue"


# ---- what agents hear ----------------------------------------------------------------------------------------------


def test_members_hear_the_level_also_when_it_comes_down_to_nought() -> None:
    assert not any(isinstance(w, IntervalExponent) for w in words(talking(), A))
    for level in (3, 0):
        status = replace(STATUS, memory_interval=SaveInterval(1 << level, level, "", NOW, 1, NOW))
        assert IntervalExponent(2, level) in words(talking(status=status), A, status)


# ---- cadence ---------------------------------------------------------------------------------------------------------
# How often to save: what was asked for or costs least, never faster than saves arrive, and steady.

some = st.floats(1e-3, 1e4)
levels = st.none() | st.integers(0, MAX_EXPONENT)
wishes = st.builds(IntervalRequest, st.integers(1, 20), st.none() | some, st.integers(0, 6))
measured = st.builds(IntervalInputs, st.floats(1e-3, 100.0), some, st.none() | some, st.floats(10.0, 1e8))


def chosen(wish: IntervalRequest, inputs: IntervalInputs, present: int | None = None) -> IntervalDecision:
    found = choose_exponent(wish, inputs, present)
    assert found is not None
    return found


def length(wish: IntervalRequest, inputs: IntervalInputs, level: int) -> float:
    return (wish.base_steps << level) * (inputs.step_seconds or 0.0)


@pytest.mark.parametrize(
    ("wish", "inputs", "steps", "why"),
    [
        (IntervalRequest(1, 10.0), IntervalInputs(0.1, 0.01, 0.2, DAY), 64, "at most every 10 s was requested"),
        (IntervalRequest(1, 10.0), IntervalInputs(0.1, None, None, DAY), 64, "at most every 10 s was requested"),
        (IntervalRequest(10, 10.0), IntervalInputs(0.1, 0.01, 0.2, DAY), 80, "at most every 10 s was requested"),
        (IntervalRequest(1, 10.0), IntervalInputs(30.0, 0.01, 0.2, DAY), 1, "at most every 10 s was requested"),
        (IntervalRequest(1, 1.0), IntervalInputs(0.1, 0.01, 3.0, DAY), 64, "at most every 1 s was requested, but a save takes 3 s to be flushed"),
        (IntervalRequest(1, 1.0, min_exponent=5), IntervalInputs(0.1, 0.01, 0.2, DAY), 32, "but saves to the memory tier are not made more often"),
        # sqrt(2 * 0.02 s * 10 days) = 186 s
        (IntervalRequest(1), IntervalInputs(1.0, 0.02, 0.5, 10 * DAY), 256, "every 3.1 min costs least, if a save costs 0.02 s"),
        (IntervalRequest(1), IntervalInputs(1.0, 0.0, 0.5, 10 * DAY), 1, "every 0 s costs least"),
        (IntervalRequest(1), IntervalInputs(1.0, 0.0, 7.0, 10 * DAY), 16, "but a save takes 7 s to be flushed, and the next must wait for it"),
    ],
)  # fmt: skip
def test_what_is_chosen_and_why(wish: IntervalRequest, inputs: IntervalInputs, steps: int, why: str) -> None:
    found = chosen(wish, inputs)
    assert wish.base_steps << found.exponent == steps
    assert why in found.reason


@pytest.mark.parametrize(
    ("wish", "inputs"),
    [
        (IntervalRequest(1, 10.0), IntervalInputs(None, 0.01, 0.2, DAY)),
        (IntervalRequest(1), IntervalInputs(0.1, None, None, DAY)),
    ],
)
def test_nothing_is_chosen_before_it_is_measured(wish: IntervalRequest, inputs: IntervalInputs) -> None:
    assert choose_exponent(wish, inputs, None) is None


@given(st.floats(1e-3, 10.0), st.floats(10.0, 1e8))
def test_the_best_interval_costs_less_than_any_other(cost: float, incident: float) -> None:
    def lost_share(interval: float) -> float:
        return cost / interval + interval / (2 * incident)

    best = cheapest_interval_seconds(cost, incident)
    assert lost_share(best) <= min(lost_share(best * 1.1), lost_share(best / 1.1))
    # what rounding to a power of two may cost
    assert lost_share(best * math.sqrt(2)) <= 1.07 * lost_share(best)


@given(wishes, measured, some, levels)
def test_dearer_saves_are_made_no_oftener(
    wish: IntervalRequest, inputs: IntervalInputs, more: float, present: int | None
) -> None:
    dearer = replace(inputs, cost_seconds=(inputs.cost_seconds or 0.0) + more)
    assert chosen(wish, dearer, present).exponent >= chosen(wish, inputs, present).exponent


@given(wishes, measured, st.floats(1.0, 1000.0), levels)
def test_more_incidents_are_saved_against_no_less_often(
    wish: IntervalRequest, inputs: IntervalInputs, times: float, present: int | None
) -> None:
    oftener = replace(inputs, incident_seconds=inputs.incident_seconds / times)
    assert chosen(wish, oftener, present).exponent <= chosen(wish, inputs, present).exponent


@given(wishes, measured, levels)
def test_the_next_save_is_never_due_before_the_last_has_arrived(
    wish: IntervalRequest, inputs: IntervalInputs, present: int | None
) -> None:
    level = chosen(wish, inputs, present).exponent
    assert level == MAX_EXPONENT or length(wish, inputs, level) >= (inputs.flush_seconds or 0.0)


@given(wishes, measured, levels)
def test_seconds_are_a_promise_that_only_drains_and_the_tier_below_break(
    wish: IntervalRequest, inputs: IntervalInputs, present: int | None
) -> None:
    level = chosen(wish, replace(inputs, flush_seconds=None), present).exponent
    if wish.seconds is not None and level > wish.min_exponent:
        assert length(wish, inputs, level) <= wish.seconds * (1 + 1e-9)


@given(wishes, measured, st.floats(-0.95 * EXPONENT_HYSTERESIS, 0.95 * EXPONENT_HYSTERESIS))
def test_a_choice_stays_while_what_is_measured_wavers(
    wish: IntervalRequest, inputs: IntervalInputs, wavering: float
) -> None:
    first = chosen(wish, inputs).exponent
    again = replace(inputs, step_seconds=(inputs.step_seconds or 0.0) * 2**wavering)
    assert chosen(wish, again, first).exponent == first


@given(wishes, measured, levels)
def test_a_choice_is_made_once(wish: IntervalRequest, inputs: IntervalInputs, present: int | None) -> None:
    level = chosen(wish, inputs, present).exponent
    assert chosen(wish, inputs, level).exponent == level


@given(wishes, measured, levels)
def test_a_tier_is_saved_to_at_steps_that_the_one_below_has(
    wish: IntervalRequest, inputs: IntervalInputs, present: int | None
) -> None:
    level = chosen(wish, inputs, present).exponent
    below = SaveSchedule(wish.base_steps)
    assert level >= wish.min_exponent
    for step in range(1, 4):
        assert below.is_due(step * (wish.base_steps << level), wish.min_exponent)


def test_trainers_know_every_level_that_may_be_chosen() -> None:
    assert TRAINERS_HIGHEST == MAX_EXPONENT
    assert SaveSchedule(1).is_due(1 << MAX_EXPONENT, MAX_EXPONENT)
    assert not SaveSchedule(1).is_due(1 << (MAX_EXPONENT - 1), MAX_EXPONENT)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0123, "0.012 s"), (6.4, "6.4 s"), (119.0, "120 s"), (186.0, "3.1 min"), (7300.0, "2 h"), (8.64e6, "100 days")],
)
def test_times_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words
