"""Defines the agent's state as frozen values.

Pure. `state_machine.transition` alone changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from surefoot.agent.looks import Look
from surefoot.ipc.trainer_messages import HoldAt
from surefoot.protocol.checkpoints.sources import joined
from surefoot.protocol.messages import Assign, Exited, FromAgent
from surefoot.protocol.progress import NOTHING_TOLD, Progress, of_worker

_STAND_SECONDS, _STAND_STEPS = 5.0, 5
"""Trainers without a step for so long, and for so many steps' time, stand still. A killed peer is known long before."""
_START_SECONDS = 60.0
"""The same before the first step, which may have much to compile."""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One local trainer of the started epoch."""

    local: int
    rank: int
    alive: bool = True
    code: int | None = None
    attached: bool = False
    closed: bool = False
    progress: Progress = NOTHING_TOLD
    """What it told with its last step."""
    source: str | None = None
    held: int | None = None
    accepted: bool | None = None
    """Its answer to the hold that is being asked for."""
    paused: str = ""
    """Why no step is to be expected of it; empty: one is."""
    pause_seconds: float | None = None
    """How long that may take; None: as long as a step."""

    @property
    def step(self) -> int:
        return self.progress.step


@dataclass(frozen=True, slots=True)
class Departure:
    """Until when a departing worker's trainers go on.

    Until `word_by` for the announcement of a halt; from then on until `part_by`.
    """

    word_by: float
    part_by: float


@dataclass(frozen=True, slots=True)
class AgentState:
    """Everything an agent knows that its decisions depend on."""

    step_timeout_seconds: float = 600.0
    warm: bool = False
    claimed: int = 0
    """Newest epoch heard of."""
    stopped: int = 0
    """Every trainer of epochs below this is reaped."""
    assign: Assign | None = None
    started: int = 0
    """Newest epoch whose trainers were started: once each."""
    ranks: tuple[LocalRank, ...] = ()
    killing: bool = False
    store: str | None = None
    store_epoch: int = 0
    """Newest epoch whose store was asked for here."""
    hold: HoldAt | None = None
    level: int = 0
    progress_at: float | None = None
    """When the last step finished; None before the epoch's first."""
    ticked_at: float = 0.0
    begun_at: float | None = None
    """First tick of the started epoch's trainers."""
    exit_report: Exited | None = None
    """What is said of the trainers once their stacks are taken, and before they are killed."""
    stacks: str | None = None
    """Where the trainers stood when half of the step timeout was over, for people; None: nobody asked since the last step."""
    gaps: tuple[float, ...] = ()
    """Recent steps of the started epoch, in seconds."""
    looks: int = 0
    """How often was looked where the trainers stand since the last step."""
    look: Look | None = None
    """What was seen last; None: nothing since the last step."""
    facts: tuple[FromAgent, ...] = field(default=())
    flushing: bool = False
    flushed: bool = False
    seeking: frozenset[int] = frozenset()
    """Local ranks that wait to be told of every holder."""
    leaving: int | None = None
    """Exit code, once this worker is to end."""
    departure: Departure | None = None
    """While it is to end and its trainers go on, for the world to be left in order."""
    gone: bool = False

    @property
    def alive(self) -> bool:
        return any(r.alive for r in self.ranks)

    @property
    def trains(self) -> bool:
        """Whether trainers here go on with steps, which copies may disturb."""
        stays = self.leaving is None and self.departure is None and self.hold is None
        return stays and self.started == self.claimed and any(r.alive and not r.closed for r in self.ranks)

    @property
    def running(self) -> int:
        """The epoch running or finished here; 0: stopped for a newer one."""
        return self.started if self.alive or self.started == self.claimed else 0

    @property
    def step(self) -> int:
        """Last step that every local rank has finished in the started epoch."""
        return min((r.step for r in self.ranks), default=0)

    @property
    def progress(self) -> Progress:
        """Merges all local ranks' progress in the started epoch."""
        told = of_worker([r.progress for r in self.ranks])
        ended = tuple(r.rank for r in self.ranks if r.code == 0)
        return replace(
            told,
            restored=self.restored,
            restored_from=self.restored_from,
            ended=ended,
            paused=self.paused,
            pause_seconds=self.pause_seconds,
        )

    @property
    def paused(self) -> str:
        """Why a local rank announced a pause; empty: none did."""
        return next((r.paused for r in self.ranks if r.paused), "")

    @property
    def pause_seconds(self) -> float | None:
        """How long the longest announced pause may take; None: as a step."""
        return max((r.pause_seconds for r in self.ranks if r.pause_seconds is not None), default=None)

    @property
    def step_limit_seconds(self) -> float:
        """After how long without a step the trainers hang."""
        return max(self.step_timeout_seconds, self.pause_seconds or 0.0)

    @property
    def stalled(self) -> bool:
        """Whether the trainers stopped without a known reason: their stacks are wanted."""
        if not self.alive or any(r.held is not None or r.closed for r in self.ranks):
            return False
        if self.progress_at is None:
            return self.begun_at is not None and self.ticked_at - self.begun_at > _START_SECONDS
        limit = max(_STAND_SECONDS, _STAND_STEPS * (self.progress.step_seconds or 0.0))
        # well before the hang itself: whose step ended a moment later than its peer's hangs as well when told to stop
        return self.ticked_at - self.progress_at > min(limit, self.step_timeout_seconds / 2)

    @property
    def restored(self) -> bool:
        return bool(self.ranks) and all(r.source is not None for r in self.ranks)

    @property
    def restored_from(self) -> str | None:
        return joined(r.source for r in self.ranks if r.source is not None) if self.restored else None
