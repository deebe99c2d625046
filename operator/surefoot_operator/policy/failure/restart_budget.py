"""Decides whether a failed job restarts, and after what delay.

Pure; called by `plan`. A node's failure counts for neither `backoffLimit` nor `maxNoProgressRestarts`, an announced end of a
worker for no budget. A failure that repeats without one new step counts for `maxNoProgressRestarts` whatever its message:
a data server that is down, or a collective that one rank calls once too often, causes the same messages as a peer that died.
`maxRestarts` counts every restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.protocol.text import count_of
from surefoot.protocol.timeouts import Backoff
from surefoot_operator.api.spec import FailureRule
from surefoot_operator.api.status import JobStatus, Restart
from surefoot_operator.policy.core.facts import (
    JobFacts,
)
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.incidents import open_incident

MAX_RECENT_RESTARTS = 32
"""Restarts kept in the status. Beyond that, the two nearest in time are merged into one entry with a count."""

RESTART_BACKOFF = Backoff(1.0, 60.0)
"""Delays before restarts in a row without a new step, from the second on. The first restart is immediate."""

DELAYED_INCIDENT_KINDS = ("trainer-failed", "hang", "startup", "checkpoint-lost")
"""Kinds of incidents that a program may cause. Recovery from a lost node or worker is never delayed."""


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The restart to record, or the rejection that fails the job."""

    restart: Restart | None
    """Entry for the recent restarts; None if no budget counts it."""
    restarts_without_progress: int
    """Restarts in a row without a new step, this one included."""
    is_counted: bool = False
    """Whether the restart counts for `backoffLimit`."""
    rejection: str | None = None
    """Why the job fails; None: it restarts."""
    corroboration_seconds: float | None = None
    """Unix time at which `rejection` takes effect: until then a lost node may still explain the failure. None: at once."""


def decide_restart(facts: JobFacts, failure: Failure, last_step: int) -> RestartDecision:
    """Decides whether the job restarts after this failure: the first failure rule that matches, then every budget."""
    # A failure rule comes first: it can fail the job at once, or exempt the restart from the budgets.
    rule = _find_matching_rule(facts.spec.failure_policy.rules, failure)
    is_ignored = rule is not None and rule.action == "RestartAndIgnoreMaxRestarts"
    is_counted = failure.caused_by_program and not is_ignored
    # Steps beyond every earlier failure reset the count of restarts without progress.
    has_progressed = _has_new_steps(facts, last_step)
    may_be_programs_fault = failure.caused_by_program or failure.unexplained
    restarts_without_progress = 0 if has_progressed else facts.status.no_progress_restarts + int(may_be_programs_fault)
    restart = None if is_ignored or failure.expected else Restart(facts.now)
    decision = RestartDecision(restart, restarts_without_progress, is_counted)
    if rule is not None and rule.action == "FailJob":
        return replace(
            decision, rejection=f"{failure.reason}; failure rule {rule.name!r} fails the job on this exit code"
        )
    if is_ignored or failure.expected:
        return decision
    exhausted_budget = _describe_exhausted_budget(facts, is_counted)
    if exhausted_budget is not None:
        return replace(decision, rejection=f"{failure.reason}; {exhausted_budget}")
    max_restarts = facts.spec.failure_policy.max_no_progress_restarts
    if not may_be_programs_fault or restarts_without_progress <= max_restarts:
        return decision
    rejection = (
        f"{failure.reason}; {count_of(restarts_without_progress - 1, 'restart')} in a row without one new step used up"
        f" maxNoProgressRestarts ({max_restarts})"
    )
    corroboration_timeout_seconds = facts.spec.health_policy.heartbeat_timeout_seconds + 1.0
    return replace(
        decision,
        rejection=rejection,
        corroboration_seconds=failure.first_sign_seconds + corroboration_timeout_seconds
        if failure.unexplained
        else None,
    )


def is_within_budget(facts: JobFacts) -> bool:
    """Whether `maxRestarts` allows one planned change and one failure after it."""
    max_restarts = facts.spec.failure_policy.max_restarts
    return max_restarts is None or _count_recent_restarts(facts) + 1 < max_restarts


