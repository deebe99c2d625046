"""The conversation of agents and coordinator: one frozen dataclass a message; `wire` says how they travel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from surefoot.protocol.codec import flat, since
from surefoot.protocol.completeness import LeftOut
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId, OlderJob, RankSave
from surefoot.protocol.progress import NOTHING_TOLD, Progress

# ---- agent → coordinator ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on every connection. `epoch` is the epoch whose trainers run here, 0 if none does."""

    job: str
    index: int
    attempt: int
    incarnation: str
    node: str
    token: str
    epoch: int
    stopped: int
    """Every trainer of epochs below this is reaped."""
    warm: bool
    store: str | None = None
    """host:port of the epoch's store, if this agent hosts it."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Every heartbeatSeconds, and at once when something changed. Its progress is the running epoch's."""

    epoch: int
    stopped: int
    warm: bool
    progress: Progress = flat(NOTHING_TOLD)  # noqa: RUF009  it makes a field
    pending: tuple[Checkpoint, ...] = ()
    """Checkpoints staged here and not yet on all their holders."""
    saved: Checkpoint | None = None
    """Newest checkpoint all of whose local rank saves are committed."""
    copies: int = 0
    """On how many holders `saved` is."""
    leaving: bool = since(2, False)
    """This worker was told to end: by the deletion of its pod, or by its node alone, which nobody else may have seen."""


@dataclass(frozen=True, slots=True)
class Exited:
    """A trainer ended with an error. Only the first of a node's is sent; the rest were killed by the agent.

    `rank` is −1 for a hang in which none is behind the others. `code` is −N for signal N, `cause` one line.
    """

    epoch: int
    rank: int
    code: int
    cause: str
    secondary: bool
    """The error is the echo of another rank's death (its connection broke)."""
    step: int
    kind: Literal["failed", "hang"] = since(2, "failed")
    """hang: the agent ended its trainers, none of which made a step for too long."""
    detail: str = since(2, "")
    """More lines for people, as where each rank stood. Whoever keeps them shortens them."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Every trainer of epochs below `epoch` is dead and reaped on this worker."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The epoch's store answers at this host:port."""

    epoch: int
    address: str


@dataclass(frozen=True, slots=True)
class HoldAnswer:
    """Whether every local rank will hold at `step`: false if one is already there or beyond."""

    epoch: int
    step: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Held:
    """Every local rank has finished `step`, has staged its save of it, and waits."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class UnreadableSave:
    """Every copy of something rank `rank` needs of `checkpoint` answered and failed verification.

    `absent` means instead that every holder answered and none has it any more: the holder restarted after being read.
    """

    epoch: int
    checkpoint: Checkpoint
    rank: int
    absent: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Every local rank of the epoch exited with 0 and everything staged has been drained."""

    epoch: int
    exit_code: int
    steps: int
    """Last finished step; 0 means that the program never called step, −1 that a plain torchrun cannot know it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A page of the answer to ListPersistent: manifests (JSON of `RankManifest`), and layout records by digest.

    Pages of one request come in their order; the last has `more` false, and alone says what was left out. Manifests name
    their layouts by digest; records of layouts come as far as they were asked for.
    """

    request: int
    manifests: tuple[str, ...] = ()
    layouts: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    left_out: tuple[LeftOut, ...] = since(2, ())
    page: int = since(2, 0)
    more: bool = since(2, False)


