"""How long a listing of a large persistent tier takes: from the operator's question to its knowledge of every manifest.

`python -m bench.listing [--ranks 2048] [--checkpoints 8] [--turns 5] [--latency-ms 50] [--out FILE]`. A real S3 server,
with a delay in front of it; a real agent's chores, its line, and the coordinator's server and order book, in one process.
Each turn is a new agent's first listing. Beside it: its second one, one of checkpoints without the record that tells all
manifests (as a tier without that record has them), and what leaving that record costs whoever commits the last rank. CPU seconds are
of agent and operator together, a listing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot.agent.coordinator_client import CoordinatorClient, first_address
from surefoot.agent.coordinator_requests import CoordinatorRequests, SaveLocations
from surefoot.format.layouts import Stream, build_layout
from surefoot.format.manifests import build_manifest
from surefoot.protocol.identities import Checkpoint, RankSave, WorkerId
from surefoot.protocol.messages import Heartbeat, Hello, ListPersistent, ToAgent
from surefoot.settings import JobSettings, job_settings
from surefoot.tiers import object_store, open_persistent, persistent_records
from surefoot.tiers.persistent import ObjectStoreTier
from surefoot_operator.api.status import JobStatus, Member, Membership
from surefoot_operator.coordinator import listings
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.agent_server import AgentServer
from surefoot_operator.coordinator.desired_messages import derive_desired_state
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers
from surefoot_operator.settings import CoordinatorSettings

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.servers import s3_server

JOB = "listed"
MOST_SECONDS = 600.0


@contextmanager
def delayed(port: int, latency_seconds: float) -> Iterator[int]:
    """A port that leads to `port`, half the latency there and half of it back; in a process of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(_delay(listener, port, latency_seconds / 2))
            finally:
                os._exit(0)
        try:
            yield listener.getsockname()[1]
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


async def _delay(listener: socket.socket, port: int, seconds: float) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 20):
            loop.call_later(seconds, writer.write, data)
        loop.call_later(seconds, writer.close)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, back), carry(there, writer), return_exceptions=True)

    async with await asyncio.start_server(serve, sock=listener) as server:
        await server.serve_forever()


def fill(folder: Path, job: JobSettings, checkpoints: int, ranks: int) -> list[float]:
    """Puts checkpoints there; the last rank of each is committed by the tier. Seconds of each such commit."""
    stream = Stream(build_layout([]))
    store = object_store.DirectoryStore(folder, create_root=True)
    seconds = []
    for number in range(1, checkpoints + 1):
        saves = [RankSave(1, 10 * number, rank) for rank in range(ranks)]
        made = [
            build_manifest(save, ranks, "0123456789abcdef", stream, (b"", b"values"), time.time()) for save in saves
        ]
        place = f"{JOB}/{10 * number}-1"
        for manifest in made[:-1]:
            store.put(f"{place}/rank-{manifest.save.rank}.json", manifest.to_json().encode())
            store.put(f"{place}/rank-{manifest.save.rank}/values", b"values")
        assert job.persistent is not None
        tier = open_persistent(job.persistent, JOB)
        tier.put_layout(stream.digest, stream.text)
        tier.put_values(saves[-1], b"values")
        tier.put_digests(saves[-1], b"")
        began = time.monotonic()
        tier.commit(made[-1], 1, ())
        seconds.append(time.monotonic() - began)
        tier.close()
    return seconds


