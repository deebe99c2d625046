"""Applies actions: calls the fabric, agents and holders.

Called by `reconcile`. Nothing here decides. Each action is idempotent, and none waits for another: what is refused is
returned, and the next plan says what is left to do. Seals, listings and talk come first, for training waits for them;
workers and pod groups are asked for beside the loop (`worker_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from surefoot.protocol.identities import MemoryServerInstance, RankSave, WorkerId
from surefoot.protocol.messages import Barrier, RepairSave, Shutdown, UploadSave
from surefoot.task_set import TaskSet
from surefoot_operator.coordinator import conversations, listings, pending_requests, uploads
from surefoot_operator.coordinator.barrier import update_barrier
from surefoot_operator.coordinator.listings import listing_rights
from surefoot_operator.coordinator.pending_requests import PendingRequests
from surefoot_operator.coordinator.sessions import Sessions
from surefoot_operator.errors import PlatformError
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import (
    Action,
    ApplyPodGroup,
    ClearJobMemory,
    CreateWorker,
    DeleteJob,
    DeletePodGroup,
    DeleteUploaded,
    DeleteWorker,
    DropSaves,
    FenceMemoryServer,
    ListPersistentTier,
    MaintenanceAction,
    PurgePersistent,
    RequestRepair,
    SetFinalizer,
    ShutDownWorkers,
    UploadSaves,
)
from surefoot_operator.policy.core.facts import servers_by_id
from surefoot_operator.reconcile.build_snapshot import Dependencies, worker_ids
from surefoot_operator.reconcile.worker_calls import WorkerCalls


async def apply_plan(
    dependencies: Dependencies, calls: WorkerCalls, actions: Iterable[Action], seen: JobSnapshot
) -> tuple[PlatformError, ...]:
    """Applies a plan's actions; returns the fabric's refusals, those excepted that `calls` reports."""
    actions, errors = tuple(actions), list[PlatformError]()
    for action in actions:
        try:
            await _one(dependencies, action, seen)
        except PlatformError as error:
            errors.append(error)
    for action in actions:
        if isinstance(action, DeleteWorker):
            calls.delete(action, _delete(dependencies, action))
        elif isinstance(action, CreateWorker):
            calls.create(action, _create(dependencies, action, seen))
        elif isinstance(action, ApplyPodGroup | DeletePodGroup):
            calls.group(action, _group(dependencies, action))
        elif isinstance(action, PurgePersistent):
            calls.purge(action, _purge(dependencies, action, seen))
    # known before they exist: an agent may be quicker than our next look
    dependencies.channel.set_expected_workers(worker_ids(seen.workers, (*seen.creates, *calls.pending_creates())))
    return tuple(errors)


async def _one(dependencies: Dependencies, action: Action, seen: JobSnapshot) -> None:
    if isinstance(action, ClearJobMemory):
        await dependencies.memory.delete_job()
    elif isinstance(action, FenceMemoryServer):
        _fence(dependencies, action)
    elif isinstance(action, SetFinalizer):
        await dependencies.platform.set_finalizer(action.present)
    elif isinstance(action, DeleteJob):
        await dependencies.platform.delete_job()
    elif not isinstance(action, CreateWorker | DeleteWorker | ApplyPodGroup | DeletePodGroup | PurgePersistent):
        _ask(dependencies, action, seen)


def _create(
    dependencies: Dependencies, action: CreateWorker, seen: JobSnapshot
) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: dependencies.platform.create_worker(action, dependencies.environment(seen.job, action))


def _delete(dependencies: Dependencies, action: DeleteWorker) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: dependencies.platform.delete_worker(action)


def _purge(
    dependencies: Dependencies, action: PurgePersistent, seen: JobSnapshot
) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: dependencies.platform.start_purge(
        action.attempt, dependencies.environment(seen.job, CreateWorker(0, 0))
    )


def _group(
    dependencies: Dependencies, action: ApplyPodGroup | DeletePodGroup
) -> Callable[[], Coroutine[Any, Any, None]]:
    if isinstance(action, ApplyPodGroup):
        return lambda: dependencies.platform.apply_pod_group(action)
    return lambda: dependencies.platform.remove_group(action)


def apply_maintenance(
    dependencies: Dependencies, actions: Iterable[MaintenanceAction], seen: JobSnapshot, background: TaskSet
) -> None:
    """An upkeep's actions: agents are asked, holders are called in the background."""
    drops: dict[MemoryServerInstance, tuple[RankSave, ...]] = {}
    expires: list[float] = []
    promotions: dict[WorkerId, UploadSave] = {}
    copies: list[tuple[WorkerId, RepairSave]] = []
    for action in actions:
        if isinstance(action, DropSaves):
            drops[action.server] = action.saves
            expires.append(action.expires_seconds)
        elif isinstance(action, UploadSaves):
            promotions[action.worker] = UploadSave(
                action.generation, action.saves, begin=listing_rights(seen.status).begin
            )
        elif isinstance(action, RequestRepair):
            copies.append((action.worker, _copy(action, seen)))
        elif isinstance(action, FenceMemoryServer):
            _fence(dependencies, action)
        else:
            _ask(dependencies, action, seen)
    if copies:
        now = dependencies.clock()
        _order(dependencies, lambda orders: uploads.repair(orders, copies, now))
    _order(dependencies, lambda orders: uploads.promote(orders, promotions))
    world = seen.status.membership
    if drops and world is not None:
        left, epoch = min(expires) - dependencies.clock(), world.generation
        background.start_once("drops", lambda: dependencies.memory.drop(drops, epoch, left))


