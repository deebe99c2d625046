"""Applies the actions of a plan: calls the platform, agents and memory servers.

Called by `reconcile`. Nothing is decided here. Each action is idempotent and none waits for another. Errors are
returned, and the next plan requests the missing actions again. Fencing, listing and messages come first, because
training waits for them. Calls for workers and pod groups run in the background (`worker_calls`).
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
from surefoot_operator.coordinator.listings import derive_listing_rights
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
from surefoot_operator.reconcile.build_snapshot import Dependencies, expected_worker_ids
from surefoot_operator.reconcile.worker_calls import WorkerCalls


async def apply_plan(
    dependencies: Dependencies, calls: WorkerCalls, actions: Iterable[Action], snapshot: JobSnapshot
) -> tuple[PlatformError, ...]:
    """Applies a plan's actions; returns the platform's errors, except those of calls that `calls` runs and reports."""
    actions, errors = tuple(actions), list[PlatformError]()
    # Short actions first, one by one: training waits for fences, listings and messages to agents.
    for action in actions:
        try:
            await _apply_action(dependencies, action, snapshot)
        except PlatformError as error:
            errors.append(error)
    # Slow calls run in the background, so that a rejected pod does not delay the next plan.
    for action in actions:
        if isinstance(action, DeleteWorker):
            calls.start_delete(action, _delete_worker_call(dependencies, action))
        elif isinstance(action, CreateWorker):
            calls.start_create(action, _create_worker_call(dependencies, action, snapshot))
        elif isinstance(action, ApplyPodGroup | DeletePodGroup):
            calls.start_pod_group_call(action, _pod_group_call(dependencies, action))
        elif isinstance(action, PurgePersistent):
            calls.start_purge(action, _purge_call(dependencies, action, snapshot))
    # A new pod's agent may connect before the next observation shows the pod: expect it now.
    dependencies.channel.set_expected_workers(
        expected_worker_ids(snapshot.workers, (*snapshot.creates, *calls.pending_creates()))
    )
    return tuple(errors)


async def _apply_action(dependencies: Dependencies, action: Action, snapshot: JobSnapshot) -> None:
    if isinstance(action, ClearJobMemory):
        await dependencies.memory.delete_job()
    elif isinstance(action, FenceMemoryServer):
        _fence(dependencies, action)
    elif isinstance(action, SetFinalizer):
        await dependencies.platform.set_finalizer(action.present)
    elif isinstance(action, DeleteJob):
        await dependencies.platform.delete_job()
    elif not isinstance(action, CreateWorker | DeleteWorker | ApplyPodGroup | DeletePodGroup | PurgePersistent):
        _send_request(dependencies, action, snapshot)


def _create_worker_call(
    dependencies: Dependencies, action: CreateWorker, snapshot: JobSnapshot
) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: dependencies.platform.create_worker(action, dependencies.environment(snapshot.job, action))


def _delete_worker_call(dependencies: Dependencies, action: DeleteWorker) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: dependencies.platform.delete_worker(action)


def _purge_call(
    dependencies: Dependencies, action: PurgePersistent, snapshot: JobSnapshot
) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: dependencies.platform.start_purge(
        action.attempt, dependencies.environment(snapshot.job, CreateWorker(0, 0))
    )


def _pod_group_call(
    dependencies: Dependencies, action: ApplyPodGroup | DeletePodGroup
) -> Callable[[], Coroutine[Any, Any, None]]:
    if isinstance(action, ApplyPodGroup):
        return lambda: dependencies.platform.apply_pod_group(action)
    return lambda: dependencies.platform.delete_pod_group(action)


def apply_maintenance(
    dependencies: Dependencies, actions: Iterable[MaintenanceAction], snapshot: JobSnapshot, background: TaskSet
) -> None:
    """Applies maintenance actions: sends requests to agents, and calls memory servers in `background`."""
    drops: dict[MemoryServerInstance, tuple[RankSave, ...]] = {}
    expiry_times: list[float] = []
    uploads_by_worker: dict[WorkerId, UploadSave] = {}
    repairs: list[tuple[WorkerId, RepairSave]] = []
    for action in actions:
        if isinstance(action, DropSaves):
            drops[action.server] = action.saves
            expiry_times.append(action.expires_seconds)
        elif isinstance(action, UploadSaves):
            uploads_by_worker[action.worker] = UploadSave(
                action.generation, action.saves, begin=derive_listing_rights(snapshot.status).may_create_folder
            )
        elif isinstance(action, RequestRepair):
            repairs.append((action.worker, _repair_message(action, snapshot)))
        elif isinstance(action, FenceMemoryServer):
            _fence(dependencies, action)
        else:
            _send_request(dependencies, action, snapshot)
    if repairs:
        now = dependencies.clock()
        _update_requests(dependencies, lambda orders: uploads.request_repairs(orders, repairs, now))
    _update_requests(dependencies, lambda orders: uploads.set_uploads(orders, uploads_by_worker))
    membership = snapshot.status.membership
    # Drops expire: late ones could reach a server whose copies have become the last ones.
    if drops and membership is not None:
        remaining_seconds, generation = min(expiry_times) - dependencies.clock(), membership.generation
        background.start_once("drops", lambda: dependencies.memory.drop(drops, generation, remaining_seconds))


def _repair_message(action: RequestRepair, snapshot: JobSnapshot) -> RepairSave:
    """Builds the request with the endpoints of both servers, which the copying agent may not know."""
    servers = servers_by_id(snapshot.servers)
    endpoints = tuple(
        servers[server_id].endpoint for server_id in (action.source, action.target) if server_id in servers
    )
    return RepairSave(0, action.generation, action.save, action.source, action.target, endpoints)


def saves_in_repair(sessions: Sessions) -> frozenset[RankSave]:
    """Returns the rank saves that agents are copying between memory servers now."""
    messages = (request.message for request in sessions.requests.by_id.values())
    return frozenset(m.save for m in messages if isinstance(m, RepairSave))


def _fence(dependencies: Dependencies, action: FenceMemoryServer) -> None:
    membership = dependencies.channel.sessions.membership
    if (
        dependencies.memory.fence(action.server, action.generation)
        and membership is not None
        and membership.state == "Claimed"
    ):
        # Saves move from memory to the persistent tier, so a listing is valid only if it follows the last index read.
        _update_requests(dependencies, listings.discard_listing)


def _send_request(
    dependencies: Dependencies,
    action: ShutDownWorkers | ListPersistentTier | Barrier | DeleteUploaded,
    snapshot: JobSnapshot,
) -> None:
    now = dependencies.clock()
    if isinstance(action, ShutDownWorkers):
        workers = [WorkerId(w.index, w.attempt) for w in snapshot.workers if w.index in action.indexes]
        message = Shutdown(action.reason, action.exit_code)
        _update_requests(dependencies, lambda orders: conversations.request_shutdown(orders, workers, message))
    elif isinstance(action, ListPersistentTier):
        listing_workers = [
            WorkerId(s.index, s.attempt) for s in snapshot.sessions if s.index == action.index and s.connected
        ]
        if listing_workers:
            listing_action, known_layouts = action, dependencies.memory.layout_digests
            _update_requests(
                dependencies,
                lambda orders: listings.request_listing(
                    orders,
                    max(listing_workers),
                    listing_action.generation,
                    now,
                    listing_action.source_job,
                    known_layouts,
                    derive_listing_rights(snapshot.status),
                ),
            )
    elif isinstance(action, Barrier):
        membership = snapshot.status.membership
        members = [WorkerId(m.index, m.attempt) for m in membership.members] if membership is not None else []
        barrier = action
        _update_requests(
            dependencies,
            lambda orders: pending_requests.with_barrier(orders, update_barrier(orders.barrier, barrier, members, now)),
        )
    else:
        deletion = action
        _update_requests(
            dependencies,
            lambda orders: listings.request_deletion(
                orders, deletion.worker, deletion.generation, deletion.checkpoints, now
            ),
        )


def _update_requests(dependencies: Dependencies, transition: Callable[[PendingRequests], PendingRequests]) -> None:
    dependencies.channel.apply_transition(lambda sessions: replace(sessions, requests=transition(sessions.requests)))
