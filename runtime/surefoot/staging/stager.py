"""Schedules a save's copies: eager ones inside the call, lazy ones in the background of the training.

Lazy copies are joined before the next optimizer step, as in DataStates-LLM (HPDC'24): parameters and optimizer state do
not change between two optimizer steps, so copying them can overlap with forward and backward. A thread of lowest priority
copies host tensors, a side stream copies device tensors. Before tensors change, `join` is called. It first executes the
copies that the thread has not started (a thread of lowest priority may starve), then waits for those it has.

Only the program guarantees that tensors do not change, and no counter shows all changes (`.data`, views, arrays of other
libraries). Therefore every lazily copied tensor is digested inside the call, which reads it once, and its copy must have
that digest. If a tensor changed, this save fails, and the tensor is copied eagerly from then on. If background copies
delay the training more than eager ones, because no core is idle, everything is copied inside the call.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from surefoot import metrics
from surefoot.staging.device_copies import SMALL_BYTES as SMALL_DEVICE_BYTES
from surefoot.staging.device_copies import DeviceCopies, QueuedCopies
from surefoot.staging.host_copies import (
    SMALL_BYTES,
    Bytes,
    Copy,
    CopyBuffers,
    CopyOutcome,
    CopySource,
    CopyTarget,
    GatherCopy,
    GatheredSources,
    prepare_copies,
)

_log = logging.getLogger(__name__)


# ---- cost of copies --------------------------------------------------------------------------------------------------
# Chooses lazy or eager copies by their measured cost. Lazy copies cost a digest in the call, and the copies that are
# not finished at the next optimizer step. If no core is idle, those are all copies, at a higher cost each: eager
# copies, which use the cores that the training leaves idle during the call, are then cheaper. Pure; times are
# arguments.

MIN_BYTES = 8 * 1024 * 1024
"""Saves smaller than this are copied lazily, as their times are too short to compare."""

RETRY_INTERVAL_SAVES = 16
"""Interval, in saves, at which the other way is tried, since other processes may have freed or occupied a core."""


class CopyCosts:
    """The last measured costs of lazy and of eager copies, in seconds per byte."""

    def __init__(self) -> None:
        self._lazy_cost: float | None = None
        self._eager_cost: float | None = None
        self._saves = 0

    def should_copy_lazily(self, size_bytes: int) -> bool:
        """Whether the next save, of `size_bytes`, should copy lazily."""
        self._saves += 1
        if size_bytes < MIN_BYTES or self._lazy_cost is None:
            return True
        if self._eager_cost is None:
            return False
        return (self._lazy_cost <= self._eager_cost) != (self._saves % RETRY_INTERVAL_SAVES == 0)

    def record_cost(self, background: bool, size_bytes: int, call_seconds: float, join_seconds: float) -> None:
        """Records a save's cost: the seconds inside the call and those spent in `join`.

        Until eager copies were measured, lazy copies that were finished in time are not recorded: they cost less than any
        eager copy.
        """
        if size_bytes < MIN_BYTES:
            return
        if not background:
            self._eager_cost = call_seconds / size_bytes
        elif self._eager_cost is not None or join_seconds > call_seconds:
            self._lazy_cost = (call_seconds + join_seconds) / size_bytes


# ---- copying threads -------------------------------------------------------------------------------------------------
# Helper threads that copy while the training waits inside a call, when its own cores are idle.

MAX_HELPERS = 3
"""With the training's own thread these are four cores, which read as much memory bandwidth as a rank may take."""

T = TypeVar("T")


class CopyThreads:
    """Helper threads of normal priority, which are idle while there is no task."""

    def __init__(self, helpers: int) -> None:
        self._wake = threading.Condition()
        self._task: Callable[[], None] | None = None
        self._turn = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        for number in range(helpers):
            thread = threading.Thread(target=self._run_helper, name=f"surefoot-helper-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as problem:  # a limit of threads: the calling thread then does all the work
                _log.warning(
                    "only %d of %d helper threads could be started, so copies take longer: %s",
                    number,
                    helpers,
                    problem,
                )
                break
            self._threads.append(thread)

    @staticmethod
    def helper_count() -> int:
        """Returns the number of helpers for which there are cores, in addition to the calling thread."""
        return min(MAX_HELPERS, len(os.sched_getaffinity(0)) - 1)

    @contextmanager
    def run_in_helpers(self, task: Callable[[], None]) -> Iterator[None]:
        """Lets each helper run `task` once during the block; the caller must wait for the results of the task."""
        with self._wake:
            self._task = task
            self._turn += 1
            self._wake.notify_all()
        try:
            yield
        finally:
            with self._wake:
                self._task = None

    def close(self, wait_seconds: float | None = None) -> None:
        """Ends the threads, and waits up to `wait_seconds` for each; None: without a limit."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(wait_seconds)

    def _run_helper(self) -> None:
        turn = 0
        while True:
            turn, task = self._next_task(turn)
            if task is None:
                return
            try:
                task()
            except Exception:  # noqa: BLE001  # the calling thread then does the work and reports its error
                _log.debug("a helper thread failed; the calling thread does its work", exc_info=True)
            del task  # an idle helper must not keep the tensors of its last task alive

    def _next_task(self, turn: int) -> tuple[int, Callable[[], None] | None]:
        """Waits for a task after the given turn; returns its turn and the task, None once closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or (self._turn != turn and self._task is not None))
            return self._turn, None if self._closed else self._task