def _copy(action: RequestRepair, seen: JobSnapshot) -> RepairSave:
    """The request, with where both holders answer: whoever copies need not know of them otherwise."""
    holders = servers_by_id(seen.servers)
    where = tuple(holders[one].endpoint for one in (action.source, action.target) if one in holders)
    return RepairSave(0, action.generation, action.save, action.source, action.target, where)


def repairing(sessions: Sessions) -> frozenset[RankSave]:
    """Returns the rank saves that an agent is copying now."""
    messages = (order.message for order in sessions.orders.pending.values())
    return frozenset(m.save for m in messages if isinstance(m, RepairSave))


def _fence(dependencies: Dependencies, action: FenceMemoryServer) -> None:
    world = dependencies.channel.sessions.membership
    if dependencies.memory.fence(action.server, action.generation) and world is not None and world.state == "Claimed":
        # a listing must come after the last index that was read: data moves from memory to the persistent tier
        _order(dependencies, listings.void_listing)


def _ask(
    dependencies: Dependencies,
    action: ShutDownWorkers | ListPersistentTier | Barrier | DeleteUploaded,
    seen: JobSnapshot,
) -> None:
    now = dependencies.clock()
    if isinstance(action, ShutDownWorkers):
        workers = [WorkerId(w.index, w.attempt) for w in seen.workers if w.index in action.indexes]
        message = Shutdown(action.reason, action.exit_code)
        _order(dependencies, lambda orders: conversations.retire(orders, workers, message))
    elif isinstance(action, ListPersistentTier):
        there = [WorkerId(s.index, s.attempt) for s in seen.sessions if s.index == action.index and s.connected]
        if there:
            wish, known = action, dependencies.memory.layouts_known
            _order(
                dependencies,
                lambda orders: listings.list_persistent(
                    orders, max(there), wish.generation, now, wish.source_job, known, listing_rights(seen.status)
                ),
            )
    elif isinstance(action, Barrier):
        world = seen.status.membership
        members = [WorkerId(m.index, m.attempt) for m in world.members] if world is not None else []
        wanted = action
        _order(
            dependencies,
            lambda orders: pending_requests.with_barrier(orders, update_barrier(orders.barrier, wanted, members, now)),
        )
    else:
        drop = action
        _order(
            dependencies,
            lambda orders: listings.drop_persistent(orders, drop.worker, drop.generation, drop.checkpoints, now),
        )


def _order(dependencies: Dependencies, transition: Callable[[PendingRequests], PendingRequests]) -> None:
    dependencies.channel.apply_transition(lambda sessions: replace(sessions, orders=transition(sessions.orders)))
