"""What an agent answers when its coordinator asks it to look at the persistent tier."""

from __future__ import annotations

import asyncio

import pytest

from surefoot.agent.coordinator_requests import CoordinatorRequests, SaveLocations
from surefoot.protocol.messages import FromAgent, ListPersistent, PersistentPage
from surefoot.settings import JobSettings


def answers(job: JobSettings, *requests: ListPersistent) -> list[FromAgent]:
    """One agent's, to all of them."""

    async def ask() -> list[FromAgent]:
        told: asyncio.Queue[FromAgent] = asyncio.Queue()
        work = CoordinatorRequests(job, SaveLocations(lambda holder: pytest.fail(str(holder)), tuple), told.put_nowait)
        task = asyncio.create_task(work.run())
        found = []
        for request in requests:
            work.queue_request(request)
            while True:
                found.append(await asyncio.wait_for(told.get(), 30))
                if not (isinstance(found[-1], PersistentPage) and found[-1].more):
                    break
        task.cancel()
        await work.close()
        return found

    return asyncio.run(ask())
