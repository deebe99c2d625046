"""`python -m kind first-hour`: every command of docs/first-hour.md, in its order, with its seconds.

They run as they are written. Where no registry answers, the program `kind` that they find is a shell script around the real one:
`create` uses the stand-in for its node, and `load` also brings Redis and the S3 server, since no node could pull them.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
"load docker-image") shift 2; exec {python} -m kind load --cluster kind "$@" {others} ;;
*) exec {kind} "$@" ;;
esac
"""


MILESTONES = {
    "images": "make images",
    "cluster": "kind load",
    "chart": "helm test",
    "job": "kubectl wait trainingjob/minimal",
    "killed node": "docker kill",
    "smaller world": "kubectl wait trainingjob/elastic --for=jsonpath='{.status.membership.worldSize}'=4",
    "recovered": "kubectl wait trainingjob/elastic --for=jsonpath='{.status.membership.worldSize}'=6",
    "job with S3": "kubectl wait trainingjob/with-s3",
    "uninstalled": "kubectl delete crd",
}
"""In their order: each is reached with the next command that begins so."""

Took = dict[str, Any]


def run(docker: Docker) -> None:
    """Writes `first_hour` of build/kind.json after each command: a walk that ends early leaves its times too.

    Raises:
        ClusterError: a command failed; which, and its last words.
    """
    node = stand_ins.node(docker, print)
    others = [stand_ins.redis(docker, print), stand_ins.s3(docker, print)]
    with tempfile.TemporaryDirectory(prefix="surefoot-first-hour-") as folder:
        environment = _environment(docker, Path(folder), node, others)
        began = time.monotonic()
        took: list[Took] = []
        lines = walkthrough.lines()
        try:
            for line in lines:
                seconds = _run(line, environment)
                took.append({"command": line, "seconds": round(seconds, 1), "load": round(os.getloadavg()[0], 1)})
                print(f"{time.monotonic() - began:7.1f} s  {seconds:6.1f} s  {line}", flush=True)
                rows.update("first_hour", "commands", _walked(took, len(took) == len(lines)), REPORT)
        except BaseException:
            subprocess.run(["kind", "delete", "cluster"], env=environment, check=False, timeout=300)
            raise


def _walked(took: list[Took], is_whole: bool) -> Took:
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"at": at, "to_its_end": is_whole, "reached_seconds": reached(took), "commands": took}


def reached(took: list[Took]) -> dict[str, float]:
    """Seconds from the first command to each milestone, as far as the walk came. Pure."""
    found: dict[str, float] = {}
    left = list(MILESTONES.items())
    total = 0.0
    for one in took:
        total += one["seconds"]
        if left and one["command"].startswith(left[0][1]):
            found[left.pop(0)[0]] = round(total, 1)
    return found


def _environment(docker: Docker, folder: Path, node: str, others: list[str]) -> dict[str, str]:
    shim = folder / "kind"
    words = {"kind": binaries.kind(), "image": node, "python": sys.executable}
    quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
    shim.write_text(SHIM.format(**quoted, others=shlex.join(others)))
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
