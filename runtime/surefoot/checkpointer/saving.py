"""Stages one rank's saves and hands sealed slots to the save backend.

Nothing here may stop the training. A save that fails is a metric, a word to a person and a log line. Called by
`checkpointer`, once for each due step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from errno import ENOMEM, ENOSPC
from operator import is_
from typing import Literal, Protocol

import numpy as np
import torch

from surefoot import metrics
from surefoot.checkpointer.usage_checks import StateGuard
from surefoot.errors import StagingMemoryUnavailable, StateNotRestorable
from surefoot.ipc.save_backend import SaveBackend
from surefoot.ipc.trainer_messages import Staged
from surefoot.save_schedule import RankBackoff, SaveSchedule
from surefoot.staging import Arena, CopyOutcome, CopySource, Stager
from surefoot.state import Entry, PieceRange, Program, SavePlan, save_plan, structure_of

_log = logging.getLogger(__name__)


PAGE_BYTES = 4096
PREPARE_SECONDS = 330.0
"""How long a save waits for staging memory: an agent may take 300 s to touch it."""

VALUES_ROOM_BYTES = 256 * 1024
"""Room behind the stream for plain values, which may grow a little from save to save."""

Result = Literal["staged", "skipped", "failed"]


class SaveableState(Protocol):
    """Gives a save the entries and values of the program."""

    def entries(self) -> list[Entry]: ...

    def values(self, step: int) -> bytes: ...


class Saver:
    """Stages saves of one program into the slots of one link."""

    def __init__(self, program: SaveableState, link: SaveBackend, rank: int) -> None:
        self._program, self._link, self._rank = program, link, rank
        self._stager = Stager()
        self._arena: Arena | None = None
        self._plan: SavePlan | None = None
        self._entries: Sequence[Entry] = ()
        self._pieces: tuple[list[CopySource], list[CopySource]] = ([], [])
        """What the plan was made for, and what is copied for it: eager and lazy."""
        self._sources: dict[int, tuple[Entry, CopySource]] = {}
        """What is copied, by where it begins in the stream; most of it stays when one tensor is replaced."""
        self._preparing: threading.Thread | None = None
        self._waited_in_vain = False
        self._ready_for: SavePlan | None = None
        self._reported: set[str] = set()
        self._unsteady: set[str] = set()
        """Objects of which a tensor changed under its copy."""
        self._rejected = False
        self._started_step = 0
        self.dropped_step: int | None = None
        """Newest step whose tensors changed while they were copied: its state is gone."""
        self.staged_step = 0
        """Newest step whose slot was sealed and handed over."""
        self.stall_seconds = 0.0
        """Time that saves held the training up, since somebody last set it to nought."""

    def prepare(self) -> None:
        """Plans saves and allocates staging memory in background, before the first save."""
        self._join_preparation()
        entries = self._program.entries()
        if self._plan is not None and self._plan is self._ready_for and self._are_planned(entries):
            return  # nothing has changed: the first save has nothing to wait for
        work = (entries, len(self._program.values(0)))
        thread = threading.Thread(target=self._make_ready, args=work, name="surefoot-prepare", daemon=True)
        thread.start()
        self._preparing = thread

    def prepare_first(self) -> None:
        """Prepares the first save, and counts it where that fails.

        The training goes on; each due save tries again, and says why it fails.

        Raises:
            StateNotRestorable: an object's state could be saved and not restored.
        """
        try:
            self.prepare()
        except StateNotRestorable:
            raise
        except Exception as error:  # noqa: BLE001  no save is worth the training
            self._count_unprepared(error)

    def save(self, step: int, wait_seconds: float) -> Result:
        """Begins the save of `step`: eager copies finish here, lazy ones later.

        Only StateNotRestorable is raised; every other failure is counted and logged, and the training goes on.
        """
        begun = time.perf_counter()
        try:
            return self._save(step, wait_seconds, begun)
        except StateNotRestorable:
            raise  # the program's own mistake, which every save would meet: the one thing that ends the training here
        except StagingMemoryUnavailable as refusal:
            self._report_rejection(refusal)  # the agent has told people already, once
            return "failed"
        except Exception as error:  # noqa: BLE001  # whatever fails in a save, the training goes on
            self._report_failure(step, metrics.reason_of(error), f"the save of step {step} failed: {error}")
            return "failed"
        finally:
            self._count_stall(begun)

    def closed_step(self, step: int) -> int:
        """The newest step that no save can be handed over for.

        `step` is where the program is now.
        """
        return (self._started_step if self._stager.is_busy else step) - 1

    def join(self) -> None:
        """Finishes the copies before an optimizer changes their tensors."""
        begun = time.perf_counter()
        self._stager.join_copies()
        self._count_stall(begun)

    def wait(self) -> None:
        """Waits until the current save is sealed and handed over, or fails."""
        self._stager.wait_for_save()

    def close(self) -> None:
        """Ends the copying thread after the save under way."""
        try:
            self._join_preparation()
            self._stager.wait_until_idle()
        except TimeoutError as hung:
            _log.warning("a copy still uses the staging memory, which is freed when the process ends: %s", hung)
            return
        self._stager.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    # ---- getting ready ---------------------------------------------------------------------------------------------

    def _make_ready(self, entries: Sequence[Entry], values_bytes: int) -> None:
        try:
            plan = self._plan_for(entries)
            if plan is self._ready_for:
                return
            self._ready_for = plan
            arena = self._arena_for(plan, values_bytes)
            for index in range(arena.slots):
                self._stager.prepare(arena.slot_view(index), *self._pieces)
        except StagingMemoryUnavailable as refusal:
            self._report_rejection(refusal)
        except Exception as error:  # noqa: BLE001  # the training goes on; each due save tries again, and says why it fails
            self._count_unprepared(error)

    def _count_unprepared(self, error: Exception) -> None:
        _log.warning("the first save could not be prepared: %s", describe_error(error))
        metrics.checkpoint_failures.labels(tier="staging", reason=reason_of(error)).inc()

    def _join_preparation(self) -> None:
        """Waits for what `prepare` began, and but once for long.

        Raises:
            TimeoutError: it still runs.
        """
        if self._preparing is None:
            return
        self._preparing.join(0.0 if self._waited_in_vain else PREPARE_SECONDS)
        self._waited_in_vain = self._preparing.is_alive()
        if self._waited_in_vain:
            raise TimeoutError("staging memory is still being prepared")
        self._preparing = None

    # ---- one save --------------------------------------------------------------------------------------------------

    def _save(self, step: int, wait_seconds: float, begun: float) -> Result:
        self._join_preparation()
        self._stager.wait_until_idle()
        entries = self._program.entries()
        plan = self._plan_for(entries)
        values = self._program.values(step)
        arena = self._arena_for(plan, len(values))
        index = self._link.wait_for_free_slot(wait_seconds)
        if index is None:
            metrics.checkpoint_skipped.inc()
            return "skipped"
        slot = arena.slot_view(index)
        end = plan.layout.stream_bytes
        slot[end : end + len(values)] = np.frombuffer(values, dtype=np.uint8)
        eager, lazy = self._pieces
        message = Staged(index, step, end, len(values), plan.digest, self._layout_for(plan))
        self._started_step = step
        self._stager.start_save(slot, eager, lazy, self._sealing(message, begun))
        return "staged"

    def _plan_for(self, entries: Sequence[Entry]) -> SavePlan:
        same = self._are_planned(entries)
        if self._plan is None or not (same or self._plan.structure == structure_of(entries)):
            self._plan = save_plan(entries, self._rank)
            self._sources.clear()
            self._stager.release_prepared()
        if not same:
            self._entries = entries
            self._pieces = self._divided(self._plan, entries)
        return self._plan

    def _are_planned(self, entries: Sequence[Entry]) -> bool:
        """Whether the present plan was made for just these."""
        return len(entries) == len(self._entries) and all(map(is_, entries, self._entries))

    def _arena_for(self, plan: SavePlan, values_bytes: int) -> Arena:
        needed = plan.layout.stream_bytes + values_bytes
        if self._arena is None or self._arena.slot_bytes < needed:
            wanted = -(-(needed + VALUES_ROOM_BYTES) // PAGE_BYTES) * PAGE_BYTES
            if self._arena is not None:
                self._link.wait_for_flush(60.0)  # what drains from the old memory must be out of it
                self._arena.close()
            self._reported.clear()  # whoever drains the new memory has heard of no layout
            self._arena = Arena(*self._link.request_arena(wanted))
            self._rejected = False
            if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it so
                self._arena.pin()
        return self._arena

    def _layout_for(self, plan: SavePlan) -> str | None:
        return None if plan.digest in self._reported else plan.layout_json

    def _divided(self, plan: SavePlan, entries: Sequence[Entry]) -> tuple[list[CopySource], list[CopySource]]:
        """The pieces to copy: eager and lazy ones."""
        eager: list[CopySource] = []
        lazy: list[CopySource] = []
        known, self._sources = self._sources, {}
        for portion in plan.portions:
            if portion.start == portion.stop:
                continue
            entry = entries[portion.entry]
            made = known.get(portion.start)
            if made is None or made[0] is not entry:
                made = entry, _source(entry, portion)
            self._sources[portion.start] = made
            steady = entry.copy_in_background and _object_of(portion.name) not in self._unsteady
            (lazy if steady else eager).append(made[1])
        return eager, lazy

    def _sealing(self, message: Staged, begun: float) -> Callable[[CopyOutcome], None]:
        def seal(outcome: CopyOutcome) -> None:
            if outcome.is_complete:
                self._link.hand_over_slot(message)
                metrics.checkpoint_seconds.labels("staging", "stage").observe(time.perf_counter() - begun)
                metrics.checkpoint_bytes.labels("staging").inc(message.stream_bytes)
                self._reported.add(message.layout)
                self.staged_step = message.step
                return
            if outcome.error is not None:
                self._report_failure(message.step, "copy", f"copying step {message.step} failed: {outcome.error}")
            else:
                self.dropped_step = message.step
                self._report_failure(message.step, "changed", _dropped(message.step, outcome.changed))
            # Who swaps some of an object's tensors swaps all: those that were copied in time would cost the next save.
            self._unsteady.update(map(_object_of, outcome.changed))
            self._entries = ()

        return seal

    def _report_failure(self, step: int, reason: str, text: str) -> None:
        metrics.checkpoint_failures.labels(tier="staging", reason=reason).inc()
        _log.warning("%s", text)
        try:
            self._link.report_notice("SaveFailed", text)
        except Exception:  # noqa: BLE001  # a word that nobody hears must not stop the training either
            _log.exception("nobody could be told that the save of step %d failed", step)

    def _report_rejection(self, refusal: StagingMemoryUnavailable) -> None:
        """Counts a refusal and logs the first: every due save asks again."""
        metrics.checkpoint_failures.labels(tier="staging", reason="memory").inc()
        if not self._rejected:
            self._rejected = True
            _log.warning("training goes on without saves until there is memory to stage them in: %s", refusal)

    def _count_stall(self, begun: float) -> None:
        self.stall_seconds += time.perf_counter() - begun


def describe_error(error: Exception) -> str:
    """Describes an error for people; missing memory is named as such."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in (ENOMEM, ENOSPC)):
        return f"no staging memory: {error}"
    return f"{type(error).__name__}: {error}"


