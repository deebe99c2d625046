"""Defines what a snapshot says of the two tiers.

Pure values; part of `job_snapshot`. A silent holder is unknown and never empty, a record that a listing left out is unread and never
absent: either may be the only copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from surefoot.protocol.checkpoints.completeness import LeftOut
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, OlderJob, WorkerId

HIGHEST_EPOCH = 2**31 - 1
"""No job comes this far: a greater number in a listing is damage or malice, and decides nothing."""


@dataclass(frozen=True, slots=True)
class HolderSeen:
    """One instance of the memory tier, as the operator last reached it."""

    endpoint: HolderEndpoint
    state: Literal["Ready", "Proxied", "Silent", "Gone"]
    """Ready: provisioned for this job and answering. Proxied: silent to the operator, and sealed and read by an agent for this
    claim. Silent: unknown. Gone: the fabric knows that it no longer is."""
    since_seconds: float
    fence: int | None = None
    """Epoch that it was last sealed to by us or read to have; None: not known."""
    read_epoch: int | None = None
    """Claimed epoch for which `entries` were read *after* sealing; None: `entries` are not fit to decide."""
    entries: tuple[RankManifest, ...] = ()
    used_bytes: int | None = None
    """What the server holds for all jobs when `entries` were read, rounded up by a hundredth of its limit at most."""
    limit_bytes: int | None = None
    """What it may hold. Both None: not known, or without a limit."""
    closed: str = ""
    """Why the job may not write there: it holds more than its part. Empty: it may."""
    trouble: str = ""
    """Of a silent one: how the operator's last call to it ended."""
    refusing: bool = False
    """Of a silent one: something answers there, and refuses the operator (password, authority)."""


@dataclass(frozen=True, slots=True)
class SightSeen:
    """An agent's answer about a holder that the operator cannot reach."""

    epoch: int
    since_seconds: float
    """When it was asked first."""
    asked_seconds: float
    """When it was asked last."""
    answered_seconds: float | None = None
    """None: nobody has answered yet."""
    there: bool = False
    """Whether the agent that answered last sees exactly this instance."""
    trouble: str = ""
    """Why it does not."""
    entries: tuple[RankManifest, ...] | None = None
    """Its index, read by an agent that had sealed it at `epoch`; None: nobody has."""
    refused: tuple[str, ...] = ()
    """Records of that reading that broke a bound: a sentence each."""


@dataclass(frozen=True, slots=True)
class PersistentSeen:
    """The persistent tier as one agent listed it.

    `read_epoch`: as for holders, and no holder was read later.
    """

    read_epoch: int | None = None
    entries: tuple[RankManifest, ...] | None = None
    asked_seconds: float | None = None
    error: str | None = None
    older_job: OlderJob | None = None
    """Whose folder was listed, if not this job's: the saves among `entries` have their epochs negated."""
    left_out: tuple[LeftOut, ...] = ()
    """Records that the listing could not read."""
    unjudged: frozenset[Checkpoint] = frozenset()
    """Checkpoints that may be complete for all that could be read: never deleted, never taken for absent."""
    asked_of: frozenset[WorkerId] = frozenset()
    """Workers whose agents were asked and have not answered yet."""
    newest_epoch: int = 0
    """The newest epoch that the tier has a save or a claim of, the claim that was asked for aside."""
    deleting: frozenset[Checkpoint] = frozenset()
    """Those whose deletion this leader has asked for and that may still be there; not among `entries`."""

    def unreadable_checkpoints(self, negated: bool) -> frozenset[Checkpoint]:
        """Lists checkpoints of which a manifest or layout could not be read."""
        told = {one.checkpoint for one in self.left_out if one.checkpoint is not None}
        told = {c.negated() for c in told} if negated else told
        return frozenset(told | {m.save.checkpoint for m in self.entries or () if m.layout in self.lost_layouts})

    def without(self, going: frozenset[Checkpoint]) -> PersistentSeen:
        """Takes out checkpoints that are being deleted."""
        entries = None if self.entries is None else tuple(m for m in self.entries if m.save.checkpoint not in going)
        return replace(self, entries=entries, deleting=self.deleting | going)

    @property
    def lost_layouts(self) -> frozenset[str]:
        return frozenset(one.digest for one in self.left_out if one.digest is not None)
