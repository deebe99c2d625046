"""Runs a command at low CPU priority: it yields to other work and still makes progress.

`python -m support.low_priority COMMAND…`; its exit code is the command's. With autogroups the kernel divides the CPU
between sessions first, and a process's niceness counts only within its session. So the command gets a session of its
own, and the session gets the niceness too. SCHED_IDLE is not used: beside normal work a test under it stood still for
minutes and ran past its time limit.
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
"""A tenth of the CPU weight that a process, or session, of normal priority has."""


def _yield_to_others(parent: int) -> None:
    die_with_parent(parent)
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with suppress(OSError):  # without autogroups, or the right to change them, only the process's niceness counts
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
        process.terminate()  # the command has its own session, so the terminal's Ctrl-C did not reach it
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
