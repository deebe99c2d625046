"""Without a cluster each command says what is lacking, and names only options that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot_operator.cli.main import main


@pytest.fixture(autouse=True)
def nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        (["list"], True),
        (["list", "--all-namespaces"], True),
        (["describe", "gpt"], True),
        (["list", "gpt"], True),
        (["rollback", "gpt", "--to", "5"], False),
        (["fork", "gpt", "--step", "5"], True),
        (["suspend", "gpt"], False),
        (["resume", "gpt"], False),
    ],
    ids=str,
)
def test_what_is_advised_is_an_option_of_that_command(
    command: list[str], folder: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "no cluster is configured" in said
    assert ("--run-folder" in said) == folder


@pytest.mark.parametrize("other", [["rollback", "gpt", "--step", "5"], ["fork", "gpt", "--to", "5"]], ids=str)
def test_an_option_of_the_other_command_is_refused(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(other)
    assert caught.value.code == 2
    assert "no cluster" not in (said := capsys.readouterr().err)
    assert f"usage: surefoot {other[0]} " in said
