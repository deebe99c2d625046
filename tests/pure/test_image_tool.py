"""The tool that builds images: what it decides, and what it finds in layers."""

from __future__ import annotations

import io
import json
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from images import bom, build, contents, plan, report
from images.docker import Docker
from images.errors import ImagesError
from images.recipes import OPERATOR, RUNTIME, Release, build_arguments, pip_settings

EVERYTHING = plan.Machine(docker_answers=True, is_root=True, is_debian=True)
KEY = b"-----BEGIN RSA PRIVATE KEY-----\n" + b"A" * 64 + b"\n-----END RSA PRIVATE KEY-----\n"
RELEASE = Release("registry.example/team/", "1.2.3", "abc", "unknown")
SEEN = {
    "Id": "sha256:1",
    "Size": 10,
    "Config": {
        "User": OPERATOR.user,
        "Env": ["PATH=/bin"],
        "Labels": {f"org.opencontainers.image.{name}": "x" for name in report.LABELS},
    },
}


# ---- which docker, which base ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        (EVERYTHING, "given"),
        (plan.Machine(docker_answers=True, is_root=False, is_debian=False), "given"),
        (plan.Machine(docker_answers=False, is_root=True, is_debian=True), "own"),
    ],
)
def test_the_docker_that_answers_is_taken_else_one_of_our_own(machine: plan.Machine, kind: str) -> None:
    assert plan.daemon(machine).kind == kind


@pytest.mark.parametrize(
    ("is_root", "is_debian", "said"),
    [
        (False, True, "this user is not root"),
        (True, False, "this is not Debian"),
        (False, False, "this user is not root and this is not Debian"),
    ],
)
def test_where_there_can_be_none_it_is_said_why(is_root: bool, is_debian: bool, said: str) -> None:
    with pytest.raises(ImagesError, match=said):
        plan.daemon(plan.Machine(False, is_root, is_debian))


def test_a_base_that_cannot_be_pulled_is_made_but_for_one_that_somebody_named() -> None:
    assert not plan.base(plan.NAMED_BASE, None, EVERYTHING).is_made
    assert plan.base(plan.NAMED_BASE, "no such host", EVERYTHING).is_made
    with pytest.raises(ImagesError, match=r"mine:1 cannot be pulled: no such host"):
        plan.base("mine:1", "no such host", EVERYTHING)
    with pytest.raises(ImagesError, match="no base can be made: this is not Debian"):
        plan.base(plan.NAMED_BASE, "no such host", plan.Machine(True, True, is_debian=False))


def test_a_build_names_its_base_and_its_labels() -> None:
    said = build_arguments(OPERATOR, RELEASE, "base@sha256:1", can_bridge=True, extra_index="https://cpu.example")
    assert said[said.index("--tag") + 1] == "registry.example/team/operator:1.2.3"
    assert {"BASE=base@sha256:1", "VERSION=1.2.3", "REVISION=abc"} <= set(said)
    assert "--network" not in said
    assert not [word for word in said if "cpu.example" in word], "the operator has no torch"
    runtime = build_arguments(RUNTIME, RELEASE, "base", can_bridge=False, extra_index="https://cpu.example")
    assert runtime[runtime.index("--network") + 1] == "host"
    assert "PIP_EXTRA_INDEX_URL=https://cpu.example" in runtime


def test_pips_settings_go_along_and_those_about_this_machine_do_not() -> None:
    listed = (
        "global.index-url='https://user:word@index.example/simple'\nglobal.find-links='/opt/wheels'\n"
        ":env:.cert='/etc/authorities.crt'\nglobal.cert='/older.crt'\n:env:.default-timeout='180'\n"
    )
    settings, authorities = pip_settings(listed)
    assert settings == (
        "[global]\ncert = /run/secrets/ca.crt\nindex-url = https://user:word@index.example/simple\ntimeout = 180\n"
    )
    assert authorities == "/etc/authorities.crt"
    assert pip_settings("") == ("[global]\n", None)


# ---- what is in layers ----------------------------------------------------------------------------------------------


