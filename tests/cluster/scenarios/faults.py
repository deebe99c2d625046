"""Each way to hurt a job that trains, as tests, bench and demo use them: done at once, with the moment it was done."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from cluster.scenarios.installed import Installed
from cluster.scenarios.job import Job
from cluster.scenarios.measuring import Struck, strike


def kill_trainer(job: Job, installed: Installed, index: int = 1) -> Struck:
    """SIGKILL to one trainer; its agent lives."""
    return _signalled(job, installed, index, "KILL")


def stop_trainer(job: Job, installed: Installed, index: int = 1) -> Struck:
    """SIGSTOP to one trainer: it hangs until somebody ends it."""
    return _signalled(job, installed, index, "STOP")


def _signalled(job: Job, installed: Installed, index: int, signal: str) -> Struck:
    pod = job.pod_of(index)["metadata"]["name"]
    struck = strike(job)
    command = f"date +%s.%N; kill -{signal} {_trainer(job, index)}"
    said = installed.kubectl("exec", pod, "--container=trainer", "--", "sh", "-c", command, namespace=job.space.name)
    return replace(struck, at=float(said.split()[0]))


def _trainer(job: Job, index: int) -> int:
    """Its process id in its container, as it wrote it down."""
    member = job.member(index)
    (path,) = job.asked.folder.glob(f"epoch-{job.epoch}-rank-*-worker-{member.index}-{member.attempt}-*.jsonl")
    first = path.read_text().partition("\n")[0]
    return int(json.loads(first)["pid"])


def delete_pod(job: Job, index: int = 1) -> Struck:
    """As `kubectl delete pod` does."""
    pod = job.pod_of(index)["metadata"]["name"]
    struck = strike(job)
    job.api.call("DELETE", f"/api/v1/namespaces/{job.space.name}/pods/{pod}")
    return struck


def on_node(job: Job, hurt: Callable[[str], None], node: str) -> Struck:
    """Any of the engine's verbs for nodes."""
    struck = strike(job)
    hurt(node)
    return struck


def victim(job: Job, installed: Installed) -> str:
    """A node that trains and where no operator leads: its loss is the job's alone."""
    leading = installed.leading_node()
    world = job.status.membership
    assert world is not None
    return next(member.node for member in reversed(world.members) if member.node != leading)


def kill_all_copies(job: Job, installed: Installed) -> Struck:
    """Every Redis and every agent with its staging memory, at once: only the persistent tier is left."""
    containers = [(job.space.name, pod["metadata"]["name"], "trainer") for pod in job.pods()]
    for pod in installed.pods("memory-tier"):
        servers = [one["name"] for one in pod["spec"]["containers"] if one["name"] != "companion"]
        containers += [(pod["metadata"]["namespace"], pod["metadata"]["name"], server) for server in servers]
    struck = strike(job)
    at_once(lambda c=one: installed.engine.kill_container(*c) for one in containers)  # type: ignore[misc]
    return struck


def at_once(calls: Iterable[Callable[[], None]]) -> None:
    """Side by side; the first error of any is raised."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # raised again below, in the thread that may fail the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
