"""What a mutation is, how it is put into a run for the time of a `with` block, and the runs that show it soonest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from simulator import announced, damage, hindrances, lasting, rollout, spoiling
from simulator.faults import KINDS
from simulator.rules import ALL, Rules
from simulator.scopes import Scope
from simulator.settings import Settings
from simulator.world import REAL, Decisions
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.planning import plan


@dataclass(frozen=True, slots=True)
class Mutation:
    """One broken rule. Some seed must show a violation, or the search of `scope` must, unless the rule is redundant."""

    name: str
    rules: Rules = ALL
    decisions: Decisions = REAL
    patches: tuple[tuple[Any, str, Any], ...] = ()
    settings: Settings = field(default_factory=lambda: ROUGH)
    scope: Scope | None = None
    redundant: str = ""
    """Why nothing can come of it: what else keeps the same promise."""


MACHINES = tuple(
    kind
    for kind, (weight, _) in KINDS.items()
    if weight
    and "pods" not in kind
    and (kind == "chunk is damaged" or kind not in damage.KINDS)
    and kind not in {**hindrances.KINDS, **lasting.KINDS, **announced.KINDS, **rollout.KINDS, **spoiling.KINDS}
)
"""What hurts machines: pods that the API refuses for minutes leave too little for an old world to do."""

ROUGH = Settings(nodes=3, workers=3, steps=24, interval=1, step_seconds=0.2, faults=8, fault_span_seconds=8.0, kinds=MACHINES,
                 persistent_interval=None, memory_server_timeout_seconds=2.0)  # fmt: skip
RIVALS = replace(
    ROUGH, kinds=("operator freezes, another leads", "node dies"), faults=12, fault_span_seconds=12.0, steps=60
)
TIED = replace(ROUGH, tied=True)
REFUSING = replace(ROUGH, refused=0.1)
SELDOM = replace(ROUGH, interval=2, refused=0.4)
PROMOTING = replace(ROUGH, persistent_interval=2)
WITHOUT_PODS = replace(ROUGH, kinds=("node dies", "pods are refused"), steps=60, nodes=4)
FRAGILE = replace(ROUGH, steps=12, persistent_interval=12, replicas=1, fault_span_seconds=6.0, faults=5,
                  kinds=("holder restarts", "agent dies", "persistent tier is away"))  # fmt: skip
ENDING = replace(ROUGH, steps=12, persistent_interval=8, fault_span_seconds=6.0, faults=10)
LAST = replace(ROUGH, nodes=2, workers=2, local_ranks=2, steps=12, interval=4, faults=5, fault_span_seconds=4.0,
               kinds=("operator loses nodes", "holder restarts"))  # fmt: skip
PARTED = replace(ROUGH, steps=40, fault_span_seconds=10.0, kinds=("operator loses nodes", "two nodes lose each other",
                 "node freezes", "holder freezes", "trainer dies", "agent dies"))  # fmt: skip
SERVED = replace(PARTED, servers=2, local_ranks=2, replicas=1, kinds=("holder freezes", "operator loses holders",
                 "trainer dies", "agent dies"))  # fmt: skip
DYING_TRAINERS = replace(ROUGH, kinds=("trainer dies",), faults=6, interval=1)
LEFT = replace(ROUGH, nodes=4, workers=3, least_workers=2, steps=60, faults=6, fault_span_seconds=12.0,
               kinds=("node is to be left", "pod is deleted", "trainer dies", "operator dies"))  # fmt: skip
PAIRS = replace(LEFT, local_ranks=2, unwilling=0.2)
CHURNED = replace(PROMOTING, nodes=4, replicas=1, keep=3, persistent_interval=1, steps=40, faults=12, fault_span_seconds=12.0,
                  kinds=("holder restarts", "node dies", "trainer dies", "agent dies", "persistent tier is away",
                         "pod is deleted"))  # fmt: skip
STRAYING = replace(ROUGH, replicas=1, steps=40, faults=14, fault_span_seconds=10.0,
                   kinds=("holder freezes", "node freezes", "node is cut off", "agent dies"))  # fmt: skip
UNGIVING = replace(PROMOTING, nodes=3, workers=2, replicas=1, persistent_interval=1, steps=60, faults=14, fault_span_seconds=16.0,
                   kinds=("node dies", "objects fail", "objects fail", "objects fail"))  # fmt: skip
UPLOADING = replace(UNGIVING, kinds=("node dies", "uploads are slow", "uploads are slow", "uploads are slow"))
FORMER = replace(ROUGH, steps=60, faults=6, fault_span_seconds=12.0, kinds=("former leader answers",))
COLD = replace(
    ROUGH, steps=60, faults=10, fault_span_seconds=12.0, kinds=("warm process ends at a commit", "trainer dies")
)
OUTLIVED = replace(ROUGH, steps=12, faults=5, fault_span_seconds=4.0, kinds=("operator dies",))
UNHEARD = replace(
    ROUGH,
    steps=60,
    faults=6,
    fault_span_seconds=10.0,
    kinds=("operator loses nodes", "operator and nodes hear one way"),
)
BROKEN = replace(ROUGH, steps=60, faults=6, fault_span_seconds=10.0, kinds=("line breaks for long",))
UNSEEN = replace(
    ROUGH, steps=60, faults=8, fault_span_seconds=10.0, kinds=("operator loses a holder for long", "trainer dies")
)


@contextmanager
def broken(mutation: Mutation) -> Iterator[None]:
    """The mutation's patches, in place until the block ends."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in mutation.patches]
    try:
        for owner, name, value in mutation.patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def planning(change: Callable[[JobSnapshot], JobSnapshot]) -> Decisions:
    """The real plan, of a snapshot that was changed."""
    return Decisions(plan=lambda seen: plan.plan(change(seen)))


def constant(value: Any) -> Callable[..., Any]:
    """A decision that never looks."""
    return lambda *_, **__: value
