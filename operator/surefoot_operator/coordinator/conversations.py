"""Gives each reply of an agent to its conversation, and joins what an agent is to receive of all of them.

Pure. A reply that matches no request is ignored: it was meant for another coordinator, or came twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import (
    BarrierReply,
    DropPersistent,
    FromAgent,
    Listing,
    Persisted,
    PersistentDropped,
    Repaired,
    RepairSave,
    Retire,
    ToAgent,
)
from surefoot_operator.coordinator import barrier, listings, uploads
from surefoot_operator.coordinator.listings import (
    older_without,
    persistent_without,
)
from surefoot_operator.coordinator.pending_requests import (
    PendingRequests,
    describe_request,
    with_barrier,
    with_failure,
)


def apply_reply(orders: PendingRequests, worker: WorkerId, message: FromAgent, now: float) -> PendingRequests:
    """Applies an agent's reply; one that matches no request is ignored."""
    if isinstance(message, BarrierReply):
        return with_barrier(orders, barrier.apply_reply(orders.barrier, worker, message))
    if isinstance(message, Persisted):
        return uploads.apply_reply(orders, worker, message)
    if not isinstance(message, Listing | Repaired | PersistentDropped):
        return orders
    order = orders.outstanding.get(message.request)
    if order is None or order.worker != worker:
        return orders
    if isinstance(message, Listing):
        return listings.apply_page(orders, order, message)
    orders = replace(orders, outstanding={n: o for n, o in orders.outstanding.items() if n != message.request})
    if message.error is not None:
        return with_failure(orders, f"{worker} could not {describe_request(order.message)}: {message.error}")
    if isinstance(order.message, DropPersistent):
        return listings.confirm_deletion(orders, order.message)
    if isinstance(order.message, RepairSave):
        return uploads.confirm_repair(orders, order.message, now)
    return orders


def desired_requests(orders: PendingRequests, worker: WorkerId) -> list[ToAgent]:
    """Lists the requests that this worker's agent must have received; a barrier comes with its assignment."""
    upload, shutdown = orders.promotions.get(worker), orders.retired.get(worker)
    return [*orders.requests_of(worker), *(message for message in (upload, shutdown) if message is not None)]


def affected_workers(old: PendingRequests, new: PendingRequests) -> set[WorkerId] | None:
    """Workers whose desired requests differ; None: all."""
    if (old.barrier and old.barrier.sent) != (new.barrier and new.barrier.sent):
        return None
    workers: set[WorkerId] = set()
    if old.outstanding is not new.outstanding:
        workers |= {one.worker for number, one in new.outstanding.items() if old.outstanding.get(number) is not one}
    if old.promotions is not new.promotions:
        workers |= {worker for worker, one in new.promotions.items() if old.promotions.get(worker) != one}
    if old.retired is not new.retired:
        workers |= {worker for worker, one in new.retired.items() if old.retired.get(worker) != one}
    return workers


def retire(orders: PendingRequests, workers: Iterable[WorkerId], message: Retire) -> PendingRequests:
    """Tells exactly these attempts of workers to leave."""
    wanted = {**orders.retired, **dict.fromkeys(workers, message)}
    return orders if wanted == orders.retired else replace(orders, retired=wanted)


def drop_other_generations(orders: PendingRequests, epoch: int, committed: bool) -> PendingRequests:
    """Voids requests of another epoch than the present world's."""
    outstanding = {n: o for n, o in orders.outstanding.items() if o.epoch == epoch}
    is_current = orders.barrier is not None and orders.barrier.sent.generation == epoch and committed
    present_barrier = orders.barrier if is_current else None
    promotions = {w: p for w, p in orders.promotions.items() if p.epoch == epoch}
    if (len(outstanding), present_barrier, len(promotions)) == (
        len(orders.outstanding),
        orders.barrier,
        len(orders.promotions),
    ):
        return orders
    return replace(
        orders,
        outstanding=outstanding,
        barrier=present_barrier,
        promotions=promotions,
        older=older_without(orders, outstanding),
    )


def drop_worker(orders: PendingRequests, worker: WorkerId) -> PendingRequests:
    """Drops the requests of an agent that is gone for good."""
    outstanding = {n: o for n, o in orders.outstanding.items() if o.worker != worker}
    promotions = {w: p for w, p in orders.promotions.items() if w != worker}
    if (len(outstanding), len(promotions)) == (len(orders.outstanding), len(orders.promotions)):
        return orders
    return replace(
        orders,
        outstanding=outstanding,
        promotions=promotions,
        persistent=persistent_without(orders, outstanding),
        older=older_without(orders, outstanding),
    )
