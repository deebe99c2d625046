"""Who is who: checkpoints, rank saves, workers, holders. Used by every room of both packages."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.protocol.codec import since


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """All that one world saved at one step. `step` counts finished optimizer steps.

    Ordering is by (epoch, step); along one lineage, steps alone decide, see `lineage.newest`. A job's own epochs begin
    at 1: an epoch below 0 is an older job's, negated, and marks a checkpoint that this job only began from.
    """

    epoch: int
    step: int

    @property
    def imported(self) -> bool:
        """Whether an older job saved it: it lies in that job's folder, is read there only, and nothing here drops it."""
        return self.epoch < 0

    def negated(self) -> Checkpoint:
        """The same checkpoint as the other job names it."""
        return Checkpoint(-self.epoch, self.step)

    def __str__(self) -> str:
        if self.imported:
            return f"step {self.step} of epoch {-self.epoch} of an older job"
        return f"step {self.step} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class OlderJob:
    """Another job whose checkpoints this one takes up, read-only: the folder `{uri}/{job}` of a persistent tier."""

    uri: str
    job: str

    def __str__(self) -> str:
        return f"job {self.job} in {self.uri}"


@dataclass(frozen=True, slots=True, order=True)
class RankSave:
    """What one rank saved at one step of one epoch."""

    epoch: int
    step: int
    rank: int

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.epoch, self.step)

    def __str__(self) -> str:
        return f"rank {self.rank} at step {self.step} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """A worker's place (`index`) and which of its replacements this is (`attempt`)."""

    index: int
    attempt: int

    def __str__(self) -> str:
        return f"worker {self.index} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True, order=True)
class HolderId:
    """One Redis of the memory tier. One that restarted is empty, and another holder: `instance` is its run id."""

    node: str
    instance: str

    def __str__(self) -> str:
        return f"holder {self.node}/{self.instance[:8]}"


@dataclass(frozen=True, slots=True)
class HolderEndpoint:
    """Where a holder answers, and what fails together with it (`domain`, a topology value)."""

    holder: HolderId
    host: str
    port: int
    domain: str
    tls: bool = since(2, default=False)
    """Whether it speaks TLS, and nothing else."""


@dataclass(frozen=True, slots=True)
class LocalHolder:
    """The holder of this process' own node: its Unix socket, where a byte costs less than over the network."""

    node: str
    socket: str
