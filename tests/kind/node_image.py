"""The image of kind's nodes: kind's own where a registry gives it, else one of the same shape made of Debian's packages.

Its programs are built from the Go module proxy, its scripts come out of kind's own module, and the control plane's images lie in
it already, under the names that kubeadm gives them: a cluster of it pulls nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from cluster import binaries
from cluster.images import write_program
from images.docker import Docker
from images.errors import ImagesError
from images.plan import MADE_BASE

HERE = Path(__file__).parent / "node"
VERSIONS = (binaries.KIND, binaries.ETCD, binaries.COREDNS)
BUILD_SECONDS = 1800.0
SAVE_SECONDS = 300.0
VERSION_MARK = "KUBERNETES_VERSION"
SECURE_SANDBOX = "restrict_oom_score_adj = false"
REGISTRIES = """
[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "/etc/containerd/certs.d"
"""
"""Where hosts of registries are described: the default of the containerd in kind's own nodes, and not of Debian's."""


def make(docker: Docker) -> str:
    """Its name; made unless it is there. The base of the project's own images must be there.

    Raises:
        ImagesError: docker's own words.
        ClusterError: a program could not be built.
    """
    files = [path for path in sorted(HERE.rglob("*")) if path.is_file()] + [Path(__file__)]
    image = name_of([*VERSIONS, *(path.read_text(encoding="utf-8") for path in files)])
    if docker.inspected(image) is None:
        programs = _programs()
        with tempfile.TemporaryDirectory(prefix="surefoot-kind-node-") as folder:
            _assemble(docker, Path(folder), programs)
            _build(docker, Path(folder), image, "--build-arg", f"KUBERNETES={binaries.KUBERNETES}")
    return image


def name_of(recipe: list[str]) -> str:
    """Of the image that this recipe makes: another one is another image, whatever lies in docker already. Pure."""
    digest = hashlib.sha256("\0".join(recipe).encode()).hexdigest()
    return f"surefoot/kind-node:{binaries.KUBERNETES}-{digest[:12]}"


def _programs() -> dict[str, Path]:
    kubernetes = binaries.kubernetes_folder()
    found = {name: kubernetes / name for name in binaries.KUBERNETES_PROGRAMS}
    return found | {
        "kubeadm": binaries.kubeadm(),
        "etcd": binaries.etcd(),
        "coredns": binaries.coredns(),
        "pause": binaries.pause(),
    }


def image_names(listed: str) -> dict[str, str]:
    """Component to image, of what `kubeadm config images list` prints. Pure."""
    names = [line.strip() for line in listed.splitlines() if line.strip()]
    return {name.rpartition(":")[0].rpartition("/")[2]: name for name in names}


def _assemble(docker: Docker, folder: Path, programs: dict[str, Path]) -> None:
    """The build's context."""
    _take_kinds_files(binaries.kind_source() / "images" / "base" / "files", folder / "kind")
    (folder / "programs").mkdir()
    for name in ("kubelet", "kubeadm", "kubectl", "kube-proxy"):
        shutil.copy2(programs[name], folder / "programs" / name)
    command = [str(programs["kubeadm"]), "config", "images", "list", f"--kubernetes-version={binaries.KUBERNETES}"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    names = image_names(listed.stdout)
    shutil.copytree(HERE / "own", folder / "own")
    _replace(folder / "own/kind/manifests/default-cni.yaml", VERSION_MARK, binaries.KUBERNETES)
    containerd = folder / "kind/etc/containerd/config.toml"
    _replace(containerd, SECURE_SANDBOX, SECURE_SANDBOX.replace("false", "true"))
    lines = containerd.read_text().splitlines()
    sandbox = f'  sandbox_image = "{names["pause"]}"'
    containerd.write_text("\n".join(sandbox if "sandbox_image" in line else line for line in lines) + REGISTRIES)
    with (folder / "kind/etc/default/kubelet").open("a") as file:
        file.write(" --fail-cgroupv1=false\n")
    (folder / "images").mkdir()
    for component, name in names.items():
        archive = folder / "images" / f"{component}.tar"
        if component == "kube-proxy":
            _build(docker, folder, name, "--target", "proxy")
            docker.run("image", "save", "--output", str(archive), name, seconds=SAVE_SECONDS)
        else:
            path = f"/{component}" if component in ("coredns", "pause") else f"/usr/local/bin/{component}"
            write_program(archive, name, programs[component], path)


def _take_kinds_files(source: Path, target: Path) -> None:
    """As kind's own Dockerfile copies them: scripts may be run, the rest read."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            there = target / path.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)
            there.chmod(0o755 if there.parent.name == "bin" else 0o644)


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    if old not in text:
        raise ImagesError(f"{file.name} has no {old!r}: this kind differs from {binaries.KIND}")
    file.write_text(text.replace(old, new))


def _build(docker: Docker, folder: Path, name: str, *arguments: str) -> None:
    network = () if docker.can_bridge else ("--network", "host")
    told = ["build", "--file", str(HERE / "Dockerfile"), "--tag", name, *network, "--build-arg", f"BASE={MADE_BASE}"]
    said = docker.tried(*told, *arguments, "--progress", "plain", str(folder), seconds=BUILD_SECONDS)
    if said.returncode != 0:
        words = [line for line in said.stderr.splitlines() if line.strip()][-12:]
        raise ImagesError(f"the image of kind's nodes does not build: {os.linesep.join(words)}")
