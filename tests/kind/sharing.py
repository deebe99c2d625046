"""An image of one node's containerd given to another's without a copy: the same files by further names, and a record of each.

Nobody writes them: pods write into layers of their own. Blobs and layers are recorded as an import would, so that pods start of
them and the collector of garbage keeps them; a layer that the node has already, of another image, is left as it is.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from images.docker import Docker
from images.errors import ImagesError

CTR = ("ctr", "--namespace", "k8s.io")
BLOBS = "lib/containerd/io.containerd.content.v1.content/blobs/sha256"
SNAPSHOTTER = "overlayfs"
GARBAGE_LABEL = f"containerd.io/gc.ref.snapshot.{SNAPSHOTTER}"
KEY = "surefoot-shared"
LINK_SECONDS = 300.0
LINK_ATTEMPTS = 10
Json = dict[str, Any]


@dataclass(frozen=True)
class Disk:
    """A node's /var as a folder of this machine."""

    node: str
    folder: Path

    @property
    def blobs(self) -> Path:
        return self.folder / BLOBS

    def is_beside(self, other: Disk) -> bool:
        """Whether a file can have a name on both."""
        return self.folder.stat().st_dev == other.folder.stat().st_dev

    def here(self, path: str) -> Path:
        """Where this machine has what the node calls so."""
        return self.folder / Path(path).relative_to("/var")


@dataclass(frozen=True)
class Image:
    """As the first node has it: the bytes of its manifest and of its configuration."""

    name: str
    manifest: bytes
    config: bytes

    @property
    def told(self) -> Json:
        return dict(json.loads(self.manifest))


def find(docker: Docker, image: str, source: Disk) -> Image | None:
    """None where its name leads to a list of manifests: an import knows which of them it takes.

    Raises:
        ImagesError: the node's own words.
    """
    name = reference(image)
    listed = _ctr(docker, source.node, "images", "list", f"name=={name}").decode()
    manifest = (source.blobs / digest_of(listed, name)).read_bytes()
    told = json.loads(manifest)
    if "config" not in told:
        return None
    return Image(name, manifest, (source.blobs / _hexadecimal(told["config"])).read_bytes())


def share(docker: Docker, image: Image, source: Disk, target: Disk) -> None:
    """The source has it whole.

    Raises:
        ImagesError: a node's own words.
    """
    _ctr(docker, target.node, "images", "import", "--no-unpack", "-", given=archive(image))
    for layer in image.told["layers"]:
        _share_blob(docker, layer, source, target)
    above: str | None = None
    chains = chain_ids(json.loads(image.config)["rootfs"]["diff_ids"])
    for chain in chains:
        _share_layer(docker, chain, above, source, target)
        above = chain
    config = image.told["config"]["digest"]
    _ctr(docker, target.node, "content", "label", config, f"{GARBAGE_LABEL}={chains[-1]}")


def reference(image: str) -> str:
    """As containerd names what docker calls so. Pure."""
    host, slash, _ = image.partition("/")
    if not slash:
        return f"docker.io/library/{image}"
    return image if "." in host or ":" in host or host == "localhost" else f"docker.io/{image}"


def chain_ids(layers: list[str]) -> list[str]:
    """The name of each layer on those below it, as OCI's image specification has it. Pure."""
    chains = layers[:1]
    for layer in layers[1:]:
        chains.append(f"sha256:{hashlib.sha256(f'{chains[-1]} {layer}'.encode()).hexdigest()}")
    return chains


def archive(image: Image) -> bytes:
    """An OCI layout of it, without its layers. Pure."""
    digest = hashlib.sha256(image.manifest).hexdigest()
    entry = {
        "mediaType": image.told["mediaType"],
        "digest": f"sha256:{digest}",
        "size": len(image.manifest),
        "annotations": {"io.containerd.image.name": image.name},
    }
    files = {
        "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
        f"blobs/sha256/{digest}": image.manifest,
        f"blobs/sha256/{_hexadecimal(image.told['config'])}": image.config,
    }
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for path, content in files.items():
            header = tarfile.TarInfo(path)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return written.getvalue()


