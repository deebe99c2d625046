"""Defines the agent's state, the events that it receives and the commands that it decides on.

Pure. Only `state_machine.next_state` computes a new state.
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
from surefoot.protocol.progress import NO_PROGRESS, Progress, merge_rank_progress

# ---- observations of ranks -------------------------------------------------------------------------------------------
# Compares two observations of trainers that complete no step. A stack alone proves little: a rank that reads or computes
# for long shows one stack too, and a loop of two lines shows the same one in every second observation. But a rank that
# shows the same stack twice, while neither it nor its children did I/O or used CPU, hangs or waits for one that does.

_IO_BYTES = 1 << 20
"""I/O below this is no progress: threads of a library exchange that much while the program hangs."""
_CPU_SHARE = 0.05
"""Share of one core that a hanging program may use. Ranks in a collective are not measured: they spin."""


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """Counts the I/O and CPU time of trainers and their children since they started."""

    io_bytes: int = 0
    """Bytes read and written by the trainers and their children."""
    cpu_seconds: float = 0.0
    """CPU time of the trainers that wait for no other rank, and of all trainers' children (loader workers)."""


@dataclass(frozen=True, slots=True)
class HangObservation:
    """Records stacks, activity and collectives of all running local ranks at one moment."""

    at_seconds: float
    """Time of the observation, in monotonic seconds."""
    stacks: tuple[RankStack, ...]
    """Main-thread stacks, one entry for all ranks with the same stack."""
    activity: ProcessActivity
    collectives: tuple[Collective, ...] = ()
    """Collectives that the ranks are in or called last; empty if some rank did not report."""


def is_idle_between(earlier: HangObservation, later: HangObservation) -> bool:
    """Whether stacks and collectives are the same in two observations, with almost no I/O and CPU use in between."""
    io_bytes = later.activity.io_bytes - earlier.activity.io_bytes
    cpu_seconds = later.activity.cpu_seconds - earlier.activity.cpu_seconds
    collectives_changed = bool(earlier.collectives and later.collectives) and earlier.collectives != later.collectives
    return (
        later.stacks == earlier.stacks
        and not collectives_changed
        and 0 <= io_bytes < _IO_BYTES
        and 0.0 <= cpu_seconds <= _CPU_SHARE * (later.at_seconds - earlier.at_seconds)
    )


# ---- agent state -----------------------------------------------------------------------------------------------------

_STAND_SECONDS, _STAND_STEPS = 5.0, 5
"""A hang is suspected after this many seconds, and this many step times, without a step.

A killed peer is reported long before."""
_START_SECONDS = 60.0
"""A hang is suspected after this long without a first step, which may include compilation."""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """State of one local rank's trainer in the started generation."""

    local: int
    """Local rank (LOCAL_RANK)."""
    rank: int
    """Global rank (RANK)."""
    alive: bool = True
    """Whether its process has not been reaped yet."""
    exit_code: int | None = None
    """Exit code of its process, negative for a signal; None while it runs."""
    attached: bool = False
    """Whether it has connected to the agent's socket."""
    closed: bool = False
    """Whether it has closed its Checkpointer: it makes no more steps."""
    progress: Progress = NO_PROGRESS
    """Progress that it reported with its last step."""
    restore_source: str | None = None
    """Tier from which it restored; None until it has restored."""
    at_barrier: int | None = None
    """Step of the barrier at which it waits; None: it does not wait."""
    barrier_accepted: bool | None = None
    """Its reply to the proposed barrier; None: none yet."""
    pause_reason: str = ""
    """Its announced reason for making no steps; empty: it announced none."""
    pause_seconds: float | None = None
    """How long the announced pause may take; None: no longer than a step."""

    @property
    def step(self) -> int:
        return self.progress.step


@dataclass(frozen=True, slots=True)
class TerminationGrace:
    """Limits how long a terminating worker's trainers continue, in monotonic seconds."""

    barrier_announced_by: float
    """Time until which the coordinator must announce a barrier, or the trainers are stopped."""
    barrier_reached_by: float
    """Time until which the trainers must reach an announced barrier."""


