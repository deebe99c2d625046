"""Agrees with all agents on a barrier, the step at which all ranks save and wait for a planned change.

Pure. The plan proposes a step. The barrier becomes bound once every member has accepted it, and is cancelled as soon as
one rejects it, so no rank waits at a step that another has already passed. Not durable: a new coordinator knows no
barrier, and sends a cancellation to every member that was already training when it connected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import Barrier, BarrierReply
from surefoot_operator.job_snapshot import ObservedBarrier


def update_barrier(
    barrier: ObservedBarrier | None, proposal: Barrier, members: Iterable[WorkerId], now: float
) -> ObservedBarrier | None:
    """Proposes the plan's barrier to every member, or cancels the present one.

    A plan cannot bind a barrier: only the last member's acceptance does.
    """
    if proposal.phase == "cancelled":
        if barrier is None or barrier.barrier.generation != proposal.generation:
            return barrier
        return _cancel_barrier(barrier)
    is_proposed_already = (
        barrier is not None
        and (barrier.barrier.generation, barrier.barrier.step) == (proposal.generation, proposal.step)
        and barrier.barrier.phase != "cancelled"
    )
    if is_proposed_already or proposal.phase == "bound":
        return barrier
    return ObservedBarrier(proposal, now, frozenset(members))


def apply_barrier_reply(
    barrier: ObservedBarrier | None, worker: WorkerId, reply: BarrierReply
) -> ObservedBarrier | None:
    """Applies an agent's reply to the proposal; a reply to an earlier proposal is ignored."""
    if barrier is None or barrier.barrier != Barrier(reply.generation, reply.step, "proposed"):
        return barrier
    if not reply.accepted:
        return _cancel_barrier(barrier)
    workers_to_answer = barrier.unanswered_by - {worker}
    sent = barrier.barrier if workers_to_answer else replace(barrier.barrier, phase="bound")
    return replace(barrier, barrier=sent, unanswered_by=workers_to_answer)


def desired_barrier(barrier: ObservedBarrier | None, generation: int, is_adopted: bool) -> Barrier | None:
    """Returns the barrier message that a member must have received; None: none.

    Args:
        barrier: The newest barrier.
        generation: The committed generation.
        is_adopted: Whether the member's trainers ran this generation when its agent connected. It may then wait at a
            barrier that an earlier coordinator proposed.
    """
    if barrier is not None and barrier.barrier.generation == generation:
        return barrier.barrier
    return Barrier(generation, 0, "cancelled") if is_adopted else None


def _cancel_barrier(barrier: ObservedBarrier) -> ObservedBarrier:
    return replace(barrier, barrier=replace(barrier.barrier, phase="cancelled"), unanswered_by=frozenset())
