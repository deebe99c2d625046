"""`python -m kind up`: a real kind cluster of a control plane and three workers. `exec -- COMMAND`: with its docker, kubectl, helm.

With the docker that answers, else, as root on Debian, with one of its own that runs until `down`. The verbs that hurt a node are
those of `python -m cluster`, which finds this cluster under `exec`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chart import helm
from cluster import kind
from cluster.engine import Engine
from cluster.errors import ClusterError
from cluster.kind import KindCluster
from images import build, daemon, plan
from images.docker import Docker, observe
from images.errors import ImagesError
from images.recipes import RECIPES, RUNTIME
from kind import first_hour, loading, stand_ins
from kind.release import NAMESPACE, SMALL, Release


def main(words: list[str]) -> int:
    options = _options(words)
    began = time.monotonic()
    try:
        if options.verb == "down":
            return _down()
        docker = _docker(make=options.verb in ("up", "first-hour"))
        if options.verb == "exec":
            return subprocess.run(options.command, check=False).returncode
        if options.verb == "load":
            for image in options.images:
                loading.load(docker, image, workers(docker, options.cluster))
            return 0
        if options.verb == "install":
            _install(docker, with_runtime=options.runtime)
            return 0
        if options.verb == "first-hour":
            first_hour.run(docker)
            return 0
        if options.verb == "status":
            return subprocess.run([sys.executable, "-m", "cluster", "status"], check=False).returncode
        _up(docker, options.nodes)
        _say(f"{options.nodes} workers are Ready after {time.monotonic() - began:.0f} s")
        return 0
    except (ImagesError, ClusterError) as error:
        print(f"kind: {error}", file=sys.stderr)
        return 2


def workers(docker: Docker, cluster: str) -> list[str]:
    """The worker nodes of a cluster that run."""
    labels = (f"io.x-k8s.kind.cluster={cluster}", "io.x-k8s.kind.role=worker")
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    return sorted(docker.run("ps", *filters, "--format", "{{.Names}}").split())


def _up(docker: Docker, nodes: int) -> Engine:
    engine = KindCluster(stand_ins.node(docker, _say))
    engine.up(nodes)
    return engine


def _install(docker: Docker, with_runtime: bool) -> None:
    """The chart as it is, of images on the nodes alone, where only restricted pods may run."""
    facts = KindCluster().facts()
    built = build.release("surefoot/", "unknown")
    names = [built.tag(recipe) for recipe in RECIPES if with_runtime or recipe is not RUNTIME]
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


def _down() -> int:
    """Nothing is left but what is in the cache."""
    if _found() is not None:
        KindCluster().down()
    daemon.end_kept(daemon.cache_folder())
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
    parser = argparse.ArgumentParser(prog="python -m kind", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="make the cluster, or repair it; waits until every node is Ready")
    up.add_argument("--nodes", type=int, default=3)
    verbs.add_parser("down", help="leave nothing but the cache")
    verbs.add_parser("status", help="what runs, what is Ready")
    loaded = verbs.add_parser("load", help="bring images into every worker; nothing is written to disk between")
    loaded.add_argument("--cluster", default=kind.CLUSTER)
    loaded.add_argument("images", nargs="+")
    verbs.add_parser(
        "first-hour", help="run the commands of docs/install.md in their order, and write how long each took"
    )
    given = verbs.add_parser("exec", help="run a command on it, such as `exec -- python -m cluster crash NODE`")
    given.add_argument("command", nargs="+")
    return parser.parse_args(words)


def _say(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
