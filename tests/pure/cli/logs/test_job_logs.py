"""`surefoot logs` of a cluster that refuses parts of them, and of a run folder."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from support.builders import BEGAN, running
from support.fakes.fake_api import FakeApi
from support.stored import stored_document, worker_pod, written
from surefoot_operator.api.status import Incident, JobStatus
from surefoot_operator.cli import logs
from surefoot_operator.cli.cluster_access import ClusterRefused, OpenCluster
from surefoot_operator.cli.main import build_parser, main
from surefoot_operator.platforms.kubernetes.api_objects import ApiRefused
from surefoot_operator.platforms.local.platform import Store
from surefoot_operator.platforms.local.run_folder import RunFolder

FAILED = Incident("trainer-failed", "rank 1 ended with exit code 1", 1, "n1", 2, BEGAN, rank=1)
STAMP = "2026-11-23T09:00:0"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    found, seen = FakeApi(), running()
    status = replace(seen.status, incidents=(FAILED,))
    found.keep("/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs/gpt", written(status, seen))
    for index in range(3):
        found.keep(f"/api/v1/namespaces/team/pods/gpt-worker-{index}-1", worker_pod(index))
    for index in range(2):
        text = f"{STAMP}{index}Z [rank {index}] words of {index}\n{STAMP}{index}Z the agent of {index}\n"
        found.texts[f"/api/v1/namespaces/team/pods/gpt-worker-{index}-1/log"] = text
    cluster = OpenCluster(found.api, "team", "https://cluster:6443")
    monkeypatch.setattr(logs, "on_cluster", lambda given, ask: asyncio.run(ask(cluster)))
    return found


def said(capsys: pytest.CaptureFixture[str], *given: str) -> list[str]:
    given_all = build_parser("surefoot").parse_args(["logs", *given])
    assert logs.run_logs(given_all) == 0
    return capsys.readouterr().out.splitlines()


def test_the_blamed_rank_comes_first_and_a_pod_without_a_log_is_a_note(
    server: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, "gpt")
    assert lines[0] == "== rank 1, worker 1 (attempt 1), blamed: rank 1 ended with exit code 1"
    assert lines[1] == "words of 1"
    assert "gpt-worker-2-1 has no log" in lines[-1]


@pytest.mark.parametrize(
    ("given", "kept", "left"),
    [(["--rank", "0"], "words of 0", "words of 1"), (["--worker", "1"], "the agent of 1", "words of 0")],
)
def test_one_rank_or_worker_can_be_had(
    server: FakeApi, capsys: pytest.CaptureFixture[str], given: list[str], kept: str, left: str
) -> None:
    text = "\n".join(said(capsys, "gpt", *given))
    assert kept in text
    assert left not in text


def test_by_time_all_are_one(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "gpt", "--by-time", "--tail", "1")
    assert lines[0].startswith(f"{STAMP}1Z  worker 1.1 ")  # the newest stamp of all pods


def test_who_may_not_read_logs_is_told_so(server: FakeApi) -> None:
    def before(verb: str, path: str) -> None:
        if path.endswith("/log"):
            raise ApiRefused(f"{verb} {path}", 403, "Forbidden", "no")

    server.before = before
    with pytest.raises(ClusterRefused, match="you may not get pods/log in namespace team"):
        logs.run_logs(build_parser("surefoot").parse_args(["logs", "gpt"]))


def test_a_run_folders_files_are_parted_by_epoch_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    Store(folder).write_job(stored_document(), "uid-1")
    Store(folder).patch_status(replace(running().status, serial=0, incidents=(FAILED,)), JobStatus())
    for epoch in (1, 2):
        path = folder.logs / "worker-1-1" / f"epoch-{epoch}" / "rank-1.log"
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"line {number} of epoch {epoch}\n" for number in range(5)))
    (folder.logs / "worker-1-1" / "agent.log").write_text("[rank 1] line 4\nthe agent's\n")
    lines = said(capsys, "--run-folder", str(tmp_path), "--tail", "2")
    assert lines == [
        "== rank 1, worker 1 (attempt 1), epoch 2, blamed: rank 1 ended with exit code 1", "line 3 of epoch 2", "line 4 of epoch 2", "",
        "== rank 1, worker 1 (attempt 1), epoch 1", "line 3 of epoch 1", "line 4 of epoch 1", "",
        "== agent, worker 1 (attempt 1)", "the agent's",
    ]  # fmt: skip
    assert "there is no line here: rank 1 ended" in said(capsys, "--run-folder", str(tmp_path), "--rank", "5")[0]


@pytest.mark.parametrize("given", [["--tail", "0"], ["--tail", "9999999"], ["--by-time"]])
def test_what_cannot_be_shown_is_refused(tmp_path: Path, given: list[str]) -> None:
    assert main(["logs", "--run-folder", str(tmp_path), *given]) == 2
