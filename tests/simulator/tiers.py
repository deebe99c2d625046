"""The memory tier and the persistent tier as the protocol describes them: scripts, conditional puts, listing.

Data lives here in the open, so that the oracle can look at it without asking. A holder's life is one instance: a
restart is another Holder, empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from simulator.engine import Process, Refusal
from simulator.rules import Rules
from surefoot.protocol.checkpoints.completeness import UnreadRecord
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave

CHUNKS = 2
"""Chunks of every modelled rank save."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk: the content of a rank save, and which part of it."""

    content: int
    part: int
    damaged: bool = False


def manifest(
    save: RankSave, world: int, incarnation: str, content: int, at: float, objects: tuple[tuple[str, str], ...] = ()
) -> RankManifest:
    digest = f"{content & (2**64 - 1):016x}"
    return RankManifest(
        save=save, world_size=world, incarnation=incarnation, layout=f"{world:016x}", stream_bytes=1000, chunks=CHUNKS,
        digests_digest=digest, digests_bytes=8, values_digest=digest, values_bytes=8, saved_at=at, objects=objects,
    )  # fmt: skip


class Watcher:
    """What the oracle hears of the tiers. This one hears nothing."""

    def committed(self, holder: Holder, entry: RankManifest, writer: int) -> None: ...
    def dropping(self, holder: Holder, save: RankSave, writer: int) -> None: ...
    def persisted(self, entry: RankManifest) -> None: ...
    def overwriting(self, tier: Persistent, save: RankSave, piece: Piece) -> None: ...
    def deleting(self, checkpoint: Checkpoint) -> None: ...


@dataclass(eq=False)
class Holder:
    """One Redis of a node: fence, chunks, index."""

    endpoint: MemoryServerEndpoint
    process: Process
    rules: Rules
    watcher: Watcher
    fence: int = 0
    sealed: int = 0
    """What a leader was told the fence is; the oracle's, not the holder's."""
    provisioned: bool = False
    full: bool = False
    chunks: dict[tuple[RankSave, int], Piece] = field(default_factory=dict)
    index: dict[RankSave, RankManifest] = field(default_factory=dict)
    written_after_fence: set[RankSave] = field(default_factory=set)
    damaged: set[RankSave] = field(default_factory=set)
    """Whose index entries nobody can read any more."""
    holes: set[tuple[RankSave, int]] = field(default_factory=set)
    """Chunks that a fault took from under an index entry."""
    layouts: dict[str, bool] = field(default_factory=dict)
    """Layout records by digest, and whether each can be read."""

    @property
    def id(self) -> MemoryServerInstance:
        return self.endpoint.instance

    def provision(self, epoch: int) -> int:
        """Idempotent: users, scripts, and a fence that is at least `epoch`. Answers the fence."""
        self._ready(provisioning=True)
        self.provisioned = True
        self.fence = max(self.fence, epoch)
        return self.fence

    def seal(self, writer: int) -> None:
        self._ready()
        if writer < self.fence:
            raise Refusal("fenced")
        self.sealed = writer
        if self.rules.seal:
            self.fence = writer

    def read(self) -> tuple[RankManifest, ...]:
        self._ready()
        return tuple(self.index[save] for save in sorted(self.index) if save not in self.damaged)

    def good_layouts(self) -> frozenset[str]:
        """Digests of the layout records that can be read here."""
        self._ready()
        return frozenset(digest for digest, good in self.layouts.items() if good)

    def put(self, save: RankSave, piece: Piece) -> None:
        self._ready()
        if self.full:
            raise Refusal("full")
        self.chunks[save, piece.part] = piece
        self.holes.discard((save, piece.part))

    def commit(self, entry: RankManifest, writer: int) -> None:
        self._ready()
        if writer < self.fence and self.rules.fence_in_commit:
            raise Refusal("fenced")
        if writer < max(self.fence, self.sealed):
            self.written_after_fence.add(entry.save)
        if self.rules.whole_commit and any((entry.save, part) not in self.chunks for part in range(entry.chunks)):
            raise Refusal("missing")
        self.fence = max(self.fence, writer)
        self.index[entry.save] = entry
        self.damaged.discard(entry.save)
        self.layouts[entry.layout] = True  # whoever writes a save writes its layout before
        self.watcher.committed(self, entry, writer)

    def drop(self, save: RankSave, writer: int) -> None:
        self._ready()
        if writer < self.fence and self.rules.fence_in_drop:
            raise Refusal("fenced")
        self.watcher.dropping(self, save, writer)
        if self.rules.drop_index_first:
            self.index.pop(save, None)
            self.damaged.discard(save)
        for part in range(CHUNKS):
            self.chunks.pop((save, part), None)

    def unindexed(self) -> set[RankSave]:
        """Of which there are chunks, and no entry."""
        self._ready()
        return {save for save, _ in self.chunks} - (set(self.index) if self.rules.sweep_by_index else set())

    def sweep(self, saves: set[RankSave], writer: int) -> None:
        """Their chunks go, where there is no entry by now and nobody newer rules."""
        self._ready()
        if writer < self.fence:
            raise Refusal("fenced")
        for save in saves:
            if save not in self.index or not self.rules.sweep_by_index:
                for part in range(CHUNKS):
                    self.chunks.pop((save, part), None)

    def get(self, save: RankSave) -> tuple[Piece, ...] | None:
        """All chunks of an indexed rank save, or None: it answered, and does not have it."""
        self._ready()
        if save not in self.index:
            return None
        if not self._describes(save):
            return ()
        return tuple(self.chunks[save, part] for part in range(CHUNKS) if (save, part) in self.chunks)

    def holds(self, save: RankSave) -> bool:
        """For the oracle: whether a good copy is here, whoever may reach it."""
        return self._describes(save) and all(
            (save, part) in self.chunks and not self.chunks[save, part].damaged for part in range(CHUNKS)
        )

    def _describes(self, save: RankSave) -> bool:
        """Whether entry and layout of a save are here, and can be read."""
        return save in self.index and save not in self.damaged and self.layouts[self.index[save].layout]

    def _ready(self, provisioning: bool = False) -> None:
        if not self.provisioned and not provisioning:
            raise Refusal("noauth")  # a restarted one knows no user of ours; callers treat it as away