@dataclass(frozen=True, slots=True)
class AgentState:
    """Holds everything that the agent's decisions depend on. All times are monotonic seconds."""

    step_timeout_seconds: float = 600.0
    """Longest time between two steps before the trainers count as hanging."""
    is_warm: bool = False
    """Whether trainers can start at once."""
    claimed_generation: int = 0
    """Newest generation that the coordinator has announced."""
    stopped_below: int = 0
    """Every trainer of generations below this one is reaped."""
    assign: Assign | None = None
    """Assignment of the claimed generation; None until it comes."""
    started_generation: int = 0
    """Newest generation whose trainers were started; each is started at most once."""
    ranks: tuple[LocalRank, ...] = ()
    """Local ranks of the started generation."""
    killing: bool = False
    """Whether the started generation's trainers are being killed."""
    store_address: str | None = None
    """Address (host:port) of the claimed generation's store that runs here; None: none does."""
    store_generation: int = 0
    """Newest generation whose store this agent was asked to start."""
    barrier: Barrier | None = None
    """Barrier that is proposed or bound; None: there is none."""
    interval_exponent: int = 0
    """Exponent of the save interval, as the coordinator has set it for the claimed generation."""
    progress_at: float | None = None
    """Time of the last finished step or pause report; None before the generation's first step."""
    ticked_at: float = 0.0
    """Time of the last tick."""
    started_seconds: float | None = None
    """Time of the first tick after the started generation's trainers were started; None: no tick yet."""
    exit_report: TrainerFailure | None = None
    """Failure report to send once the stacks are collected and before the trainers are killed."""
    stacks: str | None = None
    """Description of the stacks, for an incident; None: none were requested since the last step."""
    step_durations_seconds: tuple[float, ...] = ()
    """Durations of recent steps of the started generation, in seconds."""
    observation_count: int = 0
    """Number of stack collections since the last step."""
    last_observation: HangObservation | None = None
    """Newest observation of the trainers; None: none since the last step."""
    facts: tuple[FromAgent, ...] = field(default=())
    """Messages that stay true for the claimed generation; sent again on every Welcome."""
    flushing: bool = False
    """Whether a flush of all staged saves is running."""
    flushed: bool = False
    """Whether all saves of the started generation are flushed or lost."""
    awaiting_all_servers: frozenset[int] = frozenset()
    """Local trainers' ranks that wait for the complete list of memory servers."""
    termination_exit_code: int | None = None
    """Exit code of this worker if it was asked to end; None: it was not."""
    termination_grace: TerminationGrace | None = None
    """Limits within which a terminating worker's trainers continue to a barrier; None: they stop now, or are not asked to."""
    shut_down: bool = False
    """Whether the agent has decided to exit; later events are ignored."""

    @property
    def has_running_trainers(self) -> bool:
        """Whether a local trainer still runs."""
        return any(r.alive for r in self.ranks)

    @property
    def is_training(self) -> bool:
        """Whether trainers here are making steps, so that copies must limit their bandwidth."""
        is_staying = self.termination_exit_code is None and self.termination_grace is None and self.barrier is None
        return (
            is_staying
            and self.started_generation == self.claimed_generation
            and any(r.alive and not r.closed for r in self.ranks)
        )

    @property
    def running_generation(self) -> int:
        """The generation that runs or has finished here; 0: its trainers have ended and a newer one is claimed."""
        return (
            self.started_generation
            if self.has_running_trainers or self.started_generation == self.claimed_generation
            else 0
        )

    @property
    def step(self) -> int:
        """Last step that every local rank has finished in the started generation."""
        return min((r.step for r in self.ranks), default=0)

    @property
    def progress(self) -> Progress:
        """Merges all local ranks' progress in the started generation."""
        merged = merge_rank_progress([r.progress for r in self.ranks])
        exited_ranks = tuple(r.rank for r in self.ranks if r.exit_code == 0)
        return replace(
            merged,
            restored=self.restored,
            restored_from=self.restored_from,
            exited_ranks=exited_ranks,
            pause_reason=self.pause_reason,
            pause_seconds=self.pause_seconds,
        )

    @property
    def pause_reason(self) -> str:
        """Why a local rank announced a pause; empty: none did."""
        return next((r.pause_reason for r in self.ranks if r.pause_reason), "")

    @property
    def pause_seconds(self) -> float | None:
        """How long the longest announced pause may take; None: no longer than a step."""
        return max((r.pause_seconds for r in self.ranks if r.pause_seconds is not None), default=None)

    @property
    def step_limit_seconds(self) -> float:
        """Seconds without a step after which the trainers count as hanging."""
        return max(self.step_timeout_seconds, self.pause_seconds or 0.0)

    @property
    def hang_suspected(self) -> bool:
        """Whether the trainers make no steps for no known reason, so that their stacks should be collected."""
        if not self.has_running_trainers or any(r.at_barrier is not None or r.closed for r in self.ranks):
            return False
        if self.progress_at is None:
            return self.started_seconds is not None and self.ticked_at - self.started_seconds > _START_SECONDS
        timeout_seconds = max(_STAND_SECONDS, _STAND_STEPS * (self.progress.step_seconds or 0.0))
        # well before the step timeout: a rank that finished its last step later than its peers hangs too by the time the
        # first agent reports the hang and all are stopped
        return self.ticked_at - self.progress_at > min(timeout_seconds, self.step_timeout_seconds / 2)

    @property
    def restored(self) -> bool:
        """Whether every local rank has restored its checkpoint."""
        return bool(self.ranks) and all(r.restore_source is not None for r in self.ranks)

    @property
    def restored_from(self) -> str | None:
        """Tiers from which the local ranks restored; None until all have."""
        return (
            join_sources(r.restore_source for r in self.ranks if r.restore_source is not None)
            if self.restored
            else None
        )


