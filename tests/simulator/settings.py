"""What one seed's job looks like: sizes, intervals, replicas, tiers and the faults that it will meet."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from surefoot_operator.api.spec import (
    CheckpointPolicy,
    ElasticPolicy,
    HealthPolicy,
    MemoryTierSpec,
    NumericsPolicy,
    PersistentTierSpec,
    RunPolicy,
    Template,
    TrainingJob,
    TrainingJobSpec,
)
from surefoot_operator.api.status import Incident


@dataclass(frozen=True, slots=True)
class Settings:
    nodes: int = 3
    workers: int = 3
    least_workers: int = 1
    spares: int = 0
    local_ranks: int = 1
    steps: int = 30
    interval: int = 3
    step_seconds: float = 0.25
    step_timeout_seconds: float = 20.0
    replicas: int = 2
    keep: int = 1
    persistent_interval: int | None = 6
    adaptive: bool = False
    """The operator chooses both intervals, from seconds, and trainers follow its level; `interval` is one step."""
    memory_server_timeout_seconds: float = 10.0
    faults: int = 4
    kinds: tuple[str, ...] = ()
    """Kinds of faults to draw from; none named: all."""
    fault_span_seconds: float = 14.0
    refused: float = 0.0
    """How often a rank finds no memory to stage a save in; of 0 nothing is drawn."""
    unwilling: float = 0.0
    """How often a rank refuses a halt for a reason of its own; of 0 nothing is drawn."""
    deadline_seconds: float = 400.0
    tied: bool = False
    """The program's loader is each rank's own: only as many ranks as saved can restore."""

    good_after: int = field(default=0, repr=False)
    """Steps after which a checkpoint counts as good, of a job that heals its mathematics; 0: of one that does not."""
    pre_join_check: Literal["Disabled", "Warn", "Enforce"] = field(default="Disabled", repr=False)
    """Whether agents try their nodes before they join."""
    record: tuple[float, float] | None = field(default=None, repr=False)
    """What the job's incidents say already: how long replacements take, and a change of size. None: nothing yet."""
    paced: bool = field(default=False, repr=False)
    """Ranks are looked at whether they work or wait."""
    on_straggler: Literal["Warn", "Replace"] = field(default="Warn", repr=False)
    servers: int = field(default=1, repr=False)
    """Of each node's memory tier."""
    active_deadline_seconds: float | None = field(default=None, repr=False)
    """When the job ends though it is not complete; None: never."""
    racks: int = field(default=0, repr=False)
    """That the nodes stand in, as their labels say; 0: nobody says."""
    encoded: bool = field(default=False, repr=False)
    """Messages of agents and operator go through the project's own codec."""

    @property
    def allowed_workers(self) -> range:
        return range(self.least_workers, self.workers + 1)


def draw(rng: random.Random) -> Settings:
    """One seed's settings."""
    workers = rng.choice((2, 3, 3, 4))
    local_ranks = 2 if rng.random() < 0.15 else 1
    interval = rng.choice((1, 2, 3, 4))
    persistent = interval * rng.choice((1, 2, 3)) if rng.random() < 0.5 else None
    drawn = Settings(
        nodes=workers + rng.choice((0, 0, 1)),
        workers=workers,
        least_workers=rng.choice((1, 1, 2, workers)),
        local_ranks=local_ranks,
        steps=rng.choice((20, 30, 40)),
        interval=interval,
        step_seconds=rng.choice((0.15, 0.3, 0.5)),
        replicas=rng.choice((1, 2, 2, 2, 3)),
        keep=rng.choice((1, 1, 2)),
        persistent_interval=persistent,
        memory_server_timeout_seconds=rng.choice((2.0, 5.0, 10.0)),
        faults=rng.choice((0, 1, 2, 3, 4, 6, 8)),
    )
    drawn = replace(drawn, encoded=rng.random() < 0.25)
    # drawn apart: what a seed did before there were spares it does still, unless it has some
    spares = random.Random(str(drawn)).choice((0, 0, 0, 1, 2))
    drawn = replace(drawn, spares=spares, nodes=drawn.nodes + spares)
    drawn = replace(drawn, good_after=random.Random(f"numerics {drawn}").choice((0, 0, 2, 4)))
    rng = random.Random(f"record {drawn}")
    record = (rng.choice((0.5, 2.0, 8.0)), rng.choice((0.5, 3.0, 12.0))) if rng.random() < 0.3 else None
    check = random.Random(f"join {drawn}").choice(
        ("Disabled", "Disabled", "Disabled", "Disabled", "Disabled", "Warn", "Enforce", "Enforce")
    )
    # more ranks than servers, as many, and fewer: drawn apart, as the spares
    servers = random.Random(f"servers {drawn}").choice((1, 1, 1, 1, 1, 2, 2, 3))
    drawn = replace(drawn, pre_join_check=check, servers=servers)
    return replace(drawn, record=record, fault_span_seconds=max(6.0, drawn.steps * drawn.step_seconds * 1.3))


