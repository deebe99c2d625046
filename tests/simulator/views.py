"""What one modelled operator keeps: of each holder, of each agent's line, and of what it still has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simulator.engine import Line
from surefoot.protocol import messages as said
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, WorkerId
from surefoot_operator.coordinator import desired_messages
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.policy.core import actions as act

FEW_HOLDERS = 0
"""Nobody is told of all because there are few: what a large job does is searched at the size of a small one."""


@dataclass(frozen=True, slots=True)
class Uploads:
    """All uploads of one upkeep: together they are the whole wish."""

    shares: dict[WorkerId, said.UploadSave]

    def __str__(self) -> str:
        return f"uploads: {', '.join(f'{w} {p.saves}' for w, p in self.shares.items())}"


Todo = act.Action | act.MaintenanceAction | Uploads


@dataclass
class Watch:
    """What this operator's own calls to one holder showed."""

    endpoint: MemoryServerEndpoint
    state: str = "Unreachable"
    since: float = 0.0
    fence: int | None = None
    read_epoch: int | None = None
    entries: tuple[RankManifest, ...] = ()
    busy: bool = False
    sealing: bool = False
    dropping: bool = False
    polled: float = -10.0
    provisioned: bool = False


def seen_holders(
    watches: Mapping[MemoryServerInstance, Watch], named: tuple[MemoryServerEndpoint, ...], term_seconds: float
) -> tuple[ObservedMemoryServer, ...]:
    """What an operator saw of holders; one that status names and this term never met is silent."""
    seen = [
        ObservedMemoryServer(w.endpoint, w.state, w.since, w.fence, w.read_epoch, w.entries)  # type: ignore[arg-type]
        for w in watches.values()
    ]
    unmet = [e for e in named if e.instance not in watches]
    return (*seen, *(ObservedMemoryServer(e, "Unreachable", term_seconds) for e in unmet))


@dataclass
class Connection:
    line: Line
    told: desired_messages.Delivered = field(default_factory=dict)
    worker: WorkerId | None = None
    incarnation: str = ""

    @property
    def hears_all(self) -> bool:
        """As `AgentConnection.hears_all`."""
        return desired_messages.was_sent_all_servers(self.told)


def copy_request(copy: act.RequestRepair, watches: Mapping[MemoryServerInstance, Watch]) -> said.RepairSave:
    """Says where both holders answer, as far as the operator met them."""
    where = tuple(watches[one].endpoint for one in (copy.source, copy.target) if one in watches)
    return said.RepairSave(0, copy.generation, copy.save, copy.source, copy.target, where)
