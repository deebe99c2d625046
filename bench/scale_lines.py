"""One job of many workers on real lines: agents in processes of their own, TLS, the whole reconciler; what a loss costs.

`python -m bench.scale_lines --workers 10 2000 --out FILE`. The fabric and the holders are in memory and answer at once, so
that what is measured is the operator: from the moment that the fabric shows a worker's end to the last agent's Stop
(`stopped_seconds`: who trains must hear it) and the last agent's Assign (`committed_seconds`); CPU a heartbeat with TLS,
socket, decoding and transition; how late the loop was at worst.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from bench.scripted_agents import ScriptedWorker
from support.builders import COVERED, running
from support.servers.certificates import authority
from surefoot.protocol.checkpoints.completeness import Covers
from surefoot.protocol.identities import MemoryServerInstance
from surefoot.protocol.messages import Hello, HelloRejected
from surefoot_operator.api.status import JobStatus
from surefoot_operator.controller.health_endpoints import LoopLag
from surefoot_operator.controller.process_setup import configure_gc
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.agent_server import AgentServer
from surefoot_operator.errors import StatusConflict
from surefoot_operator.job_snapshot import JobSnapshot, ObservedMemoryServer, ObservedWorker
from surefoot_operator.platforms.interface import PlatformSnapshot, WorkerEnvironment
from surefoot_operator.policy.core.actions import ApplyPodGroup, CreateWorker, DeletePodGroup, DeleteWorker
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers
from surefoot_operator.reconcile import Reconciler
from surefoot_operator.reconcile.build_snapshot import Dependencies
from surefoot_operator.rejected_calls import RejectedCall
from surefoot_operator.settings import CoordinatorSettings, OperatorSettings

JOB = "job"
SAVED_STEP = 40
AGENTS_OF_A_PROCESS = 1000
BEATING_SECONDS = 10.0
LIMIT_SECONDS = 240.0
SETTINGS = OperatorSettings(
    coordinator=CoordinatorSettings(
        max_agents=4096, max_unauthenticated=4096, max_unauthenticated_per_address=4096, hello_timeout_seconds=60.0
    )
)


class InstantFabric:
    """A job's objects in memory."""

    def __init__(self, seen: JobSnapshot) -> None:
        self.status, self._job, self._nodes = seen.status, seen.job, seen.nodes
        self.workers = {worker.name: worker for worker in seen.workers}
        self._news = asyncio.Event()

    async def observe(self) -> PlatformSnapshot:
        return PlatformSnapshot(self._job, self.status, tuple(self.workers.values()), self._nodes, free_nodes=0)

    def end(self, indexes: Sequence[int]) -> None:
        for name, worker in list(self.workers.items()):
            if worker.index in indexes:
                self.workers[name] = replace(worker, phase="Failed", exit_code=137)
        self._news.set()

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        name = f"t-worker-{worker.index}-{worker.attempt}"
        self.workers[name] = ObservedWorker(worker.index, worker.attempt, name, f"uid-{name}", None, "Pending")

    async def delete_worker(self, worker: DeleteWorker) -> None:
        self.workers.pop(worker.name, None)

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        if self.status.serial != old.serial:
            raise StatusConflict("the status has another serial")
        self.status = replace(new, serial=old.serial + 1)
        return self.status

    def rejected_calls(self) -> tuple[RejectedCall, ...]:
        return ()

    async def set_finalizer(self, held: bool) -> None: ...

    async def record_events(self, events: Sequence[object]) -> None: ...

    async def apply_pod_group(self, wanted: ApplyPodGroup) -> None:
        raise AssertionError("this job is of no gang")

    async def delete_pod_group(self, removed: DeletePodGroup) -> None:
        raise AssertionError("this job is of no gang")

    async def start_purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        raise AssertionError("nobody deletes this job")

    async def delete_job(self) -> None:
        raise AssertionError("nobody deletes this job")

    async def watch_changes(self) -> AsyncIterator[None]:
        while True:
            await self._news.wait()
            self._news.clear()
            yield

    async def close(self) -> None: ...


