"""The Dockerfiles without a docker daemon: linted, their rules held, and the operator's install lines run in a folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import surefoot
from chart.dockerfile import Instruction, bases, instructions
from chart.helm import PROJECT
from support.machine_speed import scaled

FILES = sorted((PROJECT / "docker").glob("*.Dockerfile"))
STAND_INS = sorted((PROJECT / "tests" / "kind").rglob("Dockerfile"))
"""What they install is Debian's newest of that release: nobody runs them but tests."""
BIN = Path(sys.prefix) / "bin"
INSTALL_SECONDS = scaled(280.0)


def run(*command: str, environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def found(request: pytest.FixtureRequest) -> list[Instruction]:
    path: Path = request.param
    return instructions(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [*FILES, *STAND_INS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_hadolint_finds_nothing(path: Path) -> None:
    assert run(str(BIN / "hadolint"), "--failure-threshold", "style", str(path)) == ""


def test_bases_are_pinned(found: list[Instruction]) -> None:
    for image in bases(found):
        assert re.fullmatch(r"[a-z0-9./-]+:\d+\.\d+\.\d+-[a-z0-9.-]+(@sha256:[0-9a-f]{64})?", image), image


def test_nobody_is_root_at_the_end(found: list[Instruction]) -> None:
    users = [one for one in found if one.word == "USER"]
    assert users, "no USER"
    assert users[-1].stage == max(one.stage for one in found)
    uid, gid = users[-1].rest.split(":")
    assert int(uid) > 0, "a number, since a kubelet cannot know that a name is not root"
    assert int(gid) > 0


def test_nothing_comes_from_addresses(found: list[Instruction]) -> None:
    assert [one for one in found if one.word == "ADD" or "://" in one.rest] == []
    for one in found:
        if "apt-get install" in one.rest:
            assert "--no-install-recommends" in one.rest


def test_what_is_installed_leaves_no_caches(found: list[Instruction]) -> None:
    for one in found:
        if re.search(r"\bpip\b.* (install|wheel)\b", one.rest):
            assert "--no-cache-dir" in one.rest, one.rest


def test_what_is_copied_exists_and_is_not_ignored(found: list[Instruction]) -> None:
    let_in = {
        line.removeprefix("!")
        for line in (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    for source in copied(found):
        assert (PROJECT / source).exists(), source
        assert source in let_in, f"{source} is copied and .dockerignore keeps it out"


def copied(found: list[Instruction]) -> list[str]:
    """Sources from the build's own folder."""
    lines = [one.rest.split() for one in found if one.word == "COPY" and "--from=" not in one.rest]
    return [word.removeprefix("./") for words in lines for word in words[:-1]]


# ---- the install lines, run ----------------------------------------------------------------------------------------


class Root:
    """What the first stage would make, in a folder: its sources copied, its RUN lines run with paths moved there."""

    def __init__(self, folder: Path, found: list[Instruction]) -> None:
        self.folder = folder
        self._source = folder / "source"
        for name in copied([one for one in found if one.stage == 0]):
            self._copy(name)
        programs = folder / "programs"
        programs.mkdir()
        (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (programs / "python3").chmod(0o755)
        kept = ("HOME", "LANG", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL", "PIP_CONFIG_FILE")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ}
        self.environment["PATH"] = f"{programs}:/usr/bin:/bin"
        for one in found:
            if one.word == "RUN" and one.stage == 0:
                line = re.sub(r"--mount=\S+ ", "", one.rest).replace("/opt/surefoot", f"{folder}/opt/surefoot")
                run("/bin/sh", "-euc", line, environment=self.environment, folder=self._source)

    def _copy(self, name: str) -> None:
        there, here = PROJECT / name, self._source / name
        here.parent.mkdir(parents=True, exist_ok=True)
        if there.is_dir():
            shutil.copytree(there, here, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(there, here)

    def says(self, *command: str, code: int = 0) -> str:
        """What a program of the root prints; nothing of the checkout or its environment is in its reach."""
        program = self.folder / "opt" / "surefoot" / "bin" / command[0]
        done = subprocess.run(
            [str(program), *command[1:]],
            env={"PATH": f"{program.parent}:/usr/bin:/bin"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Root:
    text = (PROJECT / "docker" / "operator.Dockerfile").read_text(encoding="utf-8")
    return Root(tmp_path_factory.mktemp("operator"), instructions(text))


def test_the_operators_image_runs_the_operator(operator: Root) -> None:
    assert "--kubeconfig" in operator.says("surefoot-operator", "--help")
    assert operator.says("surefoot-operator", "--version") == f"surefoot-operator {surefoot.__version__}\n"


def test_the_operators_image_has_the_companion_and_all_that_it_imports(operator: Root) -> None:
    operator.says("python", "-c", "import surefoot.memory_server.sidecar.__main__")


def test_the_operators_image_has_no_torch_and_no_pip(operator: Root) -> None:
    say = (
        "import importlib.util as u; print([n for n in ('torch', 'numpy', 'boto3', 'pip', 'pytest') if u.find_spec(n)])"
    )
    assert operator.says("python", "-c", say).strip() == "[]"


def test_the_operators_image_stands_alone(operator: Root) -> None:
    say = "import surefoot, surefoot_operator; print(surefoot.__file__, surefoot_operator.__file__)"
    for path in operator.says("python", "-c", say).split():
        assert Path(path).is_relative_to(operator.folder / "opt")


def test_the_operators_image_passes_the_charts_test_program_to_its_first_question(operator: Root) -> None:
    check = (PROJECT / "charts" / "surefoot" / "files" / "check.py").read_text(encoding="utf-8")
    assert "KeyError: 'SUREFOOT_NAMESPACE'" in operator.says("python", "-c", check, code=1)


def test_the_wheel_that_other_images_take_brings_the_agent(operator: Root, tmp_path: Path) -> None:
    """As the third line of such an image has it, without what it stands on."""
    [wheel] = (operator.folder / "opt" / "surefoot" / "wheels").glob("*.whl")
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    run(str(BIN / "uv"), "pip", "install", "--python", str(environment / "bin" / "python"), str(wheel))
    assert "surefoot-agent -- COMMAND" in _usage(environment / "bin" / "surefoot-agent")


def test_what_the_runtimes_image_installs_can_be_had(tmp_path: Path) -> None:
    """Asked for without installing it: torch takes 5 GB. `make test-images` builds and runs it."""
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    asked = ("--dry-run", "--python", str(environment / "bin" / "python"), "--only-binary", ":all:")
    wanted = ("--constraint", "docker/runtime.txt", ".[runtime,local,embedded-redis]")
    had = run(str(BIN / "uv"), "pip", "install", *asked, *wanted, folder=PROJECT)
    pinned = dict(
        re.findall(r"^([a-z0-9-]+)==(\S+)", (PROJECT / "docker/runtime.txt").read_text("utf-8"), re.MULTILINE)
    )
    for name in ("torch", "aiohttp", "redis", "boto3", "rich"):
        assert f"+ {name}=={pinned[name]}" in had


def test_torchs_build_for_cpus_goes_before_the_plain_one(tmp_path: Path) -> None:
    """Both satisfy the pinned number: with PyTorch's index beside the usual one, pip takes the build that says more."""
    for version in ("2.15.0", "2.15.0+cpu"):
        folder = f"torch-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{folder}/RECORD", "")
    asked = (sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-index", "--no-deps")
    (tmp_path / "pins").write_text("torch==2.15.0\n")
    said = run(*asked, "--find-links", str(tmp_path), "--constraint", str(tmp_path / "pins"), "torch")
    assert "Would install torch-2.15.0+cpu" in said


def _usage(program: Path) -> str:
    done = subprocess.run([str(program)], env={}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    return done.stderr
