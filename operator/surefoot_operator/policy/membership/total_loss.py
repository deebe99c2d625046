"""Reports that no checkpoint can be read, and how to continue.

Pure; called by `restore_point`. What looks lost may be a tier whose nodes are being rebooted, or a bucket whose key
expired: a job that failed for that could not use what came back an hour later. So a total loss waits, with everything
kept, until something comes back or a person gives it up.
"""

from __future__ import annotations

from datetime import UTC, datetime

from surefoot.protocol.checkpoints.completeness import LeftOut
from surefoot.protocol.plain import listed
from surefoot_operator.api.spec import ACCEPT_LOSS
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.policy.failure.memory_server_liveness import may_return
from surefoot_operator.policy.membership.initial_restore import origin_of
from surefoot_operator.policy.membership.rollback_record import ceiling

LIST_AGAIN_SECONDS = 60.0
"""How often the persistent tier is listed anew while everything else is lost."""

LATE_UPLOAD_SECONDS = 30.0
"""How long after a loss an object may still appear that a worker had begun to upload: one try's 15 s, and as much again."""

GONE_SECONDS = 45.0
"""How long after a failure what was stored last may lack in a listing before it counts as gone: a client of a network file system
shows a folder that changes as it was for half a minute."""

_LONGEST_SHOWN = 40


def accepted(facts: Facts) -> bool:
    """Whether a person accepted the loss of this very epoch.

    An annotation for an older loss accepts no later one.
    """
    said = facts.seen.job.accepted_loss
    return said == str(facts.world.epoch)


def acceptance(facts: Facts) -> str:
    """The annotation by which a person accepts the loss."""
    return f'annotate the job with {ACCEPT_LOSS}: "{facts.world.epoch}"'


def lost(facts: Facts, left_out: tuple[LeftOut, ...]) -> str:
    """Says what is lost, and where it was."""
    if left_out:
        return f"no checkpoint can be restored: {left_out[0]} ({len(left_out)} such records; put the files back from a copy)"
    status = facts.status
    last, most = status.last_complete or status.floor, ceiling(facts)
    if most:
        return (
            f"every copy of every checkpoint up to step {most}, to which a rollback goes back, is lost{_where(facts)};"
            " of what may be left behind it the loss was odd"
        )
    return f"every copy of every checkpoint is lost (the last known was {last}){_where(facts)}"


def waiting(facts: Facts, left_out: tuple[LeftOut, ...]) -> str:
    """The condition's message: what is lost, since when, the ways out."""
    since = datetime.fromtimestamp(facts.world.changed_seconds, UTC).isoformat(timespec="seconds")
    begin = origin_of(facts.status) or "step 0"
    sentences = [
        lost(facts, left_out),
        f"The job has waited since {since}, keeps what is in memory, and continues by itself when any of it comes back",
        f"To begin again at {begin} instead, {acceptance(facts)}",
        "To end the job, set spec.checkpoint.onTotalLoss to Fail, or delete it",
    ]
    said = facts.seen.job.accepted_loss
    if said and not accepted(facts):
        shown = said if len(said) <= _LONGEST_SHOWN else said[:_LONGEST_SHOWN] + "…"
        sentences.append(f"Its annotation {ACCEPT_LOSS} says {shown!r}, which is not this epoch, {facts.world.epoch}")
    return ". ".join(sentences)


def _where(facts: Facts) -> str:
    named = {e.holder.node for e in facts.status.named_holders}
    members = {m.node for m in facts.world.members}
    if not named:  # the fabric knows of each that it is gone
        return f"; its workers saved from {listed(sorted(members))}, and those holders are gone" if members else ""
    silent = sorted({e.holder.node for e in may_return(facts)})
    # a holder that was known to be gone a moment before the others is named no more, and had its workers' saves too
    text = f"; it was on the holders of {listed(sorted(named | members))}"
    return f"{text}, of which {listed(silent)} do not answer" if silent else f"{text}, and none has it any more"
