"""`python -m gate.measured FILE COMMAND…`: runs COMMAND and writes its CPU seconds to FILE.

Counted are the command and all descendants that were waited for; not those that left its process tree.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    file, *command = sys.argv[1:]
    # a shell that starts this in the background makes it ignore SIGINT, by which the gate asks a stage to clean up and end
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command)
    # a signal to the group ends the command; this process ignores it, so that it can still write the file
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    code = process.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(file).write_text(f"{used.ru_utime + used.ru_stime:.1f}\n")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