async def time_listings(job: JobSettings, expected: int, times: int) -> list[float]:
    """So many listings of one agent, one after another: seconds until the operator's order book has all of it."""

    async def welcome(_: Hello) -> None:
        return None

    worker, done = WorkerId(0, 1), asyncio.Event()
    server = AgentServer(CoordinatorSettings(), welcome)
    await server.start()
    server.set_leading(True)
    conversation = AgentChannel(JOB, 0.5, time.time, lambda urgent: done.set() if urgent else None)
    conversation.set_expected_workers([worker])
    server.add_channel(JOB, conversation)
    world = Membership(2, "Claimed", None, 1, (Member(0, 1, "agent", "node"),), "reason", time.time())
    conversation.apply_desired_state(derive_desired_state(JobStatus(membership=world), UsableMemoryServers(), 2))
    chores: CoordinatorRequests | None = None

    def hear(message: ToAgent) -> None:
        if isinstance(message, ListPersistent) and chores is not None:
            chores.queue_request(message)

    line = CoordinatorClient(
        first_address(server.url),
        lambda: Hello(JOB, 0, 1, "agent", "node", "token", 0, 2, True),
        lambda: Heartbeat(0, 2, True),
        hear,
    )
    chores = CoordinatorRequests(job, SaveLocations(lambda _: None, tuple), line.send)  # type: ignore[arg-type,return-value]  # no memory tier is asked
    tasks = [asyncio.create_task(line.run()), asyncio.create_task(chores.run())]
    seconds = []
    try:
        async with asyncio.timeout(MOST_SECONDS):
            while not conversation.connections:
                await _change(done)
            for _ in range(times):
                conversation.apply_transition(lambda s: replace(s, requests=listings.discard_listing(s.requests)))
                began = time.monotonic()
                conversation.apply_transition(
                    lambda s: replace(s, requests=listings.request_listing(s.requests, worker, 2, time.time()))
                )
                while (seen := conversation.sessions.requests.persistent_listing).read_generation is None:
                    if seen.error is not None:
                        raise RuntimeError(seen.error)
                    await _change(done)
                seconds.append(time.monotonic() - began)
                if len(seen.entries or ()) != expected or seen.unread_records:
                    raise RuntimeError(f"the listing tells {len(seen.entries or ())} of {expected} manifests")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await chores.close()
        await server.close()
    return seconds


async def _change(done: asyncio.Event) -> None:
    await done.wait()
    done.clear()


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with s3_server.running(folder) as server:
        if server.folder is None:
            raise RuntimeError("versitygw is not here and cannot be built without Go: nothing is measured")
        with delayed(int(server.endpoint.rpartition(":")[2]), given.latency_ms / 1000) as port:
            settings = replace(server.settings(), endpoint=f"http://127.0.0.1:{port}")
            job = replace(job_settings({"SUREFOOT_JOB_UID": JOB}), persistent=settings)
            # told that nobody else is busy: the delay begins with the fork, so no thread may be alive before it
            assert threading.active_count() == 1
            objects = server.folder / s3_server.BUCKET
            commits = fill(objects, job, given.checkpoints, given.ranks)
            expected = given.checkpoints * given.ranks
            first, second, cpu = [], [], []
            for _ in range(given.turns):
                began = time.process_time()
                one, two = asyncio.run(time_listings(job, expected, 2))
                cpu.append((time.process_time() - began) / 2)
                first.append(one)
                second.append(two)
            tier = ObjectStoreTier(object_store.DirectoryStore(objects), JOB)
            for checkpoint in tier.list_all_checkpoints():
                (
                    objects / f"{JOB}/{checkpoint.step}-{checkpoint.generation}/{persistent_records.MANIFEST_LIST_NAME}"
                ).unlink()
            assert tier.list_all_checkpoints()[0] == Checkpoint(1, 10)
            (without,) = asyncio.run(time_listings(job, expected, 1))
    return {
        "manifests": expected,
        "checkpoints": given.checkpoints,
        "latency_ms": given.latency_ms,
        "server": f"versitygw {s3_server.VERSION}",
        "first_seconds": _spread(first),
        "second_seconds": _spread(second),
        "cpu_seconds": _spread(cpu),
        "without_lists_seconds": without,
        "last_commit_seconds": _spread(commits),
        "load": os.getloadavg()[0],
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.listing", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2048)
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        text = json.dumps(measured(given, Path(folder)), indent=1)
    print(text)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
