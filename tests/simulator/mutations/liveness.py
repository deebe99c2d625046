"""What keeps a job going though something refuses, delays or lies: each mend switched off again, and what keeps house beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from simulator import calls, caretakers, trainers
from simulator.engine import Engine, Process
from simulator.mutations.mutation import ROUGH, UNSEEN, WITHOUT_PODS, Mutation, constant
from simulator.rules import ALL
from surefoot.agent import state_machine as agent_life
from surefoot.flush import state_machine
from surefoot.protocol.checkpoints.completeness import find_watermark
from surefoot.protocol.identities import MemoryServerEndpoint, WorkerId
from surefoot.protocol.messages import UploadSave
from surefoot_operator.coordinator import listings, uploads
from surefoot_operator.coordinator.pending_requests import PendingRequests
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.policy.failure import failure_detection as failures
from surefoot_operator.policy.failure import memory_server_liveness as sight
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers
from surefoot_operator.policy.membership import claim, final_checkpoint, restore_point, workers
from surefoot_operator.policy.membership import restore_decisions as choices
from surefoot_operator.policy.membership.expected_cost import CostDecision

_spend, _node_lost = Engine.spend, workers.is_node_lost

SLOW_LISTINGS = replace(ROUGH, persistent_interval=2, steps=40, faults=8, kinds=("listings are slow", "trainer dies"))
LOST_LISTINGS = replace(ROUGH, persistent_interval=2, steps=40, replicas=1, faults=12, nodes=2, workers=2,
                        kinds=("listings are slow", "holder restarts", "trainer dies"))  # fmt: skip
AWAY = replace(ROUGH, nodes=4, steps=60, faults=8, kinds=("API is away", "trainer dies", "agent dies"))
UNSEEING = replace(ROUGH, nodes=2, workers=2, steps=100, faults=6, kinds=("operator loses holders",))
UNSEEING_AND_ODD = replace(
    UNSEEING, replicas=1, good_after=2, kinds=("operator loses holders", "model becomes no number")
)
BEREFT = replace(ROUGH, workers=2, least_workers=1, steps=40, replicas=1, interval=2, persistent_interval=2, faults=12, fault_span_seconds=12.0,
                 kinds=("node dies", "node dies", "record is gone"))  # fmt: skip
BLIND = replace(ROUGH, steps=60, faults=8, kinds=("operator loses holders", "trainer dies"))
BLIND_AT_THE_END = replace(ROUGH, nodes=3, workers=3, least_workers=3, steps=24, replicas=1, persistent_interval=2, faults=8,
                           fault_span_seconds=5.0, kinds=("operator loses a holder for long",))  # fmt: skip
ALONE = replace(ROUGH, steps=120, faults=6, fault_span_seconds=20.0, kinds=("operator dies", "holder restarts"))
LAST_LOST = replace(ROUGH, steps=12, replicas=1, persistent_interval=2, faults=8, fault_span_seconds=6.0,
                    kinds=("holder restarts", "holder ends in a call"))  # fmt: skip
LAST_UPLOADS = replace(ROUGH, nodes=5, least_workers=3, replicas=1, persistent_interval=4, interval=4, steps=12, step_seconds=0.5,
                       faults=4, fault_span_seconds=10.0, kinds=("node is cut off",))  # fmt: skip
NEW_LEADERS = replace(ROUGH, nodes=4, steps=60, fault_span_seconds=12.0,
                      kinds=("operator dies", "operator freezes, another leads", "lines are cut"))  # fmt: skip
FIXED = replace(ROUGH, least_workers=3, nodes=4, steps=60, kinds=("pods are refused", "node dies"))


def _slow_plans(engine: Engine, process: Process, seconds: float) -> None:
    """A plan computes for seconds, on the loop."""
    _spend(engine, process, seconds * 4000)


def _doubted(facts: Facts, name: str | None) -> bool:
    """A node that the cluster calls silent is lost, whoever is heard there."""
    node = facts.nodes.get(name or "")
    return _node_lost(facts, name) or (node is not None and bool(node.unconfirmed_failure))


def _the_same_again(orders: PendingRequests, shares: Mapping[WorkerId, UploadSave]) -> PendingRequests:
    """A share that comes back is the message that the agent has had."""
    wanted = {worker: replace(share, round=0) for worker, share in shares.items()}
    return orders if orders.uploads == wanted else replace(orders, uploads=wanted)


def _at_once(facts: Facts) -> float:
    """Whoever has not come when a leader begins is lost."""
    return facts.snapshot.term_seconds


def _of_one(reading: Any, lineage: Any, epoch: int, bad: Any, covers: Any, domains: Any, replicas: int) -> Any:
    """An agent without a leader takes one copy for enough."""
    return find_watermark(reading, lineage, epoch, bad, covers, domains, 1)


def _for_ever(facts: Facts, ready: int, tied: int | None = None) -> CostDecision:
    """Whoever is missing is waited for, come who may."""
    return CostDecision(facts.membership.changed_seconds + 1e9)


def _answering(
    holders: Sequence[ObservedMemoryServer], named: Sequence[MemoryServerEndpoint], epoch: int
) -> UsableMemoryServers:
    """Holders that the operator does not see are taken from the agents that do."""
    return UsableMemoryServers(tuple(h.endpoint for h in holders if h.state == "Ready" and (h.fence or 0) >= epoch))


LIVENESS = (
    Mutation("a replacement is waited for without limit", patches=((claim, "wait_or_shrink", _for_ever),),
             settings=WITHOUT_PODS),
    Mutation("a listing that does not decide is waited for without limit",
             patches=((restore_point, "MIN_LISTING_WAIT_SECONDS", 1e9), (restore_point, "MAX_LISTING_WAIT_SECONDS", 1e9)),
             settings=SLOW_LISTINGS),
    Mutation("a listing that takes long is given up and begun again",
             patches=((choices, "LISTING_SECONDS", 10.0), (listings, "MAX_SIMULTANEOUS_LISTINGS", 0)), settings=LOST_LISTINGS),
    Mutation("what silent holders may have is waited for without limit",
             patches=((restore_point, "_wait_budget_seconds", constant(1e9)),), settings=UNSEEN),
    Mutation("lost sight is lost data", patches=((restore_point, "describe_why_alive", constant("")),), settings=BLIND),
    Mutation("a last checkpoint that is out of the operator's sight is trained again",
             patches=((final_checkpoint, "_describe_unreachable_parts", constant("")),), settings=BLIND_AT_THE_END),
    Mutation("holders out of the operator's sight are taken from agents", patches=((sight, "usable_servers", _answering),),
             settings=UNSEEING),
    Mutation("an older epoch's saves keep their slots", patches=((state_machine, "GenerationStarted", lambda _: state_machine.Tick(0.0)),),
             settings=UNSEEING_AND_ODD),
    Mutation("a last step that was lost is not trained again",  # by programs whose patience for a slot is over
             patches=((final_checkpoint, "_find_lost_save", constant(None)), (trainers, "HOLD_SLOT_SECONDS", 0.0)), settings=LAST_LOST),
    Mutation("a hang is never noticed",
             patches=((failures, "detect_hang", constant(None)), (agent_life, "_apply_tick", lambda life, at: (life, ()))),
             settings=replace(ROUGH, kinds=("trainer hangs",))),
    Mutation("what was refused is not asked for again", patches=((calls, "REFUSED_SECONDS", 1e9),), settings=FIXED),
    Mutation("an upload that was not wanted for a while is not asked for again",
             patches=((uploads, "set_uploads", _the_same_again),), settings=LAST_UPLOADS),
    Mutation("who has not come to a new leader is lost at once", patches=((failures, "absent_member_deadline", _at_once),),
             settings=NEW_LEADERS),
    Mutation("a plan blocks the loop for seconds", patches=((Engine, "spend", _slow_plans),), settings=ROUGH),
    Mutation("a node that the cluster doubts is lost", patches=((workers, "is_node_lost", _doubted), (failures, "is_node_lost", _doubted)),
             settings=AWAY),
    Mutation("where what was stored last is gone, nothing older is restored",
             patches=((restore_point, "_older_than_last_uploaded", constant(None)),), settings=BEREFT),
    Mutation("the janitor does not look for the entry", replace(ALL, sweep_by_index=False)),
    Mutation("an agent without a leader takes one copy for enough", patches=((caretakers, "find_watermark", _of_one),), settings=ALONE),
)  # fmt: skip
