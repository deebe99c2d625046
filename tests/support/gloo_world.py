"""Worlds of real gloo ranks, each rank one program of tests/support: begun, awaited and never left behind.

Called by integration tests; `leave` by the programs, as their last word.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from support.warm_pair import Rank, WarmPair
from surefoot.launcher.job_program import LaunchProgram

SUPPORT = Path(__file__).parent
Ranks = list[Rank]

_warm: list[WarmPair] = []
"""The one of this process, once a world was begun."""


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SUREFOOT_")}
    return environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT.parent)}


def started(program: str, arguments: Sequence[str], size: int, group: Path, **given: str) -> Ranks:
    """`size` ranks of a program of this folder, whose store is the file `group`; `given` goes into their environment."""
    if not _warm:
        _warm.append(WarmPair(_environment()))
    environment = _environment() | {"WORLD_SIZE": str(size), "GROUP": f"file://{group}", **given}
    script = LaunchProgram(tuple(arguments), script=str(SUPPORT / "programs" / program))
    return [_warm[0].fork(rank, script, environment | {"RANK": str(rank)}) for rank in range(size)]


def ended(ranks: Ranks, killed: int | None = None, code: int = 9) -> list[str]:
    """What each rank printed; all must have ended well, but `killed` with `code`."""
    found = []
    try:
        for number, rank in enumerate(ranks):
            wanted = code if number == killed else 0
            assert rank.ended() == wanted, f"rank {number} ended with {rank.code}: {rank.said()[-3000:]}"
            found.append(rank.said())
    finally:
        for rank in ranks:
            rank.child.kill()  # says nothing to one that has ended
            rank.output.close()
    return found


def told(ranks: Ranks, killed: int | None = None) -> list[dict[str, Any]]:
    """The objects that ranks printed, a line each; what PyTorch warns of stands between them."""
    lines = [line for output in ended(ranks, killed) for line in output.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def close() -> None:
    """Ends this process' warm pair, if it has one."""
    while _warm:
        _warm.pop().close()


def leave() -> NoReturn:
    """Ends a rank whose work is done, without taking the interpreter down.

    Threads of torch and gloo that still hold something of Python's may abort the process there, after all went well
    (pytorch/pytorch#38228 and #117762). Trainers that an agent forks end like this too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