def archive(files: Mapping[str, tuple[int, bytes] | int]) -> bytes:
    """A tar; a number alone is a folder's mode."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name, what in files.items():
            member = tarfile.TarInfo(name)
            if isinstance(what, int):
                member.type, member.mode = tarfile.DIRTYPE, what
                tar.addfile(member)
            else:
                member.mode, member.size = what[0], len(what[1])
                tar.addfile(member, io.BytesIO(what[1]))
    return written.getvalue()


def image(*layers: Mapping[str, tuple[int, bytes] | int]) -> contents.Contents:
    """Its contents, read from what `docker save` would write: the last layer first, the manifest last."""
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    saved: dict[str, tuple[int, bytes] | int] = {
        name: (0o644, archive(layer)) for name, layer in reversed(list(zip(names, layers, strict=True)))
    }
    saved["blobs/sha256/1"] = (0o644, b'{"a configuration": "is no layer"}')
    saved["manifest.json"] = (0o644, json.dumps([{"Layers": names}]).encode())
    return contents.read(io.BytesIO(archive(saved)))


def test_modes_are_those_of_the_last_layer_that_has_the_path() -> None:
    found = image(
        {"./bin/su": (0o4755, b""), "bin/sg": (0o2755, b""), "tmp": 0o1777, "open": 0o777, "file": (0o666, b"")},
        {"bin/su": (0o755, b""), "file": (0o644, b"")},
    )
    assert found.setuid() == ["bin/sg"]
    assert found.world_writable() == ["open"]
    assert stat.S_ISREG(found.modes["bin/su"])


def test_what_a_layer_deletes_is_gone_and_its_secrets_are_not() -> None:
    found = image(
        {"usr/bin/gcc": (0o755, b""), "opt/a/key": (0o600, KEY), "opt/ab": (0o4755, b""), "old/b": (0o4755, b"")},
        {
            "usr/bin/.wh.gcc": (0o644, b""),
            "opt/.wh.a": (0o644, b""),
            "old/.wh..wh..opq": (0o644, b""),
            "old/c": (0o644, b""),
        },
    )
    assert found.compilers() == []
    assert found.setuid() == ["opt/ab"]
    assert "old/c" in found.modes
    assert found.secrets == ("opt/a/key: a private key",)


@pytest.mark.parametrize(
    ("path", "content", "is_secret"),
    [
        ("a", KEY, True),
        ("a", b'if line == "-----BEGIN RSA PRIVATE KEY-----":\n    pass', False),
        ("a", b"key = AKIA" + b"2" * 16, True),
        ("a", b"key = AKIAIOSFODNN7EXAMPLE", False),
        ("a", b"ghp_" + b"a" * 36, True),
        ("root/.netrc", b"machine", True),
        ("etc/pip.conf", b"[global]", True),
        ("etc/pip.conf", b"", False),
    ],
)
def test_secrets_are_told_from_programs_that_name_them(path: str, content: bytes, is_secret: bool) -> None:
    assert bool(image({path: (0o644, content)}).secrets) == is_secret


@pytest.mark.parametrize(
    ("path", "is_compiler"),
    [
        ("usr/bin/gcc", True),
        ("bin/ld", True),
        ("opt/conda/bin/cc", True),
        ("usr/bin/ldd", False),
        ("usr/lib/as", False),
    ],
)
def test_compilers_are_programs_on_the_path(path: str, is_compiler: bool) -> None:
    assert bool(image({path: (0o755, b"")}).compilers()) == is_compiler


def test_a_layer_that_ends_in_its_middle_is_no_empty_layer() -> None:
    whole = archive({"a": (0o644, b"x" * 4096), "b": (0o644, b"x" * 4096)})
    with pytest.raises(tarfile.ReadError):
        contents.read_layer(io.BytesIO(whole[:6000]))


# ---- what is said of it ---------------------------------------------------------------------------------------------


def test_the_bill_names_debians_packages_and_pythons() -> None:
    status = "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\n\nPackage: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    metadata = "Metadata-Version: 2.4\nName: Typing_Extensions\nVersion: 4.16.0\nLicense-Expression: PSF-2.0\n"
    found = image(
        {
            "var/lib/dpkg/status": (0o644, status.encode()),
            "opt/x/typing_extensions-4.16.0.dist-info/METADATA": (0o644, metadata.encode()),
        }
    )
    installed = bom.packages(found.texts)
    assert [(one.kind, one.name, one.version) for one in installed] == [
        ("deb", "libc6", "2.36-9"),
        ("pypi", "typing-extensions", "4.16.0"),
    ]
    told = json.loads(bom.document("surefoot/operator:1", "1", installed))
    assert told["bomFormat"] == "CycloneDX"
    assert {one["purl"] for one in told["components"]} == {
        "pkg:deb/debian/libc6@2.36-9",
        "pkg:pypi/typing-extensions@4.16.0",
    }


def test_an_image_as_it_should_be_has_no_findings() -> None:
    assert report.findings(OPERATOR, SEEN, image({"tmp": 0o1777})).sentences() == []


def test_every_kind_of_finding_is_a_sentence() -> None:
    settings = {"User": "", "Env": ["REGISTRY_PASSWORD=x"], "Labels": None}
    found = image({"bin/su": (0o4755, b""), "usr/bin/gcc": (0o755, b""), "open": 0o777, "key": (0o600, KEY)})
    said = report.findings(OPERATOR, SEEN | {"Config": settings}, found).sentences()
    assert len(said) == 5 + 1 + len(report.LABELS)
    assert "its user is root, not 65532:65532" in said
    assert "a secret? environment REGISTRY_PASSWORD" in said


def test_a_build_of_one_image_keeps_the_rows_of_those_that_are_still_there(tmp_path: Path) -> None:
    program, file = tmp_path / "docker", tmp_path / "images.json"
    program.write_text("""#!/bin/sh
case "$3" in
there|built) echo '[{"Id": "sha256:1"}]' ;;
newer) echo '[{"Id": "sha256:2"}]' ;;
*) echo "Error: No such image: $3" >&2; exit 1 ;;
esac
""")
    program.chmod(0o755)
    row = {"id": "sha256:1"}
    file.write_text(json.dumps({"images": dict.fromkeys(("there", "built", "newer", "gone"), row)}))
    docker = Docker(str(program))
    assert build.rows_of_others(docker, file, ["built"]) == {"there": row}
    assert build.rows_of_others(docker, tmp_path / "none.json", []) == {}
