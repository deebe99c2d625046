"""When copies run relative to the training: eagerly inside the call, or lazily behind it, joined before the next step.

Parameters and optimizer state stand still from one optimizer step to the next, so copying them may overlap forward and
backward: a thread of lowest priority copies host tensors, a side stream copies device tensors. Whoever is about to
change them calls `join`, which first takes over what the thread has not begun (a thread of lowest priority may starve)
and then waits for what it has. After the copy, versions, addresses and a rotating sample of the bytes are compared;
a tensor that changed meanwhile costs this save and is copied eagerly from then on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from surefoot.staging.arena import Bytes
from surefoot.staging.copies import Copy, copies_of
from surefoot.staging.device import DeviceCopies, let_training_wait
from surefoot.staging.pieces import Outcome, Room, Source
from surefoot.staging.samples import Sample, Sampler, differing

_log = logging.getLogger(__name__)

SMALL_BYTES = 64 * 1024
"""Lazy pieces up to this size are copied at once: handing one over costs more than copying it."""

BACKGROUND_NICE = 19
STUCK_NICE = 5
"""Priority of the copying thread, and where it could not be raised again when somebody comes to wait for it: lower
would leave the training waiting for a thread that a busy machine does not run."""

_MOST_KNOWN = 200_000
"""Copies remembered; beyond this a program changes its tensors faster than remembering helps."""


@dataclass(slots=True)
class _Staging:
    """One save under way."""

    slot: Bytes
    lazy: Sequence[Source]
    stamps: list[tuple[int, int]]
    samples: list[Sample]
    done: Callable[[Outcome], None]
    queue: deque[Copy] = field(default_factory=deque)
    running: int = 0
    event: Any = None
    error: Exception | None = None
    finishing: bool = False
    moved: tuple[str, ...] | None = None
    """What had changed when somebody joined copies of a device; None: nobody did."""
    finished: threading.Event = field(default_factory=threading.Event)


class Stager:
    """Owner of the copying thread and the side stream. One save at a time; `start` and `join` from one thread."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._current: _Staging | None = None
        self._closed = False
        self._sampler = Sampler()
        self._device = DeviceCopies()
        self._normal_nice: int | None = None
        self._known: dict[tuple[int, int], tuple[tuple[object, ...], list[Copy]]] = {}
        """Copies made before, by where they go to; good as long as the tensor lies where it did."""
        self._thread = threading.Thread(target=self._copy_behind, name="surefoot-staging", daemon=True)
        self._thread.start()

    def prepare(self, slot: Bytes, sources: Sequence[Source]) -> None:
        """Makes the copies that saves into `slot` will need, so that the first save costs what the tenth does."""
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        room = Room.of(slot)
        for source, tensor in _live(sources):
            if not tensor.is_cuda:
                self._copies(source, tensor, room)
        self._sampler.prepare(sum(s.size_bytes for s in sources))

    def start(
        self,
        slot: Bytes,
        eager: Sequence[Source],
        lazy: Sequence[Source],
        done: Callable[[Outcome], None],
        compare_all: bool = False,
    ) -> None:
        """Copies `eager` now and `lazy` behind; `done` is called once, from whichever thread copies last.

        Of tensors on a device, `now` means before whatever the training queues next.
        """
        self.wait()
        now = [*eager, *(s for s in lazy if s.size_bytes <= SMALL_BYTES)]
        behind = [s for s in lazy if s.size_bytes > SMALL_BYTES]
        live = _live(behind)
        staging = _Staging(slot, behind, [_stamp(tensor) for _, tensor in live], [], done)
        room = Room.of(slot)
        at_once = self._copy_now(now, room)
        on_device = [s for s, tensor in live if tensor.is_cuda]
        copies = [(s.name, copy) for s, tensor in live if not tensor.is_cuda for copy in self._copies(s, tensor, room)]
        staging.samples = list(self._sampler.of(copies, compare_all))
        if at_once or on_device:
            turn = self._sampler.whose_turn([s.size_bytes for s in on_device], compare_all)
            staging.event, samples = self._device.queue(at_once, [on_device[i] for i in turn], on_device, room)
            staging.samples += samples
        self._sampler.turn += 1
        staging.queue.extend(copy for _, copy in copies)
        with self._wake:
            self._current = staging
            self._wake.notify_all()

    def join(self) -> None:
        """Returns when nothing of the last save is still to be copied: afterwards its tensors may change."""
        staging = self._current
        if staging is None or staging.finished.is_set():
            return
        if staging.event is not None:
            let_training_wait(staging.event)
        self._hurry()
        self._work(staging)
        if staging.event is None:
            self._finish(staging)
            staging.finished.wait()
        else:
            self._settle(staging)

    def _settle(self, staging: _Staging) -> None:
        """The host goes on while the device copies: what has changed is settled now, for what changes from here on is
        queued behind the copies, and its version grows at once."""
        with self._wake:
            if not staging.finishing:
                if staging.moved is None:
                    staging.moved = tuple(_moved(staging))
                return
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
        """Ends and joins the thread, after the save under way."""
        self.wait()
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    # ---- copying ---------------------------------------------------------------------------------------------------

    def _copy_now(self, sources: Sequence[Source], room: Room) -> list[Source]:
        """Copies those in host memory; returns the others, which are on a device."""
        on_device = []
        for source, tensor in _live(sources):
            if tensor.is_cuda:
                on_device.append(source)
                continue
            for copy in self._copies(source, tensor, room):
                copy.run()
        return on_device

    def _copies(self, source: Source, tensor: torch.Tensor, room: Room) -> list[Copy]:
        """Those made before, unless the tensor has moved: making them costs more than a small tensor's copy."""
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
            self._work(staging)
            try:
                if staging.event is not None:
                    staging.event.synchronize()
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
        """Somebody waits for the copy that the thread is at: on a busy machine it would not get its turn."""
        thread = self._thread.native_id
        if self._normal_nice is not None and thread is not None and self._thread.is_alive():
            os.setpriority(os.PRIO_PROCESS, thread, self._normal_nice)

    def _pending(self) -> _Staging | None:
        staging = self._current
        return staging if staging is not None and not staging.finishing else None

    def _work(self, staging: _Staging) -> None:
        """Runs copies until none is left to begin; both threads do, each copy is run by one of them."""
        while True:
            with self._wake:
                if not staging.queue:
                    break
                copy = staging.queue.popleft()
                staging.running += 1
            try:
                copy.run()
            except (ValueError, RuntimeError, MemoryError) as error:
                staging.error = error
            finally:
                with self._wake:
                    staging.running -= 1
                    self._wake.notify_all()
        with self._wake:
            self._wake.wait_for(lambda: staging.running == 0)

    def _finish(self, staging: _Staging) -> None:
        with self._wake:
            if staging.finishing:
                return
            staging.finishing = True
        try:
            staging.done(Outcome(tuple(_changed(staging)), staging.error))
        except Exception:  # noqa: BLE001  # a save may fail, the thread that ends it (maybe the training's) may not
            _log.exception("the end of a save could not be reported")
        staging.finished.set()


def _live(sources: Sequence[Source]) -> list[tuple[Source, torch.Tensor]]:
    """Each with the tensor it is of now: asked once a save, for it costs more than a small copy."""
    return [(source, source.holder()) for source in sources]


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()


def _moved(staging: _Staging) -> Iterator[str]:
    """Lazy tensors that are not what they were when their copies were asked for."""
    for source, stamp in zip(staging.lazy, staging.stamps, strict=True):
        if _stamp(source.holder()) != stamp:
            yield source.name


def _changed(staging: _Staging) -> Iterator[str]:
    moved = staging.moved if staging.moved is not None else _moved(staging)
    seen = set()
    for name in moved:
        if name not in seen:
            seen.add(name)
            yield name
    for name in differing(staging.samples):
        if name not in seen:
            seen.add(name)
            yield name
