"""The command writes one page, of a run folder as of a cluster, and says where."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.builders import running
from support.fakes.fake_api import FakeApi
from support.stored import stored_document, written
from surefoot_operator.api.status import JobStatus
from surefoot_operator.cli import run_local
from surefoot_operator.cli.cluster_access import OpenCluster
from surefoot_operator.cli.jobs import read_jobs
from surefoot_operator.cli.local import run_report
from surefoot_operator.cli.local.progress import RunProgress
from surefoot_operator.cli.main import main
from surefoot_operator.platforms.local.platform import Store
from surefoot_operator.platforms.local.run_folder import RunFolder

LINE = '{"epoch": 1, "step": %d, "rank": %d, "loss": %s, "samples": null, "at": %f, "seconds": 0.5, "stall_seconds": null}\n'


def ended(root: Path, began: float, loss: str = "2.5") -> RunFolder:
    """A run of three ranks that finished four steps."""
    found = RunFolder(root)
    found.make()
    store = Store(found)
    store.write_job(stored_document(), "uid-1")
    status = replace(
        running().status, serial=0, phase="Complete", step=4, start_seconds=began, completion_seconds=began + 9
    )
    store.patch_status(status, JobStatus())
    for rank in range(3):
        text = "".join(LINE % (step, rank, loss, began + step) for step in range(1, 5))
        (found.ledger / f"worker-{rank}-1.jsonl").write_text(text)
    return found


def test_a_run_folder_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path / "run", 1000.0)
    assert main(["report", "--run-folder", str(tmp_path / "run"), "--to", str(tmp_path / "x.html")]) == 0
    text = (tmp_path / "x.html").read_text()
    assert "from 2.5 at step 1 to 2.5 at step 4; no incident" in text
    assert "the same job without faults" not in text
    assert capsys.readouterr().out.startswith(f"{tmp_path}/x.html: ")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("began", "beside"), [(1010.0, True), (900.0, False)], ids=["of this run", "of a former run"])
def test_the_undisturbed_run_is_drawn_where_it_is_this_runs(tmp_path: Path, began: float, beside: bool) -> None:
    ended(tmp_path / "run", 1000.0)
    ended(tmp_path / "run" / "undisturbed", began, "2.25")
    assert main(["report", "--run-folder", str(tmp_path / "run"), "--to", str(tmp_path / "x.html")]) == 0
    text = (tmp_path / "x.html").read_text()
    assert ("the same job without faults" in text) == beside
    assert ("0.25" in text) == beside


@pytest.mark.parametrize("name", ["x.html", "x.HTM", "x.json", "x"])
def test_a_local_runs_report_is_a_page_where_its_name_says_so(tmp_path: Path, name: str) -> None:
    progress = RunProgress(ended(tmp_path / "run", 1000.0))
    progress.look()
    job = Store(progress.folder).job()
    over = run_report.EndedRun(job, progress, (), ())
    found = run_report.conclude(over, None)
    text = run_local._report_text(Path(name), tmp_path / "run", over, found)
    assert text.startswith("<!doctype html>" if "ht" in name.lower() else "{")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs the name of a TrainingJob"),
        (["--run-folder", "nowhere"], "is no run folder"),
        (["--run-folder", "RUN", "--to", "x.json"], "the report is a page of HTML"),
        (["--run-folder", "RUN", "--to", "/proc/nowhere/x.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(tmp_path / "run", 1000.0)
    assert main(["report", *[str(tmp_path / "run") if one == "RUN" else one for one in arguments]]) == 2
    assert said in capsys.readouterr().err


def test_a_clusters_job_becomes_a_page_named_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, seen = FakeApi(), running()
    server.keep("/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs/gpt", written(seen.status, seen))

    @asynccontextmanager
    async def opened(_choice: Any) -> AsyncIterator[OpenCluster]:
        yield OpenCluster(server.api, "team", "https://cluster:6443")

    monkeypatch.setattr(read_jobs, "opened", opened)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "gpt"]) == 0
    text = (tmp_path / "gpt.html").read_text()
    assert "A cluster keeps no loss of each step" in text
