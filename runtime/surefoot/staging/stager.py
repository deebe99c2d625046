"""Orders copies against the training: eager in the call, lazy behind it.

Lazy ones are joined before the next step, as in DataStates-LLM (HPDC'24): parameters and optimizer state do not change
from one optimizer step to the next, so copying them may overlap forward and backward. A thread of lowest priority
copies host tensors, a side stream copies device tensors. Whoever is about to change them calls `join`, which first
takes over what the thread has not begun (a thread of lowest priority may starve) and then waits for what it has.

That they do not change is the program's doing, and no counter shows when they do (`.data`, views, arrays of other
libraries). So all that is copied lazily is digested inside the call, which reads it once, and each copy must have the
digest of the step. A tensor that changed meanwhile costs this save; it is copied eagerly from then on. Where copying
behind the training holds it up for longer, since no core is idle, everything is copied inside the call.
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
    CopyOutcome,
    CopySource,
    CopyTarget,
    GatherCopy,
    GatheredSources,
    Scratch,
    copies_of,
)

_log = logging.getLogger(__name__)


# ---- time that a save takes of a step --------------------------------------------------------------------------------
# Chooses lazy or eager copies by their measured cost. Behind it they cost a digest in the call and whatever nobody
# found the time for until the next optimizer step. Where no core is to spare that is all of them, and the dearer copy
# at that: copying inside the call, with the cores that the training leaves idle there, then holds it up for less. Pure;
# times are given.

MIN_BYTES = 8 * 1024 * 1024
"""Below this the times say nothing, and copies stay behind."""

TRY_EVERY = 16
"""One in so many saves tries the other way: a neighbour that left has freed a core, one that came has taken it."""


class CopyCosts:
    """Keeps the last measured cost of either way, in seconds per byte."""

    def __init__(self) -> None:
        self._behind: float | None = None
        self._inside: float | None = None
        self._saves = 0

    def choose(self, size_bytes: int) -> bool:
        """Whether the next save copies so many bytes behind the training."""
        self._saves += 1
        if size_bytes < MIN_BYTES or self._behind is None:
            return True
        if self._inside is None:
            return False
        return (self._behind <= self._inside) != (self._saves % TRY_EVERY == 0)

    def record_cost(self, behind: bool, size_bytes: int, call_seconds: float, join_seconds: float) -> None:
        """Records a save's cost in the call and before the next step.

        Lazy copies that ended in time are not compared until eager ones were measured: their cost is less than any
        copy's.
        """
        if size_bytes < MIN_BYTES:
            return
        if not behind:
            self._inside = call_seconds / size_bytes
        elif self._inside is not None or join_seconds > call_seconds:
            self._behind = (call_seconds + join_seconds) / size_bytes


# ---- copying threads -------------------------------------------------------------------------------------------------
# Runs copies in helper threads while the training waits. While the training is inside a call its own cores stand idle.

MAX_HELPERS = 3
"""With the training's own thread that is four cores, which read memory about as fast as all of a socket's ranks may."""

T = TypeVar("T")


class CopyThreads:
    """Runs helping threads of normal priority, idle without shared work."""

    def __init__(self, helpers: int) -> None:
        self._wake = threading.Condition()
        self._task: Callable[[], None] | None = None
        self._turn = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        for number in range(helpers):
            thread = threading.Thread(target=self._help, name=f"surefoot-helper-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as refused:  # no more threads are allowed: whoever shares the work does it all
                _log.warning(
                    "only %d of %d helping threads could be started, so copies take longer: %s",
                    number,
                    helpers,
                    refused,
                )
                break
            self._threads.append(thread)

    @staticmethod
    def size() -> int:
        """How many helpers there are cores for, beside the calling thread."""
        return min(MAX_HELPERS, len(os.sched_getaffinity(0)) - 1)

    @contextmanager
    def helping(self, task: Callable[[], None]) -> Iterator[None]:
        """Lets each helper run `task` once, inside the block.

        It does not wait for them: whoever shares the work does.
        """
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
        """Ends the threads, and waits for them that long."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(wait_seconds)

    def _help(self) -> None:
        turn = 0
        while True:
            turn, task = self._next(turn)
            if task is None:
                return
            try:
                task()
            except Exception:  # noqa: BLE001  # whoever shares the work does it then, and reports what ails it
                _log.debug("a helper could not", exc_info=True)
            del task  # with what it holds: the helper may rest for long

    def _next(self, turn: int) -> tuple[int, Callable[[], None] | None]:
        """The first task behind this turn; none when the crew is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or (self._turn != turn and self._task is not None))
            return self._turn, None if self._closed else self._task


class SharedWork(Generic[T]):
    """Distributes items to threads; each item is begun by one of them."""

    def __init__(self, do: Callable[[T], None], things: Iterable[T]) -> None:
        self._do, self._things = do, deque(things)
        self._changed = threading.Condition()
        self._running = 0
        self.error: Exception | None = None

    def work_until_empty(self) -> None:
        """Carries out items that no thread has begun, until none is left."""
        while self.do_next():
            pass

    def do_next(self) -> bool:
        """Does one thing; False if nothing was left to begin."""
        with self._changed:
            if not self._things:
                return False
            thing = self._things.popleft()
            self._running += 1
        try:
            self._do(thing)
        except Exception as error:  # noqa: BLE001  # whoever asked for the work raises or reports it
            self.error = error
        except BaseException as interrupt:  # Ctrl-C in the middle of a copy: what it was of is not copied
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
        """Whether anything of it has not been done."""
        return bool(self._things or self._running)

    def finish(self, wait_seconds: float | None = None) -> bool:
        """Shares it, and waits that long for what other threads have begun; returns whether all of it is done."""
        self.work_until_empty()
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, wait_seconds)


class Digests:
    """Digests the sources of copies while the training waits.

    A helper may be preempted at any moment on a busy machine. Nobody waits for one: its copy is digested again, and
    whatever it finds later, of bytes that may have changed, is ignored.
    """

    def __init__(self, copies: Sequence[Copy], scratch: Scratch) -> None:
        self._copies, self._scratch = copies, scratch
        self._found: dict[int, int] = {}
        self._left = deque(range(len(copies)))

    def work_until_empty(self) -> None:
        """Digests copies that no thread has begun, until none is left."""
        while True:
            try:
                index = self._left.popleft()
            except IndexError:
                return
            self._take(index)

    def finish(self) -> list[int]:
        """Completes the digests and returns them, one per copy."""
        self.work_until_empty()
        for index in range(len(self._copies)):
            if index not in self._found:
                self._take(index)
        return [self._found[index] for index in range(len(self._copies))]

    def _take(self, index: int) -> None:
        self._found.setdefault(index, self._copies[index].digest(self._scratch))


# ---- stager ----------------------------------------------------------------------------------------------------------

BACKGROUND_NICE = 19
STUCK_NICE = 5
"""Priority of the copying thread, and where it could not be raised again when somebody comes to wait for it: lower
would leave the training waiting for a thread that a busy machine does not run."""

WAIT_SECONDS = 60.0
"""How long the training waits for what other threads or a device have begun, each at most a band. A save that takes
longer is dropped, and none is begun until its last copy has left the slot."""

_ASK_SECONDS = 0.001

_MAX_KNOWN = 200_000
"""Copies remembered; beyond this a program changes its tensors faster than remembering helps."""


@dataclass(frozen=True, slots=True)
class _BackgroundCopy:
    """A copy behind the training, and what it must find."""

    name: str
    copy: Copy
    digest: int


@dataclass(slots=True)
class _Staging:
    """Holds one save under way."""

    done: Callable[[CopyOutcome], None]
    work: SharedWork[_BackgroundCopy]
    queued: list[QueuedCopies]
    changed: dict[str, None]
    """Names, in the order in which they were found."""
    error: Exception | None = None
    join_seconds: float = 0.0
    finishing: bool = False
    abandoned: bool = False
    """Nobody waits for it any more, and something may still copy into its slot."""
    finished: threading.Event = field(default_factory=threading.Event)

    def is_copying(self) -> bool:
        """Whether a thread or a device may still write to the slot."""
        return self.work.has_work or not all(queued.ended() for queued in self.queued)


class Stager:
    """Owns the copying threads and side streams for one save at once.

    `start` and `join` are called from one thread.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._current: _Staging | None = None
        self._closed = False
        self._scratch = Scratch()
        self._threads = CopyThreads(CopyThreads.size())
        self._devices: dict[torch.device, DeviceCopies] = {}
        self._timing = CopyCosts()
        self._last: tuple[bool, int, float] | None = None
        """Of the last save: whether it copied behind the training, how many bytes, and its seconds inside the call."""
        self._normal_nice: int | None = None
        self._prepared_copies: dict[tuple[int, int], tuple[tuple[object, ...], list[Copy]]] = {}
        """Copies made before, by where they go to; good as long as the tensor lies where it did."""
        self._prepared: GatheredSources | None = None
        self._strays: list[SharedWork[Copy | GatherCopy]] = []
        """Copies inside a call that some helper had not ended in time."""
        self._thread = threading.Thread(target=self._copy_behind, name="surefoot-staging", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as refused:  # no more threads are allowed (a limit of processes)
            _report_no_thread(refused)

    def prepare(self, slot: Bytes, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> None:
        """Prepares the copies into `slot` before the first save needs them."""
        if len(self._prepared_copies) > _MAX_KNOWN:
            self.forget()
        room = CopyTarget.of(slot)
        sources = self._gathered(eager, lazy)
        sources.small.copies(room)
        for source in (*sources.eager, *sources.lazy):
            tensor = source.server()
            if tensor.is_cuda:
                self._device(tensor.device).random_keys()
            else:
                self._copies(source, tensor, room)

    def forget(self) -> None:
        """Releases prepared copies and their tensors; others are saved from now on."""
        self._prepared_copies.clear()
        self._prepared = None

    def start(
        self, slot: Bytes, eager: Sequence[CopySource], lazy: Sequence[CopySource], done: Callable[[CopyOutcome], None]
    ) -> None:
        """Copies `eager` now and `lazy` behind the training.

        `done` is called once, from whichever thread copies last. Of tensors on a device, now means before whatever the
        training queues next.
        """
        self.wait_until_idle()
        if self._last is not None and self._current is not None:
            self._timing.record_cost(*self._last, self._current.join_seconds)
        begun = time.perf_counter()
        room = CopyTarget.of(slot)
        prepared = self._gathered(eager, lazy)
        parted = _DividedSources()
        for sources, steady in ((prepared.eager, False), (prepared.lazy, True)):
            for source in sources:
                parted.add(source, source.server(), steady)
        size = sum(source.size_bytes for source, _ in parted.behind)
        if not (stays_behind := self._timing.choose(size) and self._thread.is_alive()):
            parted.now += parted.behind
            parted.behind.clear()
        behind = [(s.name, copy) for s, tensor in parted.behind for copy in self._copies(s, tensor, room)]
        now = [copy for s, tensor in parted.now for copy in self._copies(s, tensor, room)]
        digests = self._take([*prepared.small.copies(room), *now], [copy for _, copy in behind])
        queued = self._queue(parted, room)
        changed: dict[str, None] = {}

        def run(lazy: _BackgroundCopy) -> None:
            if not lazy.copy.run_verified(lazy.digest, self._scratch):
                changed.setdefault(lazy.name)

        work = SharedWork(
            run, [_BackgroundCopy(name, copy, d) for (name, copy), d in zip(behind, digests, strict=True)]
        )
        self._last = stays_behind, size, time.perf_counter() - begun
        with self._wake:
            self._current = _Staging(done, work, queued, changed)
            self._wake.notify_all()
        if not self._thread.is_alive():
            self.wait()

    def join(self) -> None:
        """Waits until the last save is copied: its tensors may change then."""
        staging = self._current
        if staging is None or staging.abandoned or staging.finished.is_set():
            return
        for queued in staging.queued:
            queued.let_training_wait()
        self._raise_priority()
        begun = time.perf_counter()
        with self._threads.helping(staging.work.work_until_empty):
            ended = staging.work.finish(WAIT_SECONDS)
        staging.join_seconds += time.perf_counter() - begun
        if not ended:
            self._abandon(staging)
        elif not staging.queued:
            self._finish(staging)
            self._await(staging)

    def wait(self) -> None:
        """Returns when the last save has ended altogether, its `done` called, or was dropped for taking too long."""
        self.join()
        staging = self._current
        if staging is None or staging.abandoned:
            return
        if not self._thread.is_alive() and _came_true(lambda: not staging.is_copying(), WAIT_SECONDS):
            self._end(staging)
        self._await(staging)

    def wait_until_idle(self) -> None:
        """Waits for the last save, and for whatever still copies into a slot.

        Raises:
            TimeoutError: it does not end: no slot may be written to, or given up, meanwhile.
        """
        self.wait()
        self._strays = [work for work in self._strays if work.has_work]
        staging = self._current
        if self._strays or (staging is not None and staging.abandoned and staging.is_copying()):
            raise TimeoutError(f"an earlier save is still being copied after a wait of {WAIT_SECONDS:g} s")

    @property
    def busy(self) -> bool:
        """Whether the last save has not ended altogether."""
        return self._current is not None and not self._current.finished.is_set()

    def close(self) -> None:
        """Ends and joins the threads, after the save under way."""
        self.wait()
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread.ident is not None:  # else it was never started
            self._thread.join(WAIT_SECONDS)
        self._threads.close(WAIT_SECONDS)

    # ---- inside the call -------------------------------------------------------------------------------------------

    def _queue(self, parted: _DividedSources, room: CopyTarget) -> list[QueuedCopies]:
        """Copies of device tensors, device by device."""
        found = []
        for device, (now, behind) in parted.on_device.items():
            found.append(self._device(device).queue(now, behind, room))
        return found

    def _device(self, device: torch.device) -> DeviceCopies:
        if device not in self._devices:
            self._devices[device] = DeviceCopies(device)
        return self._devices[device]

    def _take(self, now: Sequence[Copy | GatherCopy], behind: Sequence[Copy]) -> list[int]:
        """Runs the copies of `now` and digests the sources of the others, with the helpers."""
        small = [copy for copy in now if copy.size_bytes <= SMALL_BYTES]
        copying = SharedWork(_run, [copy for copy in now if copy.size_bytes > SMALL_BYTES])
        digests = Digests(behind, self._scratch)

        def share() -> None:
            digests.work_until_empty()
            copying.work_until_empty()

        with self._threads.helping(share):
            for copy in small:
                copy.run()
            ended = copying.finish(WAIT_SECONDS)
            found = digests.finish()
        if not ended:
            self._strays.append(copying)
            raise TimeoutError(f"a helping thread did not end its copy within {WAIT_SECONDS:g} s")
        if copying.error is not None:
            raise copying.error
        return found

    def _gathered(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> GatheredSources:
        """The small tensors and the other sources, prepared again where they are others."""
        if self._prepared is None or not self._prepared.prepare_for(eager, lazy):
            self._prepared = GatheredSources(eager, lazy)
        return self._prepared

    def _copies(self, source: CopySource, tensor: torch.Tensor, room: CopyTarget) -> list[Copy]:
        """Reuses prepared copies unless the tensor has moved: making them costs more than a small tensor's copy."""
        if tensor.is_conj() or tensor.is_neg():
            return copies_of(source.read(), source.tile, room.part(source))  # of what it means now, not of its memory
        where = (room.address + source.start - room.stream_offset, source.size_bytes)
        what = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, source.tile, source.within)
        known = self._prepared_copies.get(where)
        if known is None or known[0] != what:
            made = copies_of(source.read(), source.tile, room.part(source))
            known = self._prepared_copies[where] = (what, made)
        return known[1]

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _copy_behind(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  # a thread may end, the training goes on without it
            _report_no_thread(error)

    def _serve(self) -> None:
        background = self._background_nice()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._pending() is not None)
                staging = self._pending()
                if staging is None:
                    return
            _set_nice(threading.get_native_id(), background)  # of this thread alone
            staging.work.finish()
            self._end(staging)

    def _end(self, staging: _Staging) -> None:
        """Ends a save of which the host's part is copied, behind its devices' part."""
        try:
            for queued in staging.queued:
                staging.changed.update(dict.fromkeys(queued.changed()))
        except Exception as error:  # noqa: BLE001  # of any kernel: whoever waits for this save must not wait for it
            staging.error = error
        self._finish(staging)

    def _background_nice(self) -> int:
        """The lowest priority from which this thread's may be raised again, which most containers do not allow.

        A process that is nicer already (`nice -n 10`) keeps its own: only the privileged may raise it.
        """
        me = threading.get_native_id()
        normal = os.getpriority(os.PRIO_PROCESS, me)
        if not _set_nice(me, min(normal + 1, BACKGROUND_NICE)) or not _set_nice(me, normal):
            return max(normal, STUCK_NICE)
        self._normal_nice = normal
        return BACKGROUND_NICE

    def _raise_priority(self) -> None:
        """Raises the copying thread's priority while somebody waits for it: on a busy machine it would not get its
        turn."""
        thread = self._thread.native_id
        if self._normal_nice is not None and thread is not None and self._thread.is_alive():
            _set_nice(thread, self._normal_nice)

    def _await(self, staging: _Staging) -> None:
        if not staging.finished.wait(WAIT_SECONDS):
            self._abandon(staging)

    def _abandon(self, staging: _Staging) -> None:
        """Drops a save for which the training has waited long enough."""
        staging.abandoned = True
        staging.error = staging.error or TimeoutError(f"the copy did not end in a wait of {WAIT_SECONDS:g} s")
        metrics.fallbacks.labels("staging_abandoned").inc()
        self._finish(staging)

    def _pending(self) -> _Staging | None:
        staging = self._current
        return staging if staging is not None and not staging.finishing else None

    def _finish(self, staging: _Staging) -> None:
        with self._wake:
            if staging.finishing:
                return
            staging.finishing = True
        try:
            staging.done(CopyOutcome(tuple(staging.changed), staging.error or staging.work.error))
        except Exception:  # noqa: BLE001  # a save may fail, the thread that ends it (maybe the training's) may not
            _log.exception("the end of a save could not be reported")
        staging.finished.set()


def _set_nice(thread: int, nice: int) -> bool:
    """Whether a thread has this priority now: a sandbox may refuse any, also a lower one."""
    try:
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError:
        return False
    return True


def _report_no_thread(why: Exception) -> None:
    metrics.fallbacks.labels("staging_thread_ended").inc()
    _log.error("no background thread can copy saves (%r): from now on they are copied inside step()", why)


def _came_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Asks until then; a device's event has no wait with a limit."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_ASK_SECONDS)
    return True


def _run(copy: Copy | GatherCopy) -> None:
    copy.run()


class _DividedSources:
    """Divides sources into those copied now and behind, on the host and on each device."""

    def __init__(self) -> None:
        self.now: list[tuple[CopySource, torch.Tensor]] = []
        self.behind: list[tuple[CopySource, torch.Tensor]] = []
        self.on_device: dict[torch.device, tuple[list[CopySource], list[CopySource]]] = {}

    def add(self, source: CopySource, tensor: torch.Tensor, steady: bool) -> None:
        """`tensor` is what it is of now: asked once a save, for it costs more than a small copy."""
        if tensor.is_cuda:
            sides = self.on_device.setdefault(tensor.device, ([], []))
            sides[steady and source.size_bytes > SMALL_DEVICE_BYTES].append(source)
        elif steady and source.size_bytes > SMALL_BYTES:
            self.behind.append((source, tensor))
        else:
            self.now.append((source, tensor))
