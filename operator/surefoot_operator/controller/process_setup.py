"""Configures the operator process: its log, Python's garbage collector and its clock.

Called by the composition roots; `job_runner` sets the job of log records.
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
"""The job that the current task works for, as `namespace/name`; tasks that it starts inherit the value."""


class _JobContextFilter(logging.Filter):
    """Adds the current job to each record: `namespace`, `job`, and `about` for text logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        name = logged_job.get()
        record.namespace, _, record.job = name.rpartition("/")
        record.about = f"{name}: " if name else ""
        return True


def configure_logs(level: str, form: str = "") -> None:
    """Logs to stderr at this level, in the given form (`text` or `json`).

    kopf's records count only from WARNING on, because our own handlers log their work.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_JobContextFilter())
    formatter = PlainFormatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(about)s%(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter_of(form, formatter))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("kopf").setLevel(logging.WARNING)


# ---- Python's garbage collector --------------------------------------------------------------------------------------
# Configures Python's garbage collector for a process with many objects. By default it scans all young objects after
# every 700 new ones. While a page of pods is decoded, which creates a hundred thousand objects, that takes three
# quarters of the time and finds no garbage.

GC_THRESHOLD_OBJECTS = 50_000
"""Number of new objects after which the young ones are scanned, which takes some milliseconds."""


def configure_gc() -> None:
    """Excludes the objects that imports created from collection, and collects less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD_OBJECTS, *gc.get_threshold()[1:])


# ---- term clock ------------------------------------------------------------------------------------------------------
# Provides Unix seconds that never jump within one leader's term, for sessions, memory servers and plans. The wall clock
# may jump by an hour when it is corrected or after a suspend. Compared with it, every agent would be silent and every
# job would hang at once.


class TermClock:
    """Returns the wall clock's time at the start of the term, plus the monotonic seconds since."""

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall if wall is not None else time.time
        self._monotonic = steady
        self._offset = 0.0
        self.start_term()

    def start_term(self) -> None:
        """Starts a term: reads the wall clock again."""
        self._offset = self._wall() - self._monotonic()

    def __call__(self) -> float:
        return self._offset + self._monotonic()
