"""Tests of `cli.command_base`."""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

import pytest

from surefoot.errors import SurefootError
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot_operator.cli import command_base
from surefoot_operator.cli.command_base import LastingOutput, StopRequest, signals_ignored, stop_requests
from surefoot_operator.cli.main import build_parser

# ---- stop request ----------------------------------------------------------------------------------------------------
# A stop that is asked for by a signal always reaches the loop that is to stop, wherever the signal finds the program.

DEADLINE_SECONDS = 20.0


@contextmanager
def signal_after(seconds: float, number: signal.Signals) -> Iterator[None]:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextmanager
def default_interrupt() -> Iterator[None]:
    """SIGINT as from a terminal: a shell that runs the tests in the background has them ignore it."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


class RaisesInItsDestructor:
    """Gives a signal's exception a place where the interpreter prints and drops it, as redis-py's connections do."""

    def __del__(self) -> None:
        sum(range(200))


@pytest.mark.gate_only
def test_a_stop_at_any_moment_arrives() -> None:
    """KeyboardInterrupt was lost in 6 of 400 such moments: redis-py's connections drop exceptions in `__del__`."""
    moments = random.Random(7)
    with default_interrupt():
        for _ in range(200):
            number = moments.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            with stop_requests() as stop, signal_after(moments.uniform(0.001, 0.02), number):
                deadline = time.monotonic() + DEADLINE_SECONDS
                while not stop.requested:
                    assert time.monotonic() < deadline, f"{number.name} was lost"
                    RaisesInItsDestructor()
                    admin = MemoryServerAdmin("127.0.0.1", 1, "x", 1.0)
                    try:
                        admin.read_instance()
                    except (SurefootError, ValueError):
                        pass
                    finally:
                        admin.close()


def test_a_stop_ends_a_wait_early() -> None:
    with stop_requests() as stop, signal_after(0.05, signal.SIGTERM):
        began = time.monotonic()
        assert stop.wait(DEADLINE_SECONDS)
        assert time.monotonic() - began < DEADLINE_SECONDS / 2
        assert stop.wait(DEADLINE_SECONDS), "a request stays one"
        with pytest.raises(KeyboardInterrupt):
            stop.raise_if_requested()


def test_a_second_signal_raises_where_the_program_is() -> None:
    """A call that does not return would never let the loop see the flag."""
    stop = StopRequest()
    stop.on_signal(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGINT, None)
    stop.close()


def test_handlers_return_to_what_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with stop_requests(), signals_ignored():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, former)


def test_output_outlives_its_reader(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:
        output = cast(TextIO, LastingOutput(stream))
        print("read", file=output, flush=True)
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(3):
            print("x" * 100_000, file=output, flush=True)
    assert capsys.readouterr().err.count("the output has no reader any longer") == 1


# ---- cli reference ---------------------------------------------------------------------------------------------------
# docs/cli.md describes every command, option and exit code of the parser, and none that is not there.

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
