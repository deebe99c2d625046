"""Builds the images on a docker, looks into them, and gives what images.json says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from images import bom, contents, daemon, debian, plan, report
from images.docker import Docker
from images.errors import ImagesError
from images.recipes import SECRETS, Recipe, Release, pip_settings

PROJECT = Path(__file__).parents[2]
PULL_SECONDS = 600.0
BUILD_SECONDS = 3600.0
KEPT_CACHE = "16GB"
Say = Callable[[str], None]


def find_base(docker: Docker, wanted: str, machine: plan.Machine, say: Say) -> tuple[plan.Base, str]:
    """The base, and the name to build on: with its digest where a registry gave it one."""
    chosen = plan.base(wanted, pull(docker, wanted), machine)
    say(chosen.reason)
    if chosen.is_made and docker.inspected(chosen.image) is None:
        say("debootstrap makes a base of Debian's packages: minutes, once")
        folder = daemon.cache_folder()
        debian.make_base(docker, debian.unpack_packages(folder / "packages"), chosen.image)
    seen = docker.inspected(chosen.image)
    assert seen is not None
    digests = seen.get("RepoDigests") or []
    return chosen, str(digests[0]) if digests else chosen.image


def build(docker: Docker, recipe: Recipe, arguments: list[str]) -> float:
    """Builds one image; the seconds it took.

    Raises:
        ImagesError: docker's or pip's own words.
    """
    began = time.monotonic()
    with _secrets() as secrets:
        said = docker.tried(*arguments, *secrets, "--progress", "plain", str(PROJECT), seconds=BUILD_SECONDS)
    if said.returncode != 0:
        words = [line for line in said.stderr.splitlines() if line.strip()][-12:]
        raise ImagesError(f"{recipe.dockerfile} does not build: " + "\n  ".join(words))
    return time.monotonic() - began


def forget_older(docker: Docker) -> None:
    """What builds of our own docker left that no name leads to: each would keep torch once more."""
    docker.run("image", "prune", "--force", seconds=600)
    docker.run("builder", "prune", "--force", "--keep-storage", KEPT_CACHE, seconds=600)


def look_into(docker: Docker, recipe: Recipe, release: Release, folder: Path) -> dict[str, Any]:
    """The image's row; its bill of materials is written beside images.json."""
    tag = release.tag(recipe)
    seen = docker.inspected(tag)
    if seen is None:
        raise ImagesError(f"docker built {tag} and has it not")
    with docker.saved(tag) as archive:
        found = contents.read(archive)
    installed = bom.packages(found.texts)
    file = folder / "images" / f"{recipe.name}.cdx.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(bom.document(tag, release.version, installed), encoding="utf-8")
    history = docker.run("image", "history", "--no-trunc", "--human=false", "--format", "{{json .}}", tag)
    entries = [json.loads(line) for line in history.splitlines()]
    for entry in entries:
        entry["Size"] = int(entry["Size"])
    row = report.row(seen, entries, report.findings(recipe, seen, found))
    return row | {"packages": len(installed), "bill_of_materials": f"images/{file.name}"}


def release(prefix: str, source: str) -> Release:
    """The checkout's version and revision."""
    version = subprocess.run(
        [sys.executable, "-c", "import surefoot; print(surefoot.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
    return Release(prefix, version, _revision(), source)


def _revision() -> str:
    if shutil.which("git") is None or not (PROJECT / ".git").exists():
        return "unknown"
    git = ("git", "-C", str(PROJECT))
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=60)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False, timeout=60)
    if head.returncode != 0:
        return "unknown"
    return head.stdout.strip() + ("-changed" if changed.stdout.strip() else "")


def pull(docker: Docker, image: str) -> str | None:
    """None when the image is there; else docker's last words."""
    if docker.inspected(image) is not None:
        return None
    said = docker.tried("image", "pull", "--quiet", image, seconds=PULL_SECONDS)
    if said.returncode == 0:
        return None
    return (said.stderr.strip().splitlines() or ["docker says nothing"])[-1].removeprefix(
        "Error response from daemon: "
    )


@contextmanager
def _secrets() -> Iterator[list[str]]:
    """Arguments of a build in which this machine's pip settings hold; no layer keeps them."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, timeout=60
    )
    settings, authorities = pip_settings(listed.stdout)
    with tempfile.TemporaryDirectory(prefix="surefoot-images-") as folder:
        Path(folder).chmod(0o700)
        Path(folder, "pip.conf").write_text(settings, encoding="utf-8")
        sources = {"pip.conf": str(Path(folder, "pip.conf")), **({"ca.crt": authorities} if authorities else {})}
        yield [word for name in SECRETS if name in sources for word in ("--secret", f"id={name},src={sources[name]}")]


def rows_of_others(docker: Docker, path: Path, built: Collection[str]) -> dict[str, Any]:
    """Rows of images.json that still hold, of images that this build leaves alone.

    A build of the operator alone wrote a file without the runtime that lay beside it.
    """
    known = json.loads(path.read_text(encoding="utf-8"))["images"] if path.exists() else {}
    rows = {name: row for name, row in known.items() if name not in built}
    return {name: row for name, row in rows.items() if (docker.inspected(name) or {}).get("Id") == row["id"]}


def write(path: Path, told: dict[str, Any]) -> None:
    """images.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
