"""What many jobs cost the operator: cold start, memory and rest, with an API server in memory.

`python -m bench.many_jobs --jobs 1000 --nodes 1200 [--profile FILE] [--memory]`. The cache, the runners and the client are the
operator's own; one job's pods and status are made by it and copied for the others. Agents and holders are away.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubernetes.aio.client import ApiClient, Configuration

from bench.many_jobs_server import LONG_AGO, Object, serving
from surefoot.protocol.messages import HelloRejected
from surefoot_operator import metrics
from surefoot_operator.controller.cluster_operator import PROGRESS_INTERVAL_SECONDS, TAKEOVER_DELAY_SECONDS
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.controller.health_endpoints import LoopLag
from surefoot_operator.controller.job_runner import SharedResources
from surefoot_operator.controller.process_setup import configure_gc
from surefoot_operator.controller.shard_leadership import JobRunners
from surefoot_operator.controller.worker_environment import WORKER_METRICS_PORT, WorkerEnvironmentFactory
from surefoot_operator.coordinator.agent_server import AgentServer
from surefoot_operator.memory import MemoryServerPool, MemoryTierCredentials
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.pods import PodSettings
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.settings import CoordinatorSettings, OperatorSettings

SPACE = "fleet"
WORKERS = 10
ONE = "job-00000"
SECONDS = 300.0
_WAITS = f"0 workers are ready, too few for any allowed world of {WORKERS}"
"""What the status says half a minute after its pods came and no agent."""
_AUTHORITY = "-----BEGIN CERTIFICATE-----\n" + "x" * 800


class Operator:
    """What of the operator grows with jobs, pods and nodes."""

    def __init__(self, address: str) -> None:
        configuration: Any = Configuration()
        configuration.host = address
        self.api = Api(ApiClient(configuration))
        self.cache = ClusterCache(self.api)
        settings = OperatorSettings(
            coordinator=CoordinatorSettings(retry_unknown_jobs=True),
            progress_interval_seconds=PROGRESS_INTERVAL_SECONDS,
            progress_write_delay_seconds=TAKEOVER_DELAY_SECONDS,
        )
        telling = WorkerEnvironmentFactory(
            "wss://surefoot-coordinator.surefoot-system.svc:8443/v1/agents", 1.0, Secrets(b"root"), has_derived_token=False,
            coordinator_ca=lambda: _AUTHORITY, metrics_port=WORKER_METRICS_PORT,
        )  # fmt: skip
        self._server = AgentServer(settings.coordinator, _nobody)
        shared = SharedResources(
            self.cache,
            self._server,
            telling,
            PodSettings(),
            MemoryTierCredentials(),
            settings,
            MemoryServerPool(settings.memory),
        )
        self.runners = JobRunners(shared)
        self.lag = LoopLag()

    async def begin(self) -> None:
        """A replica that stands by."""
        self._lagging = asyncio.create_task(self.lag.run())
        await self._server.start()
        await self.cache.start()

    def reconciled(self) -> int:
        return sum(runner._reconciler.safety is not None for runner in self.runners._runners.values())

    async def end(self) -> None:
        await self.runners.close()
        await self.cache.close()
        await self._server.close()
        self._lagging.cancel()
        with suppress(asyncio.CancelledError):
            await self._lagging
        await self.api.close()


async def _nobody(_: Any) -> HelloRejected | None:
    return None


async def until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def asked(address: str, path: str) -> Any:
    with urllib.request.urlopen(address + path, timeout=SECONDS) as answer:
        return json.load(answer)


async def one_job(address: str) -> list[Object]:
    """Every object once the job's pods are there, and its status says so."""
    operator = Operator(address)
    await operator.begin()
    operator.runners.start()
    await until(lambda: len(operator.cache.workers.items) == WORKERS)
    await asyncio.sleep(2 * PROGRESS_INTERVAL_SECONDS + 1)  # progress is written so seldom
    await operator.end()
    found: list[Object] = asked(address, "/dump")
    return found


async def cold_start(address: str, jobs: int, rest_seconds: float, profiler: cProfile.Profile | None) -> Object:
    configure_gc()
    operator = Operator(address)
    began, cpu = time.monotonic(), time.process_time()
    await operator.begin()
    row: Object = {"listed_seconds": time.monotonic() - began, "listed_cpu": time.process_time() - cpu}
    row["listed_rss_mib"] = rss_mib()
    before = asked(address, "/calls")
    began, cpu = time.monotonic(), time.process_time()
    if profiler is not None:
        profiler.enable()
    operator.runners.start()
    row["begun_seconds"] = time.monotonic() - began
    await until(lambda: operator.reconciled() >= jobs)
    row["reconciled_seconds"], row["reconciled_cpu"] = time.monotonic() - began, time.process_time() - cpu
    if profiler is not None:
        profiler.disable()
    await asyncio.sleep(8.0)  # what is still written after it
    row["calls"] = {
        what: n - before.get(what, 0) for what, n in asked(address, "/calls").items() if n > before.get(what, 0)
    }
    began, cpu, rounds = time.monotonic(), time.process_time(), _rounds()
    await asyncio.sleep(rest_seconds)
    seconds = time.monotonic() - began
    row["rest_cores"], row["rest_rounds_per_second"] = (
        (time.process_time() - cpu) / seconds,
        (_rounds() - rounds) / seconds,
    )
    row["rest_calls"] = {what: n - before.get(what, 0) for what, n in asked(address, "/calls").items()}
    row["rss_mib"], row["worst_lag_seconds"] = rss_mib(), operator.lag.max_lag_seconds
    if tracemalloc.is_tracing():
        _tell_memory()
    gc.collect()
    row["objects"] = dict(Counter(type(o).__name__ for o in gc.get_objects()).most_common(25))
    await operator.end()
    return row


