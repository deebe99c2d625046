"""Decides which nodes are sick from what agents found on them.

Pure; called by `plan`. Only evidence of the node's own hardware moves anybody; what names a program, or is merely odd,
people are told by the agents themselves. What most nodes of a job tell at once has a cause that they share (a driver, a
switch, a file server), and leaving them all would leave the job with none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from surefoot.protocol.messages import TRIED
from surefoot.protocol.text import listed
from surefoot_operator import reasons
from surefoot_operator.api.status import ExcludedNode, Member
from surefoot_operator.job_snapshot import PairSeen, PairSideSeen, SessionSeen
from surefoot_operator.policy.core.actions import Event, TryPairs
from surefoot_operator.policy.core.availability import usable
from surefoot_operator.policy.core.facts import Facts, derived_once, soonest, worker_id

# ---- pair tests ------------------------------------------------------------------------------------------------------
# Decides whose nodes are tried together, and who is sick. An all-reduce of two nodes that fails says that one of them
# is sick, or what lies between, and never which: whoever failed is tried with others. Sick is who failed with two nodes
# that are proven. Proven is who passed with somebody, or trained. Whoever is not proven bears no witness, and one alone
# is none: the way between may be broken, so of two nodes that are alone none is blamed.

PAIR_TEST_REASON = "AllReduceFails"

TRIAL_SECONDS = 16.0
"""After so long an agent that has not answered does so no more: somewhat longer than it lets its own part last."""

PAIRED_SECONDS = 40.0
"""So long after its node can be tried, or its world was claimed, a worker waits for trials with others: two that hang, and
one."""

MOST_TRIALS = 3
"""Of one agent that never passed: then it joins, and what failed is told."""

_PROVEN = 2
"""Nodes that passed with others, or trained: to fail with so many is neither a fault of theirs, nor of the way to one of them."""

_MOST_TOLD = 4


@dataclass(slots=True)
class _Record:
    """What came of one agent's trials, by the partners' incarnations."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, tuple[PairSeen, PairSideSeen]] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    """Partners that it is not tried with again, whatever came of it."""
    busy_until: float | None = None

    @property
    def outcomes(self) -> int:
        return len(self.passed) + len(self.failed)


def is_asked_for(facts: Facts) -> bool:
    """Whether agents of this job try each other at all."""
    status, check = facts.status, facts.spec.health_policy.pre_join_check
    over = status.phase in ("Complete", "Failed") or facts.spec.suspend or facts.seen.job.deleted
    return check != "Off" and not over and status.world is not None


def is_acted_upon(facts: Facts) -> bool:
    """Whether anything follows from it but words."""
    policy = facts.spec.health_policy
    return is_asked_for(facts) and policy.pre_join_check == "Enforce" and policy.node_findings == "Leave"


def due_tests(facts: Facts) -> tuple[TryPairs, ...]:
    """Pairs those that are to be tried now.

    Whoever was tried with nobody first, each with another one like it where there is one; who failed, with one that is proven.
    """
    if not is_asked_for(facts):
        return ()
    free = [
        s
        for s in _able(facts).values()
        if _record(facts, s).busy_until is None and s.node not in unhealthy_by_pair_tests(facts)
    ]
    needy = sorted((s for s in free if _needs(facts, s)), key=lambda s: (bool(_record(facts, s).met), s.index))
    proven = {s.incarnation: s for s in free if s.incarnation in _proven(facts)}
    fresh = {s.incarnation: s for s in needy if not _record(facts, s).met}
    others = {s.incarnation: s for s in free if s.incarnation not in {*proven, *fresh}}
    left = {s.incarnation for s in needy}
    pairs: list[tuple[PairSideSeen, PairSideSeen]] = []
    for session in needy:
        pools = (fresh, proven, others) if session.incarnation in fresh else (proven, fresh, others)
        partner = _first(facts, session, pools) if session.incarnation in left else None
        if partner is not None:
            pairs.append((_side(facts, session), _side(facts, partner)))
            for taken in (session.incarnation, partner.incarnation):
                left.discard(taken)
                for pool in pools:
                    pool.pop(taken, None)
    return (TryPairs(tuple(pairs)),) if pairs else ()


def next_pair_test_deadline(facts: Facts) -> float | None:
    """When a trial counts as over, or nobody waits for it."""
    if not is_asked_for(facts):
        return None
    waiting = (awaited_until(facts, s) for s in _able(facts).values() if is_awaited(facts, s))
    return soonest((*(record.busy_until for record in _records(facts).values()), *waiting))


@derived_once
def unhealthy_by_pair_tests(facts: Facts) -> Mapping[str, str]:
    """Why nodes are sick by what they do with others, by name."""
    found: dict[str, str] = {}
    well = {s.node for s in _able(facts).values() if _record(facts, s).passed}
    for session in _able(facts).values():
        record = _record(facts, session)
        if session.node in well or not record.failed or record.busy_until is not None:
            continue
        witnesses = [other for other in record.failed if other in _proven(facts)]
        if len({record.failed[other][1].node for other in witnesses}) >= _PROVEN:
            found[session.node] = _words(record, witnesses)
    return found


def last_failure_seconds(facts: Facts, node: str) -> float:
    """When the last of this node's trials failed; 0: none did."""
    mine = [_record(facts, s) for s in _able(facts).values() if s.node == node]
    return max((pair.answered_seconds for one in mine for pair, _ in one.failed.values()), default=0.0)


