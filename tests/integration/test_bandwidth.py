"""Limits of copies beside a training, on real Redis servers: what they hold back, and when they let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from support.saves import Saver, arrays
from support.servers import redis_server
from surefoot.flush.bandwidth import TokenBucket
from surefoot.flush.engine import FlushOptions
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.identities import MemoryServerInstance, RankSave

STATE = {"weight": (220_000,)}
"""880 kB."""
SAVE = RankSave(1, 10, 0)


Holders = tuple[Callable[[MemoryServerInstance], MemoryServerClient], tuple[MemoryServerInstance, ...]]


@pytest.fixture(scope="module")
def holders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holders]:
    """Holders of two nodes, and how they are opened."""
    job, account = str(uuid4()), Credentials("user-paced", "a password")
    with (
        redis_server.running(tmp_path_factory.mktemp("own")) as own,
        redis_server.running(tmp_path_factory.mktemp("other")) as other,
    ):
        endpoints = {e.instance: e for e in (redis_server.endpoint(own, "own"), redis_server.endpoint(other, "other"))}
        for endpoint in endpoints.values():
            MemoryServerAdmin(endpoint.host, endpoint.port, redis_server.ADMIN_PASSWORD).provision(job, account, 1)
        yield lambda holder: MemoryServerClient(endpoints[holder], job, account), tuple(endpoints)


def paced(holders: Holders, pace: TokenBucket) -> Saver:
    return Saver(*holders, options=FlushOptions(rate_limit=pace, node="own"), chunk_blocks=1)


def test_bytes_go_no_faster_than_their_rate_and_whoever_waits_can_be_ended() -> None:
    pace = TokenBucket(1_000_000)
    began = time.monotonic()
    assert all(pace.wait_for(125_000) for _ in range(6)), "a quarter of a second's worth at once, the rest paid for"
    assert time.monotonic() - began > 0.4
    threading.Timer(0.05, pace.stop).start()
    assert not pace.wait_for(100_000_000), "called off while in debt"


def test_a_limit_that_is_lifted_lets_go_who_waits_and_leaves_no_debt() -> None:
    pace = TokenBucket(1_000.0)
    threading.Timer(0.05, pace.set_limited, [False]).start()
    assert pace.wait_for(10_000_000), "would take hours"
    assert pace.wait_for(10_000_000)
    pace.set_limited(True)
    assert pace.wait_for(10), "what went out before is no debt"
    assert TokenBucket().wait_for(1 << 40), "without a rate nothing is limited"


def test_a_copy_to_another_node_waits_and_the_one_here_does_not(holders: Holders) -> None:
    saver = paced(holders, TokenBucket(1_000_000))
    saver.stage(0, SAVE, arrays(10, STATE))
    saver.watched.wait(lambda: (SAVE, 1) in saver.watched.saved)
    began = time.monotonic()
    assert saver.drain.wait_until_idle(20)
    assert time.monotonic() - began > 0.3, "0.88 MB at 1 MB/s, less a quarter of a second's worth"
    assert saver.watched.saved == [(SAVE, 1), (SAVE, 2)]
    saver.close()


def test_a_copy_that_waits_goes_at_once_when_nothing_trains_any_more(holders: Holders) -> None:
    pace = TokenBucket(1_000.0)
    saver = paced(holders, pace)
    saver.stage(0, RankSave(1, 20, 0), arrays(20, STATE))
    saver.watched.wait(lambda: (RankSave(1, 20, 0), 1) in saver.watched.saved)
    pace.set_limited(False)
    assert saver.drain.wait_until_idle(20), "at its rate it would take a quarter of an hour"
    saver.close()