class SharedWork(Generic[T]):
    """Distributes items to threads, each item to one of them."""

    def __init__(self, do: Callable[[T], None], things: Iterable[T]) -> None:
        self._process, self._items = do, deque(things)
        self._changed = threading.Condition()
        self._running = 0
        self.error: Exception | None = None

    def work_until_empty(self) -> None:
        """Processes items until no thread has to start one."""
        while self.do_next():
            pass

    def do_next(self) -> bool:
        """Processes one item; False if none was left to start."""
        with self._changed:
            if not self._items:
                return False
            item = self._items.popleft()
            self._running += 1
        try:
            self._process(item)
        except Exception as error:  # noqa: BLE001  # the owner of the work raises or reports it
            self.error = error
        except BaseException as interrupt:  # Ctrl-C during a copy, which is therefore incomplete
            self.error = RuntimeError(f"the copy was interrupted by {type(interrupt).__name__}")
            raise
        finally:
            with self._changed:
                self._running -= 1
                if not self._running:
                    self._changed.notify_all()
        return True

    @property
    def has_work(self) -> bool:
        """Whether an item is not finished."""
        return bool(self._items or self._running)

    def finish(self, wait_seconds: float | None = None) -> bool:
        """Helps to process the items, then waits for those of other threads; returns whether all are finished."""
        self.work_until_empty()
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, wait_seconds)


class SourceDigests:
    """Digests the sources of copies while the training waits.

    A helper may be preempted at any moment on a busy machine, and the training does not wait for it: its copy is digested
    again, and its later result, of bytes that may have changed, is ignored.
    """

    def __init__(self, copies: Sequence[Copy], scratch: CopyBuffers) -> None:
        self._copies, self._scratch = copies, scratch
        self._digests_by_index: dict[int, int] = {}
        self._pending_indexes = deque(range(len(copies)))

    def work_until_empty(self) -> None:
        """Digests sources until no thread has to start one."""
        while True:
            try:
                index = self._pending_indexes.popleft()
            except IndexError:
                return
            self._compute_digest(index)

    def finish(self) -> list[int]:
        """Computes the missing digests and returns all, one per copy."""
        self.work_until_empty()
        for index in range(len(self._copies)):
            if index not in self._digests_by_index:
                self._compute_digest(index)
        return [self._digests_by_index[index] for index in range(len(self._copies))]

    def _compute_digest(self, index: int) -> None:
        self._digests_by_index.setdefault(index, self._copies[index].digest(self._scratch))


# ---- stager ----------------------------------------------------------------------------------------------------------

BACKGROUND_NICE = 19
FALLBACK_NICE = 5
"""Niceness of the copying thread if it could not be lowered again when the training waits for the thread: with a higher
one, the training would wait for a thread that a busy machine does not run."""

COPY_TIMEOUT_SECONDS = 60.0
"""How long the training waits for copies that other threads or a device have started, each at most a band. A save that
takes longer is abandoned, and no other is started until its last copy has ended."""

_POLL_SECONDS = 0.001

_MAX_PREPARED_COPIES = 200_000
"""Prepared copies that are cached; a program with more replaces its tensors so often that caching does not help."""


@dataclass(frozen=True, slots=True)
class _BackgroundCopy:
    """A copy to be made in the background."""

    name: str
    """Name of the tensor."""
    copy: Copy
    digest: int
    """Digest that the copied bytes must have."""


