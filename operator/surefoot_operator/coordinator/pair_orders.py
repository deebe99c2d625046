"""Has pairs of agents make an all-reduce, and keeps their words.

Pure; called by `request_replies`, `sessions`, `desired_messages` and `reconcile.apply_plan`. Not bound to an epoch: a spare is tried while others train. Soft state
like all orders: a new coordinator knows of no trial, takes no answer to an old one, and asks for others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.node_findings import LONGEST_TEXT
from surefoot.protocol.pair_messages import PairResult, PairStore, PairTrial
from surefoot_operator.coordinator.pending_requests import Orders
from surefoot_operator.job_snapshot import PairSeen, PairSideSeen

Pair = tuple[PairSideSeen, PairSideSeen]


def ask(orders: Orders, pairs: Iterable[Pair], now: float) -> Orders:
    """Asks pairs that were not asked before; numbers them."""
    known = {frozenset(side.incarnation for side in pair.sides) for pair in orders.pairs.values()}
    found = dict(orders.pairs)
    number = orders.next_request
    for sides in pairs:
        both = frozenset(side.incarnation for side in sides)
        if both not in known:
            known.add(both)
            found[number] = PairSeen(number, sides, now)
            number += 1
    return orders if number == orders.next_request else replace(orders, pairs=found, next_request=number)


def answered(orders: Orders, worker: WorkerId, message: PairStore | PairResult, now: float) -> Orders:
    """Takes one side's first word, however late."""
    pair = orders.pairs.get(message.request)
    place = None if pair is None else next((n for n, side in enumerate(pair.sides) if side.worker == worker), None)
    if pair is None or place is None:
        return orders
    if isinstance(message, PairStore):
        if place != 0 or pair.store:
            return orders
        return replace(orders, pairs={**orders.pairs, pair.request: replace(pair, store=message.address)})
    if pair.sides[place].verdict:
        return orders
    side = replace(pair.sides[place], verdict=message.verdict, text=message.text[:LONGEST_TEXT])
    sides = (side, pair.sides[1]) if place == 0 else (pair.sides[0], side)
    fresh = replace(pair, sides=sides, answered_seconds=now)
    return replace(orders, pairs={**orders.pairs, pair.request: fresh})


def kept(orders: Orders, incarnations: Collection[str]) -> Orders:
    """Forgets pairs of which neither agent is there any more."""
    found = {n: p for n, p in orders.pairs.items() if any(side.incarnation in incarnations for side in p.sides)}
    return orders if len(found) == len(orders.pairs) else replace(orders, pairs=found)


def words(orders: Orders, worker: WorkerId, incarnation: str) -> list[PairTrial]:
    """Lists what this agent is asked and has not answered.

    Whoever joins a store hears of it once it is there.
    """
    found = []
    for pair in orders.pairs_of(worker):
        host, guest = pair.sides
        for side, other, store in ((host, guest, ""), (guest, host, pair.store)):
            mine = (side.worker, side.incarnation) == (worker, incarnation) and not side.verdict
            if mine and (side is host or store):
                found.append(PairTrial(pair.request, other.node, store))
    return found


def concerned(old: Mapping[int, PairSeen], new: Mapping[int, PairSeen]) -> set[WorkerId]:
    """Whose messages a change of pairs may affect."""
    if old is new:
        return set()
    return {side.worker for n, pair in new.items() if old.get(n) is not pair for side in pair.sides}
