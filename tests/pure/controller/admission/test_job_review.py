"""Which jobs are let in: what the operator could not run is refused with its own sentence, what is as it was never."""

from __future__ import annotations

from typing import Any

from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.controller.admission_webhooks import Review, Verdict, judged_job

SPEC: dict[str, Any] = {
    "replicas": 2,
    "template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["python", "train.py"]}]}},
}


def job(name: str = "gpt", metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team"} | (metadata or {}),
        "spec": SPEC | spec,
    }


def said(found: Verdict | TrainingJob) -> Verdict:
    return Verdict(True) if isinstance(found, TrainingJob) else found


def created(body: dict[str, Any]) -> Verdict:
    return said(judged_job(Review("u", "CREATE", "team", str(body["metadata"].get("name", "")), body)))


def updated(old: dict[str, Any], new: dict[str, Any]) -> Verdict:
    return said(judged_job(Review("u", "UPDATE", "team", "gpt", new, old)))


def test_a_job_that_can_be_run_is_let_in() -> None:
    assert created(job()) == Verdict(True)


def test_one_that_cannot_is_refused_with_the_sentence_of_its_condition() -> None:
    verdict = created(job(elasticPolicy={"minReplicas": 3, "maxReplicas": 2}))
    assert (verdict.allowed, verdict.code) == (False, 422)
    assert verdict.message.startswith("the job cannot be run as it is written: spec.elasticPolicy")


def test_what_leaves_the_spec_as_it_is_passes_whatever_the_spec_says() -> None:
    bad = job(replicas=0)
    assert not created(bad).allowed
    assert updated(bad, bad | {"metadata": {"name": "gpt", "finalizers": []}}).allowed
    assert not updated(job(), bad).allowed
    assert updated(bad, job()).allowed


def test_a_job_that_is_being_deleted_is_held_up_by_nothing() -> None:
    leaving = job(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}, replicas=0)
    assert updated(job(), leaving).allowed


def test_a_job_of_another_manager_is_not_judged() -> None:
    assert created(job(managedBy="kueue.x-k8s.io/multikueue", replicas=0)).allowed


def test_a_name_that_the_server_will_make_is_no_reason_to_refuse() -> None:
    body = job(metadata={"generateName": "gpt-"})
    del body["metadata"]["name"]
    assert created(body).allowed
