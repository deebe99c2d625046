"""Pods that cannot run, three jobs together: each says why, in the words of the server or the kubelet."""

from __future__ import annotations

import pytest

from cluster.scenarios.job import Job
from cluster.scenarios.shapes import FIXED
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

UNPULLABLE = {"name": "trainer", "image": "registry.invalid/my/training:1", "command": ["true"]}


def scheduled(job: Job) -> tuple[str, str]:
    return next(((c.reason, c.message) for c in job.status.conditions if c.type == "PodsScheduled"), ("", ""))


def test_a_job_whose_pods_cannot_run_says_why(stage: Stage) -> None:
    refused = stage.job("refused", FIXED, pod={"serviceAccountName": "nobody"})
    unpulled = stage.job("unpulled", FIXED, pod={"containers": [UNPULLABLE]})
    misspelt = stage.job("misspelt", FIXED, pod={"tolerationz": []})
    refused.wait("the refusal is on the job", lambda: scheduled(refused)[0] == "CreationRejected")
    assert 'service account scenarios/nobody: serviceaccount "nobody" not found' in scheduled(refused)[1]
    refused.wait("it is an event", lambda: refused.events("WorkerCreationFailed"))
    unpulled.wait("the kubelet's words are on the job", lambda: scheduled(unpulled)[0] == "ImagePullBackOff")
    assert "registry.invalid/my/training:1" in scheduled(unpulled)[1]
    unpulled.wait("they are an event", lambda: unpulled.events("WorkerStartFailed"))
    unpulled.wait("they are its message", lambda: "registry.invalid" in unpulled.status.message)
    misspelt.wait("it has failed", lambda: misspelt.status.phase == "Failed")
    assert 'unknown field "spec.tolerationz"' in misspelt.status.message
    assert misspelt.pods() == []
    for job in (refused, unpulled, misspelt):
        stage.remove(job)
