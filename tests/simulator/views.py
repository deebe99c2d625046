"""What one modelled operator keeps: of each holder, of each agent's line, and of what it still has to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.engine import Line
from surefoot.protocol import messages as said
from surefoot.protocol.identities import HolderEndpoint, WorkerId
from surefoot.protocol.records import RankManifest
from surefoot_operator.coordinator import desired_messages
from surefoot_operator.policy import actions as act


@dataclass(frozen=True, slots=True)
class Uploads:
    """All uploads of one upkeep: together they are the whole wish."""

    shares: dict[WorkerId, said.PromoteSave]

    def __str__(self) -> str:
        return f"uploads: {', '.join(f'{w} {p.saves}' for w, p in self.shares.items())}"


Todo = act.Action | act.MaintenanceAction | Uploads


@dataclass
class Watch:
    """What this operator's own calls to one holder showed."""

    endpoint: HolderEndpoint
    state: str = "Silent"
    since: float = 0.0
    fence: int | None = None
    read_epoch: int | None = None
    entries: tuple[RankManifest, ...] = ()
    busy: bool = False
    sealing: bool = False
    dropping: bool = False
    polled: float = -10.0
    provisioned: bool = False


@dataclass
class Connection:
    line: Line
    told: desired_messages.Delivered = field(default_factory=dict)
    worker: WorkerId | None = None
    incarnation: str = ""
