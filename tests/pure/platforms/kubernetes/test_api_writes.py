"""What pods of the API mean, and how a status becomes a patch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surefoot.protocol.identities import Checkpoint, MemoryServerId
from surefoot_operator.api.status import Condition, JobStatus, Membership, precondition_of
from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.errors import PlatformError
from surefoot_operator.memory import MemoryTierCredentials
from surefoot_operator.platforms.kubernetes import api_objects, api_writes
from surefoot_operator.platforms.kubernetes.views import observations

JOB: dict[str, Any] = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt", "uid": "u"},
    "spec": {"replicas": 2, "template": {"spec": {"containers": [{"name": "trainer", "command": ["a"]}]}}},
}


def pod(phase: str, *containers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    labels = {"surefoot.dev/worker-index": "1", "surefoot.dev/attempt": "3"}
    metadata = {"name": "p", "uid": "x", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    found = {"phase": phase, "containerStatuses": list(containers), **fields}
    return {"metadata": metadata, "spec": {"nodeName": "n1", "containers": []}, "status": found}


def container(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "containerID": "containerd://1", "state": state}


@pytest.mark.parametrize(
    ("found", "phase", "code"),
    [
        (pod("Pending"), "Pending", None),
        (pod("Running", container("trainer", running={})), "Running", None),
        (pod("Running", container("trainer", waiting={}), container("side", running={})), "Pending", None),
        (
            pod("Running", container("trainer", terminated={"exitCode": 137}), container("side", running={})),
            "Failed",
            -9,
        ),
        (pod("Succeeded", container("trainer", terminated={"exitCode": 0})), "Succeeded", 0),
        (pod("Failed", container("trainer", terminated={"exitCode": 42})), "Failed", 42),
        (pod("Failed", reason="Evicted"), "Failed", None),
        (pod("Strange"), "Unknown", None),
    ],
)
def test_the_trainers_container_says_how_a_worker_is(found: dict[str, Any], phase: str, code: int | None) -> None:
    worker = observations.observe_worker(found)
    assert (worker.index, worker.attempt, worker.node, worker.phase) == (1, 3, "n1", phase)
    assert worker.exit_code == code
    assert worker.sidecar_running == (phase == "Failed" and found["status"]["phase"] == "Running")


def test_a_worker_that_waits_says_for_what() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    assert observations.observe_worker(pod("Pending", container("trainer", waiting=waiting))).message.endswith(
        "no such image"
    )
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}
    assert (
        observations.observe_worker(pod("Failed", reason="x", conditions=[evicted])).message
        == "EvictionByEvictionAPI: drained"
    )
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    assert observations.observe_worker(pod("Pending", conditions=[condition])).message == "0/3 nodes are available"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (pod("Pending", container("trainer", waiting={"reason": "ImagePullBackOff", "message": "no"})), "ImagePull"),
        (pod("Pending", container("trainer", waiting={"reason": "InvalidImageName"})), "InvalidImageName"),
        (pod("Pending", container("trainer", waiting={"reason": "CreateContainerConfigError"})), "CreateContainer"),
        (
            pod("Pending", container("side", waiting={"reason": "ErrImagePull"}), container("trainer", waiting={})),
            "Err",
        ),
        (
            pod(
                "Failed",
                container("trainer", waiting={"reason": "PodInitializing"}),
                initContainerStatuses=[container("fetch", terminated={"exitCode": 1, "message": "no\nsuch key"})],
            ),
            "init container fetch failed with exit code 1: such key",
        ),
        (pod("Pending", container("trainer", waiting={"reason": "ContainerCreating"})), ""),
        (pod("Pending", container("trainer", waiting={"reason": "PodInitializing"})), ""),
        (pod("Failed", reason="Evicted"), ""),
        (pod("Failed", container("trainer", terminated={"exitCode": 42})), ""),
        (pod("Running", container("trainer", running={})), ""),
    ],
)
def test_why_a_worker_cannot_be_started_is_its_kubelets_word(found: dict[str, Any], why: str) -> None:
    assert observations.observe_worker(found).start_blocker.startswith(why)
    assert bool(observations.observe_worker(found).start_blocker) == bool(why)


def test_foreign_labels_are_an_error_and_no_worker() -> None:
    found = pod("Running")
    found["metadata"]["labels"]["surefoot.dev/attempt"] = "x"
    with pytest.raises(PlatformError, match="delete the pod"):
        observations.observe_worker(found)


def test_a_holder_is_unknown_until_it_began_and_another_with_each_container() -> None:
    assert observations.observe_servers(pod("Pending"), False, "z", MemoryTierCredentials("a", "b")) == ()
    running = pod("Running", container("redis", running={}), podIP="10.0.0.1")
    (place,) = observations.observe_servers(running, False, "z", MemoryTierCredentials("a", "b"))
    assert (place.node, place.host, place.port, place.process) == ("n1", "10.0.0.1", 6379, "x/containerd://1")
    assert place.running
    for found, gone in ((running, True), (pod("Running", container("redis", waiting={}), podIP="10.0.0.1"), False)):
        (place,) = observations.observe_servers(found, gone, "z", MemoryTierCredentials("a", "b"))
        assert not place.running


def test_the_holder_is_the_container_with_the_port_and_not_its_companion() -> None:
    beside = {"name": "companion", "containerID": "containerd://2", "state": {"waiting": {}}}
    found = pod("Running", beside, container("server", running={}), podIP="10.0.0.1")
    ports = [{"name": "metrics", "containerPort": 9465}], [{"name": "redis", "containerPort": 7000}]
    found["spec"]["containers"] = [
        {"name": "companion", "ports": ports[0]},
        {"name": "server", "ports": ports[1]},
    ]
    (place,) = observations.observe_servers(found, False, "z", MemoryTierCredentials("a", "b"))
    assert (place.process, place.port, place.running) == ("x/containerd://1", 7000, True)
    assert place.may_be_prefaulting
    found["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    (again,) = observations.observe_servers(found, False, "z", MemoryTierCredentials("a", "b"))
    assert again == replace(place, may_be_prefaulting=False)


def test_each_server_of_a_pod_is_a_holder_of_its_own() -> None:
    found = pod(
        "Running",
        container("redis", running={}),
        {"name": "redis-1", "containerID": "containerd://7", "state": {"terminated": {}}},
        {"name": "redis-2", "state": {"waiting": {}}},
        container("companion", running={}),
        podIP="10.0.0.1",
    )
    names = ("redis-2", "redis", "redis-1", "companion")
    ports = {"redis": 6379, "redis-1": 6380, "redis-2": 6381, "companion": 9465}
    found["spec"]["containers"] = [
        {"name": n, "ports": [{"name": "metrics" if n == "companion" else n, "containerPort": ports[n]}]} for n in names
    ]
    assert observations.count_servers(found) == 3
    seen = observations.observe_servers(found, False, "z", MemoryTierCredentials("a", "b"))
    assert [(p.server_index, p.port, p.process, p.running, p.servers_on_node) for p in seen] == [
        (0, 6379, "x/containerd://1", True, 3),
        (1, 6380, "x/containerd://7", False, 3),
    ], "one that has no container yet is unknown"
    assert {p.server_id for p in seen} == {MemoryServerId("n1", 0), MemoryServerId("n1", 1)}


def test_a_patch_tests_the_status_that_it_stands_on() -> None:
    stored: dict[str, Any] = {"metadata": {"uid": "u"}}
    assert api_writes.read_precondition(stored) == precondition_of(JobStatus())
    paths = [(o["op"], o["path"]) for o in api_writes.build_status_patch(stored, {}, precondition_of(JobStatus()))]
    assert paths == [("test", "/metadata/uid"), ("test", "/status"), ("add", "/status")]
    stored["status"] = {}
    tests = api_writes.build_status_patch(stored, {}, precondition_of(JobStatus()))[1:3]
    assert [(o["path"], o["value"]) for o in tests] == [("/status/serial", None), ("/status/membership", None)]
    new = JobStatus(serial=7, membership=Membership(3, "Claimed"))
    tests = api_writes.build_status_patch(stored, {}, precondition_of(new))[1:4]
    assert [o["value"] for o in tests] == [7, 3, "Claimed"]
    assert [o["path"] for o in tests] == ["/status/serial", "/status/membership/generation", "/status/membership/state"]
    stored["status"] = status_to_json(new)
    assert api_writes.read_precondition(stored) == precondition_of(new)


def test_a_status_that_is_not_there_is_written_only_by_who_has_seen_none() -> None:
    """Found on a cluster: a writer that expected a world had its test left out, and wrote."""
    nobody_wrote = {name: value for name, value in JOB.items() if name != "status"}
    expecting = precondition_of(JobStatus(membership=Membership(1, "Claimed")))
    tests = [o for o in api_writes.build_status_patch(nobody_wrote, {}, expecting) if o["op"] == "test"]
    assert ("/status/membership/generation", 1) in [(o["path"], o["value"]) for o in tests]


def test_the_age_of_a_checkpoint_is_that_of_its_first_showing() -> None:
    new = JobStatus(last_complete=Checkpoint(1, 5), conditions=(Condition("Running", "True", "a", "b", 60.0),))
    first = api_writes.add_printer_columns(new, (), JOB, 0.0)
    assert first["checkpointTime"] == "1970-01-01T00:00:00Z"
    assert first["conditions"][0]["lastTransitionTime"] == "1970-01-01T00:01:00.000000Z"
    assert (first["ready"], first["replicas"]) == ("0/2", 0)
    again = api_writes.add_printer_columns(new, (), {**JOB, "status": first}, 100.0)
    assert again["checkpointTime"] == first["checkpointTime"]
    newer = JobStatus(last_complete=Checkpoint(1, 6))
    assert (
        api_writes.add_printer_columns(newer, (), {**JOB, "status": first}, 100.0)["checkpointTime"]
        == "1970-01-01T00:01:40Z"
    )


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (
            {"exitCode": 1, "message": "Traceback\n  File\nModuleNotFoundError: no torch\n", "reason": "Error"},
            "ModuleNotFoundError: no torch",
        ),
        ({"exitCode": 137, "message": "step 41\nstep 42\n", "reason": "OOMKilled"}, "OOMKilled"),
        ({"exitCode": 2, "reason": "Error"}, "Error"),
    ],
)
def test_of_a_program_s_log_its_last_line_is_said_and_of_a_killed_one_why(ended: dict[str, Any], said: str) -> None:
    metadata = {
        "name": "p",
        "uid": "u",
        "labels": {api_objects.WORKER_INDEX_LABEL: "0", api_objects.ATTEMPT_LABEL: "1"},
    }
    status = {
        "phase": "Failed",
        "containerStatuses": [{"name": api_objects.TRAINER_CONTAINER, "state": {"terminated": ended}}],
    }
    found = observations.observe_worker({"metadata": metadata, "spec": {}, "status": status})
    assert (found.message, found.oom_killed) == (said, ended["reason"] == "OOMKilled")


@pytest.mark.parametrize("status", ["True", "False"])
def test_a_pod_may_be_said_to_end_before_its_deletion_is_seen(status: str) -> None:
    preempted = {"type": "DisruptionTarget", "status": status, "reason": "PreemptionByScheduler", "message": "x"}
    found = observations.observe_worker(pod("Running", conditions=[preempted]))
    assert (found.disruption_announced, found.deleting) == (status == "True", False)
