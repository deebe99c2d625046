"""Defines the messages between a trainer and its agent.

Both ends are of one installation, so there is one version. The arena's file descriptor travels beside `ArenaGiven`.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal, get_args

from surefoot.protocol.codec import Codec
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId, OlderJob
from surefoot.protocol.progress import Progress
from surefoot.protocol.wire import VERSION

# ---- trainer → agent ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """First message: which rank of which epoch this is. A trainer of another epoch is refused."""

    rank: int
    epoch: int
    pid: int


@dataclass(frozen=True, slots=True)
class NeedArena:
    """Ask for staging memory: two slots of at least `slot_bytes` each."""

    slot_bytes: int


@dataclass(frozen=True, slots=True)
class FindStagedSaves:
    """Ask which saves of `checkpoint` still lie in this worker's staging memory; one LeftHere or more answer."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Staged:
    """Slot `slot` is sealed: it holds the stream of `step`, and behind it the JSON of the plain values.

    `layout_json` is sent with the first save of each layout. After this the trainer may die; the agent finishes.
    """

    slot: int
    step: int
    stream_bytes: int
    values_bytes: int
    layout: str
    layout_json: str | None


@dataclass(frozen=True, slots=True)
class Stepped:
    """One finished step. `samples` are the positions [start, stop) of the global order that this rank consumed, a pair a batch."""

    progress: Progress
    samples: tuple[tuple[int, int], ...] | None
    skipped: bool


@dataclass(frozen=True, slots=True)
class HoldReply:
    step: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Holding:
    """Waiting at `step`, its save staged."""

    step: int


@dataclass(frozen=True, slots=True)
class RestoreDone:
    """The parent (or step 0) stands in this rank's tensors, verified."""

    step: int
    source: str
    """A word of `protocol.sources`, or none at step 0."""
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    checkpoint: Checkpoint
    absent: bool
    detail: str


@dataclass(frozen=True, slots=True)
class SayNotice:
    """Something a person should hear of; becomes protocol.messages.Notice."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class MetricsGrown:
    """By how much this trainer's metrics grew since it last said so: (sample, labels, growth)."""

    grown: tuple[tuple[str, dict[str, str], float], ...]


@dataclass(frozen=True, slots=True)
class Closing:
    """`Checkpointer.close()`: the trainer is done with the agent; what is staged will be drained."""

    step: int


FromTrainer = (
    Attach
    | NeedArena
    | FindStagedSaves
    | Staged
    | Stepped
    | HoldReply
    | Holding
    | RestoreDone
    | RestoreFailed
    | SayNotice
    | MetricsGrown
    | Closing
)

# ---- agent → trainer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attached:
    """Everything a rank must know of its epoch. Credentials and the persistent tier come by environment (settings)."""

    job: str
    epoch: int
    world: int
    rank: int
    incarnation: str
    parent: Checkpoint | None
    lineage: tuple[tuple[int, Checkpoint | None, int], ...]
    holders: tuple[HolderEndpoint, ...]
    targets: tuple[HolderId, ...]
    replicas: int
    interval_steps: int
    persistent_interval_steps: int | None
    level: int
    older_job: OlderJob | None = None
    """Where the parent lies, if it is an older job's."""


@dataclass(frozen=True, slots=True)
class ArenaGiven:
    """The mapped file has `slots` × `slot_bytes`; preparing (allocating, touching) it took `seconds`."""

    slots: int
    slot_bytes: int
    seconds: float
    busy: tuple[int, ...] = ()
    """Slots from which an earlier epoch's save still drains; SlotFreed follows for each."""


@dataclass(frozen=True, slots=True)
class ArenaRefused:
    """There is no staging memory for this rank now. It trains on, and asks again with its next save."""

    why: str


@dataclass(frozen=True, slots=True)
class StagedSaves:
    """Saves that an earlier trainer sealed in this memory: (rank, slot, stream_bytes, layout). Whoever reads them
    verifies them: a slot may have been written to since. The file's descriptor comes along if there are any.

    The first answer is about the memory that the asking rank will have itself; then `further` ones follow, each about
    that of another local rank."""

    slot_bytes: int
    saves: tuple[tuple[int, int, int, str], ...] = ()
    further: int = 0


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """The save in this slot is on its holders, or was given up (`ok` false: refused, full, or away)."""

    slot: int
    step: int
    ok: bool


@dataclass(frozen=True, slots=True)
class HoldAt:
    step: int
    verb: Literal["propose", "bind", "cancel"]


@dataclass(frozen=True, slots=True)
class LevelSet:
    """Save no more often than every k·2^level steps."""

    level: int


ToTrainer = Attached | ArenaGiven | ArenaRefused | StagedSaves | SlotFreed | HoldAt | LevelSet

_CODEC = Codec((*get_args(FromTrainer), *get_args(ToTrainer)), version=VERSION, oldest=VERSION)


def encode(message: FromTrainer | ToTrainer) -> bytes:
    """One message, UTF-8 JSON; the socket's framing is the caller's (4-byte little-endian length before it)."""
    return _CODEC.encode(message).encode()


def decode(text: bytes) -> FromTrainer | ToTrainer:
    return typing.cast(FromTrainer | ToTrainer, _CODEC.decode(text))
