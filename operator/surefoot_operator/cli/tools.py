"""Runs a `surefoot.tools` module in a child process.

The last line of its output is the result in JSON; its stderr reports progress, shown as a bar on a terminal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from surefoot_operator.api.spec import PersistentTierSpec
from surefoot_operator.optional_dependencies import lacking

_TOOL_SECONDS = 600.0
_WORDS_LINES = 20

Tell = Callable[[int, int], None]
"""Bytes done, bytes in all."""


def run_tool(
    name: str,
    tier: PersistentTierSpec,
    arguments: Sequence[str],
    seconds: float = _TOOL_SECONDS,
    job: str | None = None,
    bar: str | None = None,
) -> dict[str, Any]:
    """Runs one tool on a tier and returns its JSON result.

    `job` reaches it through its environment, `bar` labels the progress bar. {"problem": …} says why there is no result.
    """
    if (missing := lacking("runtime")) is not None:
        return {"problem": missing}
    console = Console(stderr=True)
    if bar is None or not console.is_terminal:
        return _run(name, tier, arguments, seconds, job, lambda _done, _total: None)
    columns = (TextColumn(bar), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(bar, total=None)
        return _run(name, tier, arguments, seconds, job, lambda d, t: shown.update(task, completed=d, total=t))


def _run(
    name: str, tier: PersistentTierSpec, arguments: Sequence[str], seconds: float, job: str | None, tell: Tell
) -> dict[str, Any]:
    command = [sys.executable, "-m", f"surefoot.tools.{name}", *arguments]
    until = time.monotonic() + seconds
    words: list[str] = []
    with subprocess.Popen(
        command,
        env=_environment(tier, job),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None  # PIPE above
        hearing = threading.Thread(target=_hear, args=(process, words, tell), daemon=True)
        hearing.start()
        ending = threading.Timer(seconds, process.kill)
        ending.start()
        try:
            output = process.stdout.read()
            code = process.wait()
            hearing.join()
        except BaseException:
            process.kill()
            raise
        finally:
            ending.cancel()
    if time.monotonic() >= until and code < 0:
        return {"problem": f"surefoot.tools.{name} did not finish within {seconds:g} s and was killed"}
    return _answer(name, code, output, words)


def _hear(process: subprocess.Popen[str], words: list[str], tell: Tell) -> None:
    assert process.stderr is not None  # PIPE above
    for line in process.stderr:
        try:
            body = json.loads(line)
            tell(int(body["done"]), int(body["total"]))
        except (ValueError, KeyError, TypeError):
            words.append(line.strip())
            del words[:-_WORDS_LINES]


def _answer(name: str, code: int, output: str, words: list[str]) -> dict[str, Any]:
    lines = output.strip().splitlines()
    try:
        body = json.loads(lines[-1]) if lines else None
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    said = next((line for line in reversed(words) if line), "it printed no error")
    return {"problem": f"surefoot.tools.{name} exited with code {code}: {said}"}


def _environment(tier: PersistentTierSpec, job: str | None) -> dict[str, str]:
    told = {
        "SUREFOOT_PERSISTENT_URI": tier.uri,
        "SUREFOOT_PERSISTENT_ENDPOINT": tier.endpoint or "",
        "SUREFOOT_PERSISTENT_REGION": tier.region or "",
        "SUREFOOT_PERSISTENT_CA_BUNDLE": tier.ca_bundle or "",
        "SUREFOOT_TOOL_PROGRESS": "1",
        **({} if job is None else {"SUREFOOT_JOB_UID": job}),
    }
    return {name: value for name, value in {**os.environ, **told}.items() if value}
