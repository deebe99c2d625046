"""Chooses the initial restore point: step 0 or an older job's checkpoint.

Pure; called by `restore_point` for the first epoch, and for a later one without any checkpoint on its lineage. An older
job's checkpoint is chosen once and kept in status; again only if it is unreadable.
"""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.protocol.checkpoints.completeness import TierReading, is_complete
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, OlderJob
from surefoot_operator.api.spec import CheckpointPolicy
from surefoot_operator.api.status import JobStatus
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.policy.membership.restore_decisions import Chosen, NothingToTakeUp, Waiting, listing

_MOST_NAMED = 8


def older_job(policy: CheckpointPolicy) -> OlderJob | None:
    """The job that `checkpoint.restoreFrom` names."""
    given = policy.restore_from
    if given is None:
        return None
    if given.uri is not None:
        uri, _, job = given.uri.rstrip("/").rpartition("/")
        return OlderJob(f"{uri}/" if uri.endswith("//") else uri, job)
    return OlderJob(policy.persistent.uri, given.uid) if policy.persistent is not None and given.uid else None


def origin_of(status: JobStatus) -> Checkpoint | None:
    """The older job's checkpoint that this job began from, if any."""
    return None if status.origin in status.bad else status.origin


def initial_restore_point(facts: Facts, silent: tuple[HolderEndpoint, ...]) -> Waiting | Chosen | NothingToTakeUp:
    """Chooses the parent of an epoch without a checkpoint of its own."""
    status = facts.status
    origin = origin_of(status)
    if origin is not None:
        return Chosen(origin, silent, older_job=status.older_job)
    # a job that has begun without one does not turn to an older job later
    older = status.older_job or (None if facts.running_epoch else older_job(facts.spec.checkpoint))
    if older is None:
        return Chosen(None, silent)
    seen = facts.seen.older
    if seen.older_job != older or seen.read_epoch != facts.world.epoch:
        return listing(facts, seen, older)
    given = facts.spec.checkpoint.restore_from
    step = given.step if given is not None else "latest"
    found = older_job_checkpoints(facts)
    # epochs are negated here: of one step, the least is the newest epoch's
    chosen = max((c for c in found if step in ("latest", c.step)), key=lambda c: (c.step, -c.epoch), default=None)
    if chosen is None:
        return NothingToTakeUp(_missing(facts, older, step, found))
    return Chosen(chosen, silent, older_job=older)


def older_job_checkpoints(facts: Facts) -> list[Checkpoint]:
    """The older job's checkpoints that its listing shows to be complete.

    Unreadable ones are left out. Its lineage is neither known nor needed: of two epochs that completed one step, the
    job went on from the newer.
    """
    reading = TierReading({}, facts.seen.older.entries)
    found = reading.manifests().items()
    return [c for c, ranks in found if c not in facts.status.bad and is_complete(ranks, facts.seen.covers)]


def _missing(facts: Facts, older: OlderJob, step: int | str, found: Iterable[Checkpoint]) -> str:
    steps = sorted({c.step for c in found}, reverse=True)
    named = ", ".join(map(str, steps[:_MOST_NAMED])) + (", …" if len(steps) > _MOST_NAMED else "")
    there = f"complete are those of steps {named}" if steps else "none is complete there"
    unreadable = [c for c in facts.status.bad if c.imported and step in ("latest", c.step)]
    why = f", apart from what could not be read ({', '.join(map(str, unreadable))})" if unreadable else ""
    what = "no checkpoint" if step == "latest" else f"no complete checkpoint of step {step}"
    return (
        f"{older} has {what} to begin from{why}: {there}; correct spec.checkpoint.restoreFrom and create the job anew"
    )
