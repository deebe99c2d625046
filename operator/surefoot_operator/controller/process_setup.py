"""Configures the operator's log: a UTC line per record, with its job.

Called by `__main__`; `job_runner` sets the job.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar

from surefoot.logs import PlainFormatter, formatter_of

logged_job: ContextVar[str] = ContextVar("job", default="")
"""The job that the running task works for; tasks hand it on to those they start."""


class _Job(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        name = logged_job.get()
        record.namespace, _, record.job = name.rpartition("/")
        record.about = f"{name}: " if name else ""
        return True


def begin_logs(level: str, form: str = "") -> None:
    """Logs to stderr, in the form that SUREFOOT_LOG_FORMAT names.

    kopf's records count from WARNING on: its handlers are ours, and log what they do.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Job())
    formatter = PlainFormatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(about)s%(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter_of(form, formatter))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("kopf").setLevel(logging.WARNING)


# ---- garbage collector of Python -------------------------------------------------------------------------------------
# Sets Python's garbage collector for a process that keeps many objects. By default it looks through all that is young
# after every 700 new objects: while a page of pods is decoded, which makes a hundred thousand, it takes three quarters
# of the time and finds nothing.

YOUNG = 50_000
"""New objects after which the young are looked through: some milliseconds' worth."""


def configure_gc() -> None:
    """Leaves out what imports have made, and looks seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


# ---- term clock ------------------------------------------------------------------------------------------------------
# Provides Unix seconds that never step within one leader's term. Read by sessions, holders and plans. The wall clock
# may jump by an hour when it is corrected or after a suspend; compared with it, every agent would be silent and every
# world would hang at once.


class TermClock:
    """The wall clock at the term's start, plus monotonic seconds since."""

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall if wall is not None else time.time
        self._steady = steady
        self._offset = 0.0
        self.begin()

    def begin(self) -> None:
        """Starts a term: reads the wall clock anew."""
        self._offset = self._wall() - self._steady()

    def __call__(self) -> float:
        return self._offset + self._steady()
