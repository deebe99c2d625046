"""Whether a failure may be answered with another restart. Pure; only the application's own failures use budgets up."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot_operator.api.spec import FailureRule
from surefoot_operator.api.status import Restart
from surefoot_operator.policy.facts import Facts
from surefoot_operator.policy.losses import Loss

MOST_REMEMBERED = 32
"""Restarts kept in status."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """`restart`: what to record if the job goes on. `refusal`: why it fails instead."""

    restart: Restart
    refusal: str | None = None


def allowance(facts: Facts, loss: Loss, last_step: int) -> Allowance:
    """Weighs one failure: the first rule that matches, then every budget."""
    rule = _matching(facts.spec.failure_policy.rules, loss)
    counted = loss.application and (rule is None or rule.action != "RestartAndIgnoreMaxRestarts")
    restart = Restart(facts.now, loss.application, counted, _progressed(facts, last_step))
    if rule is not None and rule.action == "FailJob":
        return Allowance(restart, f"{loss.reason}; failure rule {rule.name!r} says that this fails the job")
    if not counted:
        return Allowance(restart)
    return Allowance(restart, _exhausted(facts, restart, loss))


def remember(restarts: tuple[Restart, ...], restart: Restart) -> tuple[Restart, ...]:
    return (*restarts, restart)[-MOST_REMEMBERED:]


def _matching(rules: tuple[FailureRule, ...], loss: Loss) -> FailureRule | None:
    """Rules speak of exit codes: a failure without one (a hang, a lost node) matches none."""
    if not loss.application or loss.exit_code is None:
        return None
    for rule in rules:
        listed = loss.exit_code in rule.exit_codes
        if not rule.exit_codes or listed == (rule.operator == "In"):
            return rule
    return None


def _progressed(facts: Facts, last_step: int) -> bool:
    """Whether the epoch that ended got beyond its own beginning and beyond every earlier failure."""
    parent = facts.world.parent.step if facts.world.parent else 0
    return last_step > max((i.last_step for i in facts.status.incidents), default=0) and last_step > parent


def _exhausted(facts: Facts, restart: Restart, loss: Loss) -> str | None:
    policy, limit = facts.spec.failure_policy, facts.spec.run_policy.backoff_limit
    if facts.status.restarts_counted >= limit:
        return f"{loss.reason}; {facts.status.restarts_counted} restarts used up backoffLimit ({limit})"
    recent = [
        r for r in facts.status.recent_restarts if r.counted and facts.now - r.at_seconds <= policy.eval_period_seconds
    ]
    if policy.max_restarts is not None and len(recent) >= policy.max_restarts:
        window = f"{policy.eval_period_seconds:g} s"
        return f"{loss.reason}; {len(recent)} restarts within {window} used up maxRestarts ({policy.max_restarts})"
    row = _row_without_progress(facts.status.recent_restarts)
    if not restart.progressed and row >= policy.max_no_progress_restarts:
        return (
            f"{loss.reason}; {row} restarts in a row without one new step used up "
            f"maxNoProgressRestarts ({policy.max_no_progress_restarts})"
        )
    return None


def _row_without_progress(restarts: tuple[Restart, ...]) -> int:
    """Application restarts at the end of the record whose epoch got no further; node faults in between do not count."""
    row = 0
    for restart in reversed(restarts):
        if restart.application and restart.counted:
            if restart.progressed:
                break
            row += 1
    return row
