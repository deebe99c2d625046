"""What is not installed is said in one line, with the part of the distribution that brings it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import surefoot

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def without(modules: tuple[str, ...], program: str) -> subprocess.CompletedProcess[str]:
    """`program` in an interpreter that does not find `modules`."""
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in modules)
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {hidden}{program}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


COMMAND = "from surefoot_operator.cli.main import main; sys.exit(main({}))"


@pytest.mark.gate_only
@pytest.mark.parametrize(
    ("modules", "program", "said"),
    [
        (("yaml",), COMMAND.format(["validate", "-f", "x"]), "surefoot: the module yaml is not installed; run pip install 'surefoot[cli]'"),
        (("rich",), COMMAND.format(["local", "-f", "x"]), "surefoot: the module rich is not installed; run pip install 'surefoot[cli]'"),
        (("jinja2",), COMMAND.format(["report", "gpt"]), "surefoot: the module jinja2 is not installed; run pip install 'surefoot[cli]'"),
        (("cryptography",), "import surefoot_operator.controller.__main__", "surefoot-operator: the module cryptography is not"),
        (("torch",), COMMAND.format(["local", "-f", "examples/gpt.yaml"]), "pip install 'surefoot[runtime]'"),
        (("torch",), "import surefoot; surefoot.Checkpointer", "surefoot.Checkpointer needs torch"),
    ],
)  # fmt: skip
def test_a_command_without_its_part_says_which(modules: tuple[str, ...], program: str, said: str) -> None:
    done = without(modules, program)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr or "Checkpointer" in said


@pytest.mark.gate_only
def test_a_run_on_one_machine_needs_no_client_of_a_cluster() -> None:
    """The runtime's image has none: there, whatever any command imports must be in the extras `local` and `runtime`."""
    done = without(("kubernetes", "shtab", "kopf", "cryptography"), COMMAND.format(["local", "-f", "no-such.yaml"]))
    assert "no-such.yaml" in done.stderr, done.stderr
    assert "is not installed" not in done.stderr


def test_the_version_is_said_where_nothing_else_can_run() -> None:
    done = without(("yaml", "rich", "torch"), COMMAND.format(["--version"]))
    assert (done.returncode, done.stdout) == (0, f"surefoot {surefoot.__version__}\n")


def test_the_version_is_that_of_what_is_installed() -> None:
    assert surefoot.__version__ == PROJECT["version"]


def test_an_indexs_page_has_no_link_that_leads_nowhere() -> None:
    text = PROJECT["readme"]["text"]
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")] == []
    extras = set(PROJECT["optional-dependencies"])
    assert {name for part in re.findall(r"surefoot\[([a-z,-]+)\]", text) for name in part.split(",")} <= extras
