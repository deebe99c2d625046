"""Saves the current step when SIGTERM asks a script without an agent to end.

The handler counts and nothing else: work, or an exception, inside of a handler is no reliable message. A thread
sees the count, tells the other ranks through the job's store, and learns the step that all of them save: each rank
publishes the last step that it finished, once, and passes no further step before it knows everybody's. So no rank is
beyond the largest of them plus one, and that is the step. Nobody waits in a collective for it, and nothing waits without
limit. Behind the save the script's own handler runs; without one the process ends as SIGTERM ends it. Where no step ends
(an evaluation) the process goes on to that as soon as its last step is known to be saved; nothing is saved between
steps, as weights and random numbers may be an evaluation's then. Made by `backends`.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from surefoot.checkpointer.process_group import ProcessGroupInfo
from surefoot.errors import ConfigurationError

_log = logging.getLogger(__name__)

VARIABLE = "SUREFOOT_SIGTERM_SECONDS"
GRACE_SECONDS = 25.0
"""torchrun kills 30 s after SIGTERM; Slurm and spot nodes give as much or more."""
POLL_SECONDS = 0.2
STORE_POLL_SECONDS = 1.0
"""From look to look at what other ranks were sent: every rank asks one store."""
SAME_NOTICE_SECONDS = 3.0
"""A notice may come twice: Slurm and systemd signal each process of a job, and torchrun passes its own on."""
_KEY = "surefoot/sigterm"


def grace_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """How long the save may take; 0: SIGTERM is left alone."""
    text = environment.get(VARIABLE, str(GRACE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise ConfigurationError(f"{VARIABLE} is {text!r}: give seconds from 0 on; 0 leaves SIGTERM alone")
    return seconds


def _is_loader_worker() -> bool:
    """Whether this process was just forked to fetch batches for a DataLoader of torch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_launch":
        frame = frame.f_back
    target = getattr(frame.f_locals.get("process_obj"), "_target", None) if frame is not None else None
    return getattr(target, "__module__", None) == "torch.utils.data._utils.worker"


class _Handler:
    """What SIGTERM calls, and what it called before: a script's handler set later may call this one in turn."""

    def __init__(self, ending: EndSignal, previous: Any) -> None:
        self.ending, self.previous = ending, previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.ending.count(self, frame)

    def is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self


