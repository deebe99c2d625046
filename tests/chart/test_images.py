"""The Dockerfiles without a docker daemon: linted, their rules held, and the operator's install lines run in a folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chart.dockerfile import Instruction, bases, instructions
from chart.helm import PROJECT

FILES = sorted((PROJECT / "docker").glob("*.Dockerfile"))
BIN = Path(sys.prefix) / "bin"
INSTALL_SECONDS = 280


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
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
        for name, command in (("python", sys.executable), ("pip", f"{sys.executable} -m pip")):
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
        kept = ("HOME", "LANG", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL", "PIP_CONFIG_FILE")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ}
        self.environment["PATH"] = f"{programs}:/usr/bin:/bin"
        for one in found:
            if one.word == "RUN" and one.stage == 0:
                line = re.sub(r"/(opt/surefoot|wheels)\b", rf"{folder}/\1", one.rest)
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


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Root:
    text = (PROJECT / "docker" / "runtime.Dockerfile").read_text(encoding="utf-8")
    return Root(tmp_path_factory.mktemp("runtime"), instructions(text))


def test_the_operators_image_runs_the_operator(operator: Root) -> None:
    assert "--kubeconfig" in operator.says("surefoot-operator", "--help")


def test_the_operators_image_has_the_companion_and_all_that_it_imports(operator: Root) -> None:
    operator.says("python", "-c", "import surefoot.holder.companion.__main__")


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


def test_the_runtimes_wheel_brings_the_agent(runtime: Root, tmp_path: Path) -> None:
    """Without torch, which takes 5 GB; that the extra can be had is asked for without installing it."""
    [wheel] = (runtime.folder / "wheels").glob("surefoot-*.whl")
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    uv, python = str(BIN / "uv"), str(environment / "bin" / "python")
    run(uv, "pip", "install", "--python", python, str(wheel))
    assert "surefoot-agent -- COMMAND" in _usage(environment / "bin" / "surefoot-agent")
    assert "+ torch==" in run(uv, "pip", "install", "--dry-run", "--python", python, f"{wheel}[runtime]")


def _usage(program: Path) -> str:
    done = subprocess.run([str(program)], env={}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    return done.stderr
