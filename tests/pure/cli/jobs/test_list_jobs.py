"""`surefoot list`: of one job, again and again, and with typed values."""

from __future__ import annotations

import json

import pytest

from support.stored import stored_document
from surefoot_operator.cli.jobs import list_jobs
from surefoot_operator.cli.jobs.read_jobs import StoredJob, stored_job
from surefoot_operator.cli.main import main

STATUS = {"phase": "Running", "ready": "2/3", "step": 7, "schemaVersion": 1}


@pytest.fixture(autouse=True)
def a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cluster(args: object, ask: object) -> StoredJob | list[StoredJob]:
        found = stored_job(stored_document(STATUS, creationTimestamp="2026-11-28T10:00:00Z"))
        return [found] if ask is list_jobs.read_jobs else found

    monkeypatch.setattr(list_jobs, "on_cluster", on_cluster)


@pytest.mark.parametrize("words", [["list"], ["list", "gpt"]], ids=str)
def test_numbers_are_numbers_in_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "-o", "json"]) == 0
    [job] = json.loads(capsys.readouterr().out)
    assert (job["name"], job["ready"], job["workers"]) == ("gpt", 2, 3)


def test_watching_prints_the_table_again_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = iter([None, None])

    def pause(seconds: float) -> None:
        if next(pauses, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr(list_jobs.time, "sleep", pause)
    assert main(["list", "-w"]) == 130
    assert capsys.readouterr().out.count("2/3") == 3


@pytest.mark.parametrize("words", [["-w", "-o", "json"], ["gpt", "-A"], ["gpt", "--run-folder", "x"]], ids=str)
def test_what_does_not_go_together_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *words]) == 2
