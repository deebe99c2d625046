"""Defines the messages between a trainer and its agent.

A field's name is also its name on the wire. Both ends belong to one installation and have the same version. The file
descriptor of staging memory is sent along with `ArenaGranted` and `StagedSaves` (SCM_RIGHTS).
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
    """Introduces one rank; the first message on its connection. The agent rejects trainers of other generations."""

    rank: int
    """Global rank."""
    generation: int
    """Generation that the trainer was started for."""
    pid: int
    """Process id of the trainer."""


@dataclass(frozen=True, slots=True)
class RequestArena:
    """Requests staging memory of two slots; the reply is ArenaGranted or ArenaDenied."""

    slot_bytes: int
    """Least size of each slot."""


@dataclass(frozen=True, slots=True)
class FindStagedSaves:
    """Requests the saves of a checkpoint in this worker's staging memory; the reply is one or more StagedSaves."""

    checkpoint: Checkpoint
    """Checkpoint to restore."""


@dataclass(frozen=True, slots=True)
class RequestAllServers:
    """Requests all memory servers of the job; the reply is AllServers, once the agent has received them."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Reports that a slot has a complete save: the byte stream, then the plain values as JSON.

    From now on the save is safe from the trainer's death, because the agent flushes it.
    """

    slot: int
    """Index of the slot."""
    step: int
    """Step that was saved."""
    stream_bytes: int
    """Length of the byte stream at the start of the slot."""
    values_bytes: int
    """Length of the plain values that follow the stream."""
    layout: str
    """Digest of the layout record."""
    layout_json: str | None
    """The layout record, with the first save that has this layout; None: it was sent before."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Reports a finished step."""

    progress: Progress
    """The rank's progress."""
    samples: tuple[tuple[int, int], ...] | None
    """Positions in the global sample order that this rank consumed, a pair (start, stop) per batch; stop is exclusive.
    None: the data loader is not Surefoot's."""
    skipped: bool
    """Whether a save was due at this step and was skipped."""
    span: tuple[int, int] | None = None
    """Positions (start, stop) that all ranks together consumed, where steps may have different numbers of samples; None
    elsewhere."""


@dataclass(frozen=True, slots=True)
class PauseReport:
    """Announces that the script makes no steps for a while, as during an evaluation, or that it continues."""

    reason: str
    """Why, in the script's words; empty: the pause is over."""
    seconds: float | None
    """Longest duration that the script expects; None: not limited."""


@dataclass(frozen=True, slots=True)
class RestoreDone:
    """Reports that the rank has restored and verified its state, or starts at step 0."""

    step: int
    """Step of the restored checkpoint; 0: none was restored."""
    source: str
    """Tier that the bytes came from, a value of `protocol.checkpoints.save_state`; `none` at step 0."""
    bytes: int
    """Bytes that were read; 0 at step 0."""
    seconds: float
    """Duration of the restore."""
    anomalies: AnomalyRun = NO_ANOMALIES
    """Loss anomalies before the restored step, as the checkpoint stores them: the generation may end before its own
    first step."""


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """Reports that the rank cannot restore its checkpoint, because some part of it has no readable copy."""

    checkpoint: Checkpoint
    """Checkpoint that is unreadable."""
    absent: bool
    """True: every memory server answered and none has the part any longer. False: every copy failed verification."""
    detail: str
    """Names the part and how each copy failed."""


@dataclass(frozen=True, slots=True)
class TrainerNotice:
    """Asks for an event; the agent passes it on as `protocol.messages.Notice`."""

    reason: str
    """The event's reason in CamelCase; does not change between versions."""
    text: str
    """The event's message."""


@dataclass(frozen=True, slots=True)
class MetricsReport:
    """Reports how much the trainer's metrics grew since its last report."""

    deltas: tuple[tuple[str, dict[str, str], float], ...]
    """Name of the sample, its labels, and its increase."""


@dataclass(frozen=True, slots=True)
class CollectivesReport:
    """Replies to RequestCollectives from PyTorch's flight recorder."""

    request: int
    """Id of the request."""
    collectives: tuple[Collective, ...]
    """The rank's collectives, those that it waits in first; empty: unknown, see `reason`."""
    seconds: tuple[float, ...]
    """Time since the rank made each of these calls."""
    reason: str = ""
    """Why there are no collectives; empty if there are any."""


