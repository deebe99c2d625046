"""Decides the pod group that a gang scheduler reads.

Pure; called by `plan`, `workers` and `report`. Workers that were made before their group would be held back by their scheduler, or
be placed one by one while another job gets the other half of the nodes; so none is made before the group is seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot_operator.api.spec import Gang
from surefoot_operator.api.spec_limits import allowed_sizes
from surefoot_operator.observed_groups import PodGroup, PodGroupSeen
from surefoot_operator.policy.core.actions import Action, KeepGroup, RemoveGroup
from surefoot_operator.policy.core.facts import Facts, soonest

_OVER = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class GroupStep:
    """Actions on pod groups, and when to look again."""

    actions: tuple[Action, ...] = ()
    until_seconds: float | None = None


def group_step(facts: Facts) -> GroupStep:
    """Plans one pod group while workers are wanted, else none.

    It is as the spec asks. Of a deleted job nothing is done: its group goes with it.
    """
    seen, job = facts.seen.pod_groups, facts.seen.job
    if seen is None or job.deleted:
        return GroupStep()
    policy = facts.spec.scheduling_policy
    kept = policy.gang if policy is not None and (_workers_wanted(facts) or _workers_left(facts)) else None
    why = _why_removed(facts)
    wishes: dict[Gang, Action] = {
        one.group.gang: RemoveGroup(one.group.gang, one.uid, why)
        for one in seen.groups
        if one.group.gang != kept and not one.deleting
    }
    wanted, there = wanted_group(facts), _there(facts)
    if wanted is not None and wanted.gang not in seen.unseen and not _fits(there, wanted):
        wishes[wanted.gang] = KeepGroup(wanted)
    asked = {call.gang: call for call in facts.seen.group_calls}
    waits = {
        gang for gang in wishes if gang in asked and (asked[gang].under_way or facts.now < asked[gang].until_seconds)
    }
    return GroupStep(
        tuple(wish for gang, wish in wishes.items() if gang not in waits),
        soonest(tuple(asked[gang].until_seconds for gang in waits if not asked[gang].under_way)),
    )


def wanted_group(facts: Facts) -> PodGroup | None:
    """Returns the pod group that shall exist; None: there shall be none.

    Its minimum is the smallest world: the job begins with it, and is shrunk to it rather than ended where another
    job takes its nodes. Spares are members and never part of the minimum.
    """
    policy = facts.spec.scheduling_policy
    if policy is None or not _workers_wanted(facts):
        return None
    return PodGroup(
        policy.gang,
        min(allowed_sizes(facts.spec)),
        policy.queue,
        policy.priority_class,
        policy.schedule_timeout_seconds,
    )


def lacks_group(facts: Facts) -> bool:
    """Whether workers must not be created because their group is not there."""
    if facts.seen.pod_groups is None or facts.spec.scheduling_policy is None:
        return False
    there = _there(facts)
    return there is None or there.deleting


def group_refusal(facts: Facts) -> str:
    """Says why the group that workers wait for is missing.

    Empty: it is there, or nothing is known to be in its way.
    """
    policy, seen = facts.spec.scheduling_policy, facts.seen.pod_groups
    if policy is None or seen is None or not lacks_group(facts):
        return ""
    unseen = seen.unseen.get(policy.gang)
    if unseen:
        return f"no worker is created without its pod group for {policy.gang}: {unseen}"
    refused = next((call.refusal for call in facts.seen.group_calls if call.gang == policy.gang), "")
    return (
        f"no worker is created without its pod group for {policy.gang}, which was refused: {refused}" if refused else ""
    )


def group_message(facts: Facts) -> str:
    """Returns the gang scheduler's last words, if it places no workers."""
    there = _there(facts)
    return "" if there is None else there.message


def _there(facts: Facts) -> PodGroupSeen | None:
    policy, seen = facts.spec.scheduling_policy, facts.seen.pod_groups
    if policy is None or seen is None:
        return None
    return next((one for one in seen.groups if one.group.gang == policy.gang), None)


def _fits(there: PodGroupSeen | None, wanted: PodGroup) -> bool:
    """Whether nothing is to be written: what the job leaves to the cluster may say anything."""
    if there is None:
        return False
    if there.deleting:
        return True  # it is made anew once it is gone
    left = (
        (there.group.queue, wanted.queue),
        (there.group.priority_class, wanted.priority_class),
        (there.group.schedule_timeout_seconds, wanted.schedule_timeout_seconds),
    )
    return there.group.min_members == wanted.min_members and all(ask is None or say == ask for say, ask in left)


def _workers_wanted(facts: Facts) -> bool:
    return not facts.spec.suspend and facts.status.phase not in ("Complete", "Failed")


def _workers_left(facts: Facts) -> bool:
    """Workers that still end: their scheduler may count them until then."""
    return any(worker.phase not in _OVER for worker in facts.seen.workers)


def _why_removed(facts: Facts) -> str:
    if facts.spec.scheduling_policy is None:
        return "schedulingPolicy does not ask for it any more"
    return "the job is suspended" if facts.spec.suspend else "the job wants no workers of it any more"
