"""A Link whose agent is the test: it keeps what was staged, frees slots when told, holds when told."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from surefoot.ipc.save_backend import ReusableSave
from surefoot.ipc.trainer_messages import Attached, PauseReport, Staged, StepReport
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint
from surefoot.protocol.progress import NO_ANOMALIES, AnomalyRun


def attached(interval_steps: int = 2, parent: Checkpoint | None = None) -> Attached:
    return Attached("job", 1, 1, 0, "me", parent, ((1, parent, 1),), (), 1, interval_steps, None, 0)


@dataclass
class FakeLink:
    """Slots become free at once unless `draining`."""

    attached: Attached = field(default_factory=attached)
    slots: int = 2
    draining: bool = False
    hold: int | None = None
    at_level: int = 0
    saves: list[tuple[Staged, bytes, bytes]] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    pauses: list[PauseReport] = field(default_factory=list)
    said: list[tuple[str, str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    closed: int | None = None
    refuse_arena: bool = False
    late: list[int] = field(default_factory=list)
    """Steps that were staged after it was said that they no longer could be."""

    def __post_init__(self) -> None:
        self.busy: set[int] = set()
        self.arenas = 0
        self.lock = threading.Lock()

    def request_arena(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        if self.refuse_arena:
            raise MemoryError("no staging memory here")
        self.arenas += 1
        self.slot_bytes = slot_bytes
        self.memory = bytearray(self.slots * slot_bytes)
        return memoryview(self.memory), self.slots, slot_bytes

    def find_reusable_saves(self, checkpoint: Checkpoint) -> dict[int, ReusableSave]:
        return {}

    def fetch_all_servers(self) -> tuple[MemoryServerEndpoint, ...]:
        return self.attached.servers

    def wait_for_free_slot(self, wait_seconds: float) -> int | None:
        return next((slot for slot in range(self.slots) if slot not in self.busy), None)

    def hand_over_slot(self, message: Staged) -> None:
        start = message.slot * self.slot_bytes
        middle = start + message.stream_bytes
        data = bytes(self.memory[start : middle + message.values_bytes])
        with self.lock:
            self.saves.append((message, data[: message.stream_bytes], data[message.stream_bytes :]))
            self.order.append(f"staged {message.step}")
            if any(message.step <= done.progress.closed_steps.closed_up_to for done in self.steps):
                self.late.append(message.step)
            if self.draining:
                self.busy.add(message.slot)

    def report_step(self, message: StepReport) -> None:
        self.steps.append(message)

    def report_pause(self, message: PauseReport) -> None:
        self.pauses.append(message)

    def is_barrier_at(self, step: int) -> bool:
        return self.hold == step

    def wait_at_barrier(self, step: int) -> None:
        self.order.append(f"held {step}")
        self.hold = None

    def min_interval_exponent(self) -> int:
        return self.at_level

    def report_restore(
        self, step: int, source: str, size_bytes: int, seconds: float, anomalies: AnomalyRun = NO_ANOMALIES
    ) -> None:
        self.order.append(f"restored {step}")

    def report_restore_failure(self, checkpoint: Checkpoint, absent: bool, detail: str) -> None:
        self.order.append(f"failed {checkpoint}")

    def report_notice(self, reason: str, text: str) -> None:
        self.said.append((reason, text))

    def wait_for_flush(self, wait_seconds: float) -> bool:
        return not self.busy

    def disable_after_fork(self) -> None:
        self.order.append("disowned")

    def close(self, step: int, save_requested: bool = False) -> None:
        self.closed, self.offered = step, save_requested
