"""Defines the agent's state, the events that it receives and the commands that it decides.

Pure. `state_machine.transition` alone changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from surefoot.ipc.trainer_messages import (
    AllServers,
    Attach,
    Detach,
    PauseReport,
    RequestAllServers,
    RestoreDone,
    RestoreFailed,
    StepReport,
)
from surefoot.protocol.checkpoints.save_state import join_sources
from surefoot.protocol.hangs import Collective, RankStack
from surefoot.protocol.messages import (
    Assign,
    Barrier,
    BarrierReached,
    BarrierReply,
    FromAgent,
    IntervalExponent,
    MemoryServers,
    StopTrainers,
    TrainerFailure,
    Welcome,
)
from surefoot.protocol.progress import NO_PROGRESS, Progress, of_worker

# ---- observations of ranks -------------------------------------------------------------------------------------------
# Compares two looks at trainers that make no step. A stack alone says little: a rank that reads or computes for long
# shows it as well, and one that computes in a loop of two lines shows the same one twice as often as not. One that
# shows the same stack twice, while it and its children neither read, write nor compute, hangs or waits for one that
# does.

_IO_BYTES = 1 << 20
"""Less is what threads of a library say to each other while the program stands."""
_CPU_SHARE = 0.05
"""Of a core; not that of ranks that wait in a collective, which spin."""


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """What processes have done since they began."""

    io_bytes: int = 0
    """Read and written, of the trainers and their children."""
    cpu_seconds: float = 0.0
    """Of trainers that wait for no other rank, and of all trainers' children, as a loader's workers."""


@dataclass(frozen=True, slots=True)
class HangObservation:
    """Where all living local ranks stand, at one moment."""

    at: float
    stacks: tuple[RankStack, ...]
    activity: ProcessActivity
    collectives: tuple[Collective, ...] = ()
    """What they are in or made last; empty where a rank could not say."""


def is_idle_between(before: HangObservation, after: HangObservation) -> bool:
    """Whether nothing has moved between two looks."""
    wrote = after.activity.io_bytes - before.activity.io_bytes
    computed = after.activity.cpu_seconds - before.activity.cpu_seconds
    called = bool(before.collectives and after.collectives) and before.collectives != after.collectives
    return (
        after.stacks == before.stacks
        and not called
        and 0 <= wrote < _IO_BYTES
        and 0.0 <= computed <= _CPU_SHARE * (after.at - before.at)
    )


# ---- agent state -----------------------------------------------------------------------------------------------------

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
    progress: Progress = NO_PROGRESS
    """What it told with its last step."""
    source: str | None = None
    at_barrier: int | None = None
    """The step of the barrier at which it waits."""
    accepted: bool | None = None
    """Its reply to the proposed barrier."""
    paused: str = ""
    """Why no step is to be expected of it; empty: one is."""
    pause_seconds: float | None = None
    """How long that may take; None: as long as a step."""

    @property
    def step(self) -> int:
        return self.progress.step


@dataclass(frozen=True, slots=True)
class TerminationGrace:
    """Until when a departing worker's trainers go on.

    Until `word_by` for the announcement of a halt; from then on until `part_by`.
    """

    barrier_announced_by: float
    barrier_reached_by: float


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
    store_generation: int = 0
    """Newest epoch whose store was asked for here."""
    barrier: Barrier | None = None
    interval_exponent: int = 0
    progress_at: float | None = None
    """When the last step finished; None before the epoch's first."""
    ticked_at: float = 0.0
    started_seconds: float | None = None
    """First tick of the started epoch's trainers."""
    exit_report: TrainerFailure | None = None
    """What is said of the trainers once their stacks are taken, and before they are killed."""
    stacks: str | None = None
    """Where the trainers stood when half of the step timeout was over, for people; None: nobody asked since the last step."""
    gaps: tuple[float, ...] = ()
    """Recent steps of the started epoch, in seconds."""
    observation_count: int = 0
    """How often was looked where the trainers stand since the last step."""
    last_observation: HangObservation | None = None
    """What was seen last; None: nothing since the last step."""
    facts: tuple[FromAgent, ...] = field(default=())
    flushing: bool = False
    flushed: bool = False
    awaiting_all_servers: frozenset[int] = frozenset()
    """Ranks here that wait for the list of every holder."""
    terminating: int | None = None
    """Exit code, once this worker is to end."""
    termination: TerminationGrace | None = None
    """While it is to end and its trainers go on, for the world to be left in order."""
    shut_down: bool = False

    @property
    def alive(self) -> bool:
        return any(r.alive for r in self.ranks)

    @property
    def trains(self) -> bool:
        """Whether trainers here go on with steps, which copies may disturb."""
        stays = self.terminating is None and self.termination is None and self.barrier is None
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
            exited_ranks=ended,
            pause_reason=self.paused,
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
    def hang_suspected(self) -> bool:
        """Whether the trainers stopped without a known reason: their stacks are wanted."""
        if not self.alive or any(r.at_barrier is not None or r.closed for r in self.ranks):
            return False
        if self.progress_at is None:
            return self.started_seconds is not None and self.ticked_at - self.started_seconds > _START_SECONDS
        limit = max(_STAND_SECONDS, _STAND_STEPS * (self.progress.step_seconds or 0.0))
        # well before the hang itself: whose step ended a moment later than its peer's hangs as well when told to stop
        return self.ticked_at - self.progress_at > min(limit, self.step_timeout_seconds / 2)

    @property
    def restored(self) -> bool:
        return bool(self.ranks) and all(r.source is not None for r in self.ranks)

    @property
    def restored_from(self) -> str | None:
        return join_sources(r.source for r in self.ranks if r.source is not None) if self.restored else None