def is_awaited(facts: Facts, session: SessionSeen) -> bool:
    """Whether this worker gets no rank yet.

    Its node is being tried with another one, or may be in a moment.
    """
    if (
        not is_acted_upon(facts)
        or facts.now >= awaited_until(facts, session)
        or session.incarnation not in _able(facts)
    ):
        return False
    if not _is_new(facts, session) or _record(facts, session).passed or session.node in unhealthy_by_pair_tests(facts):
        return False
    return _record(facts, session).busy_until is not None or (
        _needs(facts, session) and _others(facts, session, unhealthy_by_pair_tests(facts))
    )


def awaited_until(facts: Facts, session: SessionSeen) -> float:
    """No worker waits longer for trials with others.

    A spare that nobody was there to be tried with has its time where the world is next claimed.
    """
    if session.tried_seconds is None:
        return 0.0
    claimed = facts.world.changed_seconds if facts.world.state == "Claimed" else 0.0
    return max(session.tried_seconds, claimed) + PAIRED_SECONDS


def pair_test_remarks(facts: Facts, members: Iterable[Member]) -> tuple[str, str]:
    """(pairs of them that failed with nobody judged for it, nodes that were tried alone): sentences, or empty."""
    if not is_acted_upon(facts):
        return "", ""
    nodes, failed = {m.node for m in members}, []
    for pair in facts.seen.pairs:
        one, other = (side.node for side in pair.sides)
        if (
            _outcome(pair) == "fails"
            and {one, other} <= nodes
            and not {one, other} & unhealthy_by_pair_tests(facts).keys()
        ):
            failed.append(f"{one} and {other} ({_text(pair)})")
    doubt = (
        f"an all-reduce failed between nodes {_some(failed)}: which of them is sick, or what lies between, nobody can say:"
        " the world begins with them"
    )
    fresh = [facts.sessions.get(worker_id(m)) for m in members]
    alone = [s.node for s in fresh if s is not None and _is_new(facts, s) and not _record(facts, s).outcomes]
    return doubt if failed else "", f"tried with no other node: {_some(sorted(set(alone)))}" if alone else ""


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return listed(names[:_MOST_TOLD]) + more


# ---- facts ----------------------------------------------------------------------------------------------------------


@derived_once
def _records(facts: Facts) -> Mapping[str, _Record]:
    current = {s.incarnation for s in facts.sessions.values()}
    records: dict[str, _Record] = {}
    for pair in facts.seen.pairs:
        outcome = _outcome(pair)
        ends = pair.asked_seconds + TRIAL_SECONDS
        open_ = not outcome and facts.now < ends and all(side.incarnation in current for side in pair.sides)
        for side, other in (pair.sides, pair.sides[::-1]):
            record = records.setdefault(side.incarnation, _Record())
            record.met.add(other.incarnation)
            if outcome == "well":
                record.passed.add(other.incarnation)
            elif outcome == "fails":
                record.failed[other.incarnation] = (pair, other)
            elif open_:
                record.busy_until = ends
    return records


def _record(facts: Facts, session: SessionSeen) -> _Record:
    return _records(facts).get(session.incarnation) or _Record()


def _outcome(pair: PairSeen) -> str:
    """fails: one side says so, and the other one has lived to answer. Empty: it is not over."""
    verdicts = {side.verdict for side in pair.sides}
    if "unknown" in verdicts:
        return "unknown"
    if "" in verdicts:
        return ""
    return "fails" if "fails" in verdicts else "well"