def incidents(settings: Settings) -> tuple[Incident, ...]:
    """Two losses that were replaced, and the changes of size behind them, long before the simulation begins."""
    if settings.record is None:
        return ()
    arrival, change = settings.record
    found: list[Incident] = []
    for at in (-2000.0, -1000.0):
        loss = Incident(
            "node-lost", "long ago", None, None, 0, at, claimed_seconds=at, fenced_seconds=at, committed_seconds=at
        )
        found.append(replace(loss, first_step_seconds=at + change, replaced_seconds=at + arrival))
        grown = replace(
            loss, kind="planned", claimed_seconds=at + 100.0, fenced_seconds=at + 100.0, committed_seconds=at + 100.0
        )
        found.append(replace(grown, detected_seconds=at + 100.0, first_step_seconds=at + 100.0 + change))
    return tuple(found)


def _numerics(settings: Settings) -> NumericsPolicy | None:
    """Any number of rollbacks: how many faults meet in one seed is nobody's fault."""
    if not settings.good_after:
        return None
    return NumericsPolicy(on_spike="Rollback", spike_steps=2, good_after_steps=settings.good_after, max_rollbacks=50)


def job(settings: Settings) -> TrainingJob:
    """The TrainingJob that such a person would have written."""
    persistent, seconds = settings.persistent_interval, 4 * settings.step_seconds
    memory = MemoryTierSpec(interval_steps=settings.interval, replicas=settings.replicas, keep=settings.keep)
    tier = PersistentTierSpec(uri="file:///tier", interval_steps=persistent, keep=2) if persistent else None
    if settings.adaptive:
        memory = replace(memory, interval_steps=None, interval_seconds=seconds)
        tier = replace(tier, interval_steps=None, interval_seconds=2 * seconds) if tier is not None else None
    return TrainingJob(
        name="job",
        namespace="default",
        uid="job",
        metadata_generation=1,
        spec=TrainingJobSpec(
            template=Template(command=("python", "train.py")),
            replicas=settings.workers,
            nproc_per_node=settings.local_ranks,
            spares=settings.spares,
            elastic_policy=ElasticPolicy(min_replicas=settings.least_workers, max_replicas=settings.workers),
            run_policy=RunPolicy(
                backoff_limit=50,
                startup_deadline_seconds=40.0,
                active_deadline_seconds=settings.active_deadline_seconds,
            ),
            health_policy=HealthPolicy(
                step_timeout_seconds=settings.step_timeout_seconds,
                numerics=_numerics(settings),
                pre_join_check=settings.pre_join_check,
                on_straggler=settings.on_straggler,
            ),
            checkpoint=CheckpointPolicy(
                memory=memory,
                persistent=tier,
                flush_grace_seconds=1.0,
                memory_server_timeout_seconds=settings.memory_server_timeout_seconds,
                on_total_loss="Fail",
            ),
        ),
    )
