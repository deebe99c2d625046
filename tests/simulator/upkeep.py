"""What a leader does besides the world: the watermark, drops, repairs, promotions, by the project's own rules.

Reads every ready holder, then decides; what follows goes only to the instances that were read, as calls that may
arrive much later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simulator.engine import Refusal, Unavailable
from surefoot.protocol.completeness import (
    TierReading,
    complete,
    complete_persistent,
    copies_of,
    effective_replicas,
    watermark,
)
from surefoot.protocol.identities import Checkpoint, HolderId, RankSave, WorkerId
from surefoot.protocol.lineage import newest
from surefoot.protocol.messages import PromoteSave
from surefoot.protocol.records import RankManifest
from surefoot.protocol.retention import Repair, Standing, memory_drops, persistent_drops, repairs
from surefoot_operator.api.status import World
from surefoot_operator.coordinator import orders
from surefoot_operator.observed import Observed

if TYPE_CHECKING:
    from simulator.operators import Operator

Readings = Mapping[HolderId, tuple[RankManifest, ...]]
EVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Chores:
    """What one look at the holders asks for."""

    watermark: Checkpoint | None
    copies: int
    drops: Mapping[HolderId, tuple[RankSave, ...]]
    repairs: tuple[Repair, ...]
    due: tuple[Checkpoint, tuple[RankManifest, ...]] | None
    """The checkpoint to promote, and its manifests."""
    standing: Standing


Decide = Callable[["Operator", Observed, Readings], Chores]


def decide(operator: Operator, observed: Observed, readings: Readings) -> Chores:
    """The real rules on what was read."""
    status, spec = observed.status, observed.job.spec.checkpoint
    world = status.world
    assert world is not None
    domains = {h: h.node for h in readings}
    copies = effective_replicas(spec.memory.replicas, len(set(domains.values())))
    reading, bad = TierReading(readings, None), frozenset(status.bad)
    whole = complete(reading, status.lineage, world.epoch, bad, observed.covers)
    water = watermark(reading, status.lineage, world.epoch, bad, observed.covers, domains, copies)
    standing = Standing(status.lineage, world.epoch, False, world.parent, water, status.floor, operator.pinned, bad)
    wanted = newest(whole)
    short = wanted is not None and copies_of(wanted, reading, domains) < copies
    due = None
    if spec.persistent is not None:
        floor = status.floor.step if status.floor else 0
        promotable = newest(c for c in whole if c.step % spec.persistent.interval_steps == 0 and c.step > floor)
        if promotable is not None:
            saves = {m.save: m for entries in readings.values() for m in entries if m.save.checkpoint == promotable}
            due = promotable, tuple(saves[s] for s in sorted(saves))
    return Chores(
        water,
        copies,
        {h: tuple(memory_drops(entries, standing, spec.memory.keep)) for h, entries in readings.items()},
        tuple(repairs(dict(readings), domains, wanted, copies)) if wanted is not None and short else (),
        due,
        standing,
    )


def upkeep(operator: Operator, observed: Observed) -> None:
    """Called after every plan; looks at the holders once a second, while the world is committed."""
    world = operator.simulation.store.status.world
    if world is None or world.state != "Committed" or operator.engine.now < operator.upkeep_due:
        return
    operator.upkeep_due = operator.engine.now + EVERY_SECONDS
    operator.read_all(world.epoch, lambda readings: _decided(operator, observed, world, readings))


def _decided(operator: Operator, observed: Observed, world: World, readings: Readings) -> None:
    status = operator.simulation.store.status
    if status.world is None or (status.world.epoch, status.world.state) != (world.epoch, "Committed"):
        return
    seen = replace(observed, status=status)
    chores = operator.simulation.decisions.chores(operator, seen, readings)
    operator.simulation.oracle.certify(chores.watermark, len(readings), observed.job.spec.checkpoint.memory.replicas)
    expires = operator.engine.now + observed.job.spec.checkpoint.holder_return_seconds / 2
    for holder, saves in chores.drops.items():
        for save in saves:
            _drop(operator, holder, save, world.epoch, expires)
    workers = [w for w, s in sorted(operator.sessions.by_worker.items()) if s.seen.connected]
    book = operator.sessions.orders
    if workers:
        for repair in chores.repairs:
            book = orders.repair(
                book, workers[0], world.epoch, repair.save, repair.source, repair.target, operator.engine.now
            )
        book = _promote(operator, book, chores, world, workers)
    if book is not operator.sessions.orders:
        operator.sessions = replace(operator.sessions, orders=book)
        operator.poke()
    if observed.job.spec.checkpoint.persistent is not None:
        _tend_persistent(operator, chores, world, workers)


def _drop(operator: Operator, target: HolderId, save: RankSave, epoch: int, expires: float) -> None:
    holder, engine = operator.simulation.holders[target], operator.engine

    def arrive() -> None:
        if engine.now <= expires:
            holder.drop(save, epoch)

    operator.network.call(operator.process, holder.process, arrive, lambda _: None)


def _promote(
    operator: Operator, book: orders.Orders, chores: Chores, world: World, workers: list[WorkerId]
) -> orders.Orders:
    pinned = operator.pinned
    if pinned is not None and len(book.promoted.get(pinned, ())) >= operator.pinned_ranks:
        _raise_floor(operator, pinned)
        operator.pinned = None
    if operator.pinned is None and chores.due is not None:
        operator.pinned, entries = chores.due
        operator.pinned_ranks = entries[0].world
        shares = {
            worker: PromoteSave(world.epoch, tuple(m.save for m in entries[i :: len(workers)]))
            for i, worker in enumerate(workers)
        }
        return orders.promote(book, {w: p for w, p in shares.items() if p.saves})
    return book


def _raise_floor(operator: Operator, checkpoint: Checkpoint) -> None:
    status = operator.simulation.store.status
    if status.floor is None or status.floor.step < checkpoint.step:
        operator.simulation.store.patch(operator, replace(status, floor=checkpoint, recorded=True), status.world)


def _tend_persistent(operator: Operator, chores: Chores, world: World, workers: list[WorkerId]) -> None:
    tier = operator.simulation.persistent
    if tier is None or not workers:
        return

    def listed(answer: Any) -> None:
        if isinstance(answer, Unavailable | Refusal):
            return
        status = operator.simulation.store.status
        kept = complete_persistent(
            answer, status.lineage, world.epoch, frozenset(status.bad), operator.simulation.covers
        )
        found = persistent_drops(kept, {m.save.checkpoint for m in answer}, chores.standing, 2)
        if found:
            book = orders.drop_persistent(
                operator.sessions.orders, workers[0], world.epoch, tuple(found), operator.engine.now
            )
            operator.sessions = replace(operator.sessions, orders=book)
            operator.poke()

    operator.network.call(operator.process, tier.process, tier.listing, listed)
