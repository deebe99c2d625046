"""The tool that brings kind up: what it reads of other programs, and the runtime where root may not raise limits."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from chart import walkthrough
from cluster.kind import task_pid
from images import build, runtime
from images.docker import Docker
from kind import __main__ as tool
from kind import first_hour, registries, sharing, stand_ins
from kind.node_image import image_names, name_of
from support.servers import s3_server

TASKS = """TASK                PID     STATUS
aaa                 101     RUNNING
bbb                 102     STOPPED
"""


@pytest.mark.parametrize(("container", "pid"), [("aaa", 101), ("bbb", None), ("ccc", None)])
def test_a_containers_first_process_is_read_of_the_tasks_that_run(container: str, pid: int | None) -> None:
    assert task_pid(TASKS, container) == pid


MAKEFILE = (build.PROJECT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", re.findall(r"^\t\$\(KIND\) (.+)$", MAKEFILE, re.MULTILINE))
def test_each_line_of_the_makefile_asks_for_a_verb_that_is_there(words: str) -> None:
    """`install` once had its work, and no parser: `make kind-up` ended there."""
    assert callable(tool._options(words.split()).do)


def test_images_are_found_by_component() -> None:
    listed = (
        "registry.k8s.io/kube-proxy:v1.35.4\nregistry.k8s.io/coredns/coredns:v1.13.1\nregistry.k8s.io/pause:3.10.1\n"
    )
    assert image_names(listed) == {
        "kube-proxy": "registry.k8s.io/kube-proxy:v1.35.4",
        "coredns": "registry.k8s.io/coredns/coredns:v1.13.1",
        "pause": "registry.k8s.io/pause:3.10.1",
    }


def test_another_recipe_of_a_node_is_another_image() -> None:
    """By its Kubernetes alone, a changed recipe was not made where an older node lay in docker."""
    names = {name_of(recipe) for recipe in (["a", "b"], ["a", "c"], ["ab"], ["a", "b", ""])}
    assert len(names) == 4
    assert name_of(["a", "b"]) in names
    assert {name.partition(":")[0] for name in names} == {"surefoot/kind-node"}


def test_an_account_is_what_docker_sends_and_what_the_registry_knows() -> None:
    account = registries.Account("somebody", "a-password")
    told = json.loads(account.docker_config("registry.example:5000"))["auths"]["registry.example:5000"]
    assert base64.b64decode(told["auth"]) == b"somebody:a-password"
    name, _, word = account.htpasswd().rstrip("\n").partition(":")
    assert (name, word.startswith("$2b$05$"), len(word)) == ("somebody", True, 60)
    assert word not in registries.Account("somebody", "another").htpasswd()


def test_a_registry_without_tls_is_described_under_its_address() -> None:
    path, content = registries.described("172.18.0.1:5000")
    assert path == "/etc/containerd/certs.d/172.18.0.1:5000/hosts.toml"
    assert list(tomllib.loads(content)["host"]) == ["http://172.18.0.1:5000"]


@pytest.mark.parametrize(("bounding", "lacking"), [("000001ffffffffff", False), ("0000003ffeffffff", True)])
def test_the_capability_is_read_of_the_bounding_set(bounding: str, lacking: bool) -> None:
    assert runtime.is_lacking(f"CapEff:\t0000000000000000\nCapBnd:\t{bounding}\n") is lacking


PROCESS = {
    "args": ["sh"],
    "oomScoreAdj": -999,
    "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1, "soft": 1}],
    "capabilities": {"bounding": ["CAP_CHOWN", "CAP_SYS_RESOURCE"], "effective": ["CAP_SYS_RESOURCE"]},
}


@pytest.mark.parametrize("verb", ["create", "exec"])
def test_a_container_is_asked_for_without_what_needs_the_capability(tmp_path: Path, verb: str) -> None:
    runc, program = tmp_path / "runc", tmp_path / "runtime"
    runc.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    runc.chmod(0o755)
    text = runtime.PROGRAM.format(python=sys.executable, capability=runtime.CAPABILITY, runc=runc)
    program.write_text(text)
    program.chmod(0o755)
    config, process = tmp_path / "config.json", tmp_path / "process.json"
    config.write_text(json.dumps({"ociVersion": "1.0", "process": PROCESS}))
    process.write_text(json.dumps(PROCESS))
    told = ["--bundle", str(tmp_path)] if verb == "create" else ["--process", str(process)]
    command = [str(program), "--root", "/r", verb, *told, "name"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=os.environ)
    assert done.stdout.split() == command[1:], "runc is asked what was asked"
    found = json.loads(config.read_text())["process"] if verb == "create" else json.loads(process.read_text())
    assert found == {"args": ["sh"], "capabilities": {"bounding": ["CAP_CHOWN"], "effective": []}}


def test_the_walk_reaches_every_milestone_in_its_order() -> None:
    took = [{"command": line, "seconds": 1.0} for line in walkthrough.lines()]
    found = first_hour.reached(took)
    assert list(found) == list(first_hour.MILESTONES)
    assert sorted(found.values()) == list(found.values())


def test_a_walk_that_ended_before_the_fault_recovered_from_none() -> None:
    """The whole world is waited for before the kill too."""
    kill = next(number for number, line in enumerate(walkthrough.lines()) if line.startswith("docker kill"))
    took = [{"command": line, "seconds": 1.0} for line in walkthrough.lines()[:kill]]
    assert list(first_hour.reached(took)) == ["images", "cluster", "chart", "job"]


def test_the_s3_server_that_stands_in_bears_the_name_that_the_example_has() -> None:
    name = stand_ins.s3_name(stand_ins.S3_SERVER.read_text(encoding="utf-8"))
    assert name.rpartition(":")[2] == s3_server.VERSION


# ---- images that one node has and another shares --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("redis:7.2", "docker.io/library/redis:7.2"),
        ("surefoot/operator:0.1.0", "docker.io/surefoot/operator:0.1.0"),
        ("registry.example/team/operator:1", "registry.example/team/operator:1"),
        ("localhost/operator:1", "localhost/operator:1"),
        ("mirror:5000/operator:1", "mirror:5000/operator:1"),
    ],
)
def test_containerd_names_an_image_whole(image: str, name: str) -> None:
    assert sharing.reference(image) == name


def test_layers_are_named_with_those_below_them() -> None:
    """The example of OCI's image specification: ChainID(A|B|C) = digest(ChainID(A|B) + " " + C)."""
    a, b, c = (f"sha256:{letter * 64}" for letter in "abc")
    two = f"sha256:{hashlib.sha256(f'{a} {b}'.encode()).hexdigest()}"
    assert sharing.chain_ids([a, b, c]) == [a, two, f"sha256:{hashlib.sha256(f'{two} {c}'.encode()).hexdigest()}"]
    assert sharing.chain_ids([a]) == [a]