def _share_blob(docker: Docker, layer: Json, source: Disk, target: Disk) -> None:
    """containerd finds the file where it would write it, and records that it is there.

    Until then its collector of garbage may take the name away: the file is linked again, and once more when it is known.
    """
    name = _hexadecimal(layer)
    expected = ("--expected-digest", layer["digest"], "--expected-size", str(layer["size"]))
    ingest = " ".join([*CTR, "content", "ingest", *expected, f"{KEY}-{name}", "<", f"/var/{BLOBS}/{name}"])
    for attempt in range(1, LINK_ATTEMPTS + 1):
        _link(source.blobs / name, target.blobs / name)
        try:
            _on(docker, target.node, "sh", "-c", ingest)
            break
        except ImagesError:
            if attempt == LINK_ATTEMPTS or (target.blobs / name).exists():
                raise
    _link(source.blobs / name, target.blobs / name)


def _link(there: Path, here: Path) -> None:
    with suppress(FileExistsError):
        os.link(there, here)


def _share_layer(docker: Docker, chain: str, above: str | None, source: Disk, target: Disk) -> None:
    snapshots = ("snapshots", "--snapshotter", SNAPSHOTTER)
    known = _ctr(docker, target.node, *snapshots, "list").decode().split()
    if chain in known:
        return
    there = source.here(_folder(docker, chain, source))
    parent = [] if above is None else [above]
    try:
        here = target.here(top(_ctr(docker, target.node, *snapshots, "prepare", "--mounts", KEY, *parent).decode()))
        linked = ["cp", "--archive", "--link", f"{there}/.", str(here)]
        subprocess.run(linked, check=True, timeout=LINK_SECONDS)
        _ctr(docker, target.node, *snapshots, "commit", chain, KEY)
    except BaseException:
        _forget(docker, target)
        raise


def _folder(docker: Docker, chain: str, source: Disk) -> str:
    """A layer's own, as its node calls it: it stays when the view that told of it is gone."""
    snapshots = ("snapshots", "--snapshotter", SNAPSHOTTER)
    _forget(docker, source)  # of a run that was killed
    try:
        return top(_ctr(docker, source.node, *snapshots, "view", "--mounts", KEY, chain).decode())
    finally:
        _forget(docker, source)


def _forget(docker: Docker, disk: Disk) -> None:
    """Nobody holds a view: on a busy machine the node's own collector of garbage is there first."""
    try:
        _ctr(docker, disk.node, "snapshots", "--snapshotter", SNAPSHOTTER, "remove", KEY)
    except ImagesError as error:
        if not is_absent(str(error)):
            raise


def is_absent(words: str) -> bool:
    """Whether a node refuses to remove a snapshot because it has none of that name. Pure."""
    return f"snapshot {KEY} does not exist" in words


def top(mounts: str) -> str:
    """The folder of the layer itself, among those of a mount that `ctr` prints. Pure."""
    [mount] = json.loads(mounts)
    if mount["Type"] == "bind":
        return str(mount["Source"])
    options = dict(option.partition("=")[::2] for option in mount["Options"])
    return str(options.get("upperdir") or options["lowerdir"].partition(":")[0])


def digest_of(listed: str, name: str) -> str:
    """Of what `ctr images list` prints, the digest without its kind. Pure."""
    for line in listed.splitlines()[1:]:
        words = line.split()
        if words[0] == name:
            return words[2].removeprefix("sha256:")
    raise ImagesError(f"the node took {name} and does not list it")


def _hexadecimal(entry: Json) -> str:
    return str(entry["digest"]).removeprefix("sha256:")


def _ctr(docker: Docker, node: str, *arguments: str, given: bytes = b"") -> bytes:
    return _on(docker, node, *CTR, *arguments, given=given)


def _on(docker: Docker, node: str, *command: str, given: bytes = b"") -> bytes:
    told = [docker.program, "exec", "--interactive", node, *command]
    done = subprocess.run(
        told, env=docker.environment, input=given, capture_output=True, timeout=LINK_SECONDS, check=False
    )
    if done.returncode != 0:
        words = (done.stderr or done.stdout).decode(errors="replace").strip()[-500:]
        raise ImagesError(f"`{' '.join(command)[:200]}` on {node} failed with {done.returncode}: {words}")
    return done.stdout
