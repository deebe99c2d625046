"""What agents read of holders that the operator does not reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.mutations.mutation import ROUGH, Mutation, constant
from simulator.rules import ALL
from surefoot_operator.coordinator import listings, probes
from surefoot_operator.policy.failure import memory_server_liveness
from surefoot_operator.policy.membership import final_checkpoint

CUT_OFF = replace(ROUGH, nodes=4, workers=3, least_workers=2, steps=60, replicas=1, fault_span_seconds=12.0,
                  kinds=("operator loses a holder for long", "operator dies", "trainer dies", "agent dies"))  # fmt: skip

BLIND_AT_THE_END = replace(ROUGH, nodes=3, workers=3, least_workers=3, steps=24, replicas=1, persistent_interval=2, faults=8,
                           fault_span_seconds=5.0, kinds=("operator loses a holder for long",))  # fmt: skip


def _unread(sights: Any, *_: Any) -> Any:
    """What an agent read is of no use to the operator."""
    return sights


def _untold(usable: Any, *_: Any) -> Any:
    """Agents hear of the holders alone that they may write to."""
    return usable


PROXYING = (
    Mutation("what an agent read for the operator is ignored", patches=((probes, "record_index", _unread),), settings=CUT_OFF),
    Mutation("ranks are not told of a holder that an agent read for the operator",
             patches=((memory_server_liveness, "with_proxied", _untold),), settings=CUT_OFF),
    Mutation("a listing from before an agent read a holder counts",
             patches=((listings, "_is_past", constant(False)), (probes, "void_listing", _unread)),
             settings=replace(CUT_OFF, persistent_interval=2)),
    Mutation("an agent reads a holder for the operator and does not seal it", replace(ALL, seal_by_proxy=False),
             settings=replace(CUT_OFF, replicas=2, faults=10, kinds=("operator loses nodes",))),
    Mutation("a last checkpoint that is out of the operator's sight is trained again",
             patches=((final_checkpoint, "_hidden", constant("")),), settings=BLIND_AT_THE_END),
)  # fmt: skip
