"""Which log people are shown of a job that failed."""

from __future__ import annotations

import os
from pathlib import Path

from surefoot_operator.api.status import Incident
from surefoot_operator.cli.local.run_report import log_to_blame


def written(logs: Path, name: str, at: int, text: str = "it ended") -> Path:
    path = logs / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def test_the_log_is_that_of_the_rank_that_ended_the_job(tmp_path: Path) -> None:
    cause = written(tmp_path, "worker-1-1/epoch-5/rank-1.log", 10)
    victim = written(tmp_path, "worker-0-1/epoch-5/rank-0.log", 20)
    written(tmp_path, "worker-1-1/epoch-4/rank-1.log", 5)
    blamed = Incident("trainer-failed", "boom", 1, "n1", 5, 1.0, rank=1)
    assert log_to_blame(tmp_path, (blamed,)) == cause
    assert log_to_blame(tmp_path, ()) == victim


def test_where_nobody_is_blamed_or_said_a_word_it_is_the_newest(tmp_path: Path) -> None:
    newest = written(tmp_path, "worker-0-1/epoch-5/rank-0.log", 20)
    written(tmp_path, "worker-1-1/epoch-5/rank-1.log", 30, "")
    nobody = Incident("hang", "all stand", None, None, 5, 1.0)
    silent = Incident("trainer-failed", "killed", 1, "n1", 5, 1.0, rank=1)
    answered = Incident("trainer-failed", "boom", 0, "n0", 5, 1.0, rank=0, first_step_seconds=2.0)
    for incidents in ((), (nobody,), (silent,), (answered,)):
        assert log_to_blame(tmp_path, incidents) == newest
    written(tmp_path, "worker-0-1/agent.log", 40)
    agent = written(tmp_path, "worker-1-2/agent.log", 10)
    assert log_to_blame(tmp_path, (silent,)) == agent
    assert log_to_blame(tmp_path / "nothing", (silent,)) is None
