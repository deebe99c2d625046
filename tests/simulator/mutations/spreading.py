"""Rules by which copies are spread over racks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulator.mutations.mutation import Mutation
from simulator.settings import Settings
from surefoot.protocol.checkpoints import placement

RACKS = Settings(nodes=6, workers=6, least_workers=1, steps=40, interval=1, step_seconds=0.2, replicas=2, persistent_interval=None,
                 faults=1, fault_span_seconds=6.0, memory_server_timeout_seconds=2.0, racks=3, kinds=("rack dies",))  # fmt: skip


def _in_order(domains: Iterable[str], replicas: int, topology: Any) -> list[tuple[str, ...]]:
    """Neighbours by name hold each other's copies."""
    ordered = sorted(domains)
    return [tuple(ordered[at : at + replicas]) for at in range(0, len(ordered), replicas)]


SPREADING = (
    Mutation(
        "neighbours by name hold each other's copies",
        patches=((placement, "replica_groups", _in_order),),
        settings=RACKS,
    ),
)
