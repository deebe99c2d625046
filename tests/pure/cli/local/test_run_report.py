"""Tests of `cli.local.run_report`."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.builders import running
from support.fakes.fake_api import FakeApi
from support.stored import stored_document, written
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Incident, JobStatus, TimeSpent
from surefoot_operator.cli import run_local
from surefoot_operator.cli.cluster_access import ClusterConnection
from surefoot_operator.cli.jobs import read_jobs
from surefoot_operator.cli.local import run_report
from surefoot_operator.cli.local.faults import Fault, InjectedFault
from surefoot_operator.cli.local.progress import RunProgress, SampleAccount
from surefoot_operator.cli.local.run_report import Checkpoints, Comparison, RunRecords, log_to_blame
from surefoot_operator.cli.main import main
from surefoot_operator.platforms.local.platform import RunFolderStore
from surefoot_operator.platforms.local.run_folder import RunFolder

# ---- run report ------------------------------------------------------------------------------------------------------
# The report says what happened in seconds from the fault, and its last lines say it in words.

NODE_KILL = InjectedFault(Fault("node", "node-1", 40, 12.0), at_seconds=100.0, step=40)
TRAINER_KILL = InjectedFault(Fault("trainer", "node-0", 60, None), at_seconds=150.0, step=60)
LOST = Incident(
    kind="node-lost",
    reason="node-1 is gone",
    worker=1,
    node="node-1",
    generation=1,
    detected_seconds=100.2,
    claimed_seconds=100.25,
    committed_seconds=101.0,
    first_step_seconds=103.5,
    last_step=40,
    restored_step=40,
    steps_lost=0,
    restored_from="memory",
    world_size_before=3,
    world_size_after=2,
)
GROWN = Incident(
    "planned",
    "grow to 3",
    None,
    None,
    2,
    113.0,
    committed_seconds=113.5,
    restored_from="memory",
    world_size_before=2,
    world_size_after=3,
)


def test_seconds_count_from_the_fault_that_caused_the_incident() -> None:
    found = run_report.incident_report(LOST, [NODE_KILL, TRAINER_KILL])
    assert found["detected_seconds"] == 0.2
    assert found["committed_seconds"] == 1.0
    assert found["first_step_seconds"] == 3.5
    assert found["stopped_seconds"] is None
    assert found["fault"] == "kill node-1 at step 40, returns after 12 s"


def test_a_planned_change_counts_from_its_own_beginning() -> None:
    found = run_report.incident_report(GROWN, [NODE_KILL])
    assert found["detected_seconds"] == 0.0
    assert found["committed_seconds"] == 0.5
    assert found["fault"] is None


def test_an_incident_belongs_to_the_last_fault_on_its_own_node() -> None:
    later = InjectedFault(Fault("node", "node-1", 80, None), 200.0, 80)
    again = Incident("node-lost", "gone", 1, "node-1", 3, 200.1)
    assert run_report.cause_of(again, [NODE_KILL, TRAINER_KILL, later]) == later
    assert run_report.cause_of(Incident("trainer-failed", "x", 2, "node-2", 3, 200.1), [NODE_KILL]) is None
    cordon = InjectedFault(Fault("cordon", "node-1", 81, None), 200.05, 81)
    assert run_report.cause_of(again, [NODE_KILL, later, cordon]) == later, "what ends nothing is no cause"
    assert run_report.cause_of(Incident("coordinator", "x", None, None, 3, 200.1), [TRAINER_KILL]) == TRAINER_KILL
    assert run_report.cause_of(Incident("trainer-failed", "x", 0, "node-0", 3, 149.0), [TRAINER_KILL]) is None


RUN = RunRecords(
    lines=(),
    lineage=(LineageEntry(1, None, 3), LineageEntry(2, Checkpoint(1, 40), 2), LineageEntry(3, Checkpoint(2, 70), 3)),
    incidents=(LOST, GROWN),
    struck=(NODE_KILL,),
    checkpoints=Checkpoints(12, 3_400_000, 0.004),
    comparison=Comparison(3e-15, 1e-13, False, 120),
)


def report(status: JobStatus | None = None) -> dict[str, Any]:
    return run_report.build_report("Complete", RUN, SampleAccount(120, 24, 0, 0), status or JobStatus())


def test_where_the_seconds_went_is_reported_and_said() -> None:
    spent = TimeSpent(
        "",
        1050.0,
        training_seconds=30,
        recovering_seconds=6,
        recomputed_seconds=4,
        waiting_seconds=0,
        suspended_seconds=10,
    )
    body = report(JobStatus(start_seconds=1000.0, time_spent=spent))
    assert body["seconds"] == {"training": 30.0, "recovering": 6.0, "recomputed": 4.0, "suspended": 10.0}
    assert (body["goodput"], body["age_seconds"]) == (0.75, 50.0)
    said = "goodput 75.0%: training 30.0 s, suspended 10.0 s, recovering 6.0 s, recomputed 4.0 s"
    assert said in run_report.verdict(body)
    never = report()
    assert (never["goodput"], never["seconds"]) == (None, {})


def test_the_report_has_the_documented_keys() -> None:
    body = json.loads(json.dumps(report()))
    assert {
        "outcome",
        "generations",
        "incidents",
        "max_loss_difference",
        "max_parameter_difference",
        "samples_lost",
        "samples_unknown",
        "samples_repeated",
        "checkpoints",
    } <= set(body)
    assert body["generations"] == [
        {"generation": 1, "world_size": 3, "from_step": 0, "restored_from": None},
        {"generation": 2, "world_size": 2, "from_step": 40, "restored_from": "memory"},
        {"generation": 3, "world_size": 3, "from_step": 70, "restored_from": "memory"},
    ]
    wanted = {"kind", "detected_seconds", "committed_seconds", "first_step_seconds", "steps_lost", "restored_from"}
    assert all(wanted <= set(incident) for incident in body["incidents"])
    assert body["checkpoints"] == {"complete": 12, "bytes": 3_400_000, "median_stall_seconds": 0.004}


def test_the_last_lines_say_it_in_words() -> None:
    body = report()
    said = "\n".join([*run_report.timeline(body), *run_report.verdict(body)])
    assert "0.200 s  noticed" in said
    assert "world 3 -> 2, from step 40" in said
    assert "restored from memory, 0 steps lost" in said
    assert "worlds 3 -> 2 -> 3" in said
    assert "samples lost 0, repeated 0" in said
    assert "largest parameter difference 1e-13 (checkpoint of step 120)" in said


# ---- report job ------------------------------------------------------------------------------------------------------
# The command writes one page, of a run folder as of a cluster, and says where.

LINE = '{"generation": 1, "step": %d, "rank": %d, "loss": %s, "samples": null, "at": %f, "seconds": 0.5, "stall_seconds": null}\n'


def ended(root: Path, began: float, loss: str = "2.5") -> RunFolder:
    """A run of three ranks that finished four steps."""
    found = RunFolder(root)
    found.create_folders()
    store = RunFolderStore(found)
    store.write_job(stored_document(), "uid-1")
    status = replace(
        running().status, serial=0, phase="Complete", step=4, start_seconds=began, completion_seconds=began + 9
    )
    store.patch_status(status, JobStatus())
    for rank in range(3):
        text = "".join(LINE % (step, rank, loss, began + step) for step in range(1, 5))
        (found.ledger_folder / f"worker-{rank}-1.jsonl").write_text(text)
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
    progress.poll()
    job = RunFolderStore(progress.folder).read_job()
    over = run_report.FinishedRun(job, progress, (), ())
    found = run_report.build_conclusion(over, None)
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
    async def opened(_choice: Any) -> AsyncIterator[ClusterConnection]:
        yield ClusterConnection(server.api, "team", "https://cluster:6443")

    monkeypatch.setattr(read_jobs, "open_cluster", opened)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "gpt"]) == 0
    text = (tmp_path / "gpt.html").read_text()
    assert "A cluster keeps no loss of each step" in text


# ---- conclusion ------------------------------------------------------------------------------------------------------
# Which log people are shown of a job that failed.


def written_conclusion(logs: Path, name: str, at: int, text: str = "it ended") -> Path:
    path = logs / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def test_the_log_is_that_of_the_rank_that_ended_the_job(tmp_path: Path) -> None:
    cause = written_conclusion(tmp_path, "worker-1-1/epoch-5/rank-1.log", 10)
    victim = written_conclusion(tmp_path, "worker-0-1/epoch-5/rank-0.log", 20)
    written_conclusion(tmp_path, "worker-1-1/epoch-4/rank-1.log", 5)
    blamed = Incident("trainer-failed", "boom", 1, "n1", 5, 1.0, rank=1)
    assert log_to_blame(tmp_path, (blamed,)) == cause
    assert log_to_blame(tmp_path, ()) == victim


def test_where_nobody_is_blamed_or_said_a_word_it_is_the_newest(tmp_path: Path) -> None:
    newest = written_conclusion(tmp_path, "worker-0-1/epoch-5/rank-0.log", 20)
    written_conclusion(tmp_path, "worker-1-1/epoch-5/rank-1.log", 30, "")
    nobody = Incident("hang", "all stand", None, None, 5, 1.0)
    silent = Incident("trainer-failed", "killed", 1, "n1", 5, 1.0, rank=1)
    answered = Incident("trainer-failed", "boom", 0, "n0", 5, 1.0, rank=0, first_step_seconds=2.0)
    for incidents in ((), (nobody,), (silent,), (answered,)):
        assert log_to_blame(tmp_path, incidents) == newest
    written_conclusion(tmp_path, "worker-0-1/agent.log", 40)
    agent = written_conclusion(tmp_path, "worker-1-2/agent.log", 10)
    assert log_to_blame(tmp_path, (silent,)) == agent
    assert log_to_blame(tmp_path / "nothing", (silent,)) is None
