"""What upkeep may ask for. Idempotent, and printed as sentences; `SealHolder` and `ListPersistentTier` serve here too.

Each carries the epoch it was decided in and is void in any other: holders refuse it, and so do agents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from surefoot.protocol.identities import Checkpoint, HolderId, RankSave, WorkerId
from surefoot_operator.policy.actions import ListPersistentTier, SealHolder


@dataclass(frozen=True, slots=True)
class DropSaves:
    """Drop these rank saves from exactly this holder instance, index first; not after `expires_seconds`."""

    holder: HolderId
    epoch: int
    saves: tuple[RankSave, ...]
    expires_seconds: float

    def __str__(self) -> str:
        return f"drop {len(self.saves)} rank saves of steps {_steps(s.step for s in self.saves)} from {self.holder}"


@dataclass(frozen=True, slots=True)
class CopySave:
    """Have this worker's agent copy one rank save between holders: verify, write, commit with `epoch`."""

    worker: WorkerId
    epoch: int
    save: RankSave
    source: HolderId
    target: HolderId

    def __str__(self) -> str:
        return f"copy {self.save} from {self.source} to {self.target} through {self.worker}"


@dataclass(frozen=True, slots=True)
class UploadSaves:
    """Have this worker's agent bring these rank saves of the pinned checkpoint to the persistent tier.

    All of one upkeep together are the whole wish: a worker that is not named uploads nothing more.
    """

    worker: WorkerId
    epoch: int
    saves: tuple[RankSave, ...]

    def __str__(self) -> str:
        return f"upload {len(self.saves)} rank saves of step {_steps(s.step for s in self.saves)} through {self.worker}"


@dataclass(frozen=True, slots=True)
class DropPersisted:
    """Have this worker's agent delete these checkpoints from the persistent tier, manifests first."""

    worker: WorkerId
    epoch: int
    checkpoints: tuple[Checkpoint, ...]

    def __str__(self) -> str:
        return f"delete steps {_steps(c.step for c in self.checkpoints)} from the persistent tier through {self.worker}"


Errand = SealHolder | ListPersistentTier | DropSaves | CopySave | UploadSaves | DropPersisted


def _steps(steps: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(steps))))
