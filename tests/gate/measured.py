"""`python -m gate.measured FILE COMMAND…`: runs a command and writes the CPU seconds of it and its descendants to FILE."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    file, *command = sys.argv[1:]
    # a shell that started this in the background had it ignore SIGINT, with which the gate ends stages in order
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command)
    # the command has the group's signals, too, and ends; this process waits for it and writes the figure
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    code = process.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(file).write_text(f"{used.ru_utime + used.ru_stime:.1f}\n")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