class InstantHolders:
    """Holders that answer at once, sealed and read as soon as that is asked."""

    is_deleted = False
    layout_digests: frozenset[str] = frozenset()
    out_of_bounds_records: tuple[str, ...] = ()

    def __init__(self, seen: JobSnapshot, changed: Callable[[bool], None]) -> None:
        self._changed = changed
        self._holders: dict[MemoryServerInstance, ObservedMemoryServer] = {h.endpoint.instance: h for h in seen.servers}
        self._seen = tuple(self._holders.values())

    def observed_servers(self) -> tuple[ObservedMemoryServer, ...]:
        return self._seen

    def usable_servers(self, epoch: int) -> UsableMemoryServers:
        return UsableMemoryServers(tuple(h.endpoint for h in self._seen if (h.fence or 0) >= epoch))

    def fence(self, holder: MemoryServerInstance, epoch: int) -> bool:
        self._holders[holder] = replace(self._holders[holder], fence=epoch, read_generation=epoch)
        self._seen = tuple(self._holders.values())
        self._changed(True)
        return False

    def update(self, places: object, status: JobStatus, resting: bool, limit: int | None, ranks: int) -> None: ...

    def pause_monitoring(self, status: JobStatus) -> None: ...

    async def check_coverage(self, listed: Sequence[object], layouts: Mapping[str, str], holders: object) -> Covers:
        return COVERED

    async def drop(self, drops: object, epoch: int, seconds: float) -> None: ...

    async def set_watermark(self, checkpoint: object, epoch: int) -> None: ...

    async def delete_uncommitted(self, *given: object) -> None: ...


