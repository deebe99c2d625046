"""docs/cli.md describes every command, option and exit code of the parser, and none that is not there."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot_operator.cli import command_base
from surefoot_operator.cli.main import build_parser

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0].strip(): part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
SHARED = SECTIONS["Which cluster, which job"]
ELSEWHERE = {"convert": "convert.md", "data": "streams.md"}
"""Commands whose options have a page of their own."""


def commands() -> dict[str, argparse.ArgumentParser]:
    return children(build_parser("surefoot"))


def children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, child in action.choices.items()
    }


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (one for one in action.option_strings if one.startswith("--") and one != "--help")
    for child in children(parser).values():
        yield from options(child)


def test_every_command_has_a_section_and_every_section_a_command() -> None:
    told = {name.removeprefix("surefoot ") for name in SECTIONS if name.startswith("surefoot ")}
    assert told == set(commands())


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_option_is_described(name: str) -> None:
    section = SECTIONS[f"surefoot {name}"]
    if name in ELSEWHERE:
        assert ELSEWHERE[name] in section
        return
    missing = {one for one in options(commands()[name]) if not re.search(rf"`[^`]*{one}\b", section + SHARED)}
    assert missing == set()


@pytest.mark.parametrize("name", sorted(commands()))
def test_no_option_is_described_that_is_not_there(name: str) -> None:
    if name in ELSEWHERE:
        return
    told = set(re.findall(r"`(?:-\w`, `)?(--[a-z-]+)", SECTIONS[f"surefoot {name}"]))
    assert told <= {*options(commands()[name]), "--run-folder"}


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser("surefoot").parse_args([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: surefoot {name}" in capsys.readouterr().out


def test_every_exit_code_is_described() -> None:
    codes = {value for name, value in vars(command_base).items() if name.startswith("EXIT_")}
    assert codes == {int(code) for code in re.findall(r"^\| (\d+) \|", SECTIONS["Exit codes"], flags=re.MULTILINE)}


def test_the_plugin_is_the_same_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/kubectl-surefoot"])
    assert build_parser().prog == "kubectl surefoot"
    monkeypatch.setattr("sys.argv", ["/usr/bin/surefoot"])
    assert build_parser().prog == "surefoot"
