"""Defines everything a report page says.

Pure values, gathered by `report_data` and laid out by `page`. None is what is not known: a cluster keeps no ledger of steps, a
job that has just begun no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot_operator.api.status import DataRead, Interval
from surefoot_operator.cli.local.ledger import Account
from surefoot_operator.cli.local.progress import Happened
from surefoot_operator.cli.local.run_report import Checkpoints, Comparison
from surefoot_operator.cli.report.curves import Point


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """One epoch: its ranks and the step that it began from."""

    epoch: int
    ranks: int
    from_step: int
    restored_from: str | None = None


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """The end of one phase of a recovery.

    Seconds count from the recovery's beginning.
    """

    name: str
    at_seconds: float
    said: str


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """One incident with its phases, the figures of `surefoot timeline`."""

    number: int
    kind: str
    reason: str
    at_seconds: float
    """Unix seconds of its beginning: the injected fault, else the first sign."""
    last_step: int
    epoch: int
    phases: tuple[PhaseFacts, ...]
    steps_lost: int | None = None
    restored_from: str | None = None
    world_before: int = 0
    world_after: int | None = None
    node: str | None = None
    worker: int | None = None
    rank: int | None = None
    fault: str | None = None
    detail: str = ""

    @property
    def planned(self) -> bool:
        return self.kind == "planned"

    @property
    def took_seconds(self) -> float | None:
        """Until the first new step; None while it goes on."""
        return next((one.at_seconds for one in self.phases if one.name == "first_step"), None)


@dataclass(frozen=True, slots=True)
class LossFacts:
    """The loss by step: what counts, what was run again, and undisturbed."""

    kept: tuple[Point, ...] = ()
    discarded: tuple[tuple[Point, ...], ...] = ()
    """Of each epoch the steps that a later one ran again."""
    undisturbed: tuple[Point, ...] = ()
    not_finite: int = 0
    """Steps whose loss was no number."""


@dataclass(frozen=True, slots=True)
class StallFacts:
    """How long saves stopped the training.

    Of each saved step its slowest rank counts.
    """

    by_step: tuple[Point, ...] = ()
    median_seconds: float | None = None
    p95_seconds: float | None = None
    most_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's attempt: where it ran, and what it trained."""

    worker: str
    """`INDEX-ATTEMPT`."""
    node: str
    state: str
    ranks: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node as it stood when the page was made."""

    name: str
    state: str
    holder: str


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """Everything on one page."""

    job: str
    uid: str
    source: str
    made_seconds: float
    outcome: str
    message: str = ""
    start_seconds: float | None = None
    end_seconds: float | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: LossFacts | None = None
    """None: no ledger of steps can be read."""
    epochs: tuple[EpochFacts, ...] = ()
    incidents: tuple[IncidentFacts, ...] = ()
    data: DataRead | None = None
    """As the loader told; None: it tells nothing."""
    account: Account | None = None
    comparison: Comparison | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """By category, the operator's own account; empty: it did not count yet."""
    goodput: float | None = None
    stalls: StallFacts = field(default_factory=StallFacts)
    checkpoints: Checkpoints | None = None
    newest_checkpoint: str = ""
    persistent_step: int | None = None
    stored: str = ""
    """What each tier has, with its bytes."""
    memory_interval: Interval | None = None
    persistent_interval: Interval | None = None
    placements: tuple[Placement, ...] = ()
    nodes: tuple[NodeFacts, ...] = ()
    events: tuple[Happened, ...] = ()
    unread: tuple[str, ...] = ()
