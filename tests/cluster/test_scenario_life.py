"""What a user does to a job: suspend, resume, scale, delete, let it expire, ask for what cannot be."""

from __future__ import annotations

import json
from fnmatch import fnmatch

import pytest

from cluster import layout
from cluster.scenarios import tiers
from cluster.scenarios.job import Job
from cluster.scenarios.measuring import strike
from cluster.scenarios.rows import Row, write
from cluster.scenarios.shapes import ELASTIC, FIXED, document
from cluster.scenarios.stage import Stage
from surefoot_operator.api.spec import FINALIZER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TTL_SECONDS = 5


def test_a_suspended_job_gives_everything_back_and_resumes_where_it_stood(stage: Stage) -> None:
    job = stage.training("asked", ELASTIC)
    struck = strike(job)
    job.change({"suspend": True})
    job.wait("it is suspended", lambda: job.status.phase == "Suspended" and not job.pods())
    suspended = job.last_heard() - struck.at
    job.ledger.look()
    stood = job.ledger.finished(struck.epoch, struck.world)
    job.change({"suspend": False})
    row = Row("suspended and resumed", worlds=[3, 0, 3], whole_again_seconds=stage.whole_again(job, struck))
    began = job.lineage()[-1].parent
    assert began is not None
    assert began.step == stood, job.said()
    row.steps_lost = stood - began.step
    row.notes["suspended after seconds"] = round(suspended, 2)
    stage.check(job, row)


def test_a_job_is_scaled_down_and_up_without_losing_a_step(stage: Stage) -> None:
    job = stage.training("asked", ELASTIC)
    struck = strike(job)
    stage.kubectl("scale", f"tj/{job.asked.name}", "--replicas=2")
    job.wait_training(2)
    smaller = job.epoch
    stage.kubectl("scale", f"tj/{job.asked.name}", "--replicas=3")
    row = Row("scaled down and up", worlds=[3, 2, 3], whole_again_seconds=stage.whole_again(job, struck))
    planned = [i for i in job.incidents() if i.generation >= struck.epoch]
    assert [i.kind for i in planned] == ["planned", "planned"], planned
    row.steps_lost = sum(i.steps_lost or 0 for i in planned)
    assert row.steps_lost == 0, planned
    assert smaller < job.epoch
    stage.check(job, row)


def test_a_deleted_job_leaves_nothing_in_memory_and_its_checkpoints_in_s3(stage: Stage) -> None:
    job = stage.training("asked", ELASTIC)
    job.wait("a checkpoint is in S3", lambda: job.status.last_uploaded is not None)
    found = stage.compared(job, job.step)
    job.delete()
    job.space.wait("the job is gone", lambda: job.asked.name not in job.space.jobs.items, 60.0)
    job.space.wait("its pods are gone", lambda: not job.pods(), 60.0)
    job.space.wait("no holder has anything of it", lambda: not any(tiers.keys(stage.installed, job.uid).values()), 60.0)
    kept = tiers.stored(stage.installed, job.uid)
    assert any(fnmatch(name, "*/rank-*.json") for name in kept), f"no manifest: {kept}"
    stage.assert_equal(found, job)
    write(Row("deleted", result=found, notes={"objects kept in S3": len(kept)}))
    stage.remove(job)


@pytest.mark.nightly
def test_a_deleted_job_takes_its_checkpoints_along_where_it_says_so(stage: Stage) -> None:
    job = stage.training("asked", ELASTIC)
    job.wait("a checkpoint is in S3", lambda: job.status.last_uploaded is not None)
    job.change({"checkpoint": {"persistent": {"onJobDeletion": "Delete"}}})
    jobs = job.space.jobs.items
    job.wait("it is held", lambda: FINALIZER in jobs[job.asked.name]["metadata"].get("finalizers", ()))
    assert tiers.stored(stage.installed, job.uid)
    job.delete()
    job.space.wait("the job is gone", lambda: job.asked.name not in jobs, 120.0)
    assert tiers.stored(stage.installed, job.uid) == []
    job.space.wait("its pods are gone", lambda: not job.pods(), 60.0)
    said = stage.kubectl("get", "events", "--field-selector", f"involvedObject.name={job.asked.name}")
    assert "PersistentDataDeleted" in said
    write(Row("deleted with its checkpoints"))
    stage.remove(job)


@pytest.mark.nightly
def test_a_complete_job_expires(stage: Stage) -> None:
    job = stage.job("brief", FIXED, pace=0.01, spec={"runPolicy": {"ttlSecondsAfterFinished": TTL_SECONDS}})
    job.wait("it trains", lambda: job.trains(2), 120.0)
    job.finish()
    ended = job.last_heard()
    found = stage.compared(job)
    stage.assert_equal(found, job)
    job.space.wait("the job is gone", lambda: job.asked.name not in job.space.jobs.items, TTL_SECONDS + 60.0)
    gone = job.last_heard() - ended
    assert gone >= TTL_SECONDS - 1
    job.space.wait("its pods are gone", lambda: not job.pods(), 60.0)
    write(Row("expired", result=found, notes={"ttl seconds": TTL_SECONDS, "gone after seconds": round(gone, 2)}))
    stage.remove(job)


REFUSED = {
    "more workers than the world may have": (
        {"replicas": 5},
        "replicas must be a number that elasticPolicy allows",
    ),
    "a misspelt field": ({"replica": 3}, 'unknown field "spec.replica"'),
    "a restart policy that would race the operator": (
        {"template": {"spec": {"restartPolicy": "Always", "containers": [{"name": "trainer", "command": ["true"]}]}}},
        "restartPolicy must be Never",
    ),
}


def test_kubectl_says_what_is_wrong_with_an_invalid_job(stage: Stage) -> None:
    said = {}
    for title, (change, words) in REFUSED.items():
        job = Job(stage.space, stage.asked("invalid", ELASTIC), stage.installed.facts)
        body = document(job.asked, stage.installed.facts)
        body["spec"].update(change)
        file = layout.RUNS / f"{job.asked.name}.json"
        file.write_text(json.dumps(body))
        said[title] = stage.kubectl("create", "-f", str(file)).strip().replace(str(file), "FILE")
        file.unlink()
        assert words in said[title]
        assert job.asked.name not in stage.space.jobs.items
    write(Row("invalid jobs refused", notes=said))