class Agents:
    """The processes of scripted agents, and what they heard in all."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, url: str, trusted: Path, count: int) -> None:
        for first in range(0, count, AGENTS_OF_A_PROCESS):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.scripted_agents", "--authority", str(trusted), stdin=-1, stdout=-1
            )
            self._processes.append(process)
            some = range(first, min(first + AGENTS_OF_A_PROCESS, count))
            workers = [ScriptedWorker(JOB, index, url, epoch=1, saved_step=SAVED_STEP) for index in some]
            self._say(process, {"join": [asdict(worker) for worker in workers]})

    async def heard(self, epoch: int) -> dict[str, Any]:
        found = []
        for process in self._processes:
            assert process.stdout is not None
            self._say(process, {"heard": [JOB, epoch]})
            found.append(json.loads(await process.stdout.readline()))
        whole: dict[str, Any] = {}
        for name in found[0]:
            given = [one[name] for one in found if one[name] is not None]
            whole[name] = max(given, default=None) if "_stop" in name or "_assign" in name else sum(given)
        return whole

    @staticmethod
    def _say(process: asyncio.subprocess.Process, word: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(word).encode() + b"\n")

    async def until(self, what: str, reached: Callable[[dict[str, Any]], bool], epoch: int = 1) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_SECONDS):
            while not reached(found := await self.heard(epoch)):  # noqa: ASYNC110  # other processes announce nothing
                await asyncio.sleep(0.25)
        print(f"  {what}", file=sys.stderr, flush=True)
        return found

    async def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


class Stand:
    """One job's reconciler and its agents' server."""

    def __init__(self, seen: JobSnapshot, heartbeat_seconds: float) -> None:
        self.fabric, self.holders, self.lag = InstantFabric(seen), InstantHolders(seen, self._wake), LoopLag()
        self.channel = AgentChannel(JOB, heartbeat_seconds, time.time, self._wake)
        parts = Dependencies(
            self.fabric,
            self.channel,
            cast(Any, self.holders),
            lambda job, worker: WorkerEnvironment({}, {}),
            SETTINGS,
            time.time,
            lambda epoch: f"token-{epoch}",
        )
        self._reconciler = Reconciler(parts)

    def _wake(self, urgent: bool) -> None:
        self._reconciler.wake(urgent)

    @asynccontextmanager
    async def served(self, count: int) -> AsyncIterator[Agents]:
        signer = authority("bench")
        with tempfile.TemporaryDirectory() as folder:
            trusted = Path(folder) / "ca.pem"
            trusted.write_text(signer.pem)
            server = AgentServer(SETTINGS.coordinator, _everybody, signer.sign("127.0.0.1").server(Path(folder)))
            server.add_channel(JOB, self.channel)
            server.set_leading(True)
            await server.start()
            tasks = [asyncio.create_task(self._reconciler.run()), asyncio.create_task(self.lag.run())]
            agents = Agents()
            try:
                await agents.start(server.url.replace("0.0.0.0", "127.0.0.1"), trusted, count)
                yield agents
            finally:
                await agents.end()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await server.close()


async def _everybody(hello: Hello) -> HelloRejected | None:
    return None


async def measured(workers: int, lost: int, heartbeat_seconds: float) -> dict[str, Any]:
    """From joining to the world that goes on without `lost` workers."""
    silence = max(3.0, 10 * heartbeat_seconds)
    began = running(now=time.time(), workers=workers)
    health = replace(
        began.job.spec.health_policy, heartbeat_seconds=heartbeat_seconds, heartbeat_timeout_seconds=silence
    )
    seen = replace(began, job=replace(began.job, spec=replace(began.job.spec, health_policy=health)))
    stand = Stand(seen, heartbeat_seconds)
    load, asked_at = os.getloadavg()[0], time.monotonic()
    async with stand.served(workers) as agents:
        joined = await agents.until("all have joined", lambda said: said["joined"] >= workers)
        row: dict[str, Any] = {"workers": workers, "lost": lost, "load": load, "heartbeat_seconds": heartbeat_seconds}
        row["joined_seconds"] = time.monotonic() - asked_at
        await asyncio.sleep(2 * heartbeat_seconds)
        stand.lag._lags.clear()
        row |= await _beaten(workers, heartbeat_seconds)
        row["bytes_of_joining_a_worker"] = joined["received_bytes"] / workers
        before, cpu, struck = (await agents.heard(2))["received_bytes"], time.process_time(), time.monotonic()
        stand.fabric.end(range(workers - lost, workers))
        heard = await agents.until("all have their orders", lambda said: said["assigns"] >= workers - lost, epoch=2)
        row["stopped_seconds"] = heard["last_stop"] - struck
        row["committed_seconds"] = heard["last_assign"] - struck
        row["order_cpu_seconds"] = time.process_time() - cpu
        row["bytes_of_a_loss_a_worker"] = (heard["received_bytes"] - before) / workers
        row["refusals"] = heard["refusals"]
        row["worst_loop_lag_seconds"] = stand.lag.max_lag_seconds
        row["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


async def _beaten(workers: int, heartbeat_seconds: float) -> dict[str, float]:
    """CPU of the operator's process while nothing happens but heartbeats, rounds of the plan included and told apart."""
    cpu, began = time.process_time(), time.monotonic()
    await asyncio.sleep(BEATING_SECONDS)
    seconds = time.monotonic() - began
    used = time.process_time() - cpu
    return {
        "steady_cores": used / seconds,
        "heartbeat_microseconds": used / (workers * seconds / heartbeat_seconds) * 1e6,
    }


def ladder(sizes: Sequence[int], tries: int, lost: int = 1, heartbeat_seconds: float = 2.0) -> list[dict[str, Any]]:
    """A row for each size, `tries` times in turns, so that the machine's hour is the same for all."""
    configure_gc()  # as the operator's own process does
    rows = []
    for _ in range(tries):
        for workers in sizes:
            rows.append(asyncio.run(measured(workers, lost, heartbeat_seconds)))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[10, 2000])
    parser.add_argument("--lost", type=int, default=1)
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--heartbeat-seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = ladder(given.workers, given.tries, given.lost, given.heartbeat_seconds)
    for workers in given.workers:
        taken = [row["committed_seconds"] for row in rows if row["workers"] == workers]
        print(f"{workers} workers: orders out in {median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
