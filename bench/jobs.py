"""Parts of the benchmark, each in a process of its own, forked from one that has imported what they share: importing
torch for every turn would take a minute of a quick run.

The process and all that it started are ended with its part. What it could not do is an `error` that the others never
notice: when memory runs out, the kernel takes such a process first. Called by `run`, while no thread of it runs.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAST_LINES = 3
FIRST_TO_GO = "1000"
"""In `oom_score_adj`: the highest."""


def run_module(module: str, arguments: list[str], environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """What `module.main` wrote to the file that is its last argument, or `error`."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        log.touch()
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=_inside, args=(module, [*arguments, str(out)], environment, log))
        process.start()
        try:
            process.join(seconds)
            code = process.exitcode
        finally:
            _end_group(process)
        if code == 0 and out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
        return {"error": said(code, seconds, log.read_text(errors="replace"))}


def said(code: int | None, seconds: float, log: str) -> str:
    """Why a part has no result. `code` is None if it had to be ended, negative for a signal."""
    last = " | ".join([text for text in log.splitlines() if text.strip()][-LAST_LINES:])
    if code is None:
        return f"ended after {seconds:g} s: {last}"
    if code == -signal.SIGKILL:
        return f"killed, as the kernel does when memory runs out: {last}"
    return f"exit code {code}: {last}"


def attempt(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part that needs more than its process: what stands around it (holders, sockets) may fail too."""
    try:
        return part()
    except Exception as error:  # noqa: BLE001  # reported under `errors`; the other parts still count
        return {"error": repr(error)}


def _inside(module: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    os.setsid()
    Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    to = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(to, 1)
    os.dup2(to, 2)
    os.environ |= environment
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def _end_group(process: Any) -> None:
    """The part, and whatever helpers of its system outlive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody is left, or it had no group of its own yet
    process.kill()
    process.join()
