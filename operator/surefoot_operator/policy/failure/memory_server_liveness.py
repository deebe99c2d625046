"""Asks agents about holders that are silent to the operator.

Pure; called by `restore_point` before a holder is given up, and by `status_conditions`. An operator whose password was
changed, or that a network policy cuts off, would otherwise take every checkpoint of a healthy job for lost. Agents that
reach such a holder seal and read it for the claim, which goes on with what they found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from surefoot.protocol.identities import HolderEndpoint, HolderId, WorkerId
from surefoot_operator.job_snapshot import HolderSeen, SessionSeen, SightSeen
from surefoot_operator.policy.core.actions import LookAround
from surefoot_operator.policy.core.availability import node_lost
from surefoot_operator.policy.core.facts import Facts, is_responsive, worker_id

WORTH_SECONDS = 1.0
"""Steps that are run again in less are not worth a question."""

LOOK_SECONDS = 5.0
"""How long an agent has for its answer, and until it is asked again."""

BELIEVED_SECONDS = 15.0
"""How long what an agent saw counts."""

UNSEEN_SECONDS = 60.0
"""How long holders are waited for of whom most are silent at once, beside agents that are heard and say nothing of them."""

NOTED_SECONDS = 3.0
"""People are told of no shorter silence."""

OTHERS_SECONDS = 1.5
"""How long the second agent that was asked has for its answer after the first did not see the holder: one look takes a second."""

_WITNESSES = 2
"""Of each holder: one alone, also the one beside it, might stand on the wrong side of a broken line."""


def silent_holders(facts: Facts) -> list[HolderEndpoint]:
    """Named holders that do not answer and may still have saves.

    One in whose place another instance runs is gone.
    """
    silent = []
    for endpoint in facts.status.named_holders:
        holder = facts.holders.get(endpoint.holder)
        if (holder is None or holder.state == "Silent") and endpoint.holder.instance not in facts.status.given_up:
            silent.append(endpoint)
    return _not_restarted(facts, silent)


def may_return(facts: Facts) -> list[HolderEndpoint]:
    """Silent holders that may still have saves, those given up before included.

    A holder is given up for what it may have beyond the restore point. Where that itself is lost, its copy is looked for again.
    """
    given_up = frozenset(facts.status.given_up)
    back = [h.endpoint for h in facts.seen.holders if h.state == "Silent" and h.endpoint.holder.instance in given_up]
    return [*silent_holders(facts), *_not_restarted(facts, back)]


@dataclass(frozen=True, slots=True)
class UsableHolders:
    """Holders that agents may save to. `seen`: the operator reaches them."""

    endpoints: tuple[HolderEndpoint, ...] = ()
    seen: bool = True
    proxied: tuple[HolderEndpoint, ...] = ()
    """Others that agents may read: one of them sealed and read each for this epoch, while the operator did not reach it."""


def usable_holders(holders: Sequence[HolderSeen], named: Sequence[HolderEndpoint], epoch: int) -> UsableHolders:
    """Lists holders that agents may save to.

    Those that answer and are sealed against epochs older than `epoch`; where none does, the named ones that are silent: an
    operator that lost sight of all would take every target from agents that reach them.
    """
    wanted = {endpoint.holder for endpoint in named}
    ready = tuple(h.endpoint for h in holders if h.state == "Ready" and h.fence is not None and h.fence >= epoch)
    if any(endpoint.holder in wanted for endpoint in ready):
        return UsableHolders(ready)
    silent = tuple(h.endpoint for h in holders if h.state == "Silent" and h.endpoint.holder in wanted)
    return UsableHolders((*ready, *silent), seen=not silent)


def with_proxied(
    usable: UsableHolders,
    holders: Sequence[HolderSeen],
    named: Sequence[HolderEndpoint],
    sights: Mapping[HolderId, SightSeen],
    epoch: int,
) -> UsableHolders:
    """Adds silent holders that an agent read for `epoch`.

    The restore point may lie there alone, and whoever is not told of a holder takes what it has for absent.
    """
    read = {holder for holder, sight in sights.items() if sight.epoch == epoch and sight.entries is not None}
    if not read:
        return usable
    silent = {h.endpoint.holder for h in holders if h.state == "Silent"} & read
    found = tuple(e for e in named if e.holder in silent and e not in usable.endpoints)
    return replace(usable, proxied=found)


def awaited(facts: Facts, worth_seconds: float) -> list[HolderEndpoint]:
    """Silent holders that are waited for.

    `worth_seconds`: of what they may have; endless where nothing is left without them.
    """
    return may_return(facts) if worth_seconds == math.inf else silent_holders(facts)


def _not_restarted(facts: Facts, silent: list[HolderEndpoint]) -> list[HolderEndpoint]:
    if not silent:
        return []
    restarted = {h.endpoint.server_id: h.endpoint.holder for h in facts.seen.holders if h.state == "Ready"}
    return [e for e in silent if restarted.get(e.server_id, e.holder) == e.holder]


def living(facts: Facts, endpoint: HolderEndpoint) -> str:
    """Says why a silent holder is known to be alive; empty: unknown."""
    holder = facts.holders.get(endpoint.holder)
    if holder is not None and holder.refusing:
        return (
            f"it refuses the operator ({holder.trouble}); give the operator the current"
            " password and certificate authority of the memory tier"
        )
    sight = _sight(facts, endpoint.holder)
    since = holder.since_seconds if holder is not None else 0.0
    if sight is None or not sight.there or sight.answered_seconds is None:
        return ""
    if sight.answered_seconds < since or facts.now - sight.answered_seconds > BELIEVED_SECONDS:
        return ""
    trouble = holder.trouble if holder is not None and holder.trouble else "nothing was heard of it in this term"
    return f"an agent reaches it, the operator does not ({trouble}); let the operator connect to the memory tier's port"


def most_unseen(facts: Facts) -> list[HolderEndpoint]:
    """Silent holders with a witness, where they are most of all.

    Empty otherwise. That points to the operator's own network or credentials.
    """
    proxied = {h.endpoint.holder for h in facts.seen.holders if h.state == "Proxied"}
    silent = [*silent_holders(facts), *(e for e in facts.status.named_holders if e.holder in proxied)]
    if 2 * len(silent) <= len(facts.status.named_holders):
        return []
    beside = {s.node for s in facts.sessions.values() if is_responsive(facts, s) and not node_lost(facts, s.node)}
    spoken_for = [e for e in silent if e.holder.node in beside or living(facts, e)]
    return spoken_for if 2 * len(spoken_for) > len(facts.status.named_holders) else []


def answers_awaited(facts: Facts, endpoint: HolderEndpoint) -> float:
    """Until when an agent may still answer about this holder.

    The present where no agent can. After a first answer a second agent has a moment for its own.
    """
    sight = _sight(facts, endpoint.holder)
    if not any(is_responsive(facts, s) for s in facts.sessions.values()):
        return facts.now
    if sight is None:
        return facts.now + LOOK_SECONDS
    if sight.answered_seconds is not None:
        return sight.since_seconds + OTHERS_SECONDS
    return sight.since_seconds + LOOK_SECONDS + OTHERS_SECONDS  # others are asked when the first have not answered


def looks(facts: Facts, worth_seconds: float) -> tuple[LookAround, ...]:
    """Asks two agents about each silent holder, and others where neither answered."""
    if worth_seconds < WORTH_SECONDS:
        return ()
    agents = sorted((s for s in facts.sessions.values() if is_responsive(facts, s)), key=lambda s: (s.index, s.attempt))
    first_on: dict[str, SessionSeen] = {}
    for agent in agents:
        first_on.setdefault(agent.node, agent)
    asked: dict[WorkerId, list[HolderEndpoint]] = defaultdict(list)
    for turn, endpoint in enumerate(awaited(facts, worth_seconds)):
        sight = _sight(facts, endpoint.holder)
        if sight is not None and facts.now < sight.asked_seconds + LOOK_SECONDS:
            continue
        again = sight is not None and sight.answered_seconds is None
        beside = None if again else first_on.get(endpoint.holder.node)
        for session in _witnesses(agents, beside, turn + (_WITNESSES if again else 0)):
            asked[worker_id(session)].append(endpoint)
    epoch = facts.world.epoch
    return tuple(LookAround(worker, epoch, tuple(holders)) for worker, holders in sorted(asked.items()))


def _witnesses(agents: Sequence[SessionSeen], beside: SessionSeen | None, first: int) -> list[SessionSeen]:
    """Selects the agent beside a holder and others, in turns.

    In turns, so that of many holders no agent is asked of all.
    """
    found = [] if beside is None else [beside]
    for ahead in range(min(_WITNESSES + 1, len(agents))):
        other = agents[(first + ahead) % len(agents)]
        if len(found) < _WITNESSES and other not in found:
            found.append(other)
    return found


def lost_sight(facts: Facts) -> str:
    """The message while the operator cannot reach most holders; empty: it can."""
    unseen = most_unseen(facts)
    silences = [facts.holders[e.holder] for e in unseen if e.holder in facts.holders]
    if not silences or facts.now < max(h.since_seconds for h in silences) + NOTED_SECONDS:
        return ""
    trouble = next((h.trouble for h in silences if h.refusing), "") or next((h.trouble for h in silences), "")
    said = f" ({trouble})" if trouble else ""
    named = facts.status.named_holders
    where = "them" if not any(h.state == "Ready" for h in facts.seen.holders) else "the others"
    return (
        f"the operator cannot reach {len(unseen)} of {len(named)} holders{said}; agents still save to {where}"
        " and nothing is given up: check the operator's network, its password for the memory tier and its certificate authority"
    )


def _sight(facts: Facts, holder: HolderId) -> SightSeen | None:
    sight = facts.seen.sights.get(holder)
    world = facts.status.world
    return sight if sight is not None and world is not None and sight.epoch == world.epoch else None
