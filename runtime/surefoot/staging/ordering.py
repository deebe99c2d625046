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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from surefoot.staging.arena import Bytes
from surefoot.staging.copies import Copy, Scratch, copies_of
from surefoot.staging.crew import Crew, Digests, Work
from surefoot.staging.device import SMALL_BYTES as SMALL_DEVICE_BYTES
from surefoot.staging.device import DeviceCopies, Queued
from surefoot.staging.gathering import SMALL_BYTES, GatherCopy, GatheredSources
from surefoot.staging.pieces import CopyOutcome, CopySource, CopyTarget
from surefoot.staging.timing import Timing

_log = logging.getLogger(__name__)

BACKGROUND_NICE = 19
STUCK_NICE = 5
"""Priority of the copying thread, and where it could not be raised again when somebody comes to wait for it: lower
would leave the training waiting for a thread that a busy machine does not run."""

_MOST_KNOWN = 200_000
"""Copies remembered; beyond this a program changes its tensors faster than remembering helps."""


@dataclass(frozen=True, slots=True)
class _Lazy:
    """A copy behind the training, and what it must find."""

    name: str
    copy: Copy
    digest: int


@dataclass(slots=True)
class _Staging:
    """Holds one save under way."""

    done: Callable[[CopyOutcome], None]
    work: Work[_Lazy]
    queued: list[Queued]
    changed: dict[str, None]
    """Names, in the order in which they were found."""
    error: Exception | None = None
    join_seconds: float = 0.0
    finishing: bool = False
    finished: threading.Event = field(default_factory=threading.Event)