@dataclass(frozen=True, slots=True)
class Repaired:
    """Answer to RepairSave."""

    request: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Persisted:
    """Answer to PromoteSave, one a rank save."""

    save: RankSave
    error: str | None = None
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PersistentDropped:
    """Answer to DropPersistent."""

    request: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Sighting:
    """Answer to LookAtHolders, in their order: whether exactly that instance gave its index to this agent, else why not."""

    SINCE: ClassVar[int] = 2
    request: int
    seen: tuple[bool, ...] = ()
    trouble: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should hear of: becomes an event. `reason` is CamelCase and stable."""

    reason: str
    text: str


FromAgent = (
    Hello | Heartbeat | Exited | Stopped | StoreReady | HoldAnswer | Held
    | UnreadableSave | Finished | Listing | Repaired | Persisted | PersistentDropped | Sighting | Notice
)  # fmt: skip

# ---- coordinator → agent ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hello was accepted. `term` names this coordinator's life."""

    term: str
    heartbeat_seconds: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection is closed after this. With `retry` the agent tries again (no leader here, API away)."""

    reason: str
    retry: bool
    after_seconds: float = since(2, 0.0)
    """Not sooner than this, where many come at once; 0: as the agent likes."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop and reap every trainer of epochs below `epoch`; drains go on. Sent while `epoch` is Claimed."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Assign:
    """The committed epoch, for one member. Trainers start at most once per epoch."""

    epoch: int
    world: int
    """Ranks in all."""
    first_rank: int
    local_ranks: int
    group_rank: int
    group_size: int
    restarts: int
    parent: Checkpoint | None
    lineage: tuple[tuple[int, Checkpoint | None, int], ...]
    token: str
    hosts_store: bool
    store: str | None
    """host:port once known; the trainers wait for it."""
    holders: tuple[HolderEndpoint, ...]
    """Every provisioned holder, for restoring."""
    targets: tuple[HolderId, ...]
    """Where this worker's saves go, the local one first."""
    replicas: int
    older_job: OlderJob | None = None
    """Where the parent lies, if it is an older job's."""
    listed: bool = since(3, False)
    """`holders` are left out: they are those that `HolderChanges` told of on this line."""


@dataclass(frozen=True, slots=True)
class Holders:
    """The memory tier changed within an epoch: new `holders` and `targets` of an assignment."""

    epoch: int
    holders: tuple[HolderEndpoint, ...]
    targets: tuple[HolderId, ...]
    replicas: int
    listed: bool = since(3, False)
    """As in `Assign`."""


@dataclass(frozen=True, slots=True)
class HolderChanges:
    """What changed among holders since this line was told of them last; at first, all of them. See `holder_list`."""

    SINCE: ClassVar[int] = 3
    added: tuple[tuple[str, str, str, int, str, bool], ...]
    """Node, instance, host, port, domain (empty: the node's name) and whether it speaks TLS; also of one that moved."""
    gone: tuple[HolderId, ...] = ()


@dataclass(frozen=True, slots=True)
class Hold:
    """A planned change: save exactly at `step` and wait there.

    `propose` asks; `bind` follows once all accepted; `cancel` lets a rank that waits at an unbound step go on. Said
    again on a new connection: the agent answers again, HoldAnswer to a proposal, Held if it already holds there.
    `cancel` with step 0 cancels whatever hold the agent knows of (a coordinator that returned knows of none).
    """

    epoch: int
    step: int
    verb: Literal["propose", "bind", "cancel"]


@dataclass(frozen=True, slots=True)
class ListPersistent:
    """List the persistent tier now, or the folder of an older job, and answer with Listing."""

    request: int
    older_job: OlderJob | None = None
    manifests: bool = since(2, True)
    """Whether manifests are wanted; else the layout records alone."""
    layouts: tuple[str, ...] | None = since(2, None)
    """Digests of the layout records that are wanted; None: of every one that a manifest names."""


@dataclass(frozen=True, slots=True)
class RepairSave:
    """Copy a rank save between holders: verify, write, commit with the writer's epoch `epoch`."""

    request: int
    epoch: int
    save: RankSave
    source: HolderId
    target: HolderId


@dataclass(frozen=True, slots=True)
class PromoteSave:
    """Upload these rank saves of a pinned checkpoint to the persistent tier.

    `round` grows with each upload that failed: the same wish again is another message, and is sent.
    """

    epoch: int
    saves: tuple[RankSave, ...]
    round: int = 0


@dataclass(frozen=True, slots=True)
class DropPersistent:
    """Delete these checkpoints from the persistent tier, manifests first."""

    request: int
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class LookAtHolders:
    """Say what you see of these holders, which the operator does not reach. Changes nothing there."""

    SINCE: ClassVar[int] = 2
    request: int
    holders: tuple[HolderEndpoint, ...]


@dataclass(frozen=True, slots=True)
class SaveLevel:
    """The least level to save at: every k·2^level steps (seconds and `auto` become a level here)."""

    epoch: int
    level: int


@dataclass(frozen=True, slots=True)
class Retire:
    """This worker is not needed any more: stop trainers, flush, exit with `exit_code`."""

    reason: str
    exit_code: int


ToAgent = (
    Welcome | Refused | Stop | Assign | Holders | HolderChanges | Hold | ListPersistent | RepairSave | PromoteSave | DropPersistent
    | LookAtHolders | SaveLevel | Retire
)  # fmt: skip
Message = FromAgent | ToAgent
