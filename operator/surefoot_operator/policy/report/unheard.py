"""Reports members of a running world whose agents never came to this leader.

Pure. A new leader knows only what is stored: an agent that cannot reach it (DNS, a NetworkPolicy, other keys of an operator
that was installed anew) trains on, or stands, and no failure of its trainers is answered.
"""

from __future__ import annotations

from typing import Literal

from surefoot_operator.api.status import Condition
from surefoot_operator.policy.core.facts import Facts, derived_once

UNHEARD_SECONDS = 20.0
"""Agents come to a new leader within a few seconds; who has not in so many is reported."""
_MOST_NAMED = 8


@derived_once
def unheard_members(facts: Facts) -> tuple[int, ...]:
    """Returns members whose pod runs and whose agent was not heard of in this term, by index."""
    world = facts.status.world
    over = facts.seen.job.deleted or facts.status.phase in ("Complete", "Failed")
    if over or world is None or world.state != "Committed":
        return ()
    missing = (worker for worker in facts.members if worker not in facts.sessions)
    there = ((worker, facts.workers.get(worker)) for worker in missing)
    return tuple(sorted(w.index for w, pod in there if pod is not None and pod.phase == "Running" and not pod.deleting))


def unheard_message(facts: Facts) -> str:
    """Says who was not heard of, instead of what is not known."""
    return f"{_who(facts)}; the last known step is {facts.status.step}"


def _who(facts: Facts) -> str:
    missing = unheard_members(facts)
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    numbers = f"{', '.join(map(str, missing[:_MOST_NAMED]))}{more}"
    subject = f"worker {numbers} has" if len(missing) == 1 else f"workers {numbers} have"
    return f"{subject} not connected to this operator since it began to lead"


def unheard_due(facts: Facts) -> float | None:
    """When it is time to report them; None: nobody is missing."""
    return _since(facts) + UNHEARD_SECONDS if unheard_members(facts) else None


def agents_heard(facts: Facts, known: Condition | None) -> tuple[Literal["True", "False", "Unknown"], str, str] | None:
    """Returns (truth, reason, message) of the condition; None: all were always heard."""
    due = unheard_due(facts)
    if due is not None and facts.now >= due:
        text = (
            f"{_who(facts)}. They may still train, but the operator cannot react to their failures: check DNS and the"
            " network between them and the operator (surefoot doctor --network). If the operator was reinstalled with"
            " other keys, they cannot reconnect: delete their pods"
        )
        return "False", "NotHeard", text
    if known is None:
        return None
    if due is not None:  # a new leader waits a moment before it says the same
        return known.status, known.reason, known.message
    return "True", "Heard", "every worker of the world has connected"


def _since(facts: Facts) -> float:
    return max(facts.seen.term_seconds, facts.world.changed_seconds)
