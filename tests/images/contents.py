"""What is in an image's layers: every path with its mode, files that look like secrets, the packages. Pure but for reading.

Modes and packages are judged as a container sees them, layer over layer; secrets in each layer, since what a later layer
deletes can still be had from the earlier one.
"""

from __future__ import annotations

import json
import re
import stat
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO

LARGEST_BYTES = 1 << 20
"""Keys and tokens lie in small files; larger ones are not read."""
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
SECRET_NAMES = re.compile(
    r"(^|/)(\.netrc|\.pypirc|\.git-credentials|\.env|pip\.conf|id_(rsa|dsa|ecdsa|ed25519)|\.aws/credentials|\.docker/config\.json|\.kube/config)$"
)
SECRETS = {
    "a private key": re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\s+[A-Za-z0-9+/=\s]{64}"),
    "an AWS key": re.compile(rb"\b(?:AKIA|ASIA)(?!\w*EXAMPLE)[0-9A-Z]{16}\b"),
    "a token of a forge": re.compile(rb"\bgh[pousr]_[A-Za-z0-9]{36}\b|\bglpat-[A-Za-z0-9_-]{20}\b"),
    "a token of a package index": re.compile(rb"\bpypi-AgE[A-Za-z0-9_-]{50}"),
}
COMPILERS = re.compile(r"^(usr/(local/)?|opt/[^/]+/)?bin/(cc|gcc|g\+\+|c\+\+|clang|ld|as|make|cargo|rustc|go)$")
PYTHON_PACKAGE = re.compile(r"\.dist-info/METADATA$")
DEBIAN_PACKAGES = "var/lib/dpkg/status"


@dataclass
class Layer:
    """One layer as it was read: modes of what it has, what it hides of those below, texts that matter, secrets."""

    modes: dict[str, int] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Contents:
    """An image as a container sees it, and what any layer of it gives away."""

    modes: dict[str, int]
    texts: dict[str, str]
    secrets: tuple[str, ...]

    def setuid(self) -> list[str]:
        """Programs that run as another user or group than who starts them."""
        return sorted(p for p, m in self.modes.items() if stat.S_ISREG(m) and m & (stat.S_ISUID | stat.S_ISGID))

    def world_writable(self) -> list[str]:
        """What everybody may change; folders with the sticky bit are made for that."""
        return sorted(
            p for p, m in self.modes.items() if m & stat.S_IWOTH and not (stat.S_ISDIR(m) and m & stat.S_ISVTX)
        )

    def compilers(self) -> list[str]:
        """Programs that make programs."""
        return sorted(p for p in self.modes if COMPILERS.search(p))


def read(archive: IO[bytes]) -> Contents:
    """What `docker image save` writes, read once, as it comes."""
    layers: dict[str, Layer] = {}
    order: list[str] = []
    with tarfile.open(fileobj=archive, mode="r|") as outer:
        for member in outer:
            if member.issym():  # the older format: a layer that is there already
                layers[member.name] = layers[_beside(member.name, member.linkname)]
                continue
            content = outer.extractfile(member)
            if content is None:
                continue
            if member.name == "manifest.json":
                order = json.load(content)[0]["Layers"]
            elif member.name.endswith("/layer.tar") or member.name.startswith("blobs/"):
                layer = read_layer(content)
                if layer is not None:
                    layers[member.name] = layer
    return merged(layers[name] for name in order)


def read_layer(archive: IO[bytes]) -> Layer | None:
    """One layer; None for what is no tar."""
    layer = Layer()
    try:
        with tarfile.open(fileobj=archive, mode="r|*") as files:
            for member in files:
                _see(layer, files, member)
    except tarfile.ReadError:
        if layer.modes:
            raise  # a layer that ends in its middle
        return None
    return layer


def merged(layers: Iterable[Layer]) -> Contents:
    """Layers in their order, each over those before it."""
    modes: dict[str, int] = {}
    texts: dict[str, str] = {}
    secrets: list[str] = []
    for layer in layers:
        hidden = tuple(f"{path}/" for path in layer.hidden)
        if hidden:
            modes = {p: m for p, m in modes.items() if not f"{p}/".startswith(hidden)}
            texts = {p: t for p, t in texts.items() if not f"{p}/".startswith(hidden)}
        modes.update(layer.modes)
        texts.update(layer.texts)
        secrets += layer.secrets
    return Contents(modes, texts, tuple(secrets))


def _see(layer: Layer, files: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    path = member.name.removeprefix("./").strip("/")
    folder, _, name = path.rpartition("/")
    if name == OPAQUE:
        layer.hidden.append(folder)
    elif name.startswith(WHITEOUT):
        layer.hidden.append(f"{folder}/{name.removeprefix(WHITEOUT)}".lstrip("/"))
    elif member.isdir():
        layer.modes[path] = stat.S_IFDIR | member.mode
    elif member.isreg():
        layer.modes[path] = stat.S_IFREG | member.mode
        content = files.extractfile(member)
        if content is not None and (path == DEBIAN_PACKAGES or member.size <= LARGEST_BYTES):
            _read_file(layer, path, content.read())


def _read_file(layer: Layer, path: str, content: bytes) -> None:
    if path == DEBIAN_PACKAGES or PYTHON_PACKAGE.search(path):
        layer.texts[path] = content.decode("utf-8", "replace")
    if content and SECRET_NAMES.search(path):
        layer.secrets.append(f"{path}: a file of that name keeps secrets")
    layer.secrets += [f"{path}: {what}" for what, pattern in SECRETS.items() if pattern.search(content)]


def _beside(name: str, link: str) -> str:
    parts = name.split("/")[:-1]
    for step in link.split("/"):
        parts = parts[:-1] if step == ".." else [*parts, step]
    return "/".join(parts)
