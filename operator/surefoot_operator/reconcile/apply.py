"""Carries out what plan and upkeep ask for: fabric calls, orders to agents, calls to holders. Called by `reconcile.loop`.

Nothing here decides. Each action is idempotent, and none waits for another: what is refused is returned, and the next
plan says what is left to do. Seals, listings and talk come first, for training waits for them; workers are asked for
beside the loop (`worker_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from surefoot.protocol.identities import HolderId, RankSave, WorkerId
from surefoot.protocol.messages import PromoteSave, RepairSave, Retire
from surefoot_operator.coordinator import orders as order_book
from surefoot_operator.coordinator.orders import Orders
from surefoot_operator.coordinator.sessions import Sessions
from surefoot_operator.errors import FabricError
from surefoot_operator.observed import Observed
from surefoot_operator.policy.actions import (
    Action,
    CleanMemory,
    CopySave,
    CreateWorker,
    DeleteJob,
    DeleteWorker,
    DropPersisted,
    DropSaves,
    ListPersistentTier,
    LookAround,
    MaintenanceAction,
    PromoteSaves,
    ProposeHold,
    PurgePersistent,
    RetireWorkers,
    SealHolder,
    SetFinalizer,
)
from surefoot_operator.reconcile.background import Background
from surefoot_operator.reconcile.parts import Parts
from surefoot_operator.reconcile.worker_calls import WorkerCalls


async def carry_out(
    parts: Parts, calls: WorkerCalls, actions: Iterable[Action], seen: Observed
) -> tuple[FabricError, ...]:
    """A plan's actions; what the fabric would not do of those that are no worker's is returned."""
    actions, errors = tuple(actions), list[FabricError]()
    for action in actions:
        try:
            await _one(parts, action, seen)
        except FabricError as error:
            errors.append(error)
    for action in actions:
        if isinstance(action, DeleteWorker):
            calls.delete(action, _delete(parts, action))
        elif isinstance(action, CreateWorker):
            calls.create(action, _create(parts, action, seen))
    # known before they exist: an agent may be quicker than our next look
    parts.conversation.know({WorkerId(w.index, w.attempt) for w in seen.workers} | calls.under_way())
    return tuple(errors)


async def _one(parts: Parts, action: Action, seen: Observed) -> None:
    if isinstance(action, CleanMemory):
        await parts.memory.clean()
    elif isinstance(action, SealHolder):
        _seal(parts, action)
    elif isinstance(action, SetFinalizer):
        await parts.fabric.hold_job(action.held)
    elif isinstance(action, PurgePersistent):
        await parts.fabric.purge(action.attempt, parts.environment(seen.job, CreateWorker(0, 0)))
    elif isinstance(action, DeleteJob):
        await parts.fabric.delete_job()
    elif not isinstance(action, CreateWorker | DeleteWorker):
        _ask(parts, action, seen)


def _create(parts: Parts, action: CreateWorker, seen: Observed) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: parts.fabric.create_worker(action, parts.environment(seen.job, action))


def _delete(parts: Parts, action: DeleteWorker) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: parts.fabric.delete_worker(action)


def run_errands(parts: Parts, errands: Iterable[MaintenanceAction], seen: Observed, background: Background) -> None:
    """An upkeep's errands: agents are asked, holders are called in the background."""
    drops: dict[HolderId, tuple[RankSave, ...]] = {}
    expires: list[float] = []
    uploads: dict[WorkerId, PromoteSave] = {}
    for errand in errands:
        if isinstance(errand, DropSaves):
            drops[errand.holder] = errand.saves
            expires.append(errand.expires_seconds)
        elif isinstance(errand, PromoteSaves):
            uploads[errand.worker] = PromoteSave(errand.epoch, errand.saves)
        elif isinstance(errand, SealHolder):
            _seal(parts, errand)
        else:
            _ask(parts, errand, seen)
    _order(parts, lambda orders: order_book.promote(orders, uploads))
    world = seen.status.world
    if drops and world is not None:
        left, epoch = min(expires) - parts.clock(), world.epoch
        background.start("drops", lambda: parts.memory.drop(drops, epoch, left))


def repairing(sessions: Sessions) -> frozenset[RankSave]:
    """Rank saves that an agent is copying now: their data may lack an index entry."""
    messages = (order.message for order in sessions.orders.outstanding.values())
    return frozenset(m.save for m in messages if isinstance(m, RepairSave))


def _seal(parts: Parts, action: SealHolder) -> None:
    world = parts.conversation.sessions.world
    if parts.memory.seal(action.holder, action.epoch) and world is not None and world.state == "Claimed":
        # a listing must come after the last index that was read: data moves from memory to the persistent tier
        _order(parts, order_book.void_listing)


def _ask(
    parts: Parts,
    action: RetireWorkers | ListPersistentTier | LookAround | ProposeHold | CopySave | DropPersisted,
    seen: Observed,
) -> None:
    now = parts.clock()
    if isinstance(action, RetireWorkers):
        workers = [WorkerId(w.index, w.attempt) for w in seen.workers if w.index in action.indexes]
        message = Retire(action.reason, action.exit_code)
        _order(parts, lambda orders: order_book.retire(orders, workers, message))
    elif isinstance(action, ListPersistentTier):
        there = [WorkerId(s.index, s.attempt) for s in seen.sessions if s.index == action.index and s.connected]
        if there:
            wish, known = action, parts.memory.layouts_known
            _order(
                parts,
                lambda orders: order_book.list_persistent(orders, max(there), wish.epoch, now, wish.older_job, known),
            )
    elif isinstance(action, LookAround):
        look = action
        _order(parts, lambda orders: order_book.look(orders, look.worker, look.epoch, look.holders, now))
    elif isinstance(action, ProposeHold):
        world = seen.status.world
        members = [WorkerId(m.index, m.attempt) for m in world.members] if world is not None else []
        hold = action
        _order(parts, lambda orders: order_book.propose_hold(orders, hold.epoch, hold.step, hold.verb, members, now))
    elif isinstance(action, CopySave):
        copy = action
        _order(
            parts,
            lambda orders: order_book.repair(orders, copy.worker, copy.epoch, copy.save, copy.source, copy.target, now),
        )
    else:
        drop = action
        _order(
            parts,
            lambda orders: order_book.drop_persistent(orders, drop.worker, drop.epoch, drop.checkpoints, now),
        )


def _order(parts: Parts, transition: Callable[[Orders], Orders]) -> None:
    parts.conversation.change(lambda sessions: replace(sessions, orders=transition(sessions.orders)))
