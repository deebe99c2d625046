"""What did not change since the save before is not sent again: frozen weights, on real Redis servers and a folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from support.saves import Arrays, Saver, arrays, split, stream_of
from support.servers import holder_pair, redis_server
from support.servers.holder_pair import HolderPair
from surefoot.flush.engine import FlushOptions
from surefoot.flush.state_machine import RetryLimits
from surefoot.flush.uploader import Uploader, UploadOptions, UploadOutcome
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials, RespConnection
from surefoot.protocol.identities import MemoryServerEndpoint, RankSave
from surefoot.settings import PersistentSettings
from surefoot.tiers import Tier, open_persistent
from surefoot.tiers import tier as verified

FAST = FlushOptions(RetryLimits(attempts=3, retry_seconds=0.01, no_target_timeout_seconds=0.3))
FROZEN = {f"w{i}": (300, 70) for i in range(9)}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[MemoryServerEndpoint]]:
    with holder_pair.endpoints(tmp_path_factory.mktemp("holders")) as found:
        yield found


@pytest.fixture
def memory(servers: list[MemoryServerEndpoint]) -> HolderPair:
    return holder_pair.provisioned(servers)


class Counting:
    """A holder client that counts what it sends and what it has copied."""

    def __init__(self, tier: MemoryServerClient, sent: list[int], copied: list[int]) -> None:
        self._tier, self._sent, self._copied = tier, sent, copied

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    def send_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        self._sent.append(len(data))
        self._tier.send_chunk(save, index, data)

    def copy_chunk(self, source: RankSave, save: RankSave, index: int) -> bool:
        made = self._tier.copy_chunk(source, save, index)
        self._copied += [index] if made else []
        return made


def steps_of(frozen: int, steps: range) -> list[dict[str, np.ndarray]]:
    """States of a program that trains the last tensors and never the first `frozen`."""
    first = arrays(0, FROZEN)
    return [{n: (first if i < frozen else arrays(step, FROZEN))[n] for i, n in enumerate(FROZEN)} for step in steps]


def test_what_is_frozen_is_sent_once_and_every_save_is_whole(memory: HolderPair) -> None:
    sent, copied = [], []
    saver = Saver(
        lambda h: cast(Tier, Counting(memory.open(h), sent, copied)), memory.holders, options=FAST, chunk_blocks=1
    )
    states = steps_of(8, range(1, 5))
    each = []
    for step, state in enumerate(states, 1):
        del sent[:]
        stream = saver.save(RankSave(1, step, 0), state)
        each.append(sum(sent))
    saver.close()
    size = stream.layout.stream_bytes
    assert each[0] == 2 * size
    assert all(bytes_sent < 0.2 * 2 * size for bytes_sent in each[1:]), each
    assert len(copied) >= 3 * 2 * 8
    for step, state in enumerate(states, 1):
        assert_whole(memory, RankSave(1, step, 0), state)


def test_a_base_that_was_dropped_is_sent_again(memory: HolderPair) -> None:
    sent, copied = [], []
    saver = Saver(
        lambda h: cast(Tier, Counting(memory.open(h), sent, copied)), memory.holders, options=FAST, chunk_blocks=1
    )
    one, two = steps_of(8, range(1, 3))
    stream = saver.save(RankSave(1, 1, 0), one)
    for holder in memory.holders:
        memory.open(holder).delete_save(RankSave(1, 1, 0), 1, len(stream.layout.chunk_starts))
    del sent[:]
    saver.save(RankSave(1, 2, 0), two)
    saver.close()
    assert copied == []
    assert sum(sent) == 2 * stream.layout.stream_bytes
    assert_whole(memory, RankSave(1, 2, 0), two)


def test_an_account_that_may_not_copy_costs_no_save(memory: HolderPair) -> None:
    """As a holder that an operator of before provisioned."""
    saver = Saver(memory.open, memory.holders, options=FAST, chunk_blocks=1)
    for endpoint in memory.endpoints.values():
        wire = RespConnection(endpoint.host, endpoint.port, Credentials("", redis_server.ADMIN_PASSWORD), 1.0)
        wire.call("ACL SETUSER", memory.account.user, "-copy")
        wire.close()
    for step, state in enumerate(steps_of(8, range(1, 4)), 1):
        saver.save(RankSave(1, step, 0), state)
        assert_whole(memory, RankSave(1, step, 0), state)
    assert saver.watched.notices == []
    saver.close()


def assert_whole(memory: HolderPair, save: RankSave, state: Arrays) -> None:
    """Each holder alone gives every byte of it."""
    _, data = stream_of(state, {n: split(a.shape, 1, 0) for n, a in state.items()}, chunk_blocks=1)
    for holder in memory.holders:
        tier = memory.open(holder)
        manifest = next(m for m in tier.manifests() if m.save == save)
        stream, table = verified.read_stream(tier, manifest), verified.read_digest_table(tier, manifest)
        read = [verified.read_verified_chunk(tier, manifest, stream, table, i) for i in range(manifest.chunks)]
        assert b"".join(map(bytes, read)) == data
        tier.close()


def test_an_upload_has_the_bucket_copy_the_parts_that_did_not_change(memory: HolderPair, tmp_path: Path) -> None:
    saver = Saver(memory.open, memory.holders, options=FAST, chunk_blocks=1)
    states = steps_of(8, range(1, 4))
    for step, state in enumerate(states, 1):
        saver.save(RankSave(1, step, 0), state)
    saver.close()
    settings, results, came = PersistentSettings(uri=tmp_path.as_uri()), list[UploadOutcome](), threading.Semaphore(0)

    def on_done(promoted: UploadOutcome) -> None:
        results.append(promoted)
        came.release()

    promoter = Uploader(
        lambda _: [memory.open(h) for h in memory.holders],
        lambda: open_persistent(settings, "job"),
        on_done,
        UploadOptions(attempts=1),
    )
    for step in range(1, 4):
        promoter.queue_upload(1, [RankSave(1, step, 0)])
        assert came.acquire(timeout=20)
    assert promoter.close()
    assert [result.error for result in results] == [None] * 3
    size = sum(a.nbytes for a in states[0].values())
    whole, *others = [result.sent_bytes for result in results]
    assert whole >= size
    assert all(other < 0.6 * size for other in others), results
    there, here = open_persistent(settings, "job"), memory.open(memory.holders[0])
    for manifest in there.manifests():
        stream, table = verified.read_stream(there, manifest), verified.read_digest_table(there, manifest)
        for index in range(manifest.chunks):
            wanted = verified.read_verified_chunk(here, manifest, stream, table, index)
            assert verified.read_verified_chunk(there, manifest, stream, table, index) == wanted