class Stager:
    """Owns the copying threads and side streams for one save at once.

    `start` and `join` are called from one thread.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._current: _Staging | None = None
        self._closed = False
        self._scratch = Scratch()
        self._crew = Crew(Crew.size())
        self._devices: dict[torch.device, DeviceCopies] = {}
        self._timing = Timing()
        self._last: tuple[bool, int, float] | None = None
        """Of the last save: whether it copied behind the training, how many bytes, and its seconds inside the call."""
        self._normal_nice: int | None = None
        self._known: dict[tuple[int, int], tuple[tuple[object, ...], list[Copy]]] = {}
        """Copies made before, by where they go to; good as long as the tensor lies where it did."""
        self._prepared: GatheredSources | None = None
        self._thread = threading.Thread(target=self._copy_behind, name="surefoot-staging", daemon=True)
        self._thread.start()

    def prepare(self, slot: Bytes, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> None:
        """Prepares the copies into `slot` before the first save needs them."""
        if len(self._known) > _MOST_KNOWN:
            self.forget()
        room = CopyTarget.of(slot)
        sources = self._gathered(eager, lazy)
        sources.small.copies(room)
        for source in (*sources.eager, *sources.lazy):
            tensor = source.holder()
            if tensor.is_cuda:
                self._device(tensor.device).drawn_keys()
            else:
                self._copies(source, tensor, room)

    def forget(self) -> None:
        """Releases prepared copies and their tensors; others are saved from now on."""
        self._known.clear()
        self._prepared = None

    def start(
        self, slot: Bytes, eager: Sequence[CopySource], lazy: Sequence[CopySource], done: Callable[[CopyOutcome], None]
    ) -> None:
        """Copies `eager` now and `lazy` behind the training.

        `done` is called once, from whichever thread copies last. Of tensors on a device, now means before whatever the
        training queues next.
        """
        self.wait()
        if self._last is not None and self._current is not None:
            self._timing.saw(*self._last, self._current.join_seconds)
        begun = time.perf_counter()
        room = CopyTarget.of(slot)
        prepared = self._gathered(eager, lazy)
        parted = _Parted()
        for sources, steady in ((prepared.eager, False), (prepared.lazy, True)):
            for source in sources:
                parted.add(source, source.holder(), steady)
        size = sum(source.size_bytes for source, _ in parted.behind)
        if not (stays_behind := self._timing.choose(size)):
            parted.now += parted.behind
            parted.behind.clear()
        behind = [(s.name, copy) for s, tensor in parted.behind for copy in self._copies(s, tensor, room)]
        now = [copy for s, tensor in parted.now for copy in self._copies(s, tensor, room)]
        digests = self._take([*prepared.small.copies(room), *now], [copy for _, copy in behind])
        queued = self._queue(parted, room)
        changed: dict[str, None] = {}

        def run(lazy: _Lazy) -> None:
            if not lazy.copy.run_verified(lazy.digest, self._scratch):
                changed.setdefault(lazy.name)

        work = Work(run, [_Lazy(name, copy, d) for (name, copy), d in zip(behind, digests, strict=True)])
        self._last = stays_behind, size, time.perf_counter() - begun
        with self._wake:
            self._current = _Staging(done, work, queued, changed)
            self._wake.notify_all()

    def join(self) -> None:
        """Waits until the last save is copied: its tensors may change then."""
        staging = self._current
        if staging is None or staging.finished.is_set():
            return
        for queued in staging.queued:
            queued.let_training_wait()
        self._hurry()
        begun = time.perf_counter()
        with self._crew.helping(staging.work.share):
            staging.work.finish()
        staging.join_seconds += time.perf_counter() - begun
        if not staging.queued:
            self._finish(staging)
            staging.finished.wait()

    def wait(self) -> None:
        """Returns when the last save has ended altogether, its `done` called."""
        self.join()
        if self._current is not None:
            self._current.finished.wait()

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
        self._thread.join()
        self._crew.close()

    # ---- inside the call -------------------------------------------------------------------------------------------

    def _queue(self, parted: _Parted, room: CopyTarget) -> list[Queued]:
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
        copying = Work(_run, [copy for copy in now if copy.size_bytes > SMALL_BYTES])
        digests = Digests(behind, self._scratch)

        def share() -> None:
            digests.share()
            copying.share()

        with self._crew.helping(share):
            for copy in small:
                copy.run()
            copying.finish()
            found = digests.finish()
        if copying.error is not None:
            raise copying.error
        return found

    def _gathered(self, eager: Sequence[CopySource], lazy: Sequence[CopySource]) -> GatheredSources:
        """The small tensors and the other sources, prepared again where they are others."""
        if self._prepared is None or not self._prepared.hold_for(eager, lazy):
            self._prepared = GatheredSources(eager, lazy)
        return self._prepared

    def _copies(self, source: CopySource, tensor: torch.Tensor, room: CopyTarget) -> list[Copy]:
        """Reuses prepared copies unless the tensor has moved: making them costs more than a small tensor's copy."""
        if tensor.is_conj() or tensor.is_neg():
            return copies_of(source.read(), source.tile, room.part(source))  # of what it means now, not of its memory
        where = (room.address + source.start - room.origin, source.size_bytes)
        what = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, source.tile, source.within)
        known = self._known.get(where)
        if known is None or known[0] != what:
            made = copies_of(source.read(), source.tile, room.part(source))
            known = self._known[where] = (what, made)
        return known[1]

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _copy_behind(self) -> None:
        background = BACKGROUND_NICE if self._may_hurry() else STUCK_NICE
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._pending() is not None)
                staging = self._pending()
                if staging is None:
                    return
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), background)  # of this thread alone
            staging.work.finish()
            try:
                for queued in staging.queued:
                    staging.changed.update(dict.fromkeys(queued.changed()))
            except RuntimeError as error:  # of any kernel: whoever waits for this save must not wait for ever
                staging.error = error
            self._finish(staging)

    def _may_hurry(self) -> bool:
        """Whether this thread's priority may be raised again, which most containers do not allow."""
        me = threading.get_native_id()
        normal = os.getpriority(os.PRIO_PROCESS, me)
        os.setpriority(os.PRIO_PROCESS, me, min(normal + 1, BACKGROUND_NICE))
        try:
            os.setpriority(os.PRIO_PROCESS, me, normal)
        except PermissionError:
            return False
        self._normal_nice = normal
        return True

    def _hurry(self) -> None:
        """Raises the copying thread's priority while somebody waits for it: on a busy machine it would not get its
        turn."""
        thread = self._thread.native_id
        if self._normal_nice is not None and thread is not None and self._thread.is_alive():
            os.setpriority(os.PRIO_PROCESS, thread, self._normal_nice)

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


def _run(copy: Copy | GatherCopy) -> None:
    copy.run()


class _Parted:
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
