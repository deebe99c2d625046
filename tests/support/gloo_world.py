"""Worlds of real gloo ranks, each rank one program of tests/support: begun, awaited and never left behind.

Called by integration tests; `leave` by the programs, as their last word.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

SUPPORT = Path(__file__).parent
LIMIT_SECONDS = 240.0

Ranks = list["subprocess.Popen[str]"]


def started(program: str, arguments: Sequence[str], size: int, group: Path, **given: str) -> Ranks:
    """`size` ranks of a program of this folder, whose store is the file `group`; `given` goes into their environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SUREFOOT_")}
    environment |= {"WORLD_SIZE": str(size), "GROUP": f"file://{group}", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(SUPPORT.parent), **given}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "programs" / program), *arguments]
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True)
        for rank in range(size)
    ]


def ended(ranks: Ranks, killed: int | None = None, code: int = 9) -> list[str]:
    """What each rank printed; all must have ended well, but `killed` with `code`."""
    found = []
    try:
        for number, process in enumerate(ranks):
            output, problems = process.communicate(timeout=LIMIT_SECONDS)
            wanted = code if number == killed else 0
            assert process.returncode == wanted, f"rank {number} ended with {process.returncode}: {problems[-3000:]}"
            found.append(output)
    finally:
        for process in ranks:
            process.kill()  # says nothing to one that has ended
            with process:  # closes its pipes, which would else fail whatever test runs when they are collected
                pass
    return found


def leave() -> NoReturn:
    """Ends a rank whose work is done, without taking the interpreter down.

    Threads of torch and gloo that still hold something of Python's may abort the process there, after all went well
    (pytorch/pytorch#38228 and #117762). Trainers that an agent forks end like this too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
