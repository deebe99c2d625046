"""What `surefoot` says without a command or with a wrong one, and what it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import surefoot
from surefoot_operator.cli.main import COMMANDS, SHELLS, main


@pytest.mark.parametrize("words", [[], ["help"], ["-h"], ["--help"]], ids=str)
def test_help_needs_no_command_and_lists_every_one_in_its_group(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    for group in ("look", "act", "try here", "check"):
        assert f"\n{group}:\n" in out
    for name, command in COMMANDS.items():
        assert f"  {name:12} {command.help_text}" in out


@pytest.mark.parametrize("words", [["version"], ["-V"], ["--version"]], ids=str)
def test_the_version_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == f"surefoot {surefoot.__version__}\n"


@pytest.mark.parametrize("words", [["help", "list"], ["help", "checkpoints", "verify"]], ids=str)
def test_help_of_a_command_is_its_own(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert f"usage: surefoot {' '.join(words[1:])} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "usage", "meant"),
    [
        (["list", "--wacth"], "surefoot list", "--watch"),
        (["list", "-o", "jsn"], "surefoot list", "json"),
        (["checkpoints", "lits"], "surefoot checkpoints", "list"),
        (["checkpoints", "list", "--stp", "3"], "surefoot checkpoints list", "--step"),
        (["completion", "bsh"], "surefoot completion", "bash"),
        (["fork", "gpt", "--step", "1", "--nmae", "x"], "surefoot fork", "--name"),
        (["fork", "gpt"], "surefoot fork", None),
        (["list", "--zzzz"], "surefoot list", None),
    ],
    ids=str,
)
def test_a_command_reports_its_own_errors_with_its_own_usage_and_what_may_be_meant(
    words: list[str], usage: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"usage: {usage} [-h]" in error
    assert f"\n{usage}: error: " in error
    assert ("did you mean" in error) == (meant is not None)
    assert meant is None or f"did you mean {meant}?" in error


@pytest.mark.parametrize(("word", "meant"), [("lst", "list"), ("desribe", "describe"), ("zzz", None)])
def test_a_command_that_is_not_there_is_named_with_the_nearest(
    word: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert f"there is no command {word}; " in error
    assert (f"did you mean {meant}?" if meant else "surefoot help lists all commands") in error


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["--help"], {"rich", "yaml", "redis", "asyncio", "kubernetes", "surefoot_operator.api", "importlib.metadata"}),
        (["list"], {"redis", "torch", "jinja2", "surefoot_operator.policy", "surefoot_operator.platforms.local"}),
        (["validate", "--help"], {"redis", "jinja2", "surefoot_operator.policy", "kubernetes", "aiohttp"}),
    ],
    ids=["help", "list", "validate"],
)
def test_a_command_imports_what_it_needs_alone(words: list[str], unwanted: set[str]) -> None:
    """Half a second of imports is what a person waits for, and a shell at each completion."""
    program = (
        "import sys, os; os.environ['HOME'] = '/nonexistent'; os.environ.pop('KUBECONFIG', None)\n"
        "from surefoot_operator.cli.main import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print('imported:', *sorted({unwanted!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "imported:"


# ---- completion ------------------------------------------------------------------------------------------------------
# Completion scripts are of the parser: every command is in them.


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_knows_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in ("describe", "logs", "checkpoints", "rollback"):
        assert command in script


def test_bash_can_read_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
