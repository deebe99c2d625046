"""Defines `SaveBackend`, which provides a trainer's staging memory and flushes staged saves.

`Checkpointer` depends on this protocol alone. Implementations: `ipc.agent_client.AgentBackend` (through the agent's
socket), `checkpointer.library_mode.in_process_backend.InProcessBackend` (no agent: this process flushes).
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
    """A rank save in staging memory that a restore may read; the reader verifies it."""

    stream: memoryview
    """The byte stream of the save."""
    layout_digest: str
    """Digest of its layout record."""
    is_own: bool = True
    """Whether it is in this rank's own memory, which nothing else overwrites; another rank's may change at any time."""


class SaveBackend(Protocol):
    """Provides a trainer's staging memory and flushes staged saves.

    Thread-safe; every call returns within its own short time limit.

    Raises:
        SurefootError: From any method; training continues without saving.
    """

    @property
    def attached(self) -> Attached:
        """This rank's generation, ranks and restore point."""
        ...

    def request_arena(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        """Allocates and prefaults staging memory.

        Args:
            slot_bytes: Least size of each slot.

        Returns:
            Writable memory of all slots, the number of slots, and the size of a slot in bytes.
        """
        ...

    def find_reusable_saves(self, checkpoint: Checkpoint) -> Mapping[int, ReusableSave]:
        """Finds saves of a checkpoint in this worker's staging memory.

        They must be read before `request_arena` is called, which may overwrite them.

        Returns:
            The save of each rank that has one here.
        """
        ...

    def fetch_all_servers(self) -> tuple[MemoryServerEndpoint, ...] | None:
        """Requests all memory servers of the job, where `attached` has only some of them.

        Returns:
            All of them; None if they are not known yet, so that the caller asks again.
        """
        ...

    def wait_for_free_slot(self, wait_seconds: float) -> int | None:
        """Waits for a slot whose save is flushed.

        Returns:
            Its index; None if no slot became free in time.
        """
        ...

    def hand_over_slot(self, message: Staged) -> None:
        """Hands over a slot with a complete save, to be flushed."""
        ...

    def report_step(self, message: StepReport) -> None:
        """Reports a finished step."""
        ...

    def report_pause(self, message: PauseReport) -> None:
        """Reports the start or the end of a pause that the script announced."""
        ...

    def is_barrier_at(self, step: int) -> bool:
        """Returns whether a barrier, proposed or bound, is at this step; from now on a proposal for it is rejected."""
        ...

    def wait_at_barrier(self, step: int) -> None:
        """Reports that the barrier is reached, and waits there.

        Returns only if the barrier is cancelled; normally this process is killed before.
        """
        ...

    def min_interval_exponent(self) -> int:
        """Returns the least interval exponent, as the coordinator set it."""
        ...

    def report_restore(
        self, step: int, source: str, size_bytes: int, seconds: float, anomalies: AnomalyRun = NO_ANOMALIES
    ) -> None:
        """Reports that the rank has restored its state; see `trainer_messages.RestoreDone`."""
        ...

    def report_restore_failure(self, checkpoint: Checkpoint, absent: bool, detail: str) -> None:
        """Reports an unreadable checkpoint; see `trainer_messages.RestoreFailed`."""
        ...

    def report_notice(self, reason: str, text: str) -> None:
        """Asks for an event with this reason (CamelCase) and message."""
        ...

    def wait_for_flush(self, wait_seconds: float) -> bool:
        """Waits until everything staged is flushed; returns whether it is."""
        ...

    def close(self, step: int, save_requested: bool = False) -> None:
        """Closes the connection.

        Args:
            step: Last finished step.
            offered: Whether the program saved the state of `step`, or tried to.
        """
        ...

    def disable_after_fork(self) -> None:
        """Gives up the parent's resources in a forked child.

        Called directly after the fork, so it must not send, lock or wait.
        """
        ...
