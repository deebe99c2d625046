"""Has agents copy saves: to the persistent tier (uploads), and between memory servers (repairs).

Pure. An upload is a wish that holds until it is withdrawn, a repair one numbered request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from surefoot.protocol.identities import Checkpoint, RankSave, WorkerId
from surefoot.protocol.messages import (
    Persisted,
    PromoteSave,
    RepairSave,
)
from surefoot_operator.coordinator.pending_requests import (
    PendingRequests,
    Request,
    with_failure,
)

# ---- uploads ---------------------------------------------------------------------------------------------------------

MOST_PROMOTED = 8
"""Checkpoints whose uploads are remembered; only the pinned one matters, the rest is history."""


def promote(orders: PendingRequests, shares: Mapping[WorkerId, PromoteSave]) -> PendingRequests:
    """Sets what each worker uploads; a worker not named stops.

    A share that comes back after a while is of a new round. It would else be the message that the agent has had, and
    be said never again, though the upload failed meanwhile.
    """
    fresh = orders.promotion_round + 1
    wanted = {
        worker: replace(share, round=old.round if (old := orders.promotions.get(worker)) is not None else fresh)
        for worker, share in shares.items()
    }
    if orders.promotions == wanted:
        return orders
    newest = max((share.round for share in wanted.values()), default=0)
    return replace(orders, promotions=wanted, promotion_round=max(newest, orders.promotion_round))


def apply_reply(orders: PendingRequests, worker: WorkerId, message: Persisted) -> PendingRequests:
    """Records that a save was uploaded, or why it was not."""
    if message.error is not None:
        orders = _stumbled(_again(orders, worker, message.save), message.save)
        return with_failure(
            _known_unreadable(orders, message.save) if message.unreadable else orders,
            f"{worker} could not upload {message.save}: {message.error}",
        )
    checkpoint = message.save.checkpoint
    saves = orders.promoted.get(checkpoint, frozenset()) | {message.save}
    promoted = {**orders.promoted, checkpoint: saves}
    spent = dict(orders.promotion_times.get(checkpoint, {}))
    if message.save not in orders.promoted.get(checkpoint, frozenset()):
        spent[worker] = spent.get(worker, 0.0) + message.seconds
    times = {**orders.promotion_times, checkpoint: spent}
    newest = _newest_checkpoints(promoted)
    return replace(
        orders,
        promoted={c: saves for c, saves in promoted.items() if c in newest},
        promotion_times={c: seconds for c, seconds in times.items() if c in newest},
    )


def promotion_seconds(orders: PendingRequests, checkpoint: Checkpoint | None) -> float | None:
    """The slowest worker's seconds for a checkpoint's upload; None: not seen here."""
    spent = orders.promotion_times.get(checkpoint) if checkpoint is not None else None
    return max(spent.values()) if spent else None


def _newest_checkpoints(checkpoints: Iterable[Checkpoint]) -> frozenset[Checkpoint]:
    """Returns those of which uploads are remembered."""
    return frozenset(sorted(set(checkpoints), key=lambda c: (c.step, c.epoch))[-MOST_PROMOTED:])


def _known_unreadable(orders: PendingRequests, save: RankSave) -> PendingRequests:
    unreadable = orders.unreadable | {save}
    newest = _newest_checkpoints(s.checkpoint for s in unreadable)
    return replace(orders, unreadable=frozenset(s for s in unreadable if s.checkpoint in newest))


def _stumbled(orders: PendingRequests, save: RankSave) -> PendingRequests:
    counts = {**orders.stumbled, save: orders.stumbled.get(save, 0) + 1}
    newest = _newest_checkpoints(s.checkpoint for s in counts)
    return replace(orders, stumbled={s: n for s, n in counts.items() if s.checkpoint in newest})


def _again(orders: PendingRequests, worker: WorkerId, save: RankSave) -> PendingRequests:
    """The same wish in a new round: said again, since the agent has tried for as long as it does by itself."""
    share = orders.promotions.get(worker)
    if share is None or save not in share.saves:
        return orders
    number = orders.promotion_round + 1
    promotions = {**orders.promotions, worker: replace(share, round=number)}
    return replace(orders, promotions=promotions, promotion_round=number)


# ---- repairs ---------------------------------------------------------------------------------------------------------

COPIED_SECONDS = 2.0
"""Within so long after an agent has copied a save to a holder that holder's index is read anew."""


def repair(orders: PendingRequests, copies: Iterable[tuple[WorkerId, RepairSave]], now: float) -> PendingRequests:
    """Asks agents to copy rank saves that none of them copies yet.

    All of a round at once: a holder that came back empty lacks thousands, and one by one each looks through all others.
    One that was made is not asked for again before its target's index was read: each plan until then would have the same
    bytes sent once more. The requests are numbered here.
    """
    messages = (order.message for order in orders.outstanding.values())
    asked = {(m.save, m.target, m.epoch) for m in messages if isinstance(m, RepairSave)}
    new: dict[int, Request] = {}
    for worker, copy in copies:
        made = now - orders.copied.get((copy.save, copy.target), -math.inf) < COPIED_SECONDS
        if not made and (copy.save, copy.target, copy.epoch) not in asked:
            asked.add((copy.save, copy.target, copy.epoch))
            number = orders.next_request + len(new)
            new[number] = Request(worker, replace(copy, request=number), copy.epoch, now)
    if not new:
        return orders
    return replace(orders, next_request=orders.next_request + len(new), outstanding={**orders.outstanding, **new})


def confirm_repair(orders: PendingRequests, copy: RepairSave, now: float) -> PendingRequests:
    """Records that a save was copied to a memory server, whose index has yet to be read again."""
    lately = {copied: at for copied, at in orders.copied.items() if now - at < COPIED_SECONDS}
    return replace(orders, copied={**lately, (copy.save, copy.target): now})