def add_planned_restart(facts: JobFacts) -> tuple[Restart, ...]:
    """Returns the recent restarts with one more for a planned change."""
    return append_restart(facts.status.recent_restarts, Restart(facts.now))


def record_restart(status: JobStatus, decision: RestartDecision, last_step: int) -> JobStatus:
    """Returns the status with the decided restart counted."""
    recent_restarts = (
        status.recent_restarts if decision.restart is None else append_restart(status.recent_restarts, decision.restart)
    )
    return replace(
        status,
        restarts=status.restarts + 1,
        restarts_counted=status.restarts_counted + int(decision.is_counted),
        recent_restarts=recent_restarts,
        no_progress_restarts=decision.restarts_without_progress,
        reached_step=max(status.reached_step, last_step),
    )


def restart_delay_end(facts: JobFacts) -> float | None:
    """Returns the Unix time at which the claimed generation may start; None: at once."""
    incident, restarts_without_progress = open_incident(facts.status.incidents), facts.status.no_progress_restarts
    if incident is None or incident.kind not in DELAYED_INCIDENT_KINDS or restarts_without_progress == 0:
        return None
    pause_end_seconds = facts.membership.changed_seconds + RESTART_BACKOFF.wait_seconds(restarts_without_progress)
    return pause_end_seconds if facts.now < pause_end_seconds else None


def append_restart(restarts: tuple[Restart, ...], restart: Restart) -> tuple[Restart, ...]:
    """Appends a restart; beyond the limit, the two nearest in time are merged."""
    restarts_kept = [*restarts, restart]
    while len(restarts_kept) > MAX_RECENT_RESTARTS:
        nearest_index = min(
            range(len(restarts_kept) - 1),
            key=lambda i: restarts_kept[i + 1].time_seconds - restarts_kept[i].time_seconds,
        )
        older, newer = restarts_kept[nearest_index], restarts_kept[nearest_index + 1]
        restarts_kept[nearest_index : nearest_index + 2] = [
            replace(newer, time_seconds=older.time_seconds, count=older.count + newer.count)
        ]
    return tuple(restarts_kept)


def _find_matching_rule(rules: tuple[FailureRule, ...], failure: Failure) -> FailureRule | None:
    """Returns the first rule that applies. A failure without an exit code (a hang, a lost node) has none."""
    if not failure.caused_by_program or failure.exit_code is None:
        return None
    for rule in rules:
        is_listed = failure.exit_code in rule.on_exit_codes.values
        if is_listed == (rule.on_exit_codes.operator == "In"):
            return rule
    return None


def _has_new_steps(facts: JobFacts, last_step: int) -> bool:
    """Whether the generation that ended made steps beyond its start and beyond every earlier failure."""
    highest_step_of_incidents = max((i.last_step for i in facts.status.incidents), default=0)
    return last_step > max(highest_step_of_incidents, facts.status.reached_step, facts.membership.start_step)


def _describe_exhausted_budget(facts: JobFacts, is_counted: bool) -> str | None:
    """Returns which restart budget is used up; None: none is."""
    policy, limit = facts.spec.failure_policy, facts.spec.run_policy.backoff_limit
    if is_counted and facts.status.restarts_counted >= limit:
        return f"{count_of(facts.status.restarts_counted, 'restart')} used up backoffLimit ({limit})"
    recent_count = _count_recent_restarts(facts)
    if policy.max_restarts is not None and recent_count >= policy.max_restarts:
        window = f"{policy.eval_period_seconds:g} s"
        return f"{count_of(recent_count, 'restart')} within {window} used up maxRestarts ({policy.max_restarts})"
    return None


def _count_recent_restarts(facts: JobFacts) -> int:
    """Counts the restarts within the window of `maxRestarts`."""
    window_start_seconds = facts.now - facts.spec.failure_policy.eval_period_seconds
    return sum(r.count for r in facts.status.recent_restarts if r.time_seconds >= window_start_seconds)
