"""PyTorch's own tests of torch.distributed.checkpoint, from a folder or from Debian's source package.

The wheel of torch lacks its tests. Debian's package of an older release can be had by anybody, and is pinned by digest;
`--source` takes a checkout of any other release.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import urllib.request
from pathlib import Path

from support.cache_folder import user_cache

VERSION = "2.6.0"
URL = "https://deb.debian.org/debian/pool/main/p/pytorch/pytorch_2.6.0+dfsg.orig.tar.xz"
SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
INSIDE = "test/distributed/checkpoint/"

DOWNLOAD_SECONDS = 120.0


class NoSource(Exception):
    """The tests cannot be had here; says why and what to do."""


def cached() -> Path:
    """The folder of the tests, brought into the user's cache once."""
    cache = user_cache() / f"pytorch-{VERSION}-tests"
    if not (cache / "complete").exists():
        cache.mkdir(parents=True, exist_ok=True)
        _unpack(_downloaded(cache.with_suffix(".tar.xz")), cache)
        (cache / "complete").touch()
    return cache


def _downloaded(archive: Path) -> Path:
    if not archive.exists() or _digest(archive) != SHA256:
        partial = archive.with_name(f"{archive.name}.{os.getpid()}")
        try:
            with urllib.request.urlopen(URL, timeout=DOWNLOAD_SECONDS) as answer, partial.open("wb") as file:
                while block := answer.read(1 << 20):
                    file.write(block)
        except OSError as problem:
            partial.unlink(missing_ok=True)
            raise NoSource(
                f"{URL}: {problem}; give a checkout's test/distributed/checkpoint with --source"
            ) from problem
        partial.replace(archive)
    if _digest(archive) != SHA256:
        archive.unlink()
        raise NoSource(f"{URL} is not the file it was (sha256 {SHA256}); give a checkout with --source")
    return archive


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            _, _, name = member.name.partition(INSIDE)
            content = opened.extractfile(member) if name.endswith(".py") and member.isfile() else None
            if content is not None:
                target = into / name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(content.read())
