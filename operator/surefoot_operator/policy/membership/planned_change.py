"""Plans voluntary changes of the world: grow, shrink, suspend, vacate.

Pure. They lose no step: a step ahead is proposed, every rank saves there and waits, and only then is the next epoch
claimed. The coordinator binds the step once every member accepted it; after a refusal a later one is proposed. A
departing worker is waited for in this way even where no world is possible without it: every step is then saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from surefoot.protocol.checkpoints import retention
from surefoot.protocol.checkpoints.completeness import TierReading, complete_checkpoints, copies_of, newest_checkpoint
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.status import JobStatus, Member
from surefoot_operator.job_snapshot import JobSnapshot, ObservedBarrier
from surefoot_operator.policy.core.actions import Action
from surefoot_operator.policy.core.availability import costly_nodes, evacuation_reason, termination_reason
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    WorldFacts,
    WorldNodeFacts,
    barrier_checkpoint,
    domains_of,
    fenced_servers,
    gather,
    has_stepped,
    last_step,
    last_step_seconds,
    member_sessions,
    reading_at,
    saving_steps,
    seconds_per_step,
    step_of,
    topology_of_job,
    unreadable_checkpoints,
    waits_at,
    worker_id,
)
from surefoot_operator.policy.failure.spare_workers import largest_size, spare_agents
from surefoot_operator.policy.membership import lifecycle
from surefoot_operator.policy.membership.claim import present_tie
from surefoot_operator.policy.membership.expected_cost import (
    NOT_MEASURED,
    CostDecision,
    costs_more_than_staying,
    grow_or_stay,
)

# ---- copies on nodes that stay ---------------------------------------------------------------------------------------
# Selects copies that survive when a paused world's nodes are left. A world that waits because a worker leaves continues
# elsewhere only once its step survives the node: the copy in that node's holder is lost with it, and where two nodes of
# a placement group are drained at once, both copies are.


def barrier_step(facts: WorldFacts) -> Checkpoint | None:
    """The step at which every rank waits because a worker leaves.

    None: no world does.
    """
    goal = barrier_checkpoint(facts)
    return (
        goal
        if goal is not None and any(termination_reason(facts, member) for member in facts.membership.members)
        else None
    )


def reading_of_staying(facts: Facts) -> TierReading:
    """The memory reading without the failure domains that are being left."""
    domains, gone = domains_of(facts), domains_being_evacuated(facts)
    reading = reading_at(facts, facts.membership.generation)
    return TierReading({h: entries for h, entries in reading.servers.items() if domains[h] not in gone}, None)


def required_copies(facts: Facts, goes_on: bool) -> int:
    """The copies needed on nodes that stay.

    `goes_on`: a smaller world trains at once and makes the others meanwhile.
    """
    domains = domains_of(facts)
    live = {domains[h] for h in reading_of_staying(facts).servers}
    return min(facts.spec.checkpoint.memory.replicas, len(live), 1 if goes_on else len(live))


def missing_to_survive(facts: Facts, goal: Checkpoint, goes_on: bool) -> str:
    """Says what a checkpoint lacks to survive the nodes being left."""
    floor = facts.status.last_uploaded
    if floor is not None and floor.step >= goal.step:
        return ""
    wanted = required_copies(facts, goes_on)
    if not wanted:
        text = f"{goal} has no copy on a node that stays"
        return text if facts.spec.checkpoint.persistent is None else f"{text}, and is not in the persistent tier yet"
    told = min((s.copies for _, s in member_sessions(facts) if s is not None), default=0)
    if told - _most_lost(facts) >= wanted:
        return ""
    domains, reading = domains_of(facts), reading_of_staying(facts)
    there = goal in complete_checkpoints(
        reading, facts.status.lineage, goal.generation, unreadable_checkpoints(facts), facts.covers
    )
    found = copies_of(goal, reading, domains) if there else 0
    return "" if found >= wanted else f"{goal} has {found} of {wanted} copies on nodes that stay"


def departure_needs_upload(facts: Facts) -> bool:
    """Whether no holder stays: only the persistent tier can keep the step."""
    return barrier_step(facts) is not None and not required_copies(facts, goes_on=False)


def can_be_copied(facts: Facts) -> bool:
    """Whether missing copies can be made, in memory or persistent tier."""
    return bool(required_copies(facts, goes_on=False)) or facts.spec.checkpoint.persistent is not None


def repairs_before_departure(facts: Facts, goal: Checkpoint, goes_on: bool) -> list[retention.Repair]:
    """Plans copies onto nodes that stay; `goes_on` as in `copies_wanted`."""
    reading, domains = reading_at(facts, facts.membership.generation), domains_of(facts)
    wanted = required_copies(facts, goes_on)
    if not wanted:
        return []
    return retention.plan_repairs(
        dict(reading.servers), domains, goal, wanted, frozenset(domains_being_evacuated(facts)), topology_of_job(facts)
    )


def domains_being_evacuated(facts: Facts) -> set[str]:
    """Returns the failure domains with a node that is being left."""
    domains = {h.endpoint.instance.node: h.endpoint.domain for h in facts.holder_list}
    nodes = {name for name, n in facts.nodes.items() if n.evacuation_reason or not n.schedulable or not n.ready}
    nodes |= {one.name for one in facts.status.unhealthy_nodes if one.until_seconds > facts.now}
    for session in facts.sessions.values():
        worker = facts.workers.get(worker_id(session)) if session.terminating else None
        if session.terminating and (worker is None or not worker.deleting):
            nodes.add(session.node)
    return {domains[name] for name in nodes if name in domains}


def _most_lost(facts: Facts) -> int:
    """Copies that a save may lose with the nodes that are being left: one for each failure domain."""
    servers = {h.endpoint.domain for h in fenced_servers(facts, facts.membership.generation)}
    return len(servers & domains_being_evacuated(facts))


# ---- planned change --------------------------------------------------------------------------------------------------

AHEAD_SECONDS = 0.5
"""How far ahead a halt is named, so that word of it arrives before the first rank does."""

ANSWER_SECONDS = 5.0
"""A proposal that not everybody answered in this time is withdrawn."""

RETRY_SECONDS = 0.5
"""After a refusal."""

MOVE_SECONDS = 120.0
"""How long a replacement may take to come and be warm, before a node that others want left is left with fewer workers."""

FIRST_STEP_SECONDS = 10.0
"""A world so young that refuses a halt is still being started: it is asked again, as its first step may be under way."""

MAX_NAMED = 4

BARRIER_TIMEOUT_SECONDS = 30.0
"""How long a bound halt may take beyond its steps until all saves are on their holders; then the claim comes anyway."""


@dataclass(frozen=True, slots=True)
class DesiredChange:
    """A wanted change; an `urgent` one waits for no late step."""

    reason: str
    immediate: bool
    grows_to: int = 0
    """Workers of the larger world; 0: it is not to grow."""


@dataclass(frozen=True, slots=True)
class ChangeStep:
    """The next step of a planned change: actions, waiting, or claim."""

    reason: str
    actions: tuple[Action, ...] = ()
    claim: bool = False
    until_seconds: float | None = None


def desired_change(facts: Facts) -> DesiredChange | None:
    """Decides whether the committed world should change; None: no."""
    members = len(facts.membership.members)
    if facts.spec.suspend:
        return DesiredChange("the job is suspended", immediate=True) if members else None
    if not members:
        return DesiredChange("the job is resumed", immediate=True)
    ending = {m: why for m in facts.membership.members if (why := termination_reason(facts, m))}
    if ending:
        return DesiredChange(_describe_terminations(ending), immediate=True)
    staying = {m.index for m in facts.membership.members}
    warm = {s.index for s in spare_agents(facts)}
    tie = present_tie(facts)
    tied = None if tie is None else tie.workers(facts.spec)
    possible = largest_size(facts.spec, len(staying | warm), tied)
    move = _move(facts, list(facts.membership.members), warm, tied)
    if move is not None:
        return move
    if tied is None and possible < members and largest_size(facts.spec, members) < members:
        return DesiredChange(f"scale from {members} to {largest_size(facts.spec, members)} workers", immediate=True)
    if possible > members:
        return DesiredChange(f"grow from {members} to {possible} workers", immediate=False, grows_to=possible)
    return None


def _describe_terminations(ending: Mapping[Member, str]) -> str:
    """Who leaves and why, as a sentence that a thousand workers do not make longer."""
    named = [f"worker {m.index} {why}" for m, why in ending.items()][:MAX_NAMED]
    more = len(ending) - len(named)
    return "; ".join((*named, f"{more} more")) if more else "; ".join(named)


def _move(facts: WorldNodeFacts, staying: list[Member], warm: set[int], tied: int | None) -> DesiredChange | None:
    """Away from nodes that others want left: at once where the world keeps its size, after a while with fewer.

    Such a node still trains, so nothing is done that leaves no world at all.
    """
    moving = {m.index: m for m in staying if evacuation_reason(facts, m.node)}
    others = {index: m for index, m in moving.items() if m.node not in costly_nodes(facts)}
    there = {m.index for m in staying}
    size = largest_size(facts.spec, len(there - set(moving) | warm), tied)
    if len(others) < len(moving):
        beside_slow = largest_size(facts.spec, len(there - set(others) | warm), tied)
        if costs_more_than_staying(facts, size, beside_slow):
            moving, size = others, beside_slow
    if not moving or size == 0:
        return None
    beside = [w for w in facts.worker_list if w.index in moving and w.attempt > moving[w.index].attempt]
    if size < largest_size(facts.spec, len(staying)):
        asked = max((w.created_seconds for w in beside), default=facts.now)
        if facts.now < asked + MOVE_SECONDS:
            return None
    names = ", ".join(f"{m.index} leaves node {m.node} ({evacuation_reason(facts, m.node)})" for m in moving.values())
    return DesiredChange(f"worker {names}", immediate=False)


def next_change_step(facts: Facts) -> ChangeStep | None:
    """Plans the next step of a desired change; None: nothing to do."""
    barrier = facts.barrier
    if barrier is not None and barrier.sent.generation != facts.membership.generation:
        barrier = None
    wanted = desired_change(facts)
    if barrier is not None and barrier.sent.phase == "bound":
        return _bound(facts, barrier, wanted)
    if barrier is None and _all_wait(facts):
        return ChangeStep("every rank waits at a step that an earlier operator proposed", claim=True)
    if wanted is None:
        if barrier is not None and barrier.sent.phase == "proposed":
            return ChangeStep("a planned halt is not needed any more", (replace(barrier.sent, phase="cancelled"),))
        return None
    if not facts.membership.members or (wanted.immediate and _makes_no_step(facts, barrier)):
        return ChangeStep(wanted.reason, claim=True)
    if not wanted.immediate:
        stays = _stays(facts, wanted)
        if stays.until_seconds is not None and facts.now < stays.until_seconds:
            why = f": {stays.reason}" if stays.reason else ""
            return ChangeStep(f"{wanted.reason}, later{why}", until_seconds=stays.until_seconds)
        if not has_stepped(facts, facts.membership.generation):
            return ChangeStep(f"{wanted.reason} once epoch {facts.membership.generation} made its first step")
    return _propose_barrier(facts, barrier, wanted)


def _makes_no_step(facts: WorldFacts, barrier: ObservedBarrier | None) -> bool:
    """Whether a world makes no step before it has ended: it refused a halt, and has long had the time for one.

    A younger one may be in its first step, which a claim that does not halt it would lose.
    """
    if has_stepped(facts, facts.membership.generation) or barrier is None or barrier.sent.phase != "cancelled":
        return False
    return facts.now >= facts.membership.changed_seconds + FIRST_STEP_SECONDS


def _propose_barrier(facts: WorldFacts, barrier: ObservedBarrier | None, wanted: DesiredChange) -> ChangeStep:
    if barrier is not None and barrier.sent.phase == "proposed":
        due, step = barrier.proposed_seconds + ANSWER_SECONDS, barrier.sent.step
        if facts.now < due:
            return ChangeStep(f"{wanted.reason}: asking every worker to hold at step {step}", until_seconds=due)
        cancelled = replace(barrier.sent, phase="cancelled")
        return ChangeStep(f"not every worker answered the hold at step {step}", (cancelled,))
    if barrier is not None and facts.now < barrier.proposed_seconds + RETRY_SECONDS:
        return ChangeStep(
            f"{wanted.reason}: the hold at step {barrier.sent.step} was refused",
            until_seconds=barrier.proposed_seconds + RETRY_SECONDS,
        )
    standing = _barrier_retry_seconds(facts, barrier)
    if standing is not None and facts.now < standing:
        return ChangeStep(
            f"{wanted.reason}: no rank completes a step, so no other hold is proposed yet", until_seconds=standing
        )
    generation = facts.membership.generation
    ahead = _steps_to_barrier(facts)
    at, named = last_step(facts), barrier.sent.step if barrier is not None else 0
    # each halt has a step of its own, so that no answer to an older one is taken for it; where nobody has moved
    # since, one further is enough: a halt that runs ahead of a world that stands lies hundreds of steps away
    step = max(at, named) + ahead if standing is None else max(at + ahead, named + 1)
    return ChangeStep(
        f"{wanted.reason}: proposing a hold at step {step}",
        (Barrier(generation, step, "proposed"),),
        until_seconds=facts.now + ANSWER_SECONDS,
    )


def _steps_to_barrier(facts: WorldFacts) -> int:
    """How many steps further the halt lies: none can have finished it before it has heard.

    The end of the step under way will do where that is far off: a worker that leaves may not have the time for two.
    """
    pace, last = seconds_per_step(facts), last_step_seconds(facts, facts.membership.generation)
    if not pace:
        return 3
    if last is not None and facts.now + 2 * AHEAD_SECONDS <= last + pace:
        return 1
    return max(2, ceil(AHEAD_SECONDS / pace) + 1)


def _barrier_retry_seconds(facts: WorldFacts, barrier: ObservedBarrier | None) -> float | None:
    """Of a world that made no step since it was asked: when to ask again, after twice as long as it stood then."""
    if barrier is None:
        return None
    last = last_step_seconds(facts, facts.membership.generation)
    stood = barrier.proposed_seconds - (last if last is not None else facts.membership.changed_seconds)
    return None if stood <= 0 else barrier.proposed_seconds + max(RETRY_SECONDS, stood)


def _bound(facts: Facts, barrier: ObservedBarrier, wanted: DesiredChange | None) -> ChangeStep:
    """Nobody goes beyond a bound step: the next epoch follows, whatever became of the wish."""
    reason = wanted.reason if wanted is not None else "the world was halted for a change that is not needed any more"
    generation, step = barrier.sent.generation, barrier.sent.step
    goal = Checkpoint(generation, step)
    sessions = [session for _, session in member_sessions(facts)]
    waiting = [s for s in sessions if s is not None and waits_at(s, barrier.sent)]
    saved = [s for s in waiting if goal not in s.pending and s.saved is not None and s.saved >= goal]
    pace = seconds_per_step(facts) or 1.0
    due = barrier.proposed_seconds + BARRIER_TIMEOUT_SECONDS + 2 * pace * max(0, step - step_of(facts, generation))
    if len(saved) == len(sessions):
        lacking = (
            missing_to_survive(facts, goal, goes_on=_can_continue_without(facts))
            if barrier_step(facts) is not None
            else ""
        )
        upload = lifecycle.upload_due(facts, barrier)
        if upload is not None:
            return ChangeStep(f"{reason}: {goal} goes to the persistent tier first", until_seconds=upload)
        if not lacking or not can_be_copied(facts):
            return ChangeStep(f"{reason}; {lacking}" if lacking else reason, claim=True)
        if facts.now < due:
            return ChangeStep(f"{reason}: {lacking}", until_seconds=due)
        return ChangeStep(f"{reason}; {lacking}", claim=True)
    if len(waiting) == len(sessions) and facts.now >= due:
        return ChangeStep(f"{reason}; some saves of step {step} lack copies", claim=True)
    what = f"{len(waiting)} of {len(sessions)} workers hold at step {step}, {len(saved)} have replicated their saves"
    return ChangeStep(f"{reason}: {what}", until_seconds=due if facts.now < due else None)


def _can_continue_without(facts: Facts) -> bool:
    """Whether a world is possible without those that leave."""
    tie = present_tie(facts)
    there = {m.index for m in facts.membership.members if not termination_reason(facts, m)} | {
        s.index for s in spare_agents(facts)
    }
    return largest_size(facts.spec, len(there), None if tie is None else tie.workers(facts.spec)) > 0


def _all_wait(facts: WorldFacts) -> bool:
    """Bound by an operator that died since: nobody would ever tell them to go on."""
    sessions = [session for _, session in member_sessions(facts)]
    return bool(sessions) and all(
        s is not None
        and s.generation == facts.membership.generation
        and s.barrier_step is not None
        and s.barrier_step == s.progress.step
        for s in sessions
    )


def _stays(facts: WorldFacts, wanted: DesiredChange) -> CostDecision:
    """Until when the world stays as it is, though another is wanted."""
    policy = facts.spec.elastic_policy
    if policy is None:
        return NOT_MEASURED
    if policy.scale_up_snooze_seconds is not None:
        return CostDecision(facts.membership.changed_seconds + policy.scale_up_snooze_seconds)
    return grow_or_stay(facts, len(facts.membership.members), wanted.grows_to) if wanted.grows_to else NOT_MEASURED


# ---- what a job loses with a node ------------------------------------------------------------------------------------
# Says what a job would lose with a node. Pure; called by the eviction review through the reconciler. A drain ends, and
# the machine is switched off, as soon as its pods are gone: the holder on it, which no drain evicts, goes with whatever
# only it keeps.

STALE_SECONDS = 15.0
"""What was observed so long ago says nothing about now."""

MAX_INTERVALS_BEHIND = 2
"""Intervals: while the newest checkpoint is copied the next ones are made."""


def data_lost_with_node(seen: JobSnapshot, status: JobStatus, node: str, now: float) -> str:
    """Says what is lost of a job once `node` is gone too.

    Args:
        seen: the job's last round.
        status: what was decided in it.
        node: is being left, whether or not that round knew it.
        now: seconds of the same clock as `seen.now`.

    Returns:
        A sentence for whoever drains the node; empty: nothing is lost that is not elsewhere.
    """
    if status.phase in ("Complete", "Failed") or seen.job.deleted or not _has_data_on_node(seen, node):
        return ""
    if now - seen.now_seconds > STALE_SECONDS:
        return f"it was not reconciled for {now - seen.now_seconds:.0f} s"
    membership = status.membership
    if membership is None or status.last_complete is None:
        return ""  # it has nothing to lose yet
    last = status.last_complete
    if status.last_uploaded is not None and status.last_uploaded.step >= last.step:
        return ""
    left = tuple(replace(one, schedulable=False) if one.name == node else one for one in seen.nodes)
    facts = gather(replace(seen, nodes=left, status=status))
    reading = reading_at(facts, membership.generation)
    if not reading.servers:
        return f"no holder says at present where the copies of {last} are"
    known, covers = (facts.status.lineage, membership.generation, unreadable_checkpoints(facts)), facts.covers
    there = newest_checkpoint(complete_checkpoints(reading, *known, covers))
    stays = newest_checkpoint(complete_checkpoints(reading_of_staying(facts), *known, covers))
    kept = max((one.step for one in (stays, status.last_uploaded) if one is not None), default=None)
    if there is None or (kept is not None and kept + _copied_meanwhile(facts) >= there.step):
        return ""
    return f"{there} has no copy on a node that stays{_way_out(facts)}"


def _copied_meanwhile(facts: JobFacts) -> int:
    """Steps by which copies may be behind a world that trains: it halts before its worker leaves, and what it saves then is
    copied before that worker ends. One that does not train makes no newer copies."""
    trains = facts.membership.state == "Committed" and facts.membership.members
    return MAX_INTERVALS_BEHIND * saving_steps(facts) if trains else 0


def _has_data_on_node(seen: JobSnapshot, node: str) -> bool:
    """Whether a holder on that node has, or may have, anything of the job: of a thousand jobs few do."""
    here = (h for h in seen.servers if h.endpoint.instance.node == node and h.state != "Gone")
    return any(h.entries or h.read_generation is None for h in here)


def _way_out(facts: Facts) -> str:
    """What happens next, and what a person may do where nothing will."""
    if (
        facts.status.membership is not None
        and facts.status.membership.members
        and set(domains_of(facts).values()) - domains_being_evacuated(facts)
    ):
        return ", and is being copied to one"
    if facts.spec.checkpoint.persistent is not None:
        return ", and is on its way to the persistent tier"
    return "; leave one that runs the job, or give it spec.checkpoint.persistent"
