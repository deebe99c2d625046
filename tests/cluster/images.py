"""Container images, written as OCI archives without a builder: pause, and empty folders for the host's to be mounted on."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

from cluster import binaries, layout

# where the host links /bin to usr/bin, so does the image, and one mount of /usr brings all of it
MERGED = ("bin", "sbin", "lib", "lib64")
FOLDERS = ("dev", "etc", "etc/ssl", "home", "opt", "proc", "root", "run", "sys", "usr", "var", "var/lib", "var/log")
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n"
    "trainer:x:1000:1000:trainer:/home:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\ntrainer:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def write_archives(folder: Path) -> list[Path]:
    """Both images into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pause = folder / "pause.tar"
    write_program(pause, layout.PAUSE_IMAGE, binaries.pause(), "/pause")
    host = folder / "host.tar"
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    _write(host, layout.HOST_IMAGE, _host_layer(), {"Env": [path], "Cmd": ["/bin/sh"]})
    return [pause, host]


def write_program(archive: Path, name: str, program: Path, path: str) -> None:
    """An image of one static program, which lies at `path` and is what it starts."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        _add_file(tar, path.lstrip("/"), program.read_bytes(), 0o755)
    environment = "PATH=/usr/local/bin:/usr/bin:/bin"
    _write(archive, name, content.getvalue(), {"Env": [environment], "Entrypoint": [path]})


def _host_layer() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name in FOLDERS:
            _add_folder(tar, name, 0o755)
        for name in ("tmp", "var/tmp"):
            _add_folder(tar, name, 0o1777)
        for name in MERGED:
            on_host = Path("/", name)
            if on_host.is_symlink():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(on_host)
                tar.addfile(entry)
            elif on_host.is_dir():
                _add_folder(tar, name, 0o755)
        for name, text in ACCOUNTS.items():
            _add_file(tar, name, text.encode(), 0o644)
    return content.getvalue()


def _add_folder(tar: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    tar.addfile(entry)


def _add_file(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _write(archive: Path, name: str, layer: bytes, config: dict[str, Any]) -> None:
    platform = {"architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine], "os": "linux"}
    diff = "sha256:" + hashlib.sha256(layer).hexdigest()
    image = {**platform, "config": config, "rootfs": {"type": "layers", "diff_ids": [diff]}}
    config_blob = json.dumps(image).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _descriptor("application/vnd.oci.image.config.v1+json", config_blob),
        "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
    }
    manifest_blob = json.dumps(manifest).encode()
    listed = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest_blob)
    annotations = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    index = {"schemaVersion": 2, "manifests": [{**listed, "platform": platform, "annotations": annotations}]}
    with tarfile.open(archive, mode="w") as tar:
        _add_file(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}', 0o644)
        _add_file(tar, "index.json", json.dumps(index).encode(), 0o644)
        for blob in (config_blob, layer, manifest_blob):
            _add_file(tar, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob, 0o644)


def _descriptor(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": "sha256:" + hashlib.sha256(blob).hexdigest(), "size": len(blob)}
