"""Tells holders that are unreachable for the operator from holders that are dead.

Pure; called by `restore_point` before a holder is given up, and by `status_conditions`. An operator whose password was
changed, or that a network policy cuts off, would otherwise take every checkpoint of a healthy job for lost. The job
waits for such holders, and says which they are and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.protocol.identities import ENDPOINT_ORDER, HolderEndpoint
from surefoot.protocol.text import listed
from surefoot_operator.job_snapshot import HolderSeen
from surefoot_operator.policy.core.availability import node_lost
from surefoot_operator.policy.core.facts import (
    Facts,
    NodeFacts,
    TierFacts,
    derived_once,
    is_responsive,
)

NOTED_SECONDS = 3.0
"""People are told of no shorter silence."""


def silent_holders(facts: TierFacts) -> list[HolderEndpoint]:
    """Named holders that do not answer and may still have saves.

    One in whose place another instance runs is gone.
    """
    silent = []
    for endpoint in facts.status.named_holders:
        holder = facts.holders.get(endpoint.holder)
        if (holder is None or holder.state == "Silent") and endpoint.holder.instance not in facts.status.given_up:
            silent.append(endpoint)
    return _not_restarted(facts, silent)


def may_return(facts: TierFacts) -> list[HolderEndpoint]:
    """Silent holders that may still have saves, those given up before included.

    A holder is given up for what it may have beyond the restore point. Where that itself is lost, its copy is looked for again.
    """
    given_up = frozenset(facts.status.given_up)
    back = [h.endpoint for h in facts.holder_list if h.state == "Silent" and h.endpoint.holder.instance in given_up]
    return [*silent_holders(facts), *_not_restarted(facts, back)]


@dataclass(frozen=True, slots=True)
class UsableHolders:
    """Holders that agents may save to. `seen`: the operator reaches them."""

    endpoints: tuple[HolderEndpoint, ...] = ()
    seen: bool = True


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


def awaited(facts: TierFacts, worth_seconds: float) -> list[HolderEndpoint]:
    """Silent holders that are waited for.

    `worth_seconds`: of what they may have; endless where nothing is left without them.
    """
    return may_return(facts) if worth_seconds == math.inf else silent_holders(facts)


def _not_restarted(facts: TierFacts, silent: list[HolderEndpoint]) -> list[HolderEndpoint]:
    if not silent:
        return []
    restarted = {h.endpoint.server_id: h.endpoint.holder for h in facts.holder_list if h.state == "Ready"}
    return [e for e in silent if restarted.get(e.server_id, e.holder) == e.holder]


def why_alive(facts: Facts, endpoint: HolderEndpoint, worth_seconds: float) -> str:
    """Says why an unreachable holder is taken to be alive; empty: it may as well be dead.

    That it is one of most at once speaks for the operator's own network. Before a job ends or begins anew for it, it is
    enough that its node is well: a holder that dies there is started anew, or gone, and then not waited for.
    """
    holder = facts.holders.get(endpoint.holder)
    trouble = holder.trouble if holder is not None and holder.trouble else "nothing was heard of it in this term"
    if holder is not None and holder.refusing:
        return (
            f"it refuses the operator ({trouble}); give the operator the current"
            " password and certificate authority of the memory tier"
        )
    node = endpoint.holder.node
    is_decisive = worth_seconds == math.inf and facts.spec.checkpoint.on_total_loss != "Wait"
    if endpoint not in most_unseen(facts) and not (is_decisive and _is_well(facts, node)):
        return ""
    return f"its node is well, and the operator does not reach it ({trouble}); let the operator connect to the memory tier's port"


def _is_well(facts: NodeFacts, name: str) -> bool:
    node = facts.nodes.get(name)
    return bool(facts.heard_on.get(name)) or (node is not None and node.ready and not node.doubt)


@derived_once
def most_unseen(facts: Facts) -> frozenset[HolderEndpoint]:
    """Silent holders beside an agent that is heard, or that refuse the operator, where they are most of all.

    Empty otherwise. That points to the operator's own network or credentials. Derived once: it reads every holder, and is
    asked for of each.
    """
    silent = silent_holders(facts)
    most = len(facts.status.named_holders) // 2
    if len(silent) <= most:
        return frozenset()
    beside = {s.node for s in facts.sessions.values() if is_responsive(facts, s) and not node_lost(facts, s.node)}
    spoken_for = frozenset(e for e in silent if e.holder.node in beside or _is_refusing(facts, e))
    return spoken_for if len(spoken_for) > most else frozenset()


def _is_refusing(facts: TierFacts, endpoint: HolderEndpoint) -> bool:
    holder = facts.holders.get(endpoint.holder)
    return holder is not None and holder.refusing


def lost_sight(facts: Facts) -> str:
    """The message while the operator cannot reach most holders; empty: it can."""
    unseen = sorted(most_unseen(facts), key=ENDPOINT_ORDER)  # of a set: the sentence must not change by itself
    silences = [facts.holders[e.holder] for e in unseen if e.holder in facts.holders]
    if not silences or facts.now < max(h.since_seconds for h in silences) + NOTED_SECONDS:
        return ""
    trouble = next((h.trouble for h in silences if h.refusing), "") or next((h.trouble for h in silences), "")
    said = f" ({trouble})" if trouble else ""
    named, names = facts.status.named_holders, listed([e.holder for e in unseen])
    where = "them" if not any(h.state == "Ready" for h in facts.holder_list) else "the others"
    return (
        f"the operator cannot reach {len(unseen)} of {len(named)} holders, {names}{said}; agents still save to {where}"
        " and nothing is given up: check the operator's network, its password for the memory tier and its certificate authority"
    )