# ---- events ----------------------------------------------------------------------------------------------------------
# Defines the events that reach an agent and the commands it decides. Plain values. `state_machine.transition` turns
# events into commands; the process makes the events and carries the commands out. What the coordinator sent is an event
# itself; what a trainer sent is one together with its rank. Times are seconds of one monotonic clock, given by the
# process.

# ---- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WarmChanged:
    """Whether trainers can start at once: warm zygote, or only cold starts."""

    warm: bool


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """Retire or a final refusal: stop trainers, drain, exit with this code."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class TerminationRequested:
    """SIGTERM: as LeaveAsked, but trainers may go on to a named halt.

    The world may be left in order. Asking again changes nothing: a container's runtime may repeat the signal.
    """

    exit_code: int
    grace: TerminationGrace


@dataclass(frozen=True, slots=True)
class StoreStarted:
    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class StoreExited:
    generation: int
    detail: str


@dataclass(frozen=True, slots=True)
class TrainerExited:
    """A trainer is reaped; `cause` is the first one on this worker.

    `secondary`: it echoes another rank's death.
    """

    generation: int
    local: int
    code: int
    cause: str = ""
    secondary: bool = False
    cause_local: int | None = None
    """Local rank whose error came first, if it was not this one's."""
    oom: Literal["", "limit", "node"] = ""
    """Whose memory ended it, as in `Exited`."""


@dataclass(frozen=True, slots=True)
class TrainerMessage:
    """A message of one local rank, as it was received."""

    generation: int
    local: int
    message: (
        Attach
        | StepReport
        | PauseReport
        | BarrierReply
        | BarrierReached
        | RestoreDone
        | RestoreFailed
        | RequestAllServers
        | Detach
    )
    at: float
    """When it was received."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """All saves staged until the flush of `epoch` are drained or lost."""

    generation: int


@dataclass(frozen=True, slots=True)
class StacksCollected:
    """Describes where `epoch`'s trainers are, or why that is unknown."""

    generation: int
    detail: str
    summary: HangObservation | None = None
    """The same for comparison; None where some rank gave no stack."""


@dataclass(frozen=True, slots=True)
class Ticked:
    at: float


Event = (
    Welcome
    | Assign
    | StopTrainers
    | MemoryServers
    | Barrier
    | IntervalExponent
    | WarmChanged
    | ShutdownRequested
    | TerminationRequested
    | StoreStarted
    | StoreExited
    | TrainerExited
    | TrainerMessage
    | Flushed
    | StacksCollected
    | Ticked
)

# ---- commands -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartStore:
    generation: int


@dataclass(frozen=True, slots=True)
class StopStore:
    """End the store of every epoch below this one."""

    generation: int


@dataclass(frozen=True, slots=True)
class StartTrainers:
    assign: Assign
    store: str


@dataclass(frozen=True, slots=True)
class KillTrainers:
    """SIGKILL every trainer that still lives; each death comes back as TrainerExited."""

    generation: int


@dataclass(frozen=True, slots=True)
class CollectStacks:
    """Take living trainers' stacks, then report StacksTaken within a second or two."""

    generation: int


@dataclass(frozen=True, slots=True)
class Send:
    """Sends to the coordinator; lost if disconnected (facts are sent again on every Welcome)."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """A heartbeat now: something changed."""


@dataclass(frozen=True, slots=True)
class SendToTrainers:
    """Sends to the trainer of one rank; None: to all of them."""

    message: Barrier | IntervalExponent | AllServers
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Retarget:
    """Replaces the holders that saves go to."""

    servers: MemoryServers


@dataclass(frozen=True, slots=True)
class Flush:
    """Drain everything staged, then say Flushed(epoch)."""

    generation: int


@dataclass(frozen=True, slots=True)
class Exit:
    code: int


Command = (
    StartStore
    | StopStore
    | StartTrainers
    | KillTrainers
    | CollectStacks
    | Send
    | SendHeartbeat
    | SendToTrainers
    | Retarget
    | Flush
    | Exit
)