@dataclass(slots=True)
class _Staging:
    """A save whose copies are in progress."""

    done: Callable[[CopyOutcome], None]
    """Called once when the copies have ended."""
    work: SharedWork[_BackgroundCopy]
    """Its host copies."""
    queued: list[QueuedCopies]
    """Its device copies."""
    changed: dict[str, None]
    """Names of tensors that changed before they were copied, in the order of detection."""
    error: Exception | None = None
    join_seconds: float = 0.0
    """Seconds for which `join` delayed the training."""
    finishing: bool = False
    """`done` is being called, or was."""
    abandoned: bool = False
    """It took too long and is not waited for; copies may still write to its slot."""
    finished: threading.Event = field(default_factory=threading.Event)

    def is_copying(self) -> bool:
        """Whether a thread or a device may still write to the slot."""
        return self.work.has_work or not all(queued.has_ended() for queued in self.queued)


class Stager:
    """Copies one save at a time into staging memory. `start` and `join` must be called from the same thread."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._current: _Staging | None = None
        self._closed = False
        self._scratch = CopyBuffers()
        self._threads = CopyThreads(CopyThreads.helper_count())
        self._devices: dict[torch.device, DeviceCopies] = {}
        self._costs = CopyCosts()
        self._last: tuple[bool, int, float] | None = None
        """The last save: whether it copied lazily, its bytes, and its seconds inside the call."""
        self._normal_nice: int | None = None
        self._prepared_copies: dict[tuple[int, int], tuple[tuple[object, ...], list[Copy]]] = {}
        """Prepared copies by address and size of their target; valid while the tensor's memory is the same."""
        self._prepared: GatheredSources | None = None
        self._unfinished_work: list[SharedWork[Copy | GatherCopy]] = []
        """Eager copies that a helper did not finish in time."""
        self._thread = threading.Thread(target=self._run_background, name="surefoot-staging", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as problem:  # a limit of threads or processes
            _report_no_thread(problem)

    def prepare(self, slot: Bytes, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> None:
        """Prepares the copies into `slot` before the first save needs them."""
        if len(self._prepared_copies) > _MAX_PREPARED_COPIES:
            self.release_prepared()
        room = CopyTarget.of(slot)
        sources = self._divide_sources(eager, lazy)
        sources.small.prepare_copies(room)
        for source in (*sources.eager, *sources.lazy):
            tensor = source.versioned_tensor()
            if tensor.is_cuda:
                self._device(tensor.device).random_keys()
            else:
                self._copies_of(source, tensor, room)

    def release_prepared(self) -> None:
        """Releases prepared copies and their tensors, because other tensors will be saved from now on."""
        self._prepared_copies.clear()
        self._prepared = None

    def start_save(
        self, slot: Bytes, eager: Sequence[CopySource], lazy: Sequence[CopySource], done: Callable[[CopyOutcome], None]
    ) -> None:
        """Copies `eager` now and `lazy` in the background.

        For tensors on a device, now means before the kernels that the training queues next.

        Args:
            slot: Memory to copy to.
            eager: Pieces that the training may change at once.
            lazy: Pieces that do not change before the next `join`.
            done: Called once with the outcome, from the thread that copies last.

        Raises:
            TimeoutError: Copies of this or an earlier save did not end in time.
        """
        # Only one save at a time; its time in `join` completes its measurement.
        self.wait_until_idle()
        if self._last is not None and self._current is not None:
            self._costs.record_cost(*self._last, self._current.join_seconds)
        start = time.perf_counter()
        # Decide for each piece whether it is copied now or in the background.
        room = CopyTarget.of(slot)
        prepared = self._divide_sources(eager, lazy)
        divided = _DividedSources()
        for sources, steady in ((prepared.eager, False), (prepared.lazy, True)):
            for source in sources:
                divided.add(source, source.versioned_tensor(), steady)
        size = sum(source.size_bytes for source, _ in divided.background)
        if not (is_lazy := self._costs.should_copy_lazily(size) and self._thread.is_alive()):
            divided.now += divided.background
            divided.background.clear()
        # Copy the first group and digest the second, then queue the device copies.
        background = [(s.name, copy) for s, tensor in divided.background for copy in self._copies_of(s, tensor, room)]
        now = [copy for s, tensor in divided.now for copy in self._copies_of(s, tensor, room)]
        digests = self._copy_and_digest([*prepared.small.prepare_copies(room), *now], [copy for _, copy in background])
        queued = self._queue_device_copies(divided, room)
        changed: dict[str, None] = {}

        def run(lazy: _BackgroundCopy) -> None:
            if not lazy.copy.run_verified(lazy.digest, self._scratch):
                changed.setdefault(lazy.name)

        work = SharedWork(
            run, [_BackgroundCopy(name, copy, d) for (name, copy), d in zip(background, digests, strict=True)]
        )
        self._last = is_lazy, size, time.perf_counter() - start
        # Hand the background copies to the thread; without one, execute them here.
        with self._wake:
            self._current = _Staging(done, work, queued, changed)
            self._wake.notify_all()
        if not self._thread.is_alive():
            self.wait_for_save()

    def join_copies(self) -> None:
        """Waits until the last save is copied, so that its tensors may change."""
        staging = self._current
        if staging is None or staging.abandoned or staging.finished.is_set():
            return
        for queued in staging.queued:
            queued.make_training_wait()
        self._raise_priority()
        start = time.perf_counter()
        with self._threads.run_in_helpers(staging.work.work_until_empty):
            is_finished = staging.work.finish(COPY_TIMEOUT_SECONDS)
        staging.join_seconds += time.perf_counter() - start
        if not is_finished:
            self._abandon_staging(staging)
        elif not staging.queued:
            self._report_outcome(staging)
            self._wait_finished(staging)

    def wait_for_save(self) -> None:
        """Waits until the last save has ended and its `done` was called, or it was abandoned for taking too long."""
        self.join_copies()
        staging = self._current
        if staging is None or staging.abandoned:
            return
        if not self._thread.is_alive() and _poll_until(lambda: not staging.is_copying(), COPY_TIMEOUT_SECONDS):
            self._end_staging(staging)
        self._wait_finished(staging)

    def wait_until_idle(self) -> None:
        """Waits for the last save, and for copies of abandoned ones.

        Raises:
            TimeoutError: A copy does not end. Until it does, no slot may be written or released.
        """
        self.wait_for_save()
        self._unfinished_work = [work for work in self._unfinished_work if work.has_work]
        staging = self._current
        if self._unfinished_work or (staging is not None and staging.abandoned and staging.is_copying()):
            raise TimeoutError(
                f"an earlier save is still being copied after {COPY_TIMEOUT_SECONDS:g} s, so no other save can be staged"
            )

    @property
    def is_busy(self) -> bool:
        """Whether the last save has not ended."""
        return self._current is not None and not self._current.finished.is_set()

    def close(self) -> None:
        """Ends and joins the threads, after the current save."""
        self.wait_for_save()
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread.ident is not None:  # else it was never started
            self._thread.join(COPY_TIMEOUT_SECONDS)
        self._threads.close(COPY_TIMEOUT_SECONDS)

    # ---- inside the call -------------------------------------------------------------------------------------------

    def _queue_device_copies(self, divided: _DividedSources, room: CopyTarget) -> list[QueuedCopies]:
        """Queues the copies of device tensors, device by device."""
        queued_copies = []
        for device, (now, background) in divided.on_device.items():
            queued_copies.append(self._device(device).queue_copies(now, background, room))
        return queued_copies

    def _device(self, device: torch.device) -> DeviceCopies:
        if device not in self._devices:
            self._devices[device] = DeviceCopies(device)
        return self._devices[device]

    def _copy_and_digest(self, now: Sequence[Copy | GatherCopy], background: Sequence[Copy]) -> list[int]:
        """Executes the copies of `now`, and returns the digests of the other copies' sources; helpers take part."""
        small = [copy for copy in now if copy.size_bytes <= SMALL_BYTES]
        copying = SharedWork(_run_copy, [copy for copy in now if copy.size_bytes > SMALL_BYTES])
        digests = SourceDigests(background, self._scratch)

        def share() -> None:
            digests.work_until_empty()
            copying.work_until_empty()

        with self._threads.run_in_helpers(share):
            for copy in small:
                copy.run()
            is_finished = copying.finish(COPY_TIMEOUT_SECONDS)
            source_digests = digests.finish()
        if not is_finished:
            self._unfinished_work.append(copying)
            raise TimeoutError(f"a helper thread did not finish its copy within {COPY_TIMEOUT_SECONDS:g} s")
        if copying.error is not None:
            raise copying.error
        return source_digests

    def _divide_sources(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> GatheredSources:
        """Returns the divided sources of a save, which are prepared again if they differ from those of the last save."""
        if self._prepared is None or not self._prepared.prepare_for(eager, lazy):
            self._prepared = GatheredSources(eager, lazy)
        return self._prepared

    def _copies_of(self, source: CopySource, tensor: torch.Tensor, room: CopyTarget) -> list[Copy]:
        """Returns a piece's copies; cached while the tensor's memory is the same, as preparing costs more than copying."""
        if tensor.is_conj() or tensor.is_neg():
            return prepare_copies(
                source.read(), source.tile, room.memory_of(source)
            )  # its values differ from its memory
        target_key = (room.address + source.start - room.stream_offset, source.size_bytes)
        source_key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, source.tile, source.owner_slices)
        entry = self._prepared_copies.get(target_key)
        if entry is None or entry[0] != source_key:
            copies = prepare_copies(source.read(), source.tile, room.memory_of(source))
            entry = self._prepared_copies[target_key] = (source_key, copies)
        return entry[1]

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run_background(self) -> None:
        try:
            self._serve_saves()
        except Exception as error:  # noqa: BLE001  # without this thread the training still continues
            _report_no_thread(error)

    def _serve_saves(self) -> None:
        background = self._background_nice()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._pending_staging() is not None)
                staging = self._pending_staging()
                if staging is None:
                    return
            _set_nice(threading.get_native_id(), background)  # `join` may have raised this thread's priority
            staging.work.finish()
            self._end_staging(staging)

    def _end_staging(self, staging: _Staging) -> None:
        """Waits for a save's device copies, after its host copies, and reports its outcome."""
        try:
            for queued in staging.queued:
                staging.changed.update(dict.fromkeys(queued.changed_names()))
        except Exception as error:  # noqa: BLE001  # an error of any kernel: the training must not wait for ever
            staging.error = error
        self._report_outcome(staging)

    def _background_nice(self) -> int:
        """Returns the niceness for background copies: the highest from which it may be lowered again.

        Most containers do not allow that; the thread then gets `FALLBACK_NICE`, or keeps the process' own higher niceness.
        """
        thread_id = threading.get_native_id()
        normal = os.getpriority(os.PRIO_PROCESS, thread_id)
        if not _set_nice(thread_id, min(normal + 1, BACKGROUND_NICE)) or not _set_nice(thread_id, normal):
            return max(normal, FALLBACK_NICE)
        self._normal_nice = normal
        return BACKGROUND_NICE

    def _raise_priority(self) -> None:
        """Gives the copying thread normal priority while the training waits for it, so that a busy machine runs it."""
        thread = self._thread.native_id
        if self._normal_nice is not None and thread is not None and self._thread.is_alive():
            _set_nice(thread, self._normal_nice)

    def _wait_finished(self, staging: _Staging) -> None:
        if not staging.finished.wait(COPY_TIMEOUT_SECONDS):
            self._abandon_staging(staging)

    def _abandon_staging(self, staging: _Staging) -> None:
        """Reports a save as failed that did not end in time."""
        staging.abandoned = True
        staging.error = staging.error or TimeoutError(
            f"the copy to staging memory did not end in {COPY_TIMEOUT_SECONDS:g} s"
        )
        metrics.fallbacks.labels("staging_abandoned").inc()
        self._report_outcome(staging)

    def _pending_staging(self) -> _Staging | None:
        staging = self._current
        return staging if staging is not None and not staging.finishing else None

    def _report_outcome(self, staging: _Staging) -> None:
        """Reports a save's outcome once."""
        with self._wake:
            if staging.finishing:
                return
            staging.finishing = True
        try:
            staging.done(CopyOutcome(tuple(staging.changed), staging.error or staging.work.error))
        except Exception:  # noqa: BLE001  # the thread, which may be the training's, must survive it
            _log.exception("a callback failed when a save's copies had ended; that save may be missing")
        staging.finished.set()


def _set_nice(thread: int, nice: int) -> bool:
    """Sets a thread's niceness; returns whether that is allowed, as a sandbox may reject any change."""
    try:
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError:
        return False
    return True


def _report_no_thread(why: Exception) -> None:
    metrics.fallbacks.labels("staging_thread_ended").inc()
    _log.error("no background thread can copy saves (%r): from now on they are copied inside step()", why)


def _poll_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Polls a condition; returns whether it became true in time. (A device's event has no wait with a timeout.)"""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _run_copy(copy: Copy | GatherCopy) -> None:
    copy.run()


class _DividedSources:
    """Sources divided into those copied now and in the background, on the host and on each device."""

    def __init__(self) -> None:
        self.now: list[tuple[CopySource, torch.Tensor]] = []
        self.background: list[tuple[CopySource, torch.Tensor]] = []
        self.on_device: dict[torch.device, tuple[list[CopySource], list[CopySource]]] = {}

    def add(self, source: CopySource, tensor: torch.Tensor, steady: bool) -> None:
        """Adds a source; `tensor` is its current tensor, `steady` whether it does not change before the next `join`."""
        if tensor.is_cuda:
            sides = self.on_device.setdefault(tensor.device, ([], []))
            sides[steady and source.size_bytes > SMALL_DEVICE_BYTES].append(source)
        elif steady and source.size_bytes > SMALL_BYTES:
            self.background.append((source, tensor))
        else:
            self.now.append((source, tensor))
