"""Runs a command that takes little CPU time from others, and is never starved by them.

`python -m support.low_priority COMMAND…`; its exit code is the command's. In a session of its own: where the kernel
schedules by session (autogroups), a priority counts among the processes of one session only. It is a niceness and not
SCHED_IDLE: beside work of full priority a test under SCHED_IDLE stood still for minutes, beyond every time limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from surefoot.linux_process import die_with_parent

_NICENESS = 10
"""A tenth of the weight of a process, or session, of normal priority."""


def _yield_to_others(parent: int) -> None:
    die_with_parent(parent)
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with suppress(OSError):  # no autogroups here, or none that may be changed: the process' niceness alone then
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def main() -> int:
    process = subprocess.Popen(
        sys.argv[1:],
        start_new_session=True,
        preexec_fn=partial(_yield_to_others, os.getpid()),  # noqa: PLW1509  # one thread here
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()  # of another session, it did not hear the terminal
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
