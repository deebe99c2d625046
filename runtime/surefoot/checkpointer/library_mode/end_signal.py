"""Saves the current step when SIGTERM asks a script without an agent to end.

The handler writes one byte and nothing else: work, or an exception, inside of a handler is no reliable message. A thread
reads the byte, tells the other ranks through the job's store, and learns the step that all of them save: each rank
publishes the last step that it finished, once, and passes no further step before it knows everybody's. So no rank is
beyond the largest of them plus one, and that is the step. Nobody waits in a collective for it, and nothing waits without
limit. Behind the save the script's own handler runs; without one the process ends as SIGTERM ends it. Made by `backends`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any

from surefoot.checkpointer.world import ProcessWorld
from surefoot.errors import ConfigurationError

_log = logging.getLogger(__name__)

VARIABLE = "SUREFOOT_SIGTERM_SECONDS"
GRACE_SECONDS = 25.0
"""torchrun kills 30 s after SIGTERM; Slurm and spot nodes give as much or more."""
POLL_SECONDS = 0.2
_KEY = "surefoot/sigterm"


def grace_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """How long the save may take; 0: SIGTERM is left alone."""
    text = environment.get(VARIABLE, str(GRACE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise ConfigurationError(f"{VARIABLE} is {text!r}: set it to seconds, 0 or more; 0 leaves SIGTERM alone")
    return seconds


def _is_loader_worker() -> bool:
    """Whether this process was just forked to fetch batches for a DataLoader of torch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_launch":
        frame = frame.f_back
    target = getattr(frame.f_locals.get("process_obj"), "_target", None) if frame is not None else None
    return getattr(target, "__module__", None) == "torch.utils.data._utils.worker"


class EndSignal:
    """Takes SIGTERM for one rank until it is closed."""

    def __init__(self, world: ProcessWorld, epoch: int, seconds: float) -> None:
        self._world, self._prefix, self._seconds = world, f"{_KEY}/{epoch}", seconds
        self._process, self._signals = os.getpid(), 0
        self._previous: Any = signal.SIG_DFL
        """What runs behind the save."""
        self._first: Any = None
        """What SIGTERM did before any of this: a handler that was set since may call this one again."""
        self._lock = threading.Lock()
        self._finished_step = 0
        self._published = False
        self._decided = threading.Event()
        self._step: int | None = None
        self._deadline = 0.0
        self._closed = threading.Event()
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._taken = seconds > 0 and self._take()
        if self._taken:
            threading.Thread(target=self._watch, name="surefoot-sigterm", daemon=True).start()

    def is_due(self, step: int) -> bool:
        """Whether this step is the last one; waits for the ranks to agree once one was asked to end."""
        if not self._taken:
            return False
        main = threading.current_thread() is threading.main_thread()
        if main and not self._published and signal.getsignal(signal.SIGTERM) != self._handle:
            self._take()  # the script, or its framework, has set a handler of its own since: it runs behind the save
        with self._lock:
            self._finished_step, published = step, self._published
        if not published:
            return False
        if not self._decided.wait(self.seconds_left):
            _log.warning(
                "the ranks agreed on no step within %g s of SIGTERM: this rank saves step %d", self._seconds, step
            )
            return True
        return self._step is None or step >= self._step

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def pass_on(self) -> None:
        """Gives the signal to the script's own handler, or ends the process as it would have ended."""
        if self._closed.is_set():
            return
        previous = self._previous
        self.close()
        if callable(previous):
            previous(signal.SIGTERM, None)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def finish(self) -> None:
        """Takes SIGTERM no more; one that came meanwhile is passed on."""
        if self._signals or self._published:
            self.pass_on()
        self.close()

    def close(self) -> None:
        """Takes SIGTERM no more."""
        self._closed.set()
        if self._taken and os.getpid() == self._process and threading.current_thread() is threading.main_thread():
            self._taken = False
            self._give_back()

    def disown(self) -> None:
        """In a forked child: SIGTERM means what it meant before."""
        self._closed.set()
        if self._taken:
            self._give_back()
            if _is_loader_worker():
                with suppress(OSError):
                    os.setpgid(0, 0)  # torchrun signals a rank's whole group, and no step ends without the next batch
        self._taken = False

    def _take(self) -> bool:
        present = signal.getsignal(signal.SIGTERM)
        if present is signal.SIG_IGN or present is None:
            return False  # ignored on purpose, or handled outside of Python
        try:
            signal.signal(signal.SIGTERM, self._handle)
        except ValueError:  # only the main thread may
            _log.warning("SIGTERM will save no step: create the Checkpointer in the main thread, which this is not")
            return False
        self._previous = present
        if self._first is None:
            self._first = present
        return True

    def _give_back(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = self._first

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 1 and os.getpid() == self._process and not self._closed.is_set():
            os.write(self._pipe[1], b"!")
            return
        # the second one ends at once, and so does a child's first; a handler that calls the one before it comes back here
        # and must not be called again
        following, self._previous = self._previous, self._first
        signal.signal(number, following)
        os.kill(os.getpid(), number)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if self._asked():
                self._deadline = time.monotonic() + self._seconds
                self._agree()
                if not self._closed.wait(self.seconds_left):
                    _log.warning(
                        "no step ended within %g s of SIGTERM: the process ends without saving one", self._seconds
                    )
                    self._signals += 1
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    def _asked(self) -> bool:
        try:
            os.read(self._pipe[0], 1)
        except BlockingIOError:
            if self._world.size == 1:
                return False
            try:
                return bool(self._world.store.check([f"{self._prefix}/asked"]))
            except RuntimeError:  # the store's owner is gone: this rank's own signal still counts
                return False
        return True

    def _agree(self) -> None:
        """Publishes this rank's step and learns the others'; without an answer each rank saves where it is."""
        with self._lock:
            own, self._published = self._finished_step, True
        if self._world.size > 1:
            keys = [f"{self._prefix}/{rank}" for rank in range(self._world.size)]
            store = self._world.store
            try:
                store.set(f"{self._prefix}/asked", "1")
                store.set(keys[self._world.rank], str(own))
                store.wait(keys, timedelta(seconds=self._seconds / 3))
                self._step = max(int(store.get(key)) for key in keys) + 1
            except (RuntimeError, ValueError) as silent:
                cause = str(silent).partition("\n")[0]
                _log.warning("after SIGTERM the ranks agreed on no step, so each saves its own: %s", cause)
        self._decided.set()
