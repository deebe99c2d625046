"""Decides whether a failed job restarts, and after what delay.

Pure; called by `plan`. A node's failure counts for neither `backoffLimit` nor `maxNoProgressRestarts`, an announced end
for nothing. What repeats without one new step counts for the latter whatever its message: a data server that is down,
and a collective that one rank calls once too often, look just like a peer that died. `maxRestarts` counts every
restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.protocol.timeouts import Backoff
from surefoot_operator.api.spec import FailureRule
from surefoot_operator.api.status import JobStatus, Restart
from surefoot_operator.policy.core.facts import (
    JobFacts,
)
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.incidents import open_incident

MAX_REMEMBERED = 32
"""Entries kept in status; beyond that neighbours in time become one entry with their number."""

PAUSES = Backoff(1.0, 60.0)
"""Before the second restart in a row without a new step, and further ones. The first comes at once."""

PAUSED_KINDS = ("trainer-failed", "hang", "startup", "checkpoint-lost")
"""Incidents that a program may cause: the answer to a lost node or worker never waits."""


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The restart to record, or the refusal that fails the job.

    `restart` None: no budget counts it. `refusal` takes effect at `witness_seconds`: until then a lost node may explain
    it.
    """

    restart: Restart | None
    row: int
    """Restarts in a row without a new step, with this one."""
    counted: bool = False
    rejection: str | None = None
    corroboration_seconds: float | None = None


def decide_restart(facts: JobFacts, loss: Failure, last_step: int) -> RestartDecision:
    """Weighs a failure: the first rule that matches, then every budget."""
    rule = _matching(facts.spec.failure_policy.rules, loss)
    ignored = rule is not None and rule.action == "RestartAndIgnoreMaxRestarts"
    counted = loss.caused_by_program and not ignored
    progressed = _progressed(facts, last_step)
    own = loss.caused_by_program or loss.unexplained
    row = 0 if progressed else facts.status.no_progress_restarts + int(own)
    restart = None if ignored or loss.expected else Restart(facts.now, loss.caused_by_program, counted, progressed)
    found = RestartDecision(restart, row, counted)
    if rule is not None and rule.action == "FailJob":
        return replace(found, rejection=f"{loss.reason}; failure rule {rule.name!r} says that this fails the job")
    if ignored or loss.expected:
        return found
    used = _used_up(facts, counted)
    if used is not None:
        return replace(found, rejection=f"{loss.reason}; {used}")
    most = facts.spec.failure_policy.max_no_progress_restarts
    if not own or row <= most:
        return found
    refusal = f"{loss.reason}; {row - 1} restarts in a row without one new step used up maxNoProgressRestarts ({most})"
    patience = facts.spec.health_policy.heartbeat_timeout_seconds + 1.0
    return replace(
        found, rejection=refusal, corroboration_seconds=loss.first_sign_seconds + patience if loss.unexplained else None
    )


def is_within_budget(facts: JobFacts) -> bool:
    """Whether `maxRestarts` bears one more change, and a failure after it."""
    most = facts.spec.failure_policy.max_restarts
    return most is None or _recent(facts) + 1 < most


def planned_restart_counted(facts: JobFacts) -> tuple[Restart, ...]:
    """Recent restarts with one that nobody's failure asked for."""
    return append_restart(facts.status.recent_restarts, Restart(facts.now, False, False, True))


def record_restart(status: JobStatus, allowed: RestartDecision, last_step: int) -> JobStatus:
    """Adds one restart to the status."""
    recent = (
        status.recent_restarts if allowed.restart is None else append_restart(status.recent_restarts, allowed.restart)
    )
    return replace(
        status,
        restarts=status.restarts + 1,
        restarts_counted=status.restarts_counted + int(allowed.counted),
        recent_restarts=recent,
        no_progress_restarts=allowed.row,
        reached_step=max(status.reached_step, last_step),
    )


def pause_until(facts: JobFacts) -> float | None:
    """Returns when a claimed epoch may begin; None: at once."""
    incident, row = open_incident(facts.status.incidents), facts.status.no_progress_restarts
    if incident is None or incident.kind not in PAUSED_KINDS or row == 0:
        return None
    due = facts.membership.changed_seconds + PAUSES.seconds(row)
    return due if facts.now < due else None


def append_restart(restarts: tuple[Restart, ...], restart: Restart) -> tuple[Restart, ...]:
    """Appends a restart; beyond the limit the two nearest are merged."""
    kept = [*restarts, restart]
    while len(kept) > MAX_REMEMBERED:
        place = min(range(len(kept) - 1), key=lambda i: kept[i + 1].time_seconds - kept[i].time_seconds)
        older, newer = kept[place], kept[place + 1]
        kept[place : place + 2] = [replace(newer, time_seconds=older.time_seconds, count=older.count + newer.count)]
    return tuple(kept)


def _matching(rules: tuple[FailureRule, ...], loss: Failure) -> FailureRule | None:
    """Rules speak of exit codes: a failure without one (a hang, a lost node) matches none."""
    if not loss.caused_by_program or loss.exit_code is None:
        return None
    for rule in rules:
        listed = loss.exit_code in rule.on_exit_codes.values
        if listed == (rule.on_exit_codes.operator == "In"):
            return rule
    return None


def _progressed(facts: JobFacts, last_step: int) -> bool:
    """Whether the epoch that ended got beyond its own beginning and beyond every earlier failure."""
    reached = max((i.last_step for i in facts.status.incidents), default=0)
    return last_step > max(reached, facts.status.reached_step, facts.membership.start_step)


def _used_up(facts: JobFacts, counted: bool) -> str | None:
    policy, limit = facts.spec.failure_policy, facts.spec.run_policy.backoff_limit
    if counted and facts.status.restarts_counted >= limit:
        return f"{facts.status.restarts_counted} restarts used up backoffLimit ({limit})"
    recent = _recent(facts)
    if policy.max_restarts is not None and recent >= policy.max_restarts:
        window = f"{policy.eval_period_seconds:g} s"
        return f"{recent} restarts within {window} used up maxRestarts ({policy.max_restarts})"
    return None


def _recent(facts: JobFacts) -> int:
    since = facts.now - facts.spec.failure_policy.eval_period_seconds
    return sum(r.count for r in facts.status.recent_restarts if r.time_seconds >= since)
