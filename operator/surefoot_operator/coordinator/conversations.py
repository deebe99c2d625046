"""Passes each reply of an agent to the module that made the request, and lists each agent's requests.

Pure. A reply that matches no request is ignored: it answers an earlier coordinator, or came twice.
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
    persistent_listing_after_drop,
    source_listing_after_drop,
)
from surefoot_operator.coordinator.pending_requests import (
    PendingRequests,
    describe_request,
    with_barrier,
    with_failure,
)


def apply_reply(requests: PendingRequests, worker: WorkerId, message: FromAgent, now: float) -> PendingRequests:
    """Applies an agent's reply; a reply that matches no request is ignored."""
    if isinstance(message, BarrierReply):
        return with_barrier(requests, barrier.apply_barrier_reply(requests.barrier, worker, message))
    if isinstance(message, UploadReply):
        return uploads.apply_upload_reply(requests, worker, message)
    if not isinstance(message, PersistentPage | RepairReply | DeleteReply):
        return requests
    request = requests.by_id.get(message.request)
    if request is None or request.worker != worker:
        return requests
    if isinstance(message, PersistentPage):
        return listings.apply_page(requests, request, message)
    requests = replace(requests, by_id={n: o for n, o in requests.by_id.items() if n != message.request})
    if message.error is not None:
        return with_failure(requests, f"{worker} could not {describe_request(request.message)}: {message.error}")
    if isinstance(request.message, DeletePersistent):
        return listings.confirm_deletion(requests, request.message)
    if isinstance(request.message, RepairSave):
        return uploads.confirm_repair(requests, request.message, now)
    return requests


def desired_requests(requests: PendingRequests, worker: WorkerId) -> list[ToAgent]:
    """Lists the requests that this worker's agent must have received, except a barrier."""
    upload, shutdown = requests.uploads.get(worker), requests.shutdowns.get(worker)
    return [*requests.requests_of(worker), *(message for message in (upload, shutdown) if message is not None)]


def find_workers_with_changed_requests(old: PendingRequests, new: PendingRequests) -> set[WorkerId] | None:
    """Returns the workers whose requests differ between two states; None: all workers."""
    if (old.barrier and old.barrier.barrier) != (new.barrier and new.barrier.barrier):
        return None
    workers: set[WorkerId] = set()
    if old.by_id is not new.by_id:
        workers |= {request.worker for number, request in new.by_id.items() if old.by_id.get(number) is not request}
    if old.uploads is not new.uploads:
        workers |= {worker for worker, request in new.uploads.items() if old.uploads.get(worker) != request}
    if old.shutdowns is not new.shutdowns:
        workers |= {worker for worker, request in new.shutdowns.items() if old.shutdowns.get(worker) != request}
    return workers


def request_shutdown(requests: PendingRequests, workers: Iterable[WorkerId], message: Shutdown) -> PendingRequests:
    """Requests that exactly these attempts of workers flush and exit."""
    shutdown_by_worker = {**requests.shutdowns, **dict.fromkeys(workers, message)}
    return requests if shutdown_by_worker == requests.shutdowns else replace(requests, shutdowns=shutdown_by_worker)


def drop_requests_of_other_generations(
    requests: PendingRequests, generation: int, is_committed: bool
) -> PendingRequests:
    """Drops the requests that were made for another generation than the present one.

    Args:
        requests: The requests to filter.
        generation: The present generation; 0: none.
        is_committed: Whether it is committed. A barrier is kept only in a committed generation.
    """
    kept_requests = {n: o for n, o in requests.by_id.items() if o.generation == generation}
    is_barrier_current = (
        requests.barrier is not None and requests.barrier.barrier.generation == generation and is_committed
    )
    present_barrier = requests.barrier if is_barrier_current else None
    upload_by_worker = {w: p for w, p in requests.uploads.items() if p.generation == generation}
    if (len(kept_requests), present_barrier, len(upload_by_worker)) == (
        len(requests.by_id),
        requests.barrier,
        len(requests.uploads),
    ):
        return requests
    return replace(
        requests,
        by_id=kept_requests,
        barrier=present_barrier,
        uploads=upload_by_worker,
        source_listing=source_listing_after_drop(requests, kept_requests),
    )


def drop_requests_to(requests: PendingRequests, worker: WorkerId) -> PendingRequests:
    """Drops the requests to a worker that no longer exists or whose agent restarted."""
    kept_requests = {n: o for n, o in requests.by_id.items() if o.worker != worker}
    upload_by_worker = {w: p for w, p in requests.uploads.items() if w != worker}
    if (len(kept_requests), len(upload_by_worker)) == (len(requests.by_id), len(requests.uploads)):
        return requests
    return replace(
        requests,
        by_id=kept_requests,
        uploads=upload_by_worker,
        persistent_listing=persistent_listing_after_drop(requests, kept_requests),
        source_listing=source_listing_after_drop(requests, kept_requests),
    )
