"""Agrees with all agents on a barrier: the plan's wish, the agents' replies, and what they are to receive.

Pure. A barrier is bound once every member has accepted it, and cancelled once one has not. Soft state: a new coordinator
knows of no barrier, and cancels those that agents tell it of by running without one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import Barrier, BarrierReply
from surefoot_operator.job_snapshot import ObservedBarrier


def update_barrier(
    barrier: ObservedBarrier | None, wanted: Barrier, members: Iterable[WorkerId], now: float
) -> ObservedBarrier | None:
    """Proposes a barrier to every member, or cancels the present one.

    A plan cannot bind: no barrier is bound before every agent has accepted it.
    """
    if wanted.phase == "cancelled":
        if barrier is None or barrier.sent.generation != wanted.generation:
            return barrier
        return _cancelled(barrier)
    is_known = (
        barrier is not None
        and (barrier.sent.generation, barrier.sent.step) == (wanted.generation, wanted.step)
        and barrier.sent.phase != "cancelled"
    )
    if is_known or wanted.phase == "bound":
        return barrier
    return ObservedBarrier(wanted, now, frozenset(members))


def apply_reply(barrier: ObservedBarrier | None, worker: WorkerId, reply: BarrierReply) -> ObservedBarrier | None:
    """Applies an agent's reply; one to an earlier proposal is ignored."""
    if barrier is None or barrier.sent != Barrier(reply.generation, reply.step, "proposed"):
        return barrier
    if not reply.accepted:
        return _cancelled(barrier)
    unanswered = barrier.unanswered_by - {worker}
    sent = barrier.sent if unanswered else replace(barrier.sent, phase="bound")
    return replace(barrier, sent=sent, unanswered_by=unanswered)


def desired_barrier(barrier: ObservedBarrier | None, generation: int, is_adopted: bool) -> Barrier | None:
    """Returns what a member must have received; None: nothing.

    `is_adopted`: its trainers ran this generation when its agent connected, so it may know of a barrier that was
    proposed by an earlier coordinator.
    """
    if barrier is not None and barrier.sent.generation == generation:
        return barrier.sent
    return Barrier(generation, 0, "cancelled") if is_adopted else None


def _cancelled(barrier: ObservedBarrier) -> ObservedBarrier:
    return replace(barrier, sent=replace(barrier.sent, phase="cancelled"), unanswered_by=frozenset())
