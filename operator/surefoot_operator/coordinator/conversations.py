"""Gives each reply of an agent to its conversation, and joins what an agent is to receive of all of them.

Pure. A reply that matches no request is ignored: it was meant for another coordinator, or came twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import (
    BarrierReply,
    DeletePersistent,
    DeleteReply,
    FromAgent,
    PersistentPage,
    RepairReply,
    RepairSave,
    Shutdown,
    ToAgent,
    UploadReply,
)
from surefoot_operator.coordinator import barrier, listings, uploads
from surefoot_operator.coordinator.listings import (
    is_listing,
    older_without,
)
from surefoot_operator.coordinator.pending_requests import (
    PendingRequests,
    describe_request,
    with_barrier,
    with_failure,
)


def apply_reply(orders: PendingRequests, worker: WorkerId, message: FromAgent, now: float = 0.0) -> PendingRequests:
    """Applies an agent's reply; one that matches no request is ignored."""
    if isinstance(message, BarrierReply):
        return with_barrier(orders, barrier.apply_reply(orders.barrier, worker, message))
    if isinstance(message, UploadReply):
        return uploads.apply_reply(orders, worker, message)
    if not isinstance(message, PersistentPage | RepairReply | DeleteReply):
        return orders
    order = orders.pending.get(message.request)
    if order is None or order.worker != worker:
        return orders
    if isinstance(message, PersistentPage):
        return listings.apply_page(orders, order, message)
    orders = replace(orders, pending={n: o for n, o in orders.pending.items() if n != message.request})
    if message.error is not None:
        return with_failure(orders, f"{worker} could not {describe_request(order.message)}: {message.error}")
    if isinstance(order.message, DeletePersistent):
        return listings.confirm_deletion(orders, order.message)
    if isinstance(order.message, RepairSave):
        return uploads.confirm_repair(orders, order.message, now)
    return orders


def desired_requests(orders: PendingRequests, worker: WorkerId) -> list[ToAgent]:
    """Lists the requests that this worker's agent must have received; a barrier comes with its assignment."""
    upload, shutdown = uploads.desired_upload(orders, worker), orders.shutdowns.get(worker)
    return [*orders.requests_of(worker), *(message for message in (upload, shutdown) if message is not None)]


def affected_workers(old: PendingRequests, new: PendingRequests) -> set[WorkerId] | None:
    """Workers whose desired requests differ; None: all."""
    if (old.barrier and old.barrier.sent) != (new.barrier and new.barrier.sent):
        return None
    workers: set[WorkerId] = set()
    if old.pending is not new.pending:
        workers |= {one.worker for number, one in new.pending.items() if old.pending.get(number) is not one}
    if old.uploads is not new.uploads:
        workers |= {worker for worker, one in new.uploads.items() if old.uploads.get(worker) != one}
    if old.shutdowns is not new.shutdowns:
        workers |= {worker for worker, one in new.shutdowns.items() if old.shutdowns.get(worker) != one}
    return workers


def retire(orders: PendingRequests, workers: Iterable[WorkerId], message: Shutdown) -> PendingRequests:
    """Tells exactly these attempts of workers to leave."""
    wanted = {**orders.shutdowns, **dict.fromkeys(workers, message)}
    return orders if wanted == orders.shutdowns else replace(orders, shutdowns=wanted)


def drop_other_generations(orders: PendingRequests, epoch: int, committed: bool) -> PendingRequests:
    """Voids requests of another epoch than the present world's."""
    kept = {n: o for n, o in orders.pending.items() if o.generation == epoch}
    is_current = orders.barrier is not None and orders.barrier.sent.generation == epoch and committed
    barrier = orders.barrier if is_current else None
    promotions = {w: p for w, p in orders.uploads.items() if p.generation == epoch}
    if (len(kept), barrier, len(promotions)) == (len(orders.pending), orders.barrier, len(orders.uploads)):
        return orders
    return replace(
        orders, pending=kept, barrier=barrier, uploads=promotions, source_listing=older_without(orders, kept)
    )


def drop_worker(orders: PendingRequests, worker: WorkerId) -> PendingRequests:
    """Drops the requests of an agent that is gone for good."""
    kept = {n: o for n, o in orders.pending.items() if o.worker != worker}
    promotions = {w: p for w, p in orders.uploads.items() if w != worker}
    if (len(kept), len(promotions)) == (len(orders.pending), len(orders.uploads)):
        return orders
    lost_listing = any(is_listing(o, older=False) for n, o in orders.pending.items() if n not in kept)
    lost_listing = lost_listing and not any(is_listing(o, older=False) for o in kept.values())
    persistent = replace(orders.persistent, requested_seconds=None) if lost_listing else orders.persistent
    older = older_without(orders, kept)
    return replace(orders, pending=kept, uploads=promotions, persistent=persistent, source_listing=older)
