"""Sets the parent-death signal, then execs a trainer that cannot be forked.

`… PARENT_PID COMMAND ARGS…`.
"""

from __future__ import annotations

import os
import sys

from surefoot.launcher.job_program import write_report
from surefoot.linux_process import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    command = sys.argv[2:]
    try:
        os.execvp(command[0], command)  # the death signal survives exec
    except OSError as error:
        text = f"the job's command {command[0]!r} cannot be started: {error.strerror}"
        write_report("SystemExit", text, "")
        sys.exit(text)


if __name__ == "__main__":
    main()