@dataclass(frozen=True, slots=True)
class Detach:
    """Reports that the trainer closes its connection; the agent still flushes its staged saves."""

    step: int
    """Last finished step; 0: none."""
    save_requested: bool = False
    """Whether the program saved the state of `step`, or tried to."""


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
    """Accepts an Attach and describes the rank's generation. Credentials and tiers are in environment variables."""

    job: str
    """Uid of the job."""
    generation: int
    """The committed generation."""
    world_size: int
    """Number of ranks in the job."""
    rank: int
    """This trainer's global rank."""
    incarnation: str
    """Random id of the agent's start."""
    parent: Checkpoint | None
    """Checkpoint to restore; None: start at step 0."""
    lineage: tuple[tuple[int, Checkpoint | None, int], ...]
    """Generation, parent (None: step 0) and world size of each entry of the job's lineage, oldest first."""
    servers: tuple[MemoryServerEndpoint, ...]
    """Memory servers of the job: all, or with `is_partial` those that the worker is expected to need."""
    replicas: int
    """Number of copies of each save, on different nodes."""
    interval_steps: int
    """Base interval of saves to memory, in steps."""
    persistent_interval_steps: int | None
    """Base interval of uploads to the persistent tier, in steps; None: there is no such tier."""
    interval_exponent: int
    """Least interval exponent: the rank saves every base interval × 2^interval_exponent steps or less often."""
    source_job: SourceJob | None = None
    """Job whose folder contains the parent; None: this job's own."""
    skip_steps: int = 0
    """Steps after the parent whose batches the loaders skip; 0: none."""
    is_partial: bool = False
    """Whether the job has more memory servers than `servers`; RequestAllServers asks for them."""


@dataclass(frozen=True, slots=True)
class AllServers:
    """Replies to RequestAllServers."""

    servers: tuple[MemoryServerEndpoint, ...]
    """All memory servers of the job."""


@dataclass(frozen=True, slots=True)
class ArenaGranted:
    """Grants staging memory; its file descriptor is sent along."""

    slots: int
    """Number of slots, one after the other in the file."""
    slot_bytes: int
    """Size of each slot."""
    seconds: float
    """How long it took to allocate and prefault the memory."""
    busy_slots: tuple[int, ...] = ()
    """Slots whose save of an earlier generation is still being flushed; SlotFreed follows for each."""


@dataclass(frozen=True, slots=True)
class ArenaDenied:
    """Denies staging memory. The rank trains without saving, and asks again when its next save is due."""

    reason: str
    """Why there is none."""


@dataclass(frozen=True, slots=True)
class StagedSaves:
    """Lists the staged saves in one local rank's staging memory; its file descriptor is sent along if there are any.

    The first reply to FindStagedSaves is about the asking rank's own memory, each further one about another local
    rank's. The reader verifies the bytes, since a slot may have been overwritten in between.
    """

    slot_bytes: int
    """Size of each slot."""
    saves: tuple[tuple[int, int, int, str], ...] = ()
    """Rank, slot, length of the stream in bytes, and layout digest of each save."""
    replies_to_follow: int = 0
    """Number of further replies, in the first one; 0 in the others."""


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """Reports that a slot can be reused."""

    slot: int
    """Index of the slot."""
    step: int
    """Step of the save that was in it."""
    ok: bool
    """True: the save is on all its target servers. False: it was abandoned."""


@dataclass(frozen=True, slots=True)
class RequestCollectives:
    """Requests the rank's collectives, because it makes no step; the reply is CollectivesReport."""

    request: int
    """Id of the request, repeated in the reply."""


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
    """Encodes a message as UTF-8 JSON, without its frame; see `add_frame`."""
    return _CODEC.encode(message).encode()


def decode(text: bytes) -> FromTrainer | ToTrainer:
    """Decodes a message without its frame; raises ProtocolError if it does not fit."""
    return typing.cast(FromTrainer | ToTrainer, _CODEC.decode(text))


# ---- framing ---------------------------------------------------------------------------------------------------------
# A frame is the message's length as four little-endian bytes, then the message.

HEADER_BYTES = 4
"""Length of a frame's header."""
MAX_FRAME_BYTES = 256 << 20
"""Longest message; the layout record of a large model has some megabytes."""


def add_frame(message: bytes) -> bytes:
    """Prepends the length to an encoded message."""
    return len(message).to_bytes(HEADER_BYTES, "little") + message


class FrameDecoder:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add_bytes(self, data: bytes) -> list[bytes]:
        """Adds received bytes; returns the messages that are complete now, in order."""
        self._buffer += data
        messages: list[bytes] = []
        while len(self._buffer) >= HEADER_BYTES:
            size = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(
                    f"received a frame of {size} bytes on a trainer's connection, allowed are {MAX_FRAME_BYTES}: the other end is not a trainer or agent of this version"
                )
            if len(self._buffer) < HEADER_BYTES + size:
                break
            messages.append(bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + size]))
            del self._buffer[: HEADER_BYTES + size]
        return messages