def reason_of(error: Exception) -> str:
    memory = describe_error(error).startswith("no staging memory")
    return "memory" if memory else metrics.reason_of(error)


def _object_of(name: str) -> str:
    return name.partition("/")[0]


def _dropped(step: int, changed: Sequence[str]) -> str:
    objects = ", ".join(dict.fromkeys(map(_object_of, changed)))
    others = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
    return (
        f"{changed[0]}{others} changed between step() and the next optimizer step, while step {step} was copied: that save"
        f" is dropped, and from now on every tensor of {objects} is copied inside step(), which takes longer. A program"
        " that changes them there keeps its saves quick by calling settle() first"
    )


def _source(entry: Entry, portion: PieceRange) -> CopySource:
    live, where = entry.local_part, (portion.tile, portion.start, portion.stop)
    if portion.within.lengths == entry.location.box.lengths:
        return CopySource(portion.name, live, live, *where, plain_tensor=entry.own_tensor())
    slices = tuple(slice(o, o + n) for o, n in zip(portion.within.offsets, portion.within.lengths, strict=True))
    return CopySource(portion.name, lambda: live()[slices], live, *where, slices)


# ---- changes after step() --------------------------------------------------------------------------------------------
# Finds objects that change between step() and the next batch. Such a change is in no checkpoint of that step: a run that
# continues from it lacks the change for good (a scheduler is one step late to the end). Parameters and optimizer state
# are watched by the copies themselves; optimizers' options are not, as many scripts set them anew from the step's number.

