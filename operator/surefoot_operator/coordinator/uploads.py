"""Has agents copy saves: to the persistent tier (uploads), and between memory servers (repairs).

Pure. An upload is a wish that holds until it is withdrawn, a repair one numbered request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from surefoot.protocol.identities import Checkpoint, RankSave, WorkerId
from surefoot.protocol.messages import (
    RepairSave,
    UploadReply,
    UploadSave,
)
from surefoot_operator.coordinator.pending_requests import (
    PendingRequest,
    PendingRequests,
    with_failure,
)

# ---- uploads ---------------------------------------------------------------------------------------------------------

MOST_PROMOTED = 8
"""Checkpoints whose uploads are remembered; only the pinned one matters, the rest is history."""


def promote(orders: PendingRequests, shares: Mapping[WorkerId, UploadSave]) -> PendingRequests:
    """Sets what each worker uploads; a worker not named stops.

    A share that comes back after a while is of a new round. It would else be the message that the agent has had, and
    be said never again, though the upload failed meanwhile.
    """
    fresh = orders.upload_round + 1
    wanted = {
        worker: replace(share, round=old.round if (old := orders.uploads.get(worker)) is not None else fresh)
        for worker, share in shares.items()
    }
    if orders.uploads == wanted:
        return orders
    newest = max((share.round for share in wanted.values()), default=0)
    return replace(orders, uploads=wanted, upload_round=max(newest, orders.upload_round))


def desired_upload(orders: PendingRequests, worker: WorkerId) -> UploadSave | None:
    """Returns the share that this worker's agent must have received; None: it uploads nothing."""
    return orders.uploads.get(worker)


def apply_reply(orders: PendingRequests, worker: WorkerId, message: UploadReply) -> PendingRequests:
    """Records that a save was uploaded, or why it was not."""
    if message.error is not None:
        orders = _stumbled(_again(orders, worker, message.save), message.save)
        return with_failure(
            _known_unreadable(orders, message.save) if message.unreadable else orders,
            f"{worker} could not upload {message.save}: {message.error}",
        )
    checkpoint = message.save.checkpoint
    saves = orders.uploaded.get(checkpoint, frozenset()) | {message.save}
    promoted = {**orders.uploaded, checkpoint: saves}
    spent = dict(orders.upload_times.get(checkpoint, {}))
    if message.save not in orders.uploaded.get(checkpoint, frozenset()):
        spent[worker] = spent.get(worker, 0.0) + message.seconds
    times = {**orders.upload_times, checkpoint: spent}
    for oldest in sorted(promoted, key=lambda c: (c.step, c.generation))[:-MOST_PROMOTED]:
        del promoted[oldest]
        times.pop(oldest, None)
    return replace(orders, uploaded=promoted, upload_times=times)


def promotion_seconds(orders: PendingRequests, checkpoint: Checkpoint | None) -> float | None:
    """The slowest worker's seconds for a checkpoint's upload; None: not seen here."""
    spent = orders.upload_times.get(checkpoint) if checkpoint is not None else None
    return max(spent.values()) if spent else None


def _known_unreadable(orders: PendingRequests, save: RankSave) -> PendingRequests:
    found = orders.unreadable | {save}
    newest = sorted({s.checkpoint for s in found}, key=lambda c: (c.step, c.generation))[-MOST_PROMOTED:]
    return replace(orders, unreadable=frozenset(s for s in found if s.checkpoint in newest))


def _stumbled(orders: PendingRequests, save: RankSave) -> PendingRequests:
    counts = {**orders.failed_uploads, save: orders.failed_uploads.get(save, 0) + 1}
    newest = sorted({s.checkpoint for s in counts}, key=lambda c: (c.step, c.generation))[-MOST_PROMOTED:]
    return replace(orders, failed_uploads={s: n for s, n in counts.items() if s.checkpoint in newest})


def _again(orders: PendingRequests, worker: WorkerId, save: RankSave) -> PendingRequests:
    """The same wish in a new round: said again, since the agent has tried for as long as it does by itself."""
    share = orders.uploads.get(worker)
    if share is None or save not in share.saves:
        return orders
    number = orders.upload_round + 1
    promotions = {**orders.uploads, worker: replace(share, round=number)}
    return replace(orders, uploads=promotions, upload_round=number)


# ---- repairs ---------------------------------------------------------------------------------------------------------

COPIED_SECONDS = 2.0
"""Within so long after an agent has copied a save to a holder that holder's index is read anew."""


def repair(orders: PendingRequests, copies: Iterable[tuple[WorkerId, RepairSave]], now: float) -> PendingRequests:
    """Asks agents to copy rank saves that none of them copies yet.

    All of a round at once: a holder that came back empty lacks thousands, and one by one each looks through all others.
    One that was made is not asked for again before its target's index was read: each plan until then would have the same
    bytes sent once more. The requests are numbered here.
    """
    messages = (order.message for order in orders.pending.values())
    asked = {(m.save, m.target, m.generation) for m in messages if isinstance(m, RepairSave)}
    new: dict[int, PendingRequest] = {}
    for worker, copy in copies:
        made = now - orders.copied.get((copy.save, copy.target), -math.inf) < COPIED_SECONDS
        if not made and (copy.save, copy.target, copy.generation) not in asked:
            asked.add((copy.save, copy.target, copy.generation))
            number = orders.next_request + len(new)
            new[number] = PendingRequest(worker, replace(copy, request=number), copy.generation, now)
    if not new:
        return orders
    return replace(orders, next_request=orders.next_request + len(new), pending={**orders.pending, **new})


def confirm_repair(orders: PendingRequests, copy: RepairSave, now: float) -> PendingRequests:
    """Records that a save was copied to a memory server, whose index has yet to be read again."""
    lately = {copied: at for copied, at in orders.copied.items() if now - at < COPIED_SECONDS}
    return replace(orders, copied={**lately, (copy.save, copy.target): now})
