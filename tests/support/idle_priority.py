"""Runs a command in CPU time that nothing else wants.

`python -m support.idle_priority COMMAND…`; its exit code is the command's. In a session of its own: where the kernel
schedules by session (autogroups), a priority counts among the processes of one session only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from surefoot.linux_process import die_with_parent

_LEAST = "19"
"""The niceness of a session that yields to every other."""


def _yield_to_all(parent: int) -> None:
    die_with_parent(parent)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # no autogroups here, or none that may be changed: the policy alone then
        Path("/proc/self/autogroup").write_text(_LEAST)


def main() -> int:
    process = subprocess.Popen(
        sys.argv[1:],
        start_new_session=True,
        preexec_fn=partial(_yield_to_all, os.getpid()),  # noqa: PLW1509  # one thread here
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()  # of another session, it did not hear the terminal
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
