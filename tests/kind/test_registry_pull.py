"""Images that nodes pull: by digest, out of a registry that wants a password, into a namespace that has it as a secret."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from chart import helm
from cluster.processes import wait
from images.docker import Docker
from kind import registries, stand_ins
from kind.registries import Account
from kind.release import NAMESPACE, SECONDS, SMALL, Object, Release

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ACCOUNT = Account("surefoot", "a-password-of-the-registry")
SECRET = "of-the-registry"
PUSH_SECONDS = 300.0


@dataclass(frozen=True)
class Pushed:
    """What the registry has, as nodes name it: repository → digest."""

    address: str
    digests: dict[str, str]

    def values(self) -> Object:
        """No tag is in them."""
        operator, redis = self.digests["surefoot/operator"], self.digests["redis"]
        return {
            "imageRegistry": self.address,
            "imagePullSecrets": [SECRET],
            "operator": {"image": {"digest": operator}},
            "memoryTier": {**SMALL["memoryTier"], "image": {"digest": redis}},
        }

    def names(self) -> set[str]:
        """Of the images, as pods have them."""
        return {f"{self.address}/{repository}@{digest}" for repository, digest in self.digests.items()}


@pytest.fixture(scope="module")
def pushed(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushed]:
    """Operator and Redis in a registry of this machine that every node can reach."""
    docker = Docker("docker")
    folder = tmp_path_factory.mktemp("registry")
    version = helm.objects()[0]["metadata"]["labels"]["app.kubernetes.io/version"]
    images = {"surefoot/operator": f"surefoot/operator:{version}", "redis": stand_ins.redis_name()}
    with registries.serving(folder, ACCOUNT, host="0.0.0.0") as port:
        near = f"127.0.0.1:{port}"  # docker speaks no HTTP without TLS to other hosts
        (folder / "config.json").write_text(ACCOUNT.docker_config(near))
        digests = {name: push(docker, folder, image, f"{near}/{name}") for name, image in images.items()}
        address = f"{urlsplit(release.facts.s3_endpoint).hostname}:{port}"
        for node in release.facts.node_names:
            path, content = registries.described(address)
            written = f"mkdir --parents '{Path(path).parent}' && cat > '{path}'"
            command = ["docker", "exec", "--interactive", node, "sh", "-c", written]
            subprocess.run(command, input=content, text=True, check=True, timeout=60)
        yield Pushed(address, digests)


def push(docker: Docker, configuration: Path, image: str, there: str) -> str:
    """The digest under which the registry has it now."""
    docker.run("image", "tag", image, there)
    try:
        docker.run("--config", str(configuration), "push", there, seconds=PUSH_SECONDS)
        told = docker.run("image", "inspect", "--format", '{{join .RepoDigests "\\n"}}', there).split()
        [digest] = [one.partition("@")[2] for one in told if one.startswith(f"{there}@")]
        return digest
    finally:
        docker.run("image", "rm", there)


def refusals(pods: list[Object]) -> list[str]:
    """Why containers wait for their image, in the kubelet's words."""
    found = [
        status["state"]["waiting"]
        for pod in pods
        for kind in ("initContainerStatuses", "containerStatuses")
        for status in pod["status"].get(kind, [])
        if "waiting" in status["state"]
    ]
    return [told.get("message", "") for told in found if told["reason"] in ("ErrImagePull", "ImagePullBackOff")]


def test_nodes_pull_by_digest_with_the_pull_secret_and_not_without(release: Release, pushed: Pushed) -> None:
    file = release.folder / "pulled.yaml"
    file.write_text(json.dumps(pushed.values()))
    release.helm("upgrade", "--install", helm.RELEASE, str(helm.CHART), "--values", str(file))

    def all_refused() -> bool:
        # the operators' alone: holders wait for a secret that the operator makes
        pods = release.pods("operator")
        return bool(pods) and len(refusals(pods)) == len(pods)

    assert wait(all_refused, SECONDS), release.kubectl("get", "events", "--namespace", NAMESPACE)
    assert release.ready("operator") == release.ready("memory-tier") == []
    found = refusals(release.pods("operator"))
    assert any("auth" in words.lower() for words in found), found

    secret = release.folder / "config.json"
    secret.write_text(ACCOUNT.docker_config(pushed.address))
    release.kubectl(
        "create", "secret", "generic", SECRET, "--namespace", NAMESPACE, "--type=kubernetes.io/dockerconfigjson",
        f"--from-file=.dockerconfigjson={secret}",
    )  # fmt: skip
    release.up(str(helm.CHART), pushed.values())
    pods = [*release.ready("operator"), *release.ready("memory-tier")]
    assert {c["image"] for pod in pods for c in pod["spec"]["containers"]} == pushed.names()
    run = {s["imageID"].partition("@")[2] for pod in pods for s in pod["status"]["containerStatuses"]}
    assert run == set(pushed.digests.values())
    assert "Succeeded" in release.test()
