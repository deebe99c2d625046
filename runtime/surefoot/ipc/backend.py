"""Defines `SaveBackend`, which keeps a trainer's staging memory and drains it.

`Checkpointer` is written against this protocol alone. Implementations: `ipc.agent_backend.AgentBackend` (the socket),
`checkpointer.in_process.InProcessBackend` (no agent: the drain runs in this process).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from surefoot.ipc.trainer_messages import Attached, Staged, Stepped
from surefoot.protocol.identities import Checkpoint


@dataclass(frozen=True, slots=True)
class ReusableSave:
    """The stream of a rank save that still lies in staging memory, as it was sealed or damaged since."""

    stream: memoryview
    layout: str
    own: bool = True
    """Only this process' own saves are ever written there; else another rank may begin to at any moment."""


class SaveBackend(Protocol):
    """Thread-safe; every call returns within its own small time limit or raises a SurefootError."""

    @property
    def attached(self) -> Attached:
        """This rank's epoch, world and restore point."""
        ...

    def arena(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        """Writable memory of (slots × slot_bytes), the number of slots, and the slot size; allocated and touched."""
        ...

    def reusable_saves(self, checkpoint: Checkpoint) -> Mapping[int, ReusableSave]:
        """Rank → save of `checkpoint` in this worker's staging memory; to be read before `arena`."""
        ...

    def free_slot(self, wait_seconds: float) -> int | None:
        """A slot that nothing drains from, or None if none became free in time."""
        ...

    def staged(self, message: Staged) -> None:
        """Hands a sealed slot over."""
        ...

    def stepped(self, message: Stepped) -> None:
        """Reports a finished step."""
        ...

    def held_at(self, step: int) -> bool:
        """Whether a planned change holds this rank at `step` (proposed or bound). Atomic with answering proposals."""
        ...

    def wait_while_held(self, step: int) -> None:
        """Says Holding and waits until the hold is cancelled (returns) or this process is killed (the usual end)."""
        ...

    def level(self) -> int:
        """The least level that the coordinator asks for."""
        ...

    def restored(self, step: int, source: str, size_bytes: int, seconds: float) -> None: ...

    def restore_failed(self, checkpoint: Checkpoint, absent: bool, detail: str) -> None: ...

    def say(self, reason: str, text: str) -> None: ...

    def flush(self, wait_seconds: float) -> bool:
        """Waits until everything staged is drained; whether it was."""
        ...

    def close(self, step: int) -> None: ...

    def disown(self) -> None:
        """In a forked child, right behind the fork: lets go of what is the parent's without a word, a lock or a wait."""
        ...