class EndSignal:
    """Takes SIGTERM for one rank until it is closed."""

    def __init__(self, world: ProcessGroupInfo, generation: int, seconds: float, saved_step: Callable[[], int]) -> None:
        self._world, self._prefix, self._seconds, self._saved_step = world, f"{_KEY}/{generation}", seconds, saved_step
        self._process = os.getpid()
        self._first = math.inf
        """When the first signal came."""
        self._store_look = 0.0
        self._handler = _Handler(self, signal.SIG_DFL)
        self._lock = threading.Lock()
        self._finished_step = 0
        self._published = False
        self._decided = threading.Event()
        self._step: int | None = None
        self._ends = False
        """Whether the last finished step is the one to save and end with."""
        self._deadline = 0.0
        self._closed = threading.Event()
        self._passed = False
        self._taken = seconds > 0 and self._take()
        if self._taken:
            threading.Thread(target=self._watch, name="surefoot-sigterm", daemon=True).start()

    def is_due(self, step: int) -> bool:
        """Whether this step is the last one; waits for the ranks to agree once one was asked to end."""
        if not self._taken:
            return False
        main = threading.current_thread() is threading.main_thread()
        if main and not self._published and not self._handler.is_installed():
            self._take()  # the script, or its framework, has set a handler of its own since: it runs behind the save
        with self._lock:
            self._finished_step, published = step, self._published
        if not published:
            return False
        self._decided.wait(self.seconds_left)  # a store may hang: then this step is saved
        self._ends = self._step is None or step >= self._step
        return self._ends

    def count(self, handler: _Handler, frame: FrameType | None) -> None:
        """Takes the first signal for the thread; a later one, and a child's, is what it was before."""
        now = time.monotonic()
        self._first = min(self._first, now)
        over = self._passed or self._closed.is_set() or os.getpid() != self._process
        if not over and now - self._first < SAME_NOTICE_SECONDS:
            return
        if handler.is_installed():
            self._passed, self._taken = True, False
            signal.signal(signal.SIGTERM, handler.previous)
            os.kill(os.getpid(), signal.SIGTERM)
        elif callable(handler.previous):  # called by the script's own handler, which runs already
            handler.previous(signal.SIGTERM, frame)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def wait_for_others(self) -> None:
        """Waits until every rank has saved.

        A launcher kills the others as soon as it sees the first one end.
        """
        if self._world.size > 1 and self._tell_all("saved", "1", self.seconds_left / 2) is None:
            _log.warning("after SIGTERM not every rank is known to have saved step %d", self._finished_step)

    def pass_on(self) -> None:
        """Gives the signal to the script's own handler, or ends the process as it would have ended."""
        if self._passed:
            return
        self._passed = True
        self.close()
        previous = self._handler.previous
        if callable(previous) and threading.current_thread() is threading.main_thread():
            previous(signal.SIGTERM, None)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def finish(self) -> None:
        """Takes SIGTERM no more; one that came meanwhile is passed on."""
        if self._first < math.inf or self._published:
            self.pass_on()
        self.close()

    def close(self) -> None:
        """Takes SIGTERM no more."""
        self._closed.set()
        if self._taken and os.getpid() == self._process and threading.current_thread() is threading.main_thread():
            self._taken = False
            if self._handler.is_installed():
                signal.signal(signal.SIGTERM, self._handler.previous)

    def disable_after_fork(self) -> None:
        """In a forked child: SIGTERM means what it meant before."""
        self._closed.set()
        if self._taken and self._handler.is_installed():
            signal.signal(signal.SIGTERM, self._handler.previous)
        if self._taken and _is_loader_worker():
            with suppress(OSError):
                os.setpgid(0, 0)  # torchrun signals a rank's whole group, and no step ends without the next batch
        self._taken = False

    def _take(self) -> bool:
        present = signal.getsignal(signal.SIGTERM)
        if present is signal.SIG_IGN or present is None:
            return False  # ignored on purpose, or handled outside of Python
        handler = _Handler(self, present)
        try:
            signal.signal(signal.SIGTERM, handler)
        except ValueError:  # only the main thread may
            _log.warning("SIGTERM saves nothing: the Checkpointer was made outside of the main thread")
            return False
        self._handler = handler
        return True

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._asked():
            if self._closed.wait(POLL_SECONDS):
                return
        self._deadline = time.monotonic() + self._seconds
        self._agree()
        while not self._closed.wait(min(POLL_SECONDS, self.seconds_left)):
            saved = self._saved_step()
            between = self.seconds_left < self._seconds / 2 and not self._ends and saved == self._finished_step
            if between or not self.seconds_left:
                reason = "the last step is saved" if between else f"{self._seconds:g} s have passed"
                _log.warning("SIGTERM is passed on: %s; the newest step saved here is %d", reason, saved)
                self._passed = True
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _asked(self) -> bool:
        if self._first < math.inf:
            return True
        if self._world.size == 1 or time.monotonic() < self._store_look:
            return False
        self._store_look = time.monotonic() + STORE_POLL_SECONDS
        try:
            return bool(self._world.store.check([f"{self._prefix}/asked"]))
        except RuntimeError:  # the store's owner is gone: this rank's own signal still counts
            return False

    def _agree(self) -> None:
        """Publishes this rank's step and learns the others'; without an answer each rank saves where it is."""
        with self._lock:
            own, self._published = self._finished_step, True
        if self._world.size > 1:
            steps = self._tell_all("step", str(own), self._seconds / 3)
            if steps is None:
                _log.warning("after SIGTERM the ranks could not agree on a step")
            else:
                self._step = max(map(int, steps)) + 1
        self._decided.set()

    def _tell_all(self, what: str, text: str, seconds: float) -> list[bytes] | None:
        """Publishes this rank's word and returns that of every rank; None: one is missing, or the store is gone.

        It looks again and again: a wait inside of the store would keep the program from using it meanwhile.
        """
        store, end = self._world.store, time.monotonic() + seconds
        keys = [f"{self._prefix}/{what}/{rank}" for rank in range(self._world.size)]
        try:
            store.set(f"{self._prefix}/asked", "1")
            store.set(keys[self._world.rank], text)
            while not store.check(keys):
                if time.monotonic() >= end:
                    return None
                time.sleep(POLL_SECONDS)
            return [store.get(key) for key in keys]
        except RuntimeError as gone:
            _log.info("the job's store does not answer: %s", str(gone).partition("\n")[0])
            return None
