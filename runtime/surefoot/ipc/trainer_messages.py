"""Defines the messages between a trainer and its agent.

Both ends are of one installation, so there is one version. The arena's file descriptor travels beside `ArenaGiven`.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import get_args

from surefoot.errors import ProtocolError
from surefoot.protocol.codec import Codec
from surefoot.protocol.hangs import Collective
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, SourceJob
from surefoot.protocol.messages import Barrier, BarrierReached, BarrierReply, IntervalExponent
from surefoot.protocol.progress import NO_ANOMALIES, AnomalyRun, Progress
from surefoot.protocol.wire import VERSION

# ---- trainer → agent ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """Opens the connection of one rank; another epoch's trainer is refused."""

    rank: int
    generation: int
    pid: int


@dataclass(frozen=True, slots=True)
class RequestArena:
    """Ask for staging memory: two slots of at least `slot_bytes` each."""

    slot_bytes: int


@dataclass(frozen=True, slots=True)
class FindStagedSaves:
    """Requests `checkpoint`'s saves in this worker's staging memory: StagedSaves, one or more."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class RequestAllServers:
    """Requests every holder of the epoch: AllHolders, once they are known.

    `Attached` may name some.
    """


@dataclass(frozen=True, slots=True)
class Staged:
    """Slot `slot` is sealed: the stream of `step`, then its plain values.

    Values are JSON. `layout_json` is sent with the first save of each layout. After this the trainer may die; the agent
    finishes.
    """

    slot: int
    step: int
    stream_bytes: int
    values_bytes: int
    layout: str
    layout_json: str | None


@dataclass(frozen=True, slots=True)
class StepReport:
    """Reports a finished step.

    `samples` are the positions [start, stop) of the global order that this rank consumed, a pair per batch; `span` those
    of all ranks together, where steps may take unlike numbers of samples.
    """

    progress: Progress
    samples: tuple[tuple[int, int], ...] | None
    skipped: bool
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PauseReport:
    """The script pauses its steps to do `what`; empty: no more."""

    reason: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class RestoreDone:
    """The rank's tensors hold the parent (or step 0), verified."""

    step: int
    source: str
    """A word of `protocol.checkpoints.save_state`, or none at step 0."""
    bytes: int
    seconds: float
    anomalies: AnomalyRun = NO_ANOMALIES
    """What the parent says of the steps before it: a world may end before it makes one of its own."""


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    checkpoint: Checkpoint
    absent: bool
    detail: str


@dataclass(frozen=True, slots=True)
class TrainerNotice:
    """Becomes a protocol.messages.Notice, an event for people."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class MetricsReport:
    """How much metrics grew since the last message: (sample, labels, growth)."""

    deltas: tuple[tuple[str, dict[str, str], float], ...]


@dataclass(frozen=True, slots=True)
class CollectivesReport:
    """Answers TellCollectives.

    For each, `seconds` since the rank made it; without any, why.
    """

    request: int
    collectives: tuple[Collective, ...]
    seconds: tuple[float, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Detach:
    """The trainer is done with the agent; staged saves will be drained."""

    step: int
    save_requested: bool = False
    """It had the state of `step` saved, or tried to."""


FromTrainer = (
    Attach
    | RequestArena
    | FindStagedSaves
    | RequestAllServers
    | Staged
    | StepReport
    | PauseReport
    | BarrierReply
    | BarrierReached
    | RestoreDone
    | RestoreFailed
    | TrainerNotice
    | MetricsReport
    | CollectivesReport
    | Detach
)

# ---- agent → trainer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attached:
    """Tells a rank its epoch; credentials and tiers come by environment."""

    job: str
    generation: int
    world_size: int
    rank: int
    incarnation: str
    parent: Checkpoint | None
    lineage: tuple[tuple[int, Checkpoint | None, int], ...]
    servers: tuple[MemoryServerEndpoint, ...]
    replicas: int
    interval_steps: int
    persistent_interval_steps: int | None
    interval_exponent: int
    source_job: SourceJob | None = None
    """Where the parent lies, if it is an older job's."""
    skip_steps: int = 0
    """Loaders leave out the batches of so many steps behind the parent."""
    is_partial: bool = False
    """There are more than `holders`: `FindHolders` asks for all."""


@dataclass(frozen=True, slots=True)
class AllServers:
    """Lists every holder of the epoch."""

    servers: tuple[MemoryServerEndpoint, ...]


@dataclass(frozen=True, slots=True)
class ArenaGranted:
    """The mapped file has `slots` × `slot_bytes`; preparing (allocating, touching) it took `seconds`."""

    slots: int
    slot_bytes: int
    seconds: float
    busy_slots: tuple[int, ...] = ()
    """Slots from which an earlier epoch's save still drains; SlotFreed follows for each."""


@dataclass(frozen=True, slots=True)
class ArenaDenied:
    """No staging memory now; the rank trains on and asks again.

    It asks with its next save.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class StagedSaves:
    """Saves sealed in one memory: (rank, slot, stream_bytes, layout).

    Whoever reads them verifies them: a slot may have been written to since. The file's descriptor comes along if there
    are any. The first reply is about the asking rank's own memory; `further` ones follow, each about another local
    rank's.
    """

    slot_bytes: int
    saves: tuple[tuple[int, int, int, str], ...] = ()
    replies_to_follow: int = 0


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """The slot's save is on its holders, or given up (not `ok`)."""

    slot: int
    step: int
    ok: bool


@dataclass(frozen=True, slots=True)
class RequestCollectives:
    """Requests CollectivesTold: the rank makes no step."""

    request: int


ToTrainer = (
    Attached
    | AllServers
    | ArenaGranted
    | ArenaDenied
    | StagedSaves
    | SlotFreed
    | Barrier
    | IntervalExponent
    | RequestCollectives
)

_CODEC = Codec((*get_args(FromTrainer), *get_args(ToTrainer)), VERSION)


def encode(message: FromTrainer | ToTrainer) -> bytes:
    """Encodes a message as UTF-8 JSON; the caller frames it.

    Framing is a 4-byte little-endian length before it.
    """
    return _CODEC.encode(message).encode()


def decode(text: bytes) -> FromTrainer | ToTrainer:
    return typing.cast(FromTrainer | ToTrainer, _CODEC.decode(text))


# ---- framing ---------------------------------------------------------------------------------------------------------
# Frames trainer messages: a four-byte little-endian length before each. Both ends use it.

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
"""A layout record of a large model is megabytes; more than this is not a message."""


def add_frame(message: bytes) -> bytes:
    return len(message).to_bytes(HEADER_BYTES, "little") + message


class FrameDecoder:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, in order."""
        self._buffer += data
        whole: list[bytes] = []
        while len(self._buffer) >= HEADER_BYTES:
            size = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes on the trainer's line: it is not spoken here")
            if len(self._buffer) < HEADER_BYTES + size:
                break
            whole.append(bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + size]))
            del self._buffer[: HEADER_BYTES + size]
        return whole
