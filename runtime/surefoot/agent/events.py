"""Defines the events that reach an agent and the commands it decides.

Plain values. `state_machine.transition` turns events into commands; the process makes the events and carries the
commands out. Times are seconds of one monotonic clock, given by the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot.agent.agent_state import Departure
from surefoot.agent.looks import Look
from surefoot.ipc.trainer_messages import HoldAt
from surefoot.protocol.identities import Checkpoint, HolderEndpoint
from surefoot.protocol.loss_band import NONE_ODD, OddSteps
from surefoot.protocol.messages import Assign, FromAgent, Hold, Holders
from surefoot.protocol.progress import Progress

# ---- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WarmChanged:
    """Whether trainers can start at once: warm zygote, or only cold starts."""

    warm: bool


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The coordinator accepted our hello; it may be a new one.

    It knows nothing of what the former one was told.
    """


@dataclass(frozen=True, slots=True)
class Assigned:
    assign: Assign


@dataclass(frozen=True, slots=True)
class StopAsked:
    epoch: int


@dataclass(frozen=True, slots=True)
class HoldersChanged:
    holders: Holders


@dataclass(frozen=True, slots=True)
class HoldAsked:
    hold: Hold


@dataclass(frozen=True, slots=True)
class LevelAsked:
    epoch: int
    level: int


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """Retire or a final refusal: stop trainers, drain, exit with this code."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class DepartureAsked:
    """SIGTERM: as LeaveAsked, but trainers may go on to a named halt.

    The world may be left in order. Asking again changes nothing: a container's runtime may repeat the signal.
    """

    exit_code: int
    departure: Departure


@dataclass(frozen=True, slots=True)
class StoreUp:
    epoch: int
    address: str


@dataclass(frozen=True, slots=True)
class StoreLost:
    epoch: int
    detail: str


@dataclass(frozen=True, slots=True)
class TrainerExited:
    """A trainer is reaped; `cause` is the first one on this worker.

    `secondary`: it echoes another rank's death.
    """

    epoch: int
    local: int
    code: int
    cause: str = ""
    secondary: bool = False
    cause_local: int | None = None
    """Local rank whose error came first, if it was not this one's."""
    oom: Literal["", "limit", "node"] = ""
    """Whose memory ended it, as in `Exited`."""


@dataclass(frozen=True, slots=True)
class TrainerAttached:
    epoch: int
    local: int


@dataclass(frozen=True, slots=True)
class StepDone:
    epoch: int
    local: int
    progress: Progress
    at: float


@dataclass(frozen=True, slots=True)
class TrainerPaused:
    """A trainer begins a pause to do `what`; empty: ends it."""

    epoch: int
    local: int
    what: str
    seconds: float | None
    at: float


@dataclass(frozen=True, slots=True)
class HoldAnswered:
    epoch: int
    local: int
    step: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class HoldReached:
    epoch: int
    local: int
    step: int


@dataclass(frozen=True, slots=True)
class TrainerRestored:
    epoch: int
    local: int
    source: str
    at: float
    odd: OddSteps = NONE_ODD


@dataclass(frozen=True, slots=True)
class TrainerRestoreFailed:
    epoch: int
    local: int
    checkpoint: Checkpoint
    absent: bool
    detail: str


@dataclass(frozen=True, slots=True)
class HoldersSought:
    """A restoring trainer needs holders that nobody told it of."""

    epoch: int
    local: int


@dataclass(frozen=True, slots=True)
class TrainerClosed:
    """A trainer closed its Checkpointer; it may take long to exit.

    `offered`: it had its last step's state saved, or tried to.
    """

    epoch: int
    local: int
    offered: bool = False


@dataclass(frozen=True, slots=True)
class Flushed:
    """All saves staged until the flush of `epoch` are drained or lost."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StacksTaken:
    """Describes where `epoch`'s trainers are, or why that is unknown."""

    epoch: int
    detail: str
    look: Look | None = None
    """The same for comparison; None where some rank gave no stack."""


@dataclass(frozen=True, slots=True)
class Ticked:
    at: float


Event = (
    WarmChanged
    | Welcomed
    | Assigned
    | StopAsked
    | HoldersChanged
    | HoldAsked
    | LevelAsked
    | LeaveAsked
    | DepartureAsked
    | StoreUp
    | StoreLost
    | TrainerExited
    | TrainerAttached
    | StepDone
    | TrainerPaused
    | HoldAnswered
    | HoldReached
    | TrainerRestored
    | TrainerRestoreFailed
    | HoldersSought
    | TrainerClosed
    | Flushed
    | StacksTaken
    | Ticked
)

# ---- commands -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartStore:
    epoch: int


@dataclass(frozen=True, slots=True)
class StopStore:
    """End the store of every epoch below this one."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StartTrainers:
    assign: Assign
    store: str


@dataclass(frozen=True, slots=True)
class KillTrainers:
    """SIGKILL every trainer that still lives; each death comes back as TrainerExited."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Take living trainers' stacks, then report StacksTaken within a second or two."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Send:
    """Sends to the coordinator; lost if disconnected (facts are sent again on every Welcome)."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat now: something changed."""


@dataclass(frozen=True, slots=True)
class TellHold:
    hold: HoldAt


@dataclass(frozen=True, slots=True)
class TellLevel:
    level: int


@dataclass(frozen=True, slots=True)
class TellHolders:
    """Tells a local rank of every holder of the epoch."""

    local: int
    holders: tuple[HolderEndpoint, ...]


@dataclass(frozen=True, slots=True)
class Retarget:
    """Replaces the holders that saves go to."""

    holders: Holders


@dataclass(frozen=True, slots=True)
class Flush:
    """Drain everything staged, then say Flushed(epoch)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Exit:
    code: int


Command = (
    StartStore
    | StopStore
    | StartTrainers
    | KillTrainers
    | TakeStacks
    | Send
    | Beat
    | TellHold
    | TellLevel
    | TellHolders
    | Retarget
    | Flush
    | Exit
)
