"""helm, found or built, and what it renders of the chart. Runs the program; called by the chart's tests and by `generated`."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from cluster import binaries

Object = dict[str, Any]

PROJECT = Path(__file__).resolve().parents[2]
CHART = PROJECT / "charts" / "surefoot"
RELEASE, NAMESPACE = "surefoot", "surefoot-system"
KUBERNETES = "1.35.0"
"""What is rendered for: each helm would otherwise assume a version of its own."""
CALL_SECONDS = 120


@functools.cache
def program() -> Path:
    """helm 3 or 4 from PATH, else of the cache, else built into it."""
    found = shutil.which("helm")
    return Path(found) if found else binaries.helm()


class HelmRefused(Exception):
    """helm ended with an error; its text."""


def helm(*arguments: str, given: str | None = None, seconds: float = CALL_SECONDS) -> str:
    """Its output. Raises HelmRefused."""
    done = subprocess.run(
        [str(program()), *arguments], input=given, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode != 0:
        raise HelmRefused((done.stderr or done.stdout).strip())
    return done.stdout


def text(values: Object | None = None, release: str = RELEASE, namespace: str = NAMESPACE) -> str:
    """The rendering as helm prints it."""
    options = ("--namespace", namespace, "--kube-version", KUBERNETES, "--values", "-")
    return helm("template", release, str(CHART), *options, given=json.dumps(values or {}))


def objects(values: Object | None = None, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Object]:
    """The rendering, parsed, in the order in which helm installs it; hooks last."""
    found = [one for one in yaml.safe_load_all(text(values, release, namespace)) if one]
    return sorted(found, key=is_hook)


def is_hook(found: Object) -> bool:
    """Made by `helm test` alone."""
    return "helm.sh/hook" in (found["metadata"].get("annotations") or {})


def one(rendered: list[Object], kind: str, name: str) -> Object:
    """The object of that kind and name."""
    found = [o for o in rendered if o["kind"] == kind and o["metadata"]["name"] == name and not is_hook(o)]
    assert len(found) == 1, f"{len(found)} objects are {kind} {name}"
    return found[0]
