"""Promotes as an agent does, in a process that may kill itself in the middle. A program of its own, started by tests:
`python -m support.programs.dying_promoter ARGUMENTS.json`. Prints one JSON line: the answers, and the requests that it sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from support.programs.dying_saver import Fuse, ProbedTier
from surefoot import metrics
from surefoot.agent import coordinator_requests as chores
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import FromAgent, UploadReply, UploadSave
from surefoot.settings import JobSettings, PersistentSettings
from surefoot.tiers import ObjectStoreTier, open_persistent

SECONDS = 60.0


def requests() -> dict[str, float]:
    """Tries of each operation since the process began."""
    found: dict[str, float] = {}
    for family in metrics.s3_requests.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.labels["operation"]] = found.get(sample.labels["operation"], 0) + sample.value
    return found


async def promoted(given: dict[str, Any]) -> list[str | None]:
    """The error of each answer."""
    persistent = PersistentSettings(**given["persistent"])
    settings = JobSettings(given["job"], 10, 1, 2, given["user"], given["password"], persistent=persistent)
    endpoint = MemoryServerEndpoint(
        MemoryServerInstance(given["node"], given["instance"]), given["host"], given["port"], given["node"]
    )
    account = Credentials(given["user"], given["password"])
    answers: asyncio.Queue[FromAgent] = asyncio.Queue()
    places = chores.SaveLocations(
        lambda _: MemoryServerClient(endpoint, given["job"], account), lambda: [endpoint.instance]
    )
    work = chores.CoordinatorRequests(settings, places, answers.put_nowait)
    saves = tuple(RankSave(1, 10, rank) for rank in range(given["ranks"]))
    work.queue_uploads(UploadSave(1, saves))
    try:
        told = [await asyncio.wait_for(answers.get(), SECONDS) for _ in saves]
    finally:
        await work.close()
    return [answer.error if isinstance(answer, UploadReply) else repr(answer) for answer in told]


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    if given["die_at_part"]:
        fuse = Fuse("persistent part", given["die_at_part"])
        fuse.arm()

        def probed(settings: PersistentSettings, job: str, *, create_root: bool) -> ObjectStoreTier:
            return ProbedTier(open_persistent(settings, job, create_root=create_root), fuse.probe)

        chores.open_persistent = probed  # type: ignore[assignment]  # as an agent opens it, with a fuse
    errors = asyncio.run(promoted(given))
    sys.stdout.write(json.dumps({"errors": errors, "requests": requests()}) + "\n")


if __name__ == "__main__":
    main()
