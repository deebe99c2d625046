"""`python -m kind up`: a real kind cluster of a control plane and three workers. `exec -- COMMAND`: with its docker, kubectl, helm.

With the docker that answers, else, as root on Debian, with one of its own that runs until `down`. The verbs that hurt a node are
those of `python -m cluster`, which finds this cluster under `exec`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from chart import helm
from cluster import binaries, kind
from cluster.errors import ClusterError
from cluster.kind import KindCluster
from images import build, daemon, plan
from images.docker import Docker, observe
from images.errors import ImagesError
from images.recipes import RECIPES, RUNTIME
from kind import first_hour, loading, stand_ins, verdict
from kind.release import NAMESPACE, SMALL, Release


def main(words: list[str]) -> int:
    options = _options(words)
    try:
        return int(options.do(options))
    except (ImagesError, ClusterError) as error:
        print(f"kind: {error}", file=sys.stderr)
        return 2


def workers(docker: Docker, cluster: str) -> list[str]:
    """The worker nodes of a cluster that run."""
    labels = (f"io.x-k8s.kind.cluster={cluster}", "io.x-k8s.kind.role=worker")
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    return sorted(docker.run("ps", *filters, "--format", "{{.Names}}").split())


def _up(options: argparse.Namespace) -> int:
    began = time.monotonic()
    docker = _docker(make=True)
    binaries.registry()  # else it is built within the time limit of the first test that wants it
    KindCluster(stand_ins.node(docker, _say)).up(options.nodes)
    _say(f"{options.nodes} workers are Ready after {time.monotonic() - began:.0f} s")
    return 0


def _down(_options: argparse.Namespace) -> int:
    """Nothing is left but what is in the cache."""
    if _found() is not None:
        KindCluster().down()
    daemon.end_kept(daemon.cache_folder())
    return 0


def _status(_options: argparse.Namespace) -> int:
    _docker(make=False)
    return subprocess.run([sys.executable, "-m", "cluster", "status"], check=False).returncode


def _exec(options: argparse.Namespace) -> int:
    _docker(make=False)
    return subprocess.run(options.command, check=False).returncode


def _load(options: argparse.Namespace) -> int:
    docker = _docker(make=False)
    for image in options.images:
        loading.load(docker, image, workers(docker, options.cluster))
    return 0


def _first_hour(_options: argparse.Namespace) -> int:
    first_hour.run(_docker(make=True))
    return 0


def _verdict(_options: argparse.Namespace) -> int:
    told = json.loads(verdict.report().read_text(encoding="utf-8")) if verdict.report().exists() else {}
    for line in verdict.table(told):
        _say(line)
    lacking = verdict.lacking(told, verdict.tests())
    for sentence in lacking:
        print(f"kind: {sentence}", file=sys.stderr)
    return 1 if lacking else 0


def _install(options: argparse.Namespace) -> int:
    """The chart as it is, of images on the nodes alone, where only restricted pods may run."""
    docker, facts = _docker(make=False), KindCluster().facts()
    built = build.release("surefoot/", "unknown")
    names = [built.tag(recipe) for recipe in RECIPES if options.runtime or recipe is not RUNTIME]
    missing = [name for name in names if docker.inspected(name) is None]
    if missing:
        raise ImagesError(f"{' and '.join(missing)} must be built first: `make images`, under `python -m kind exec --`")
    for image in (*names, stand_ins.redis(docker, _say)):
        _say(f"loading {image}")
        loading.load(docker, image, facts.node_names)
    with tempfile.TemporaryDirectory(prefix="surefoot-kind-") as folder:
        release = Release(facts, Path(folder))
        release.make_namespace(NAMESPACE)
        release.up(str(stand_ins.CHART), SMALL)
        _say(release.helm("status", helm.RELEASE))
    return 0


def _docker(make: bool) -> Docker:
    """The docker for this and for what it starts."""
    found = _found()
    if found is None:
        if not make:
            raise ImagesError("there is no cluster; `make kind-up` makes one")
        chosen = plan.daemon(observe())
        _say(chosen.reason)
        found = daemon.keep(daemon.cache_folder())
    os.environ.update(found.environment)
    return found


def _found() -> Docker | None:
    found = Docker("docker") if observe().docker_answers else daemon.find_kept(daemon.cache_folder())
    if found is not None:
        os.environ.update(found.environment)
    return found


def _options(words: list[str]) -> argparse.Namespace:
    """Each verb brings the function that does it: none can be asked for that the parser does not know."""
    parser = argparse.ArgumentParser(prog="python -m kind", description=__doc__)
    verbs = parser.add_subparsers(required=True)

    def verb(name: str, do: Callable[[argparse.Namespace], int], told: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=told)
        made.set_defaults(do=do)
        return made

    up = verb("up", _up, "make the cluster, or repair it; waits until every node is Ready")
    up.add_argument("--nodes", type=int, default=3)
    verb("down", _down, "leave nothing but the cache")
    verb("status", _status, "what runs, what is Ready")
    installed = verb("install", _install, "bring the images that were built into every worker, and install the chart")
    installed.add_argument("--runtime", action="store_true", help="the image with torch too, for jobs")
    loaded = verb("load", _load, "bring images into every worker; nothing is written to disk between")
    loaded.add_argument("--cluster", default=kind.CLUSTER)
    loaded.add_argument("images", nargs="+")
    verb(
        "first-hour", _first_hour, "run the commands of docs/first-hour.md in their order, and write how long each took"
    )
    verb("verdict", _verdict, "what build/kind.json shows, and what it lacks of a whole run")
    given = verb("exec", _exec, "run a command on it, such as `exec -- python -m cluster crash NODE`")
    given.add_argument("command", nargs="+")
    return parser.parse_args(words)


def _say(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