CHECK_SHARE = 0.01
"""Of the time, at most, that the check takes: some objects' states are long."""

MAX_SAMPLE_BYTES = 65536


class ChangeWatch:
    """Compares the objects of a saved step with what they are when the next batch is requested."""

    def __init__(self, program: Program, backend: SaveBackend) -> None:
        self._program, self._backend = program, backend
        self._step = 0
        self._digests: dict[str, bytes] = {}
        """Of plain values, by object, as they are in the save of `_step`; empty: nothing is to be compared."""
        self._watched: dict[str, torch.Tensor] = {}
        """One tensor of each object that has any, chosen at the first save."""
        self._samples: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """By object: a tensor that nothing else watches, its version at the save, and a copy."""
        self._unsteady: frozenset[str] | None = None
        """Objects that give another state each time they are asked (a clock); None: not known yet."""
        self._next_check = 0.0
        self._reported = False

    def record(self, step: int, skipped: bool) -> None:
        """Records what the objects are as `step` was saved."""
        begun = time.perf_counter()
        if skipped or self._reported or begun < self._next_check:
            return
        try:
            if self._unsteady is None:
                first, again = self._program.shared_values(), self._program.shared_values()
                self._watched = self._program.unwatched_tensors(MAX_SAMPLE_BYTES)
                self._unsteady = frozenset(name for name in first if first[name] != again.get(name))
            self._digests = self._program.shared_values()
            self._samples = {name: (tensor, tensor._version, tensor.clone()) for name, tensor in self._watched.items()}
        except Exception as error:  # noqa: BLE001  # an object without a state is the save's affair
            _log.debug("objects are not watched after step %d: %s", step, error)
            return
        self._step = step
        self._next_check = time.perf_counter() + 2 * (time.perf_counter() - begun) / CHECK_SHARE

    def check(self) -> None:
        """Reports objects that are not what they were when the last step was saved, once."""
        if not self._step:
            return
        step, self._step = self._step, 0
        try:
            values = self._program.shared_values()
            changed = [
                n for n, digest in self._digests.items() if values.get(n) != digest and n not in (self._unsteady or ())
            ]
            changed += [
                n
                for n, (tensor, version, copy) in self._samples.items()
                if n not in changed and tensor._version != version and not torch.equal(tensor, copy)
            ]
        except Exception as error:  # noqa: BLE001  # as above
            _log.debug("objects were not watched after step %d: %s", step, error)
            return
        if changed:
            self._report(step, changed)

    def _report(self, step: int, changed: Sequence[str]) -> None:
        self._reported = True
        text = (
            f"{' and '.join(changed)} changed between step() and the next batch: the checkpoint of step {step} has the"
            " state from before, and a run that continues from it never makes that change. Change it before step(); the"
            " end of an epoch belongs to its last step if the loader has by_epoch=True"
        )
        _log.warning("%s", text)
        self._backend.report_notice("StateChangedAfterStep", text)


