"""Every command that asks a cluster, asked of a job that lost a trainer: by its owner, and by people with fewer rights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.scenarios import faults
from cluster.scenarios.command_line import Person, person_with
from cluster.scenarios.job import Job
from cluster.scenarios.measuring import strike
from cluster.scenarios.rows import Row
from cluster.scenarios.shapes import BUCKET_PREFIX, ELASTIC, FIXED
from cluster.scenarios.stage import Stage
from support.servers import s3_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def owner(stage: Stage) -> Person:
    return Person(stage.installed.facts.kubeconfig, stage.space.name)


@pytest.fixture(scope="module")
def job(stage: Stage) -> Job:
    """It says how many steps it makes, and one of its trainers was killed."""
    found = stage.training("worn", ELASTIC)
    found.api.merge(found.path, {"metadata": {"annotations": {"surefoot.dev/total-steps": str(ELASTIC.steps)}}})
    struck = faults.kill_trainer(found, stage.installed).wait()
    found.wait_training(3)
    found.wait("its checkpoint is protected", found.is_protected)
    stage.check(found, struck.row("trainer killed, command line"))
    return found


def test_jobs_are_listed_in_each_form(owner: Person, job: Job) -> None:
    name = job.asked.name
    row = next(line for line in owner.gets("list").splitlines() if line.startswith(name))
    assert "Running" in row
    assert "3/3" in row
    assert f"/{ELASTIC.steps} (" in row
    wide = owner.gets("list", "-o", "wide")
    assert "EXPOSED" in wide.splitlines()[0]
    assert owner.namespace in owner.gets("list", "-A")
    (listed,) = [one for one in owner.types("list", "-o", "json").parsed if one["name"] == name]
    assert (listed["state"], listed["world_size"]) == ("Running", 3)
    assert f"name: {name}" in owner.gets("list", "-o", "yaml")


def test_one_job_is_told_with_its_incident(stage: Stage, owner: Person, job: Job) -> None:
    name = job.asked.name
    told = owner.gets("describe", name)
    assert "trainer-failed" in told
    assert " samples/s" in told
    lines = owner.gets("timeline", name)
    assert "first new step" in lines
    assert "! incident: trainer-failed" in owner.gets("timeline", name, "--incidents")
    assert "Node lost:" in told
    assert "used up" not in told
    nodes = owner.gets("nodes", name, "--all")
    assert all(node in nodes for node in stage.installed.facts.node_names)
    assert owner.types("describe", name, "-o", "json").parsed["node_loss"]["restored"]


def test_logs_begin_with_whom_the_failure_blames(owner: Person, job: Job) -> None:
    name = job.asked.name
    lines = owner.gets("logs", name, "--tail", "2").splitlines()
    assert "blamed" in lines[0], lines
    assert "continues from step" in owner.gets("logs", name, "--rank", "0", "--tail", "500")
    assert owner.gets("logs", name, "--worker", "0", "--tail", "5").startswith("== worker 0 (attempt ")


def test_the_report_is_one_page(owner: Person, job: Job, tmp_path: Path) -> None:
    page = tmp_path / "job.html"
    owner.gets("report", job.asked.name, "--to", str(page))
    text = page.read_text(encoding="utf-8")
    assert "trainer-failed" in text
    assert "passes over the data" in text
    assert "<script" not in text


def test_the_doctor_finds_a_cluster_whole_and_each_way_open(owner: Person, job: Job) -> None:
    said = owner.types("doctor", "--network")
    assert said.code == 0, said
    states = {line.split(maxsplit=1)[0] for line in said.out.splitlines() if line[:1].strip()}
    assert "fault" not in states, said.out
    for ways in ("network to the operator", "network to memory servers", "network between workers"):
        (line,) = [one for one in said.out.splitlines() if ways in one]
        assert line.startswith("ok"), said.out


def test_who_may_read_alone_is_told_what_is_kept_from_them(
    stage: Stage, owner: Person, job: Job, tmp_path: Path
) -> None:
    reader = person_with(stage.installed.api, owner.kubeconfig, tmp_path, owner.namespace, "view")
    name = job.asked.name
    assert name in reader.gets("list")
    assert "trainer-failed" in reader.gets("describe", name)
    assert reader.gets("logs", name, "--tail", "1")
    assert "you may not list nodes" in reader.gets("nodes", name)
    refused = reader.types("suspend", name)
    assert (refused.code, refused.out) == (1, "")
    assert "you may not patch trainingjobs" in refused.err
    assert "403" in refused.err
    everywhere = reader.types("list", "-A")
    assert everywhere.code == 1
    assert "you may not list trainingjobs" in everywhere.err


def test_a_job_that_is_not_there_and_a_cluster_that_is_none(owner: Person, job: Job, tmp_path: Path) -> None:
    missing = owner.types("describe", "nobody")
    assert missing.code in (1, 2)
    assert "nobody" in missing.err
    away = Person(tmp_path / "no-such.yaml", owner.namespace).types("list")
    assert away.code == 2
    assert "no cluster is configured" in away.err


def test_who_may_edit_suspends_and_resumes_and_no_step_is_lost(
    stage: Stage, owner: Person, job: Job, tmp_path: Path
) -> None:
    editor = person_with(stage.installed.api, owner.kubeconfig, tmp_path, owner.namespace, "edit")
    name, struck = job.asked.name, strike(job)
    assert "is Suspended" in editor.gets("suspend", name, "--wait", "60")
    assert "Suspended" in next(line for line in editor.gets("list").splitlines() if line.startswith(name))
    assert "suspended" in editor.gets("describe", name)
    assert "is Running" in editor.gets("resume", name, "--wait", "60")
    job.wait_training(3)
    stage.check(job, Row("suspended and resumed by command", steps_lost=0, worlds=[struck.world, job.world]))


def test_who_may_edit_goes_back_within_the_job_and_makes_the_same_steps_again(
    stage: Stage, owner: Person, job: Job, tmp_path: Path
) -> None:
    editor = person_with(stage.installed.api, owner.kubeconfig, tmp_path, owner.namespace, "edit")
    job.wait("a checkpoint is in the persistent tier", lambda: job.status.last_uploaded is not None)
    floor, struck = job.status.last_uploaded, strike(job)
    assert floor is not None
    told = editor.gets("rollback", job.asked.name, "--to", str(floor.step), "--keep-data")
    assert f"go back to step {floor.step}" in told
    row = struck.wait().row("rolled back by command, the same data again")
    assert (row.kind, row.worlds[:2]) == ("numerics", [3, 3])
    entry = next(entry for entry in job.lineage() if entry.generation > struck.epoch)
    assert entry.parent == floor
    assert "RolledBack" in owner.gets("timeline", job.asked.name)
    stage.check(job, row)
    beyond = editor.types("rollback", job.asked.name, "--to", str(ELASTIC.steps))
    assert beyond.code == 2
    assert "is not allowed" in beyond.err


@pytest.mark.nightly
def test_followed_suspended_rolled_back_and_followed_to_its_end(
    stage: Stage, owner: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspending alone is shorter."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET_KEY)
    old = stage.training("followed", FIXED)
    old.wait("a checkpoint is in the persistent tier", lambda: old.status.last_uploaded is not None)
    owner.gets("suspend", old.asked.name, "--wait", "60")
    floor = old.status.last_uploaded
    assert floor is not None
    tier = (f"s3://{s3_server.BUCKET}/{BUCKET_PREFIX}", "--endpoint", stage.installed.facts.s3_endpoint)
    stored = ("--job", old.uid, "--region", "us-east-1")
    assert str(floor.step) in checkpoints("list", *tier, *stored)
    assert str(floor.step) in checkpoints("verify", *tier, *stored, "--step", str(floor.step))
    written = owner.gets("fork", old.asked.name, "--step", str(floor.step), "--name", "rolled-back")
    assert "created" in stage.kubectl("create", "-f", "-", given=written)
    follow = [str(Path(sys.executable).with_name("surefoot")), "logs", "rolled-back", "--follow", "--tail", "2000"]
    follow += ["--kubeconfig", str(owner.kubeconfig), "--namespace", owner.namespace]
    jobs = stage.space.jobs.items
    stage.space.wait(
        "the new job trains", lambda: jobs.get("rolled-back", {}).get("status", {}).get("phase") == "Running", 120.0
    )
    old.end_soon()  # the new job looks into the same folder
    done = subprocess.run(follow, capture_output=True, text=True, check=False, timeout=120.0)
    stage.kubectl("delete", "trainingjob", "rolled-back")
    assert done.returncode == 0, done
    assert done.stdout.startswith("== rank 0, worker "), done
    assert f"continues from step {floor.step}" in done.stdout, done


def checkpoints(action: str, *words: str) -> str:
    """`surefoot checkpoints`, in a process of its own: it reads with torch."""
    program = [str(Path(sys.executable).with_name("surefoot")), "checkpoints", action, *words]
    return subprocess.run(program, capture_output=True, text=True, check=True, timeout=120.0).stdout