@derived_once
def _able(facts: Facts) -> Mapping[str, SessionSeen]:
    """Agents that can be tried with others now, by incarnation: of no rank, or one whose world has stopped.

    Not that one where nothing waits for a trial: it would go on beside trainers that begin again.
    """
    world, found = facts.status.world, []
    waits = facts.spec.health_policy.pre_join_check == "Enforce"
    for session in facts.sessions.values() if world is not None else ():
        assert world is not None
        stands = session.stopped >= world.epoch if world.state == "Claimed" else worker_id(session) not in facts.members
        ready = session.tried_seconds is not None and session.warm and (waits or _is_new(facts, session))
        if ready and stands and usable(facts, session):
            found.append(session)
    return {s.incarnation: s for s in sorted(found, key=lambda s: (s.index, s.attempt))}


def _is_new(facts: Facts, session: SessionSeen) -> bool:
    """Whether this agent was not of the last world."""
    member = facts.members.get(worker_id(session))
    return member is None or member.incarnation != session.incarnation


@derived_once
def _proven(facts: Facts) -> frozenset[str]:
    """Who passed with somebody, or was of the last world and made a step: all of its nodes made collectives.

    Two that trained together and fail in a trial say that it is the trial: they prove nothing of a third. Who trained when
    it was tried stays a witness if it falls silent, or its next world ends before a step: what it said would be forgotten.
    """
    records = _records(facts)
    passed = {incarnation for incarnation, record in records.items() if record.passed}
    trained = {side.incarnation for pair in facts.seen.pairs for side in pair.sides if side.trained}
    trained |= {s.incarnation for s in facts.sessions.values() if _has_trained(facts, s)}
    believed = {one for one in trained if one not in records or not trained & records[one].failed.keys()}
    return frozenset(passed | believed)


def _has_trained(facts: Facts, session: SessionSeen) -> bool:
    return not _is_new(facts, session) and session.step_at_seconds is not None


def _needs(facts: Facts, session: SessionSeen) -> bool:
    """Whether its node has still to pass with another one. Who was of the last world is not tried for its own sake."""
    record = _record(facts, session)
    return _is_new(facts, session) and not record.passed and len(record.met) < MOST_TRIALS


def _others(facts: Facts, session: SessionSeen, sick: Collection[str] = ()) -> bool:
    """Whether there is somebody whom it was not tried with, now or in a moment."""
    able = (one for one in _able(facts).values() if one.node not in sick)
    return any(_tells_more(facts, session, one) for one in able)


def _first(facts: Facts, session: SessionSeen, pools: tuple[dict[str, SessionSeen], ...]) -> SessionSeen | None:
    return next((s for pool in pools for s in pool.values() if _tells_more(facts, session, s)), None)


def _tells_more(facts: Facts, session: SessionSeen, other: SessionSeen) -> bool:
    """Whether a trial of these two would say what none has said yet.

    Another agent of a node with which it failed says the same again, and would use up the trials that a third node is needed for.
    """
    record = _record(facts, session)
    seen = {session.node, *(side.node for _, side in record.failed.values())}
    return other.node not in seen and other.incarnation not in record.met


def _side(facts: Facts, session: SessionSeen) -> PairSideSeen:
    trained = _has_trained(facts, session)
    return PairSideSeen(worker_id(session), session.incarnation, session.node, trained=trained)


def _words(record: _Record, witnesses: list[str]) -> str:
    names = sorted({record.failed[one][1].node for one in witnesses})
    text = _text(max((record.failed[one][0] for one in witnesses), key=lambda pair: pair.request))
    return f"an all-reduce with {listed(names)} failed, {'which do' if len(names) > 1 else 'which does'} with others: {text}"


def _text(pair: PairSeen) -> str:
    """The graver side's words: whoever waited in vain knows least."""
    words = [side.text for side in pair.sides if side.verdict == "fails"]
    return words[-1] if words else ""


# ---- unhealthy nodes -------------------------------------------------------------------------------------------------

SICK_SECONDS = 3600.0
"""How long a node that was found sick is avoided: its agent leaves with its worker, and nobody looks there any more."""

SETTLE_SECONDS = 15.0
"""A finding is acted upon after so long: by then other nodes have told whether they see the same."""

MOST_KEPT = 64