def test_the_archive_of_an_image_whose_layers_are_elsewhere_leads_to_its_manifest() -> None:
    config = b'{"rootfs": {}}'
    digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    manifest = json.dumps({"mediaType": "m", "config": {"digest": digest}, "layers": [{"digest": "sha256:l"}]}).encode()
    with tarfile.open(fileobj=io.BytesIO(sharing.archive(sharing.Image("docker.io/a/b:1", manifest, config)))) as tar:
        files = {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar}
    [entry] = json.loads(files.pop("index.json"))["manifests"]
    assert json.loads(files.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    assert entry["annotations"]["io.containerd.image.name"] == "docker.io/a/b:1"
    assert files.pop(f"blobs/{entry['digest'].replace(':', '/')}") == manifest
    assert files == {f"blobs/{digest.replace(':', '/')}": config}


@pytest.mark.parametrize(
    ("mount", "folder"),
    [
        ({"Type": "bind", "Source": "/var/s/1/fs", "Options": ["ro", "rbind"]}, "/var/s/1/fs"),
        (
            {"Type": "overlay", "Source": "overlay", "Options": ["index=off", "lowerdir=/var/s/3/fs:/var/s/1/fs"]},
            "/var/s/3/fs",
        ),
        (
            {
                "Type": "overlay",
                "Source": "overlay",
                "Options": ["workdir=/w", "upperdir=/var/s/4/fs", "lowerdir=/var/s/1/fs"],
            },
            "/var/s/4/fs",
        ),
    ],
)
def test_a_layers_own_folder_is_the_uppermost_of_its_mount(mount: dict[str, object], folder: str) -> None:
    assert sharing.top(json.dumps([mount])) == folder


COLLECTED = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
*" view --mounts "*) echo '[{{"Type": "bind", "Source": "/var/layer/fs", "Options": []}}]' ;;
*" prepare --mounts "*) echo '[{{"Type": "bind", "Source": "/var/new/fs", "Options": []}}]' ;;
*" remove "*) echo 'ctr: failed to remove "surefoot-shared": snapshot surefoot-shared does not exist: not found' >&2; exit 1 ;;
esac
"""


def test_an_image_is_shared_though_its_node_forgets_the_view_of_a_layer_by_itself(tmp_path: Path) -> None:
    """The collector of garbage was there first, where an import had just ended on a busy machine, and `kind load` failed."""
    program, log = tmp_path / "docker", tmp_path / "log"
    program.write_text(COLLECTED.format(log=log))
    program.chmod(0o755)
    source, target = sharing.Disk("one", tmp_path / "one"), sharing.Disk("two", tmp_path / "two")
    for folder in (source.folder / "layer/fs", source.blobs, target.blobs, target.folder / "new/fs"):
        folder.mkdir(parents=True)
    (source.folder / "layer/fs/library").touch()
    (source.blobs / "l").touch()
    config = b'{"rootfs": {"diff_ids": ["sha256:d"]}}'
    layer = {"digest": "sha256:l", "size": 1}
    manifest = json.dumps({"mediaType": "m", "config": {"digest": "sha256:c"}, "layers": [layer]}).encode()
    sharing.share(Docker(str(program)), sharing.Image("docker.io/a/b:1", manifest, config), source, target)
    assert (target.folder / "new/fs/library").samefile(source.folder / "layer/fs/library")
    assert "exec --interactive two ctr --namespace k8s.io snapshots --snapshotter overlayfs commit sha256:d" in (
        log.read_text()
    )


def test_a_digest_is_read_of_the_images_that_a_node_lists() -> None:
    listed = (
        "REF TYPE DIGEST SIZE PLATFORMS LABELS\n"
        "docker.io/a/b:10 application/x sha256:ten 1 B linux/amd64 -\n"
        "docker.io/a/b:1 application/x sha256:one 1 B linux/amd64 -\n"
    )
    assert sharing.digest_of(listed, "docker.io/a/b:1") == "one"
