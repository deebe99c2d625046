"""Implements `SaveBackend` without an agent: arena and drain live in this process.

Made by `checkpointer` under plain `python` or `torchrun`, with whatever tiers there are as targets; for most that is
the persistent tier alone. No leader exists, so retention of the persistent tier happens here, and no barrier exists.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Never

from surefoot import metrics
from surefoot.errors import LastStepNotSaved
from surefoot.flush.engine import FlushArena, Flusher, FlushListener, FlushOptions
from surefoot.flush.garbage_collection import RetentionThread
from surefoot.flush.state_machine import StagedSave
from surefoot.ipc.trainer_messages import Attached, PauseReport, Staged, StepReport
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.protocol.progress import NO_ANOMALIES, AnomalyRun
from surefoot.tiers import Tier

log = logging.getLogger(__name__)

SLOTS = 2
PERSISTENT = MemoryServerInstance("persistent", "")
"""The persistent tier as a target of a drain."""

LOGGED_BY_SENDER = frozenset(
    (
        "DataSkipped",
        "DataSkipUnsupported",
        "LossNonFinite",
        "LossSpike",
        "ProgramChanged",
        "RestoredWithDifferences",
        "SaveFailed",
        "SaveSkipped",
        "StateChangedAfterStep",
        "ReplicasDiffer",
        "StateReset",
        "TrainingNotSaved",
    )
)
"""Notices of `checkpointer`, which reach the log in any case."""


@dataclass(frozen=True, slots=True)
class InProcessTargets:
    """Names the targets of saves and opens their tiers.

    Args:
        targets: where saves go; the first `replicas` of them must take each.
        open_tier: gives a thread its own connection.
        retention: removes older checkpoints, and what failed saves left.
    """

    targets: tuple[MemoryServerInstance, ...]
    open_tier: Callable[[MemoryServerInstance], Tier]
    retention: RetentionThread | None = None
    options: FlushOptions | None = None


class InProcessBackend:
    """`ipc.backend.SaveBackend`, in this process."""

    def __init__(self, attached: Attached, targets: InProcessTargets) -> None:
        self.attached = attached
        """May be replaced as long as nothing was saved: its restore point, where that cannot be read."""
        self._targets = targets
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0
        self._drain: Flusher | None = None
        self.lost: set[int] = set()
        """Steps whose saves were given up."""
        self.saved_step = 0
        """The newest step that a target acknowledged; 0: none yet."""
        self._without_room: dict[int, RankSave] = {}
        """Saves under way that their target had no room for, by step; at most one a slot."""
        self._trouble = ""
        """Why a newer one is not saved."""

    def request_arena(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        """Allocates anonymous memory and touches every page now, not in a save."""
        if self._memory is None or self._slot_bytes < slot_bytes:
            self._end_drain(60.0)
            self._memory = None  # until the drain of the new one runs: a thread or memory may be refused
            self._slot_bytes = -(-max(1, slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = mmap.mmap(-1, SLOTS * self._slot_bytes)
            for page in range(0, SLOTS * self._slot_bytes, mmap.PAGESIZE):
                memory[page] = 0
            self._drain = self._start_drain(FlushArena(memoryview(memory), SLOTS, self._slot_bytes))
            self._memory = memory
        return memoryview(self._memory), SLOTS, self._slot_bytes

    def find_reusable_saves(self, checkpoint: Checkpoint) -> Mapping[int, Never]:
        """Finds none: this memory ends with its process."""
        return {}

    def fetch_all_servers(self) -> tuple[MemoryServerEndpoint, ...]:
        """Those that it was told of: nobody else knows of any."""
        return self.attached.servers

    def wait_for_free_slot(self, wait_seconds: float) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._busy) < SLOTS, wait_seconds)
            return next((slot for slot in range(SLOTS) if slot not in self._busy), None)

    def hand_over_slot(self, message: Staged) -> None:
        if self._drain is None:
            raise RuntimeError("a slot was staged before arena() gave one")
        with self._changed:
            self._busy.add(message.slot)
        me = self.attached
        save = RankSave(me.generation, message.step, me.rank)
        sealed = StagedSave(
            save, me.world_size, me.incarnation, message.layout, message.stream_bytes, message.values_bytes
        )
        self._drain.add_staged(message.slot, sealed, message.layout_json)

    def report_step(self, message: StepReport) -> None:
        """Does nothing: no agent follows the progress."""

    def report_pause(self, message: PauseReport) -> None:
        """Does nothing: nobody waits for the next step."""

    def is_barrier_at(self, step: int) -> bool:
        return False

    def wait_at_barrier(self, step: int) -> None:
        """Does nothing: without a coordinator nothing pauses a world."""

    def min_interval_exponent(self) -> int:
        return 0

    def report_restore(
        self, step: int, source: str, size_bytes: int, seconds: float, anomalies: AnomalyRun = NO_ANOMALIES
    ) -> None:
        log.info("restored step %d from %s: %d bytes in %.2f s", step, source, size_bytes, seconds)

    def report_restore_failure(self, checkpoint: Checkpoint, absent: bool, detail: str) -> None:
        log.error("%s could not be restored (%s): %s", checkpoint, "absent" if absent else "unreadable", detail)

    def report_notice(self, reason: str, text: str) -> None:
        """Logs a notice, unless its sender does so itself for every backend."""
        if reason.startswith("Save"):
            self._trouble = text
        if reason not in LOGGED_BY_SENDER:
            log.warning("%s: %s", reason, text)

    def refuse_unsaved(self, step: int) -> None:
        """Raises LastStepNotSaved unless a target has acknowledged the save of `step`."""
        restored = self.attached.parent.step if self.attached.parent is not None else 0
        if step not in (self.saved_step, restored):
            cause = self._trouble or "its save did not reach the folder in time"
            raise LastStepNotSaved(step, self.saved_step or restored, cause)
        if step != restored and self._targets.retention is not None and self._targets.retention.was_overtaken:
            cause = (
                "another program began a newer epoch in this folder and saved: later starts continue from its checkpoints,"
                " not from this program's"
            )
            raise LastStepNotSaved(step, restored, cause)

    def wait_for_flush(self, wait_seconds: float) -> bool:
        return self._drain is None or self._drain.wait_until_idle(wait_seconds)

    def close(self, step: int, save_requested: bool = False) -> None:
        """Gives up what is not yet written (call flush before) and ends every thread."""
        self._end_drain(0.0)
        if self._targets.retention is not None:
            self._targets.retention.close()

    def disable_after_fork(self) -> None:
        """Does nothing: drain threads and tiers belong to the parent process."""

    def _start_drain(self, arena: FlushArena) -> Flusher:
        watcher = FlushListener(self._freed, self._saved, self.report_notice, self._lost, self._found_full)
        drain = Flusher(arena, self.attached.incarnation, self._targets.open_tier, watcher, self._targets.options)
        targets = self._targets.targets
        drain.set_targets(targets, frozenset(targets), self.attached.replicas)
        return drain

    def _freed(self, slot: int, step: int, ok: bool) -> None:
        with self._changed:
            self._busy.discard(slot)
            (self.lost.discard if ok else self.lost.add)(step)
            self._changed.notify_all()
        save = self._without_room.pop(step, None)
        if save is not None and not ok:
            self._lost(save)

    def _lost(self, save: RankSave) -> None:
        if self._targets.retention is not None:
            self._targets.retention.discard_save(save)

    def _found_full(self, save: RankSave) -> None:
        self._without_room[save.step] = save
        if self._targets.retention is not None:
            self._targets.retention.free_space()

    def _saved(self, save: RankSave, copies: int) -> None:
        self.saved_step = max(self.saved_step, save.step)
        self._trouble = ""
        if self._targets.retention is not None:
            self._targets.retention.collect_after_save(save.checkpoint)

    def _end_drain(self, flush_seconds: float) -> None:
        drain, self._drain = self._drain, None
        if drain is None:
            return
        drain.wait_until_idle(flush_seconds)
        if not drain.close():
            metrics.fallbacks.labels("library_flush_hung").inc()
            log.warning("a tier still hangs while the checkpointer closes; its thread ends with the process")
