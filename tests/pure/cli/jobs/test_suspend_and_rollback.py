"""Tests of `cli.jobs.suspend_and_rollback`."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from typing import Any

import pytest
import yaml

from support.builders import running
from support.fakes.fake_api import FakeApi
from support.stored import stored_document, written
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import RestoreFrom
from surefoot_operator.cli.cluster_access import ClusterConnection, ClusterRequestFailed
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.jobs import suspend_and_rollback
from surefoot_operator.cli.jobs.read_jobs import StoredJob, stored_job
from surefoot_operator.cli.jobs.suspend_and_rollback import describe_state, forked_manifest, suspend_patch
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

# ---- suspend job -----------------------------------------------------------------------------------------------------
# Suspend and resume change one field, under a test of the job's uid, and say what became of it.

PATH = "/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs/gpt"


def job(phase: str = "Running", **spec: Any) -> StoredJob:
    document = stored_document({"phase": phase, "schemaVersion": 1, "message": "epoch 1 runs"})
    return stored_job({**document, "spec": {**document["spec"], **spec}})


@pytest.mark.parametrize(
    ("stored", "suspend", "value"),
    [(job(), True, True), (job(suspend=True), True, None), (job(suspend=True), False, False), (job(), False, None)],
)
def test_one_field_is_changed_and_only_if_it_differs(stored: StoredJob, suspend: bool, value: bool | None) -> None:
    assert suspend_patch(stored, suspend) == (
        []
        if value is None
        else [
            {"op": "test", "path": "/metadata/uid", "value": "uid-1"},
            {"op": "add", "path": "/spec/suspend", "value": value},
        ]
    )


@pytest.mark.parametrize(
    ("stored", "said"),
    [(job("Complete"), "is Complete"), (job(managedBy="kueue.x-k8s.io/multikueue"), "managed by")],
)
def test_what_would_do_nothing_is_refused(stored: StoredJob, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        suspend_patch(stored, True)


@pytest.mark.parametrize(
    ("phase", "suspend", "waited", "said"),
    [
        ("Running", True, 0, "will be suspended: it saves"),
        ("Suspended", True, 0, "is Suspended: epoch 1 runs"),
        ("Resizing", True, 5, "is Resizing after 5 s"),
        ("Suspended", False, 0, "will continue"),
        ("Running", False, 5, "is Running: epoch 1 runs"),
    ],
)
def test_how_far_it_is_in_words(phase: str, suspend: bool, waited: float, said: str) -> None:
    assert said in describe_state(job(phase), suspend, waited)


class Switched:
    """Both commands against an API server in memory, whose operator is played by `follows`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, seen = FakeApi(), running()
        self.server.keep(PATH, written(seen.status, seen))
        cluster = ClusterConnection(self.server.api, "team", "https://cluster:6443")
        monkeypatch.setattr(suspend_and_rollback, "on_cluster", lambda given, ask: asyncio.run(ask(cluster)))
        monkeypatch.setattr(suspend_and_rollback, "_POLL_SECONDS", 0.0)

    def follows(self, phase: str) -> None:
        """The operator brings the job there as soon as it is looked at after the patch."""

        def before(verb: str, path: str) -> None:
            if verb == "GET" and any(verb == "PATCH" for verb, _ in self.server.asked):
                seen = running()
                document = written(replace(seen.status, phase=phase), seen)  # type: ignore[arg-type]
                self.server.objects[PATH] |= {"status": document["status"]}

        self.server.before = before

    def run(self, command: str, wait: float = 0.0) -> int:
        return suspend_and_rollback.run_suspend(argparse.Namespace(command=command, job="gpt", wait=wait))


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Switched:
    return Switched(monkeypatch)


def test_suspend_and_resume_set_the_field(switched: Switched, capsys: pytest.CaptureFixture[str]) -> None:
    assert switched.run("suspend") == 0
    assert switched.server.objects[PATH]["spec"]["suspend"] is True
    assert "deletes its workers" in capsys.readouterr().out
    assert switched.run("resume") == 0
    assert switched.server.objects[PATH]["spec"]["suspend"] is False


def test_waiting_ends_when_it_is_so(switched: Switched, capsys: pytest.CaptureFixture[str]) -> None:
    switched.follows("Suspended")
    assert switched.run("suspend", wait=60) == 0
    assert "team/gpt is Suspended" in capsys.readouterr().out


def test_waiting_in_vain_is_a_failure(switched: Switched, capsys: pytest.CaptureFixture[str]) -> None:
    switched.follows("Resizing")
    assert switched.run("suspend", wait=0.05) == 1
    assert "is Resizing after 0.05 s" in capsys.readouterr().out


def test_who_may_not_change_jobs_is_told_the_verb(switched: Switched) -> None:
    def before(verb: str, path: str) -> None:
        if verb == "PATCH":
            raise ApiError(f"{verb} {path}", 403, "Forbidden", "no")

    switched.server.before = before
    with pytest.raises(ClusterRequestFailed, match="you may not patch"):
        switched.run("suspend")


# ---- rollback job ----------------------------------------------------------------------------------------------------
# Going back is a new job, made of the old one: what it keeps, and when there is none.

TIER = {"persistent": {"uri": "s3://bucket/jobs"}, "memory": {"keep": 3}}


def stored(checkpoint: dict[str, Any] | None = None, step: int = 100, **metadata: Any) -> StoredJob:
    document = stored_document({"phase": "Running", "step": step, "schemaVersion": 1}, **metadata)
    document["spec"] = {**document["spec"], "suspend": True, "checkpoint": TIER if checkpoint is None else checkpoint}
    return stored_job(document)


def test_the_new_job_goes_on_from_the_step_and_keeps_the_rest() -> None:
    kept = {"team": "a", "kubectl.kubernetes.io/last-applied-configuration": "{}", "surefoot.dev/accept-loss": "3"}
    made = forked_manifest(stored(labels={"x": "y"}, annotations=kept, resourceVersion="9"), 40)
    job = parse_job(yaml.safe_load(yaml.safe_dump(made)))
    assert (job.name, job.spec.suspend, job.spec.replicas) == ("gpt-from-40", False, 3)
    assert job.spec.checkpoint.restore_from == RestoreFrom(uid="uid-1", step=40)
    assert job.spec.checkpoint.memory.keep == 3
    assert made["metadata"] == {
        "name": "gpt-from-40",
        "namespace": "team",
        "labels": {"x": "y"},
        "annotations": {"team": "a"},
    }
    assert "status" not in made


def test_the_old_document_is_left_as_it_was() -> None:
    found = stored()
    before = repr(found.document)
    forked_manifest(found, 40)
    assert repr(found.document) == before


@pytest.mark.parametrize(
    ("name", "step", "made"),
    [("gpt-from-40", 20, "gpt-from-20"), ("a" * 52, 1234567, "a" * 39 + "-from-1234567")],
)
def test_names_stay_within_their_bound(name: str, step: int, made: str) -> None:
    assert forked_manifest(stored(step=step, name=name), step)["metadata"]["name"] == made


@pytest.mark.parametrize(
    ("found", "step", "name", "said"),
    [
        (stored({}), 40, None, "has no spec.checkpoint.persistent"),
        (stored(), 0, None, "--step 0 is not allowed"),
        (stored(), 101, None, "has finished step 100"),
        (stored(), 40, "Upper", "the new job would be refused"),
        (stored_job({"metadata": {"name": "x"}}), 40, None, "its spec cannot be read"),
    ],
)
def test_what_cannot_be_gone_back_to_is_refused(found: StoredJob, step: int, name: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        forked_manifest(found, step, name)
