"""Tests of `coordinator.desired_messages`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from support.builders import endpoint, member, running
from support.talk import NODES, A, B, talking, words
from support.talk import STATUS as TALK_STATUS
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, RankSave
from surefoot.protocol.messages import Assign
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.coordinator.desired_messages import (
    ServerListScope,
    derive_desired_state,
    list_desired_messages,
    select_needed_servers,
    update_scope,
)
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers

# ---- told holders ----------------------------------------------------------------------------------------------------
# Of which holders each worker's agent is told, and of which not.

PARENT = Checkpoint(1, 40)
HOLDERS = tuple(endpoint(f"n{i:02}") for i in range(40))
MEMBERS = tuple(member(i) for i in range(4))
WORLD = Membership(2, "Committed", PARENT, 8, MEMBERS)
STATUS = JobStatus(membership=WORLD, lineage=(LineageEntry(1, None, 8), LineageEntry(2, PARENT, 8)))
TARGETS = {i: ((HOLDERS[2 * i], HOLDERS[2 * i + 1]),) for i in range(4)}


def seen(number: int, *ranks: int, checkpoint: Checkpoint = PARENT, state: str = "Ready") -> ObservedMemoryServer:
    saves = (RankSave(checkpoint.generation, checkpoint.step, rank) for rank in ranks)
    entries = tuple(RankManifest(save, 8, "abc", "0" * 16, 4, 1, "0" * 16, 8, "1" * 16, 5, 1.5) for save in saves)
    return ObservedMemoryServer(HOLDERS[number], state, 1.0, 2, 2, entries)  # type: ignore[arg-type]


READ = (seen(20, 0, 1), seen(21, 0, 1), seen(22, 2, 3), seen(23, 4, 5), seen(24, 6, checkpoint=Checkpoint(1, 30)))


def numbers(told: tuple[MemoryServerEndpoint, ...]) -> list[int]:
    return [HOLDERS.index(one) for one in told]


def test_a_worker_needs_its_targets_and_what_its_own_ranks_and_the_first_one_saved() -> None:
    needed = select_needed_servers(STATUS, HOLDERS, TARGETS, update_scope(None, STATUS, lambda: READ))
    assert needed is not None
    assert {index: numbers(told) for index, told in needed.items()} == {
        0: [0, 1, 20, 21],
        1: [2, 3, 20, 21, 22],
        2: [4, 5, 20, 21, 23],
        3: [6, 7, 20, 21],
    }


def test_what_no_index_told_of_is_left_to_whoever_asks() -> None:
    needed = select_needed_servers(STATUS, HOLDERS, TARGETS, update_scope(None, STATUS, tuple))
    assert needed is not None
    assert numbers(needed[1]) == [2, 3]


def test_a_holder_that_is_named_no_more_is_told_to_nobody() -> None:
    needed = select_needed_servers(
        STATUS,
        HOLDERS[:20] + HOLDERS[21:],
        TARGETS,
        update_scope(None, STATUS, lambda: READ),
    )
    assert needed is not None
    assert numbers(needed[3]) == [6, 7, 21]


def test_all_hear_of_all_where_holders_are_few() -> None:
    scope = update_scope(None, STATUS, lambda: READ)
    assert select_needed_servers(STATUS, HOLDERS[:32], TARGETS, scope) is None
    assert select_needed_servers(STATUS, HOLDERS[:33], TARGETS, scope) is not None


def test_what_a_world_restores_is_read_once() -> None:
    first = update_scope(None, STATUS, lambda: READ)
    assert update_scope(first, replace(STATUS, restarts=3), tuple) is first
    assert update_scope(first, replace(STATUS, membership=replace(WORLD, generation=3)), tuple).instances_by_rank == {}
    assert update_scope(
        None, replace(STATUS, membership=replace(WORLD, state="Claimed")), lambda: READ
    ) == ServerListScope(replace(WORLD, state="Claimed"))


# ---- epoch token -----------------------------------------------------------------------------------------------------
# The epoch's secret: told to members alone, the same by every leader, and written down nowhere.

ROOT = bytes(range(32))


def test_leaders_that_share_the_root_tell_the_same_and_nobody_else_can() -> None:
    first, second, stranger = Secrets(ROOT), Secrets(ROOT), Secrets(bytes(32))
    token = first.generation_token("uid-1", 2)
    assert second.generation_token("uid-1", 2) == token
    others = {
        stranger.generation_token("uid-1", 2),
        first.generation_token("uid-1", 3),
        first.generation_token("uid-2", 2),
    }
    assert token not in others
    assert len(others) == 3
    assert not hashlib.sha256(b"surefoot:uid-1:2").hexdigest().startswith(token)


def test_a_late_member_hears_what_the_first_heard_and_the_status_does_not_know_it() -> None:
    token = Secrets(ROOT).generation_token("job-1", 2)
    told = [
        message.token
        for worker in (A, B)
        for message in list_desired_messages(
            derive_desired_state(
                TALK_STATUS, UsableMemoryServers(NODES), 2, Secrets(ROOT).generation_token("job-1", 2)
            ),
            talking(),
            worker,
        )
        if isinstance(message, Assign)
    ]
    assert told == [token, token]
    assert "oken" not in json.dumps(status_to_json(running().status))
    assert token not in repr(derive_desired_state(TALK_STATUS, UsableMemoryServers(NODES), 2, token))
    assert all(m.token == "t2" for m in words(talking(), A) if isinstance(m, Assign))