def _rounds() -> float:
    return next(s.value for s in next(iter(metrics.reconcile_seconds.collect())).samples if s.name.endswith("_count"))


def _tell_memory() -> None:
    gc.collect()
    found = tracemalloc.take_snapshot()
    for by, count in (("lineno", 40), ("filename", 15)):
        for one in found.statistics(by)[:count]:
            print(f"{one.size / 2**20:8.1f} MiB {one.count:9d} {one.traceback}", file=sys.stderr)


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def node(number: int) -> list[Object]:
    name = f"simulated-{number:04d}"
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "surefoot.test/simulated": "true"}
    room = {"cpu": "64", "memory": "1Ti", "pods": "110"}
    said = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}]
    said += [
        {"type": t, "status": "False", "reason": f"No{t}"} for t in ("MemoryPressure", "DiskPressure", "PIDPressure")
    ]
    stated = {"allocatable": room, "capacity": room, "conditions": said, "nodeInfo": {"kubeletVersion": "v1.34.0"}}
    lease = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": "2026-11-26T00:00:00.000000Z"}
    return [
        {"kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {"podCIDR": "10.0.0.0/24"}, "status": stated},
        {"kind": "Lease", "metadata": {"name": name, "namespace": "kube-node-lease"}, "spec": lease},
    ]  # fmt: skip


def job() -> Object:
    container = {"name": "trainer", "image": "registry.invalid/trainer:1", "command": ["true"]}
    spec = {
        "replicas": WORKERS,
        "runPolicy": {"schedulingDeadlineSeconds": 86400},
        "template": {"spec": {"nodeSelector": {"surefoot.test/simulated": "true"}, "containers": [container]}},
    }
    metadata = {"name": ONE, "namespace": SPACE, "uid": f"c2b1f1f4-{ONE}", "generation": 1}
    return {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


def copies(found: list[Object], jobs: int, nodes: int) -> list[Object]:
    """The one job and its pods so often, each with a name, uid and node of its own."""
    mine = [one for one in found if one["kind"] in ("TrainingJob", "Pod")]
    others = [one for one in found if one["kind"] not in ("TrainingJob", "Pod", "Event", "Secret", "Service")]
    texts, made = [json.dumps(one) for one in mine], list[Object]()
    for number in range(jobs):
        for place, text in enumerate(texts):
            one = json.loads(text.replace(ONE, f"job-{number:05d}"))
            if one["kind"] == "TrainingJob":
                one["status"] |= {"message": _WAITS, "startTime": LONG_AGO}
                one["status"]["membership"]["changedTime"] = one["status"]["timeSpent"]["sinceTime"] = LONG_AGO
                for condition in one["status"]["conditions"]:
                    condition["lastTransitionTime"] = LONG_AGO
            else:
                one["metadata"]["uid"] = f"{number:08x}-{place:04x}-4000-8000-4a5e8f0a9d11"
                one["spec"]["nodeName"] = f"simulated-{(number * WORKERS + place) % nodes:04d}"
            made.append(one)
    return [*others, *made]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.many_jobs", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=110)
    parser.add_argument("--rest", type=float, default=10.0, help="seconds")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--memory", action="store_true", help="where it was allocated")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.address:
        profiler = cProfile.Profile() if given.profile else None
        if given.memory:
            tracemalloc.start(1)
        print(json.dumps(asyncio.run(cold_start(given.address, given.jobs, given.rest, profiler))))
        if profiler is not None:
            profiler.dump_stats(given.profile)
        return 0
    around = [one for number in range(given.nodes) for one in node(number)]
    names = [f"simulated-{number:04d}" for number in range(given.nodes)]
    with serving([job(), *around], names) as address:
        found = asyncio.run(one_job(address))
    with serving(copies(found, given.jobs, given.nodes), names) as address:
        # in a process of its own: its memory is the operator's alone
        command = [sys.executable, "-m", "bench.many_jobs", *sys.argv[1:], "--address", address]
        row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    print(
        json.dumps({"jobs": given.jobs, "nodes": given.nodes, **shown, "load": round(os.getloadavg()[0], 1)}, indent=1)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
