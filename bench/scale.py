"""What one job of many workers costs the operator: decided, told, stored, and on real lines; without cluster or Redis.

`python -m bench.scale --out build/scale.json --picture FILE [--cluster FILE]`. CPU time of the process, best of a few, at each number of
workers; bytes as they go to the sockets; then the lines of `bench.scale_lines`. The file ends in a summary by the names of the whole bench; what this part of it cannot measure
is null there, with the reason beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from bench import heartbeats, scale_lines
from bench.scale_summary import NO_CLUSTER, ON_A_CLUSTER, WORKERS, summary
from support.builders import running
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, WorkerId
from surefoot.protocol.messages import Hello
from surefoot_operator.api.status import JobStatus, Member, Membership
from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.coordinator.agent_channel import AgentChannel, AgentConnection, EncodedListCache
from surefoot_operator.coordinator.desired_messages import derive_desired_state
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

RANKS_OF_A_WORKER = 8
TRIES = 5
BEATING = 200


@dataclass(frozen=True, slots=True)
class Unplugged:
    """In place of a request: a line that leads nowhere."""

    transport: None = None


class Line(AgentConnection):
    """What would be sent is counted, and queued for nobody."""

    def __init__(self, shared: EncodedListCache) -> None:
        super().__init__(cast(Any, None), cast(Any, Unplugged()), 1, shared)
        self.characters = self.messages = 0

    def _queue_text(self, text: str) -> None:
        self.characters += len(text)
        self.messages += 1


def best(work: Callable[[], object]) -> float:
    """Milliseconds of CPU."""
    taken = []
    for _ in range(TRIES):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken) * 1e3


def decided(workers: int) -> dict[str, float]:
    """A round in which one agent has spoken since the last, and one in which a holder's index was read as well."""
    seen = replace(running(workers=workers), free_nodes=1)
    given = plan(seen)
    row = {
        "plan_ms": best(lambda: plan(spoken(seen))),
        "check_ms": best(lambda: check_plan(given, seen)),
        "maintain_ms": best(lambda: plan_maintenance(replace(spoken(seen), status=given.status))),
        "round_with_an_index_ms": best(lambda: a_round(reread(spoken(seen)))),
    }
    round_ms = row["plan_ms"] + row["check_ms"] + row["maintain_ms"]
    return {**row, "round_us_a_worker": round_ms * 1e3 / workers}


def spoken(seen: JobSnapshot) -> JobSnapshot:
    """The snapshot after another heartbeat: sessions are a new tuple, with one entry that changed."""
    first, *others = seen.sessions
    return replace(seen, sessions=(replace(first, last_message_seconds=first.last_message_seconds), *others))


def reread(seen: JobSnapshot) -> JobSnapshot:
    """The snapshot after another holder's index was read."""
    first, *others = seen.servers
    return replace(seen, servers=(replace(first, entries=tuple(first.entries)), *others))


def a_round(seen: JobSnapshot) -> None:
    given = plan(seen)
    check_plan(given, seen)
    plan_maintenance(replace(seen, status=given.status))


def node(number: int) -> str:
    return f"ip-10-0-{number // 256}-{number % 256}.eu-central-1.compute.internal"


def status_of(workers: int, epoch: int = 1) -> JobStatus:
    chance = random.Random(1)  # identities that nothing can make shorter, as real ones
    holders = tuple(
        MemoryServerEndpoint(
            MemoryServerInstance(node(i), f"{chance.getrandbits(48):012x}"),
            f"10.244.{i // 256}.{i % 256}",
            6379,
            node(i),
        )
        for i in sorted(range(workers), key=node)
    )
    members = tuple(Member(i, 1, f"{chance.getrandbits(48):012x}", node(i)) for i in range(workers))
    world = Membership(epoch, "Committed", None, workers * RANKS_OF_A_WORKER, members, "the job starts", 1.0)
    return replace(running(workers=3).status, membership=world, assigned_servers=holders)