@derived_once
def found_sick(facts: Facts) -> Mapping[str, str]:
    """Why nodes are sick by what their own agents found, by name."""
    sick: dict[str, str] = {}
    for reason, nodes in sorted(_told(facts).items()):
        if not _is_shared(*_alike(facts, reason, nodes)):
            for node, text in sorted(nodes.items()):
                sick.setdefault(node, f"{reason}: {text}")
    return sick


def shared_findings(facts: Facts) -> str:
    """Says what most nodes find of themselves at once; empty: nothing."""
    shared = []
    for reason, nodes in sorted(_told(facts).items()):
        alike, heard = _alike(facts, reason, nodes)
        if _is_shared(alike, heard):
            shared.append(f"{reason} on {listed(sorted(alike))}")
    if not shared:
        return ""
    what = "; ".join(shared)
    return (
        f"most nodes find the same of themselves ({what}): the cause is one that they share, and no node is left for it"
    )


def _told(facts: Facts) -> Mapping[str, Mapping[str, str]]:
    """What agents find of their own nodes' hardware, and pairs of them of one: sentences by node, by reason.

    An agent that went with its worker says nothing any more once a later one on its node has looked: the node may have
    been started anew.
    """
    told: dict[str, dict[str, str]] = {}
    if facts.spec.health_policy.node_findings != "Leave":
        return told
    with_others = unhealthy_by_pair_tests(facts) if facts.spec.health_policy.pre_join_check == "Enforce" else {}
    if with_others:
        told[PAIR_TEST_REASON] = dict(with_others)
    telling = [s for s in facts.sessions.values() if s.findings]
    if not telling:
        return told
    present = [s for s in facts.sessions.values() if worker_id(s) in facts.workers]
    looked = {session.node: session.since_seconds for session in sorted(present, key=lambda s: s.since_seconds)}
    for session in telling:
        gone = worker_id(session) not in facts.workers
        past = gone and looked.get(session.node, 0.0) > session.heard_seconds
        for one in () if past else session.findings:
            if one.blame == "node":
                told.setdefault(one.reason, {}).setdefault(session.node, one.text)
    return told


def _alike(facts: Facts, reason: str, nodes: Iterable[str]) -> tuple[set[str], set[str]]:
    """(nodes that tell the same, nodes that were heard). What a trial found on nodes that were left for it counts still.

    A trial that fails wherever it is made would else have a small job leave one node after the other.
    """
    before = {
        one.name
        for one in facts.status.sick_nodes
        if reason in TRIED and one.until_seconds > facts.now and one.reason.partition(":")[0] == reason
    }
    return {*nodes, *before}, {*facts.told_on, *before}


def sick_since(facts: Facts, name: str) -> float | None:
    """When this node was found sick; None: it was not."""
    known = next((one for one in facts.status.sick_nodes if one.name == name and one.until_seconds > facts.now), None)
    return None if known is None else known.until_seconds - SICK_SECONDS


def _is_shared(alike: Collection[str], heard: Collection[str]) -> bool:
    return len(alike) > 1 and 2 * len(alike) > len(heard)


def with_sick_found(facts: Facts) -> tuple[tuple[ExcludedNode, ...], tuple[Event, ...], float | None]:
    """Returns sick nodes for the status, events, and when to look again."""
    kept = {one.name: one for one in facts.status.sick_nodes if one.until_seconds > facts.now}
    events, due = [], []
    for name, reason in found_sick(facts).items():
        known = kept.get(name)
        settled = _since(facts, name) + SETTLE_SECONDS
        if known is None and facts.now < settled:
            due.append(settled)
        elif known is None:
            kept[name] = ExcludedNode(name, reason, facts.now + SICK_SECONDS)
            text = f"node {name} is sick ({reason}): workers leave it, and it is avoided for {SICK_SECONDS:g} s"
            events.append(Event(reasons.NODE_SICK, text, warning=True))
        elif known.until_seconds < facts.now + SICK_SECONDS / 2:  # still so: seldom written, and never let go of
            kept[name] = replace(known, until_seconds=facts.now + SICK_SECONDS)
    found = tuple(sorted(kept.values(), key=lambda one: (one.until_seconds, one.name)))[-MOST_KEPT:]
    return found, tuple(events), soonest(due)


def _since(facts: Facts, name: str) -> float:
    told = [s.findings_seconds for s in facts.sessions.values() if s.node == name and s.findings]
    return min(told) if told else last_failure_seconds(facts, name)