# ---- events ----------------------------------------------------------------------------------------------------------
# Defines the events that reach an agent and the commands it decides on; both are plain values. `state_machine.next_state`
# turns events into commands; the agent process creates the events and carries the commands out. A message of the
# coordinator is an event itself; a message of a trainer is wrapped with its rank. Times are seconds of the process's
# monotonic clock.

# ---- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WarmChanged:
    """The fork server became warm, or ended: trainers can start at once, or cannot yet."""

    warm: bool


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """The coordinator shuts this worker down or rejected it for good: stop trainers, flush, exit with this code."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class TerminationRequested:
    """SIGTERM came: as ShutdownRequested, but trainers may continue to a barrier, so that peers lose no step.

    A repeated signal changes nothing: a container runtime may send it again.
    """

    exit_code: int
    grace: TerminationGrace


@dataclass(frozen=True, slots=True)
class StoreStarted:
    """The TCP store of a generation accepts connections at `address` (host:port)."""

    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class StoreExited:
    """The TCP store of a generation could not be started or has ended; `detail` is the reason."""

    generation: int
    detail: str


@dataclass(frozen=True, slots=True)
class TrainerExited:
    """A trainer was reaped."""

    generation: int
    local: int
    """Local rank of the trainer."""
    code: int
    """Exit code; negative for a signal."""
    cause: str = ""
    """First cause of failure on this worker, in one line."""
    secondary: bool = False
    """Whether that cause is only the effect of another worker's failure."""
    cause_local: int | None = None
    """Local rank whose error came first; None: this one."""
    oom: Literal["", "limit", "node"] = ""
    """Memory limit for which the OOM killer ended it: the container's, or the node's; empty: another cause."""


@dataclass(frozen=True, slots=True)
class TrainerMessage:
    """A trainer of this worker sent a message."""

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
    """Time at which the message was received."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """All saves that were staged before the flush of `generation` are flushed or lost."""

    generation: int


@dataclass(frozen=True, slots=True)
class StacksCollected:
    """The stacks of a generation's trainers were collected."""

    generation: int
    detail: str
    """The stacks in a few lines, or why they are unknown."""
    summary: HangObservation | None = None
    """The same for comparison with the next observation; None if some rank gave no stack."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Half a second has passed; `at` is the time now."""

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
    """Starts the TCP store of a generation, then reports StoreStarted or StoreExited."""

    generation: int


@dataclass(frozen=True, slots=True)
class StopStore:
    """Ends the store if it belongs to a generation below this one."""

    generation: int


@dataclass(frozen=True, slots=True)
class StartTrainers:
    """Starts one trainer for each local rank."""

    assign: Assign
    store: str
    """Address of the generation's TCP store (host:port)."""


@dataclass(frozen=True, slots=True)
class KillTrainers:
    """Sends SIGKILL to every running trainer; each exit comes back as TrainerExited."""

    generation: int


@dataclass(frozen=True, slots=True)
class CollectStacks:
    """Collects the running trainers' stacks, then reports StacksCollected within a second or two."""

    generation: int


@dataclass(frozen=True, slots=True)
class Send:
    """Sends to the coordinator; lost if disconnected (facts are sent again on every Welcome)."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Sends a heartbeat now, because something in it changed."""


@dataclass(frozen=True, slots=True)
class SendToTrainers:
    """Sends to the trainer of one rank, or to all local ones if `rank` is None."""

    message: Barrier | IntervalExponent | AllServers
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Retarget:
    """Replaces the memory servers to which saves are flushed."""

    servers: MemoryServers


@dataclass(frozen=True, slots=True)
class Flush:
    """Flushes all staged saves, then reports Flushed."""

    generation: int


@dataclass(frozen=True, slots=True)
class Exit:
    """Ends the agent with this exit code."""

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