class Told:
    """All agents of one job on their lines; each change is measured until everybody has heard."""

    def __init__(self, workers: int) -> None:
        self.status = status_of(workers)
        self.channel = AgentChannel("job", 0.5, time.time, lambda urgent: None)
        self.channel.set_expected_workers(WorkerId(i, 1) for i in range(workers))
        shared = EncodedListCache()
        self.lines = [Line(shared) for _ in range(workers)]

    async def measured(self) -> dict[str, Any]:
        world = self.status.membership
        assert world is not None
        row = {"first": await self._cost(self._join)}
        fewer = self.status.assigned_servers[:-1]
        claimed = replace(self.status, membership=replace(world, generation=2, state="Claimed"))
        left = replace(self.status, membership=replace(world, generation=2, members=world.members[:-1]))
        row["same_again"] = await self._cost(lambda: self._rule(self.status))
        row["a_holder_goes"] = await self._cost(lambda: self._rule(self.status, fewer))
        row["claimed"] = await self._cost(lambda: self._rule(claimed, fewer))
        row["without_the_last"] = await self._cost(lambda: self._rule(left, fewer))
        return row

    def _join(self) -> None:
        self._rule(self.status)
        assert self.status.membership is not None
        for line, one in zip(self.lines, self.status.membership.members, strict=True):
            self.channel.accept_agent(Hello("job", one.index, 1, one.incarnation, one.node, "", 1, 1, True), line)

    def _rule(self, status: JobStatus, holders: tuple[MemoryServerEndpoint, ...] | None = None) -> None:
        usable = UsableMemoryServers(status.assigned_servers if holders is None else holders)
        self.channel.apply_desired_state(derive_desired_state(status, usable, 2, "t" * 32))

    async def _cost(self, change: Callable[[], None]) -> dict[str, float]:
        for line in self.lines:
            line.characters = line.messages = 0
        cpu, longest = time.process_time(), 0.0
        change()
        while self.channel._workers_to_serve:
            began = time.process_time()
            await asyncio.sleep(0)
            longest = max(longest, time.process_time() - began)
        cpu = time.process_time() - cpu
        sent = sorted(line.characters for line in self.lines)
        return {
            "cpu_ms": cpu * 1e3,
            "longest_turn_ms": longest * 1e3,
            "bytes_a_worker": sent[len(sent) // 2],
            "most_bytes_a_worker": sent[-1],
            "bytes": sum(sent),
            "messages": sum(line.messages for line in self.lines),
        }


def measured(workers: int) -> dict[str, Any]:
    status = json.dumps(status_to_json(status_of(workers)), separators=(",", ":"))
    return {
        "workers": workers,
        "load": os.getloadavg()[0],
        **decided(workers),
        "told": asyncio.run(Told(workers).measured()),
        "status_bytes": len(status),
        "heartbeat_decoded_and_applied_us": heartbeats.measured(workers, 5)["whole_us"]["median"],
    }


def on_lines(sizes: list[int], tries: int) -> list[dict[str, Any]]:
    """Rows of losses, and last one of heartbeats at their default rate, at a size that leaves the machine idle time."""
    rows = scale_lines.ladder(sizes, tries)
    return [*rows, *scale_lines.ladder([BEATING], 1, heartbeat_seconds=0.5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, nargs="*", default=list(WORKERS))
    parser.add_argument(
        "--lines", type=int, nargs="*", default=list(WORKERS), help="sizes on real lines; none: left out"
    )
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--cluster", type=Path, help="what `cluster.scenarios.fleet` measured")
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="what `cluster.scenarios.many_lines` measured, a file a run"
    )
    given = parser.parse_args()
    rows = []
    for workers in given.workers:
        row = measured(workers)
        rows.append(row)
        told = row["told"]
        print(
            f"{workers} workers: plan {row['plan_ms']:.1f} ms, maintain {row['maintain_ms']:.1f} ms"
            f" ({row['round_us_a_worker']:.0f} us a worker); first word {told['first']['bytes_a_worker']} bytes a worker,"
            f" a holder goes {told['a_holder_goes']['bytes_a_worker']} bytes in {told['a_holder_goes']['cpu_ms']:.0f} ms,"
            f" next epoch {told['without_the_last']['bytes_a_worker']} bytes in {told['without_the_last']['cpu_ms']:.0f} ms;"
            f" status {row['status_bytes']} bytes; load {row['load']:.1f}",
            flush=True,
        )
    lines = on_lines(given.lines, given.tries) if given.lines else []
    cluster = json.loads(given.cluster.read_text())["rows"] if given.cluster is not None else {}
    known = summary(rows, lines, cluster)
    unmeasured = {name: NO_CLUSTER for name in ON_A_CLUSTER if known[name] is None}
    beside = [json.loads(file.read_text())["rows"] for file in given.beside]
    parts = {"rows": rows, "lines": lines, "cluster": cluster, "jobs_beside_each_other": beside}
    found = {**parts, "unmeasured": unmeasured, "summary": known}
    print(json.dumps(known, indent=2))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=2))
    if given.picture is not None:
        from bench import scale_picture  # matplotlib is among the bench's own packages

        scale_picture.draw(rows, lines, given.picture)


if __name__ == "__main__":
    main()