# ---- step saves ------------------------------------------------------------------------------------------------------
# Saves a step where a slot is free, or for certain. A save at each interval that waited for a slot would stop the
# training that it protects; one that must happen (a held step, the last one) and did not wait would be lost.

BARRIER_SLOT_TIMEOUT_SECONDS = 30.0
"""How long a save that must happen (a held step, `save_now`, the last one) waits for a slot to become free."""


class StepSaves:
    """Saves steps of one rank, and knows what the last save cost."""

    def __init__(self, saver: Saver, link: SaveBackend, guard: StateGuard) -> None:
        self.schedule = SaveSchedule(link.attached.interval_steps, link.attached.persistent_interval_steps)
        self.stall_seconds: float | None = None
        """Of the last save whose stall was taken."""
        self._saver, self._link, self._guard = saver, link, guard
        self._level = RankBackoff()
        self._saved_before = False

    @property
    def interval_exponent(self) -> int:
        """Every 2^level-th due step is saved."""
        return max(self._level.exponent, self._link.min_interval_exponent())

    def may_save(self, step: int) -> bool:
        """Returns whether the state is still that of the last step.

        Logs if it is not.
        """
        since = self._guard.changed_by()
        if since is None and self._saver.dropped_step == step:
            since = "its tensors have changed"
        if since is None:
            return True
        text = f"step {step} is not saved: {since} since step() was called; save or close right behind step()"
        _log.warning("%s", text)
        self._link.report_notice("SaveSkipped", text)
        return False

    def stall_of_last_save(self) -> float | None:
        """Takes the stall of the last save.

        Inside the call, and before the optimizer step that followed.
        """
        stall, self._saver.stall_seconds = self._saver.stall_seconds, 0.0
        saved, self._saved_before = self._saved_before, False
        if not saved:
            return None
        metrics.stall_seconds.observe(stall)
        self.stall_seconds = stall
        return stall

    def save_if_slot_free(self, step: int, level: int) -> bool:
        """Saves without waiting; returns whether no slot was free."""
        result = self._saver.save(step, wait_seconds=0.0)
        self._level = self._level.back_off(level) if result == "skipped" else self._level.count_staged()
        self._saved_before = True
        return result == "skipped"

    def save_and_wait(self, step: int) -> bool:
        """Saves, waiting for a slot; returns whether it is staged."""
        result = self._saver.save(step, wait_seconds=BARRIER_SLOT_TIMEOUT_SECONDS)
        self._saver.wait()
        self._saved_before = True
        if result == "skipped":
            text = f"step {step} had to be saved, and no slot was free: it is not"
            _log.warning("%s", text)
            self._link.report_notice("SaveSkipped", text)
        return self._saver.staged_step == step
