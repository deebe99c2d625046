"""What `surefoot checkpoints verify` ends with: 0 says that something was read and is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot_operator.cli import checkpoints
from surefoot_operator.cli.main import main


def entry(step: int, state: str) -> dict[str, Any]:
    damaged = ["step-1 of rank 0: chunk 0"] if state == "damaged" else []
    return {
        "step": step, "generation": 1, "world_size": 2, "ranks": 1, "bytes": 1000, "state": state, "damaged": damaged,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("action", "found", "code"),
    [
        (["verify"], ["verified"], 0),
        (["verify"], ["verified", "incomplete"], 0),  # one that is being uploaded
        (["verify"], ["verified", "damaged"], 1),
        (["verify"], ["incomplete"], 1),
        (["verify"], [], 1),
        (["verify", "--step", "7"], [], 1),
        (["list"], ["complete", "incomplete"], 0),
        (["list"], [], 0),
    ],
    ids=str,
)
def test_only_a_whole_checkpoint_is_a_success(
    action: list[str], found: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"checkpoints": [entry(step, state) for step, state in enumerate(found)]}
    monkeypatch.setattr(checkpoints, "_ran", lambda *_, **__: told)
    assert main(["checkpoints", action[0], str(tmp_path), *action[1:]]) == code
