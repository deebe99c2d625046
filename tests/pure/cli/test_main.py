"""Completion scripts are of the parser: every command is in them."""

from __future__ import annotations

import subprocess

import pytest

from surefoot_operator.cli.main import SHELLS, main


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
