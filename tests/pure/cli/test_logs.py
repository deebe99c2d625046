"""`surefoot logs` shows one log: of whom the newest failure blames, of the rank or worker that was asked for, or none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, running
from support.fakes.fake_api import FakeApi
from support.stored import stored_document, worker_pod, written
from surefoot_operator.api.status import Incident, JobStatus, to_rfc3339
from surefoot_operator.cli import logs
from surefoot_operator.cli.cluster_access import ClusterConnection, ClusterRequestFailed
from surefoot_operator.cli.logs import MAX_LINE_BYTES, blamed_incident, split_lines
from surefoot_operator.cli.main import build_parser, main
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.local.platform import RunFolderStore
from surefoot_operator.platforms.local.run_folder import RunFolder

FAILED = Incident("trainer-failed", "rank 1 ended with exit code 1", 1, "n1", 2, BEGAN, rank=1)
PODS = "/api/v1/namespaces/team/pods"


def keep_job(server: FakeApi, *incidents: Incident) -> None:
    seen = running()
    status = replace(seen.status, incidents=incidents)
    server.keep("/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs/gpt", written(status, seen))


def keep_pod(server: FakeApi, index: int, attempt: int = 1, created_seconds: float = BEGAN - 60) -> None:
    pod = worker_pod(index, attempt=attempt)
    pod["metadata"]["creationTimestamp"] = to_rfc3339(created_seconds)
    name = f"{PODS}/gpt-worker-{index}-{attempt}"
    server.keep(name, pod)
    server.texts[f"{name}/log"] = "".join(
        f"[rank {index}] words {number} of {index}.{attempt}\nthe agent of {index}.{attempt}\n" for number in range(3)
    )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """Three workers of one rank each; rank 1 failed."""
    found = FakeApi()
    keep_job(found, FAILED)
    for index in range(3):
        keep_pod(found, index)
    cluster = ClusterConnection(found.api, "team", "https://cluster:6443")
    monkeypatch.setattr(logs, "on_cluster", lambda args, ask: asyncio.run(ask(cluster)))
    return found


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert logs.run_logs(build_parser("surefoot").parse_args(["logs", *words])) == 0
    return capsys.readouterr().out.splitlines()


def test_without_a_choice_the_blamed_rank_is_shown(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "gpt", "--tail", "2") == [
        "== rank 1, worker 1 (attempt 1), blamed: rank 1 ended with exit code 1", "words 1 of 1.1", "words 2 of 1.1",
    ]  # fmt: skip


def test_where_nobody_is_blamed_the_first_rank_is_shown(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    keep_job(server, replace(FAILED, kind="planned"))
    assert said(capsys, "gpt")[:2] == ["== rank 0, worker 0 (attempt 1)", "words 0 of 0.1"]


def test_before_the_first_world_a_worker_s_agent_is_shown(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    server.keep("/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs/gpt", stored_document({}))
    assert said(capsys, "gpt", "--tail", "1") == ["== worker 0 (attempt 1)", "the agent of 0.1"]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--rank", "0", "--tail", "1"], ["== rank 0, worker 0 (attempt 1)", "words 2 of 0.1"]),
        (["--worker", "1", "--tail", "2"], ["== worker 1 (attempt 2)", "[rank 1] words 2 of 1.2", "the agent of 1.2"]),
        (["--worker", "1", "--attempt", "1", "--tail", "1"], ["== worker 1 (attempt 1)", "the agent of 1.1"]),
        (["--worker", "7"], ["no log lines: a pod that was deleted took its log along"]),
    ],
)
def test_one_rank_worker_or_attempt_can_be_had(
    server: FakeApi, capsys: pytest.CaptureFixture[str], words: list[str], lines: list[str]
) -> None:
    keep_pod(server, 1, attempt=2, created_seconds=BEGAN + 5)
    assert said(capsys, "gpt", *words) == lines


def test_the_replacement_of_a_lost_worker_is_not_blamed(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    keep_pod(server, 1, attempt=2, created_seconds=BEGAN + 5)
    assert said(capsys, "gpt")[0].startswith("== rank 1, worker 1 (attempt 1), blamed")
    del server.objects[f"{PODS}/gpt-worker-1-1"]
    assert said(capsys, "gpt")[:2] == [
        "of whom the newest failure blames there is no log: rank 1 ended with exit code 1", "== rank 0, worker 0 (attempt 1)",
    ]  # fmt: skip


def test_a_pod_is_followed_from_its_last_lines(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "gpt", "--rank", "0", "-f", "--tail", "5")
    assert lines[0] == "== rank 0, worker 0 (attempt 1)"
    assert lines[1:] == [f"words {number} of 0.1" for number in range(3)]
    assert server.queries == [{"container": "trainer", "tailLines": 5, "follow": "true"}]


def test_of_one_rank_more_lines_are_asked_for_than_are_shown(
    server: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "gpt", "--rank", "0", "--tail", "7")
    said(capsys, "gpt", "--worker", "0", "--tail", "7")
    assert [query["tailLines"] for query in server.queries] == [70, 7]


def test_a_pod_that_has_not_started_is_a_note(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    del server.texts[f"{PODS}/gpt-worker-2-1/log"]
    assert "gpt-worker-2-1 has no log" in said(capsys, "gpt", "--rank", "2")[-1]


def test_who_may_not_read_logs_is_told_so(server: FakeApi) -> None:
    def before(verb: str, path: str) -> None:
        if path.endswith("/log"):
            raise ApiError(f"{verb} {path}", 403, "Forbidden", "no")

    server.before = before
    with pytest.raises(ClusterRequestFailed, match="you may not get pods/log in namespace team"):
        logs.run_logs(build_parser("surefoot").parse_args(["logs", "gpt"]))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose worker 1 failed in epoch 2 and has a second attempt since."""
    folder = RunFolder(tmp_path)
    folder.create_folders()
    RunFolderStore(folder).write_job(stored_document(), "uid-1")
    RunFolderStore(folder).patch_status(replace(running().status, serial=0, incidents=(FAILED,)), JobStatus())
    for attempt, epoch in ((1, 1), (1, 2), (2, 3)):
        path = folder.logs_folder / f"worker-1-{attempt}" / f"epoch-{epoch}" / "rank-1.log"
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"line {number} of epoch {epoch}\n" for number in range(5)))
    for attempt in (1, 2):
        (folder.logs_folder / f"worker-1-{attempt}" / "agent.log").write_text(
            f"[rank 1] line 4\nthe agent's {attempt}\n"
        )
    (folder.logs_folder / "worker-x-1").mkdir()
    return folder


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["--tail", "2"],
            [
                "== rank 1, worker 1 (attempt 1), blamed: rank 1 ended with exit code 1",
                "line 3 of epoch 2",
                "line 4 of epoch 2",
            ],
        ),
        (["--rank", "1", "--tail", "1"], ["== rank 1, worker 1 (attempt 2)", "line 4 of epoch 3"]),
        (["--worker", "1", "--tail", "1"], ["== worker 1 (attempt 2)", "the agent's 2"]),
        (["--worker", "1", "--attempt", "1"], ["== worker 1 (attempt 1)", "[rank 1] line 4", "the agent's 1"]),
        (["--rank", "5"], ["no log lines: a pod that was deleted took its log along"]),
    ],
)
def test_a_run_folder_has_a_file_for_each(
    run: RunFolder, capsys: pytest.CaptureFixture[str], words: list[str], lines: list[str]
) -> None:
    assert said(capsys, "--run-folder", str(run.root), *words) == lines


