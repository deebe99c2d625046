"""Configures the operator's log: a UTC line per record, with its job.

Called by `__main__`; `job_runner` sets the job.
"""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar

from surefoot.logs import PlainFormatter, formatter_of

job: ContextVar[str] = ContextVar("job", default="")
"""The job that the running task works for; tasks hand it on to those they start."""


class _Job(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        name = job.get()
        record.namespace, _, record.job = name.rpartition("/")
        record.about = f"{name}: " if name else ""
        return True


def begin_logs(level: str, form: str = "") -> None:
    """Logs to stderr, in the form that SUREFOOT_LOG_FORMAT names.

    kopf's records count from WARNING on: its handlers are ours, and log nothing.
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
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # else: that its thread hears no signals