@dataclass(eq=False)
class Persistent:
    """The persistent tier: chunks first, then manifests that are put once."""

    process: Process
    rules: Rules
    watcher: Watcher
    chunks: dict[tuple[RankSave, int], Piece] = field(default_factory=dict)
    manifests: dict[RankSave, RankManifest] = field(default_factory=dict)
    damaged: dict[RankSave, float] = field(default_factory=dict)
    """Whose manifests nobody can read any more, since when."""
    gone: set[RankSave] = field(default_factory=set)
    """Whose manifests a fault removed."""
    layouts: dict[str, bool] = field(default_factory=dict)
    """The shared layout records by digest, and whether each can be read."""
    worn: set[RankSave] = field(default_factory=set)
    """Beside which the layout record of its own cannot be read."""
    lost_layouts: dict[str, float] = field(default_factory=dict)
    """Digests of which a fault damaged every record that there was, and when."""
    claims: dict[int, str] = field(default_factory=dict)
    """Epochs that a leader had claimed here, and the ticket of each."""
    failing: Callable[[], bool] = lambda: False
    """Whether the next request fails."""
    slow: Callable[[], float] = lambda: 0.0
    """Seconds that the next listing takes."""

    slow_put: Callable[[], float] | None = None
    """Seconds that a rank's upload takes, where they are not the usual ones."""

    def put(self, entry: RankManifest, pieces: tuple[Piece, ...]) -> None:
        self._answers()
        there = self.manifests.get(entry.save)
        if there is not None and self.rules.compare_first:
            if there.has_same_bytes_as(entry):
                return
            raise Refusal("another save is there")
        for piece in pieces:
            self.watcher.overwriting(self, entry.save, piece)
            self.chunks[entry.save, piece.part] = piece

    def newest_epoch(self, claim_epoch: int, ticket: str) -> int:
        """Claims an epoch for who bears this ticket, and tells the newest that anything else here names."""
        self._answers()
        is_own = bool(claim_epoch) and self.claims.setdefault(claim_epoch, ticket) == ticket
        claimed = self.claims.keys() - ({claim_epoch} if is_own else set())
        return max((*claimed, *(save.generation for save, _ in self.chunks)), default=0)

    def commit(self, entry: RankManifest) -> None:
        self._answers()
        there = self.manifests.get(entry.save)
        if there is not None and self.rules.agree_manifests:
            if there.has_same_bytes_as(entry):
                return
            raise Refusal("another manifest is there")
        self.manifests[entry.save] = entry
        self.layouts[entry.layout] = True
        self.watcher.persisted(entry)

    def listing(self) -> tuple[tuple[RankManifest, ...], tuple[UnreadRecord, ...]]:
        """What can be read, and what could not."""
        self._answers()
        found, left = [], []
        for save in sorted(self.manifests):
            if save in self.damaged:
                left.append(UnreadRecord(f"the manifest of {save} is damaged", False, save.checkpoint))
            elif self.failing():
                left.append(UnreadRecord(f"the manifest of {save} was not given", True, save.checkpoint))
            else:
                found.append(self.manifests[save])
        return tuple(found), tuple(left)

    def _answers(self) -> None:
        if self.failing():
            raise Refusal("503 slow down")

    def delete(self, checkpoint: Checkpoint) -> None:
        self._answers()
        self.watcher.deleting(checkpoint)
        for save in [s for s in (*self.manifests, *self.gone) if s.checkpoint == checkpoint]:
            self.manifests.pop(save, None)
            self.damaged.pop(save, None)
            self.gone.discard(save)
        for key in [k for k in self.chunks if k[0].checkpoint == checkpoint]:
            del self.chunks[key]

    def get(self, save: RankSave) -> tuple[Piece, ...] | None:
        self._answers()
        if save not in self.manifests:
            return None
        if not self._describes(save):
            return ()
        return tuple(self.chunks[save, part] for part in range(CHUNKS) if (save, part) in self.chunks)

    def holds(self, save: RankSave) -> bool:
        return self._describes(save) and all((save, part) in self.chunks for part in range(CHUNKS))

    def struck(self, save: RankSave) -> bool:
        """For the oracle: whether a fault took what is needed to read it."""
        entry = self.manifests.get(save)
        return save in self.damaged or save in self.gone or (entry is not None and not self._readable(entry.layout))

    def layout(self, digest: str) -> UnreadRecord | None:
        """None: it was read, be it beside a save that has it, by which the shared one is mended."""
        if self.failing():
            return UnreadRecord(f"layout {digest} was not given", True, digest=digest)
        if not self._readable(digest):
            return UnreadRecord(f"layout {digest} is damaged", False, digest=digest)
        self.layouts[digest] = True
        return None

    def _readable(self, digest: str) -> bool:
        beside = (s for s, m in self.manifests.items() if m.layout == digest and s not in self.worn)
        return self.layouts.get(digest, False) or next(beside, None) is not None

    def _describes(self, save: RankSave) -> bool:
        """Whether manifest and layout of a save are here, and can be read."""
        there = save in self.manifests and save not in self.damaged
        return there and self._readable(self.manifests[save].layout)
