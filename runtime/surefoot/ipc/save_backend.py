"""Defines `SaveBackend`, which keeps a trainer's staging memory and drains it.

`Checkpointer` is written against this protocol alone. Implementations: `ipc.agent_client.AgentBackend` (the socket),
`checkpointer.library_mode.in_process.InProcessBackend` (no agent: the drain runs in this process).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from surefoot.ipc.trainer_messages import Attached, PauseReport, Staged, StepReport
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint
from surefoot.protocol.progress import NO_ANOMALIES, AnomalyRun


@dataclass(frozen=True, slots=True)
class ReusableSave:
    """Holds the stream of a rank save found in staging memory.

    As it was sealed, or damaged since.
    """

    stream: memoryview
    layout: str
    own: bool = True
    """Only this process' own saves are ever written there; else another rank may begin to at any moment."""


class SaveBackend(Protocol):
    """Keeps a trainer's staging memory and drains it.

    Thread-safe; every call returns within its own small time limit.

    Raises:
        SurefootError: any method; the training goes on.
    """

    @property
    def attached(self) -> Attached:
        """This rank's epoch, world and restore point."""
        ...

    def request_arena(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        """Allocates and touches staging memory.

        Args:
            slot_bytes: What a slot must hold at least.

        Returns:
            Writable memory of slots × slot size, the number of slots, and the slot size in bytes.
        """
        ...

    def reusable_saves(self, checkpoint: Checkpoint) -> Mapping[int, ReusableSave]:
        """Finds saves of a checkpoint in this worker's staging memory.

        To be read before `arena`.

        Returns:
            Rank → its save.
        """
        ...

    def fetch_all_servers(self) -> tuple[MemoryServerEndpoint, ...] | None:
        """Asks for every holder of the epoch, where `attached` names some.

        Returns:
            All of them; None if nobody said yet.
        """
        ...

    def free_slot(self, wait_seconds: float) -> int | None:
        """Waits for a slot that nothing drains from.

        Returns:
            Its number; None if none became free in time.
        """
        ...

    def hand_over_slot(self, message: Staged) -> None:
        """Hands a sealed slot over."""
        ...

    def report_step(self, message: StepReport) -> None:
        """Reports a finished step."""
        ...

    def report_pause(self, message: PauseReport) -> None:
        """Reports the begin or the end of an announced pause."""
        ...

    def is_barrier_at(self, step: int) -> bool:
        """Decides whether a barrier is at this step, proposed or bound. Atomic with answering proposals."""
        ...

    def wait_at_barrier(self, step: int) -> None:
        """Reports that the barrier is reached, and waits there.

        Returns if the barrier is cancelled; usually this process is killed first.
        """
        ...

    def min_interval_exponent(self) -> int:
        """The least level that the coordinator asks for."""
        ...

    def report_restore(
        self, step: int, source: str, size_bytes: int, seconds: float, odd: AnomalyRun = NO_ANOMALIES
    ) -> None: ...

    def restore_failed(self, checkpoint: Checkpoint, absent: bool, detail: str) -> None: ...

    def notify(self, reason: str, text: str) -> None: ...

    def flush(self, wait_seconds: float) -> bool:
        """Waits until everything staged is drained; whether it was."""
        ...

    def close(self, step: int, offered: bool = False) -> None:
        """Ends the connection.

        `offered`: the state of `step` was saved, or that was tried.
        """
        ...

    def disable_after_fork(self) -> None:
        """Lets go of the parent's resources in a forked child.

        Right behind the fork, without a word, a lock or a wait.
        """
        ...
