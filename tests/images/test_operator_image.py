"""The operator's image, run as the chart runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

import surefoot
from images.conftest import Built
from images.containers import Containers
from images.recipes import OPERATOR

pytestmark = pytest.mark.timeout(
    2400
)  # the first test waits for the build; torch's image takes minutes when it is cold

ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: nobody, user: {token: none}}]
contexts: [{name: none, context: {cluster: none, user: nobody}}]
current-context: none
"""


def test_it_says_its_version(built: Built, containers: Containers) -> None:
    assert containers.run(built.operator, "--version").text.strip() == f"surefoot-operator {surefoot.__version__}"


def test_its_user_is_nobody_and_can_write_nowhere(built: Built, containers: Containers) -> None:
    say = "import os; print(os.getuid(), os.getgid(), [p for p in ('/', '/opt/surefoot', '/tmp') if os.access(p, os.W_OK)])"
    said = containers.run(built.operator, "-c", say, options=("--entrypoint", "python"))
    assert said.text.strip() == f"{OPERATOR.user.replace(':', ' ')} []"


def test_outside_a_cluster_it_says_so_in_one_line(built: Built, containers: Containers) -> None:
    said = containers.run(built.operator)
    assert said.code == 1
    assert (
        "the operator cannot run: cannot read the API server's address and credentials from this pod's service account"
        in said.text
    )
    assert "Traceback" not in said.text


def test_an_api_server_that_does_not_answer_is_named_and_asked_again(
    built: Built, containers: Containers, tmp_path: Path
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(KUBECONFIG)
    file.chmod(0o644)
    with containers.running(
        built.operator, "--kubeconfig", "/kubeconfig", options=("--volume", f"{file}:/kubeconfig:ro")
    ) as operator:
        operator.wait_until_it_says("ok", "python", "-c", ASK, "http://127.0.0.1:8081/healthz", seconds=60)
        log = built.docker.tried("logs", operator.name)
    assert "Cannot connect to host 127.0.0.1:1" in log.stdout + log.stderr
    assert "trying again later" in log.stdout + log.stderr
    assert "Traceback" not in log.stdout + log.stderr


def test_the_companion_readies_the_redis_beside_it(built: Built, containers: Containers) -> None:
    """The pod of the memory tier: two containers, one network. Redis is the one that the runtime's image has."""
    redis = "import os, sys; from surefoot.memory_server.server_process import find_server_program; program = find_server_program(); os.execv(program, [program, *sys.argv[1:]])"
    settings = ("--save", "", "--maxmemory", "64mb", "--dir", "/data")
    with (
        containers.running(built.runtime, "python", "-c", redis, *settings, options=("--tmpfs", "/data")) as holder,
        containers.running(
            built.operator,
            "-m",
            "surefoot.memory_server.sidecar",
            options=("--network", f"container:{holder.name}", "--entrypoint", "python"),
        ) as companion,
    ):
        companion.wait_until_it_says("ready", "python", "-c", ASK, "http://127.0.0.1:9465/readyz", seconds=60)
        figures = companion.run("python", "-c", ASK, "http://127.0.0.1:9465/metrics").text
    assert "surefoot_" in figures
