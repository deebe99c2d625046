"""`python -m kind first-hour`: every command of docs/install.md from an empty machine to a recovered job, in its order, with its seconds.

They run as they are written. Where no registry answers, the program `kind` that they find is a shell script around the real one:
`create` uses the stand-in for its node, and `load` also brings Redis, since no node could pull it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chart import walkthrough
from cluster import binaries
from cluster.errors import ClusterError
from cluster.scenarios import rows
from images import build
from images.docker import Docker
from kind import stand_ins

REPORT = build.PROJECT / "build" / "kind.json"
COMMAND_SECONDS = 1800.0
SHIM = """#!/bin/sh
case "$1 $2" in
"create cluster") exec {kind} "$@" --image {image} ;;
"load docker-image") shift 2; exec {python} -m kind load --cluster kind "$@" {redis} ;;
*) exec {kind} "$@" ;;
esac
"""


def run(docker: Docker) -> None:
    """Writes `first_hour` of build/kind.json: seconds of each command, and those from the first to the last.

    Raises:
        ClusterError: a command failed; which, and its last words.
    """
    node, redis = stand_ins.node(docker, print), stand_ins.redis(docker, print)
    with tempfile.TemporaryDirectory(prefix="surefoot-first-hour-") as folder:
        environment = _environment(docker, Path(folder), node, redis)
        began = time.monotonic()
        took: list[dict[str, object]] = []
        try:
            for line in walkthrough.lines():
                seconds = _run(line, environment)
                took.append({"command": line, "seconds": round(seconds, 1)})
                print(f"{time.monotonic() - began:7.1f} s  {seconds:6.1f} s  {line}", flush=True)
        except BaseException:
            subprocess.run(["kind", "delete", "cluster"], env=environment, check=False, timeout=300)
            raise
        total = round(time.monotonic() - began, 1)
        rows.update("first_hour", "commands", {"total_seconds": total, "commands": took}, REPORT)


def _environment(docker: Docker, folder: Path, node: str, redis: str) -> dict[str, str]:
    shim = folder / "kind"
    words = {"kind": binaries.kind(), "image": node, "python": sys.executable, "redis": redis}
    shim.write_text(SHIM.format(**{name: shlex.quote(str(word)) for name, word in words.items()}))
    shim.chmod(0o755)
    programs = [str(folder), str(binaries.kubernetes_folder()), str(binaries.helm().parent)]
    path = ":".join([*programs, docker.environment["PATH"]])
    return {**docker.environment, "PATH": path, "KUBECONFIG": str(folder / "kubeconfig"), "PYTHONPATH": "tests"}


def _run(line: str, environment: dict[str, str]) -> float:
    began = time.monotonic()
    done = subprocess.run(
        ["sh", "-c", line],
        env=environment,
        cwd=build.PROJECT,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        words = (done.stdout + done.stderr).strip()[-1500:]
        state = subprocess.run(
            ["kubectl", "get", "pods,trainingjobs,events", "--all-namespaces", "--output=wide"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        raise ClusterError(f"`{line}` failed with {done.returncode}: {words}{os.linesep}{state.stdout[-12000:]}")
    return time.monotonic() - began