def test_a_lost_worker_of_a_run_has_its_agent_blamed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = RunFolderStore(run).read_status()
    RunFolderStore(run).patch_status(replace(before, incidents=(replace(FAILED, rank=None),)), before)
    lines = said(capsys, "--run-folder", str(run.root))
    assert lines[0] == "== worker 1 (attempt 1), blamed: rank 1 ended with exit code 1"
    assert lines[-1] == "the agent's 1"


def test_a_file_is_followed_by_other_means(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--run-folder", str(run.root), "-f"]) == 2
    assert f"tail -f {run.logs_folder / 'worker-1-1' / 'epoch-2' / 'rank-1.log'}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--tail", "0"], ["--tail", "9999999"]])
def test_what_cannot_be_shown_is_refused(tmp_path: Path, words: list[str]) -> None:
    assert main(["logs", "--run-folder", str(tmp_path), *words]) == 2


def test_a_rank_that_no_worker_has_is_refused(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "gpt", "--rank", "3"]) == 2
    assert "no worker of team/gpt has rank 3 now; --worker N" in capsys.readouterr().err


def failed(rank: int | None, worker: int | None, kind: str = "trainer-failed") -> Incident:
    return Incident(kind, f"{kind} of {rank}", worker, None, 2, 0.0, rank=rank)


@pytest.mark.parametrize(
    ("incidents", "rank"),
    [((), None), ((failed(1, 1), failed(2, 2)), 2), ((failed(1, 1), failed(None, None), failed(3, 3, "planned")), 1)],
)
def test_the_newest_failure_that_names_somebody_is_meant(incidents: tuple[Incident, ...], rank: int | None) -> None:
    found: Any = blamed_incident(incidents)
    assert (None if found is None else found.rank) == rank


@given(
    st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n"), max_size=20)),
    st.integers(1, 9),
)
def test_lines_are_the_same_however_they_are_cut(lines: list[str], size: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    found: list[str] = []
    rest = b""
    for place in range(0, len(data), size):
        more, rest = split_lines(rest + data[place : place + size])
        found += more
    assert (found, rest) == (lines, b"")


def test_a_line_without_end_is_shown_in_pieces_and_held_in_none() -> None:
    found, rest = split_lines(b"x" * (3 * MAX_LINE_BYTES + 5))
    assert [len(one) for one in found] == [MAX_LINE_BYTES] * 3
    assert rest == b"xxxxx"
