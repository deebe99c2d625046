"""What one agent's heartbeat costs the operator: decoded alone, and from its text to the sessions that plans are made from.

`python -m bench.heartbeats [--agents 300] [--rounds 40] [--out FILE]`. One process, one thread, no network: a round is one
heartbeat of every agent, each a step further, some with a save that drains. CPU time of the process, a heartbeat; median,
least and most of the rounds, and the machine's load. What the socket, TLS and aiohttp cost comes on top.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint, WorkerId
from surefoot.protocol.messages import FromAgent, Heartbeat, Hello
from surefoot.protocol.progress import Progress
from surefoot.protocol.wire import decode, encode
from surefoot_operator.api.status import JobStatus, Member, Membership
from surefoot_operator.coordinator.agent_channel import AgentChannel, AgentConnection
from surefoot_operator.coordinator.agent_server import check_size
from surefoot_operator.coordinator.desired_messages import derive_desired_state
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers

JOB = "beating"
EPOCH = 1
PROGRESS = Progress(
    loss=2.5,
    step_seconds=0.4,
    restored=True,
    stall_seconds=0.01,
    restored_from="memory",
    save_bytes=123_456,
    closed_steps=ClosedSteps(20, (10, 20), 0),
    loss_is_finite=True,
)
BEAT = Heartbeat(generation=EPOCH, stopped=EPOCH, is_warm=True, saved=Checkpoint(EPOCH, 10), copies=2)


class Mute:
    """A line that nobody reads: what is said on it is not what is measured."""

    worker: WorkerId | None = None
    was_sent_all_servers = False

    def send(self, message: object) -> None: ...

    def send_missing(self, wanted: object) -> None: ...

    def disconnect_now(self) -> None: ...


def measured(agents: int, rounds: int) -> dict[str, Any]:
    """Microseconds of CPU a heartbeat, by what is done with it."""
    woken = [0]

    def changed(urgent: bool) -> None:
        woken[0] += urgent

    conversation = AgentChannel(JOB, 0.5, time.time, changed)
    conversation.set_expected_workers(WorkerId(i, 1) for i in range(agents))
    members = tuple(Member(i, 1, f"{i:016x}", f"node-{i}") for i in range(agents))
    lines = [cast(AgentConnection, Mute()) for _ in members]
    # what each hears on a change is another matter, so that the rule comes before anybody is there
    status = JobStatus(membership=Membership(EPOCH, "Committed", world_size=agents, members=members))
    conversation.apply_desired_state(derive_desired_state(status, UsableMemoryServers(), 2))
    for member, line in zip(members, lines, strict=True):
        hello = Hello(JOB, member.index, 1, member.incarnation, member.node, "token", EPOCH, EPOCH, True)
        conversation.accept_agent(hello, line)
    texts = [encode(beat) for beat in _beats(rounds)]

    def whole(text: str) -> None:
        for line in lines:
            check_size(text)
            conversation.handle_message(line, cast(FromAgent, decode(text)))

    def alone(text: str) -> None:
        for _ in lines:
            decode(text)

    load = os.getloadavg()[0]
    woken[0] = 0
    found = {
        "decode_us": _cost(alone, texts, agents),
        "whole_us": _cost(whole, texts, agents),
        "agents": agents,
        "rounds": rounds,
        "characters": len(texts[0]),
        "load": [load, os.getloadavg()[0]],
        "plans_asked_for_at_once": woken[0],
    }
    assert all(s.observed.progress.step == rounds for s in conversation.sessions.by_worker.values()), (
        "every heartbeat is heard"
    )
    return found


def _beats(rounds: int) -> list[Heartbeat]:
    draining = (Checkpoint(EPOCH, 20),)
    return [
        replace(BEAT, progress=replace(PROGRESS, step=n + 1), pending=draining if n % 4 < 2 else ())
        for n in range(rounds)
    ]


def _cost(work: Callable[[str], None], texts: list[str], agents: int) -> dict[str, float]:
    taken = []
    for text in texts:
        begun = time.process_time()
        work(text)
        taken.append((time.process_time() - begun) / agents * 1e6)
    return {"median": statistics.median(taken), "least": min(taken), "most": max(taken)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = measured(given.agents, given.rounds)
    for name in ("decode_us", "whole_us"):
        cost = found[name]
        print(f"{name}: {cost['median']:.1f} ({cost['least']:.1f} to {cost['most']:.1f})")
    print(f"{found['agents']} agents, {found['rounds']} rounds, load {found['load'][0]:.1f} to {found['load'][1]:.1f}")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
