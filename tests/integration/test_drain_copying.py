"""Promotion, repair, upkeep and library mode, on real Redis servers and a folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.fakes.fake_tiers import MemoryPlace, MemoryTier, no_hook
from support.saves import Saver, arrays
from support.servers import holder_pair, redis_server
from support.servers.holder_pair import HolderPair
from surefoot.checkpointer.library_mode.in_process_backend import PERSISTENT, InProcessBackend, InProcessTargets
from surefoot.errors import TierFull, TierUnavailable
from surefoot.flush.bandwidth import TokenBucket
from surefoot.flush.engine import FlushOptions
from surefoot.flush.garbage_collection import GcScope, RetentionThread, collect_garbage
from surefoot.flush.state_machine import RetryLimits
from surefoot.flush.uploader import Uploader, UploadOptions, UploadOutcome, copy_save, drop_checkpoints, repair_save
from surefoot.ipc.trainer_messages import Attached, Staged
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.settings import PersistentSettings
from surefoot.tiers import open_persistent
from surefoot.tiers.persistent import ObjectStoreTier

SHAPES: dict[str, tuple[int, ...]] = {"weight": (300, 70), "bias": (70,), "count": ()}
FAST = FlushOptions(RetryLimits(attempts=3, retry_seconds=0.01, no_target_timeout_seconds=0.3))
QUICK = UploadOptions(attempts=3, retry_seconds=0.01)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[MemoryServerEndpoint]]:
    with holder_pair.endpoints(tmp_path_factory.mktemp("holders")) as found:
        yield found


@pytest.fixture
def memory(servers: list[MemoryServerEndpoint]) -> HolderPair:
    return holder_pair.provisioned(servers)


@pytest.fixture
def saver(memory: HolderPair) -> Iterator[Saver]:
    made = Saver(memory.open, memory.holders, options=FAST)
    yield made
    made.close()


def folder_tier(path: Path) -> ObjectStoreTier:
    return open_persistent(PersistentSettings(uri=path.as_uri()), "job", create_root=True)


class Done:
    """Collects what a promoter says."""

    def __init__(self) -> None:
        self.results: list[UploadOutcome] = []
        self._changed = threading.Condition()

    def __call__(self, promoted: UploadOutcome) -> None:
        with self._changed:
            self.results.append(promoted)
            self._changed.notify_all()

    def wait(self, count: int) -> list[UploadOutcome]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.results) >= count, 20)
            return self.results


def test_a_promoted_save_is_the_same_save_and_promoting_it_again_is_success(
    memory: HolderPair, saver: Saver, tmp_path: Path
) -> None:
    save = RankSave(1, 10, 0)
    saver.save(save, arrays(10, SHAPES))
    done = Done()
    promoter = Uploader(lambda _: [memory.open(h) for h in memory.holders], lambda: folder_tier(tmp_path), done, QUICK)
    promoter.queue_upload(1, [save])
    assert done.wait(1)[0].error is None
    promoter.queue_upload(1, [save])
    assert done.wait(2)[1].error is None
    there, here = folder_tier(tmp_path).manifests(), memory.open(memory.holders[0]).manifests()
    assert there == here
    assert promoter.close()
    assert drop_checkpoints(folder_tier(tmp_path), [save.checkpoint]) is None
    assert folder_tier(tmp_path).manifests() == ()


def test_promotion_takes_each_chunk_from_a_good_copy() -> None:
    places = [MemoryPlace("memory:a"), MemoryPlace("memory:b")]
    ids = {MemoryServerInstance(p.name, "1"): p for p in places}
    saver = Saver(lambda h: ids[h].tier(), tuple(ids), options=FAST)
    save = RankSave(1, 10, 0)
    saver.save(save, arrays(10, SHAPES))
    saver.close()
    good = dict(places[1].parts)
    places[0].flip(save, 0, 100)
    places[1].flip(save, "digests", 3)
    target, done = MemoryPlace("persistent"), Done()
    promoter = Uploader(lambda _: [p.tier() for p in places], target.tier, done, QUICK)
    promoter.queue_upload(1, [save])
    assert done.wait(1)[0].error is None
    assert target.parts[save, 0] == good[save, 0]
    places[1].flip(save, 0, 200)
    promoter.queue_upload(1, [RankSave(1, 10, 0)])
    failed = done.wait(2)[1]
    assert "no source has an intact copy" in str(failed.error)
    assert failed.is_unreadable
    assert promoter.close()


def silent(call: str, save: RankSave | None) -> None:
    """A hook of a holder whose line broke."""
    raise TierUnavailable("memory:b does not answer")


@pytest.mark.parametrize(("other", "unreadable"), [("damaged", True), ("without it", True), ("silent", False)])
def test_an_upload_calls_a_save_unreadable_only_where_no_source_may_have_a_good_copy(
    other: str, unreadable: bool
) -> None:
    places = [MemoryPlace("memory:a"), MemoryPlace("memory:b")]
    ids = {MemoryServerInstance(p.name, "1"): p for p in (places if other == "damaged" else places[:1])}
    saver = Saver(lambda h: ids[h].tier(), tuple(ids), options=FAST)
    save = RankSave(1, 10, 0)
    saver.save(save, arrays(10, SHAPES))
    saver.close()
    del places[0].parts[save, 0]
    if other == "damaged":
        places[1].flip(save, 0, 100)
    places[1].hook = silent if other == "silent" else no_hook
    done = Done()
    promoter = Uploader(lambda _: [p.tier() for p in places], MemoryPlace("persistent").tier, done, QUICK)
    promoter.queue_upload(1, [save])
    found = done.wait(1)[0]
    assert found.error is not None
    assert found.is_unreadable == unreadable, found.error
    assert promoter.close()


@pytest.mark.parametrize("error", [TierFull("disk full"), TierUnavailable("bucket gone")])
def test_a_persistent_tier_that_is_full_or_gone_is_told_and_used_again_later(error: Exception) -> None:
    source = MemoryPlace("memory:a")
    saver = Saver(lambda _: source.tier(), (MemoryServerInstance("a", "1"),), options=FAST)
    save = RankSave(1, 10, 0)
    saver.save(save, arrays(10, SHAPES))
    saver.close()
    target, done = MemoryPlace("persistent"), Done()

    def hook(call: str, _: RankSave | None) -> None:
        if call == "put_chunk":
            raise error

    target.hook = hook
    promoter = Uploader(lambda _: [source.tier()], target.tier, done, QUICK)
    promoter.queue_upload(1, [save])
    assert done.wait(1)[0].error == str(error)
    assert not target.index
    target.hook = no_hook
    promoter.queue_upload(1, [save])
    assert done.wait(2)[1].error is None
    assert promoter.close()


def test_repair_makes_a_second_copy_and_an_old_epoch_cannot(memory: HolderPair) -> None:
    one, two = memory.holders
    saver = Saver(memory.open, (one,), options=FAST)
    save = RankSave(1, 10, 0)
    saver.save(save, arrays(10, SHAPES))
    saver.close()
    assert memory.saves(two) == []
    memory.client(two).fence(3)
    assert "generation 3 of this job has replaced this one" in str(
        repair_save(save, memory.open(one), memory.open(two), 2, TokenBucket())
    )
    assert memory.saves(two) == []
    assert repair_save(save, memory.open(one), memory.open(two), 3, TokenBucket()) is None
    assert memory.saves(two) == [save]


def test_a_full_redis_costs_saves_and_nothing_else_until_something_is_dropped(tmp_path: Path) -> None:
    account = Credentials("user-job", "a password")
    with redis_server.running(tmp_path, memory_bytes=16 << 20) as server:
        endpoint = redis_server.endpoint(server)
        MemoryServerAdmin(endpoint.host, endpoint.port, redis_server.ADMIN_PASSWORD).provision("job", account, 1)
        saver = Saver(lambda _: MemoryServerClient(endpoint, "job", account), (endpoint.instance,), 1, FAST, 8 << 20)
        shape = {"weight": (1200, 1000)}
        step = 0
        while not saver.watched.freed or saver.watched.freed[-1][2]:
            step += 10
            assert step < 100, "the server never became full"
            stream = saver.save(RankSave(1, step, 0), arrays(step, shape))
        assert saver.watched.freed[-1] == (0, step, False)
        assert "full" in saver.watched.notices[-1][1]
        client = MemoryServerClient(endpoint, "job", account)
        chunks = len(stream.layout.chunk_starts)
        for gone in (RankSave(1, 10, 0), RankSave(1, step, 0)):
            client.delete_save(gone, 1, chunks)
        saver.save(RankSave(1, step + 10, 0), arrays(step + 10, shape))
        assert saver.watched.freed[-1] == (0, step + 10, True)
        saver.close()


def test_without_a_leader_old_checkpoints_go_only_behind_a_full_newer_one(memory: HolderPair, saver: Saver) -> None:
    one, two = memory.holders
    for step in (10, 20, 30):
        saver.save(RankSave(1, step, 0), arrays(step, SHAPES))
    saver.drain.set_targets((one,), frozenset({one}), 1)
    saver.save(RankSave(1, 40, 0), arrays(40, SHAPES))
    clients = {h: memory.client(h) for h in memory.holders}
    domains = {h: h.node for h in memory.holders}
    charge = GcScope((LineageEntry(1, None, 1),), 1, replicas=2, keep=1, domains=domains)
    kept = collect_garbage(clients, charge)
    assert kept.watermark == Checkpoint(1, 30)
    assert memory.saves(one) == [RankSave(1, 30, 0), RankSave(1, 40, 0)]
    assert memory.saves(two) == [RankSave(1, 30, 0)]
    assert collect_garbage(clients, charge).dropped_count == 0
    clients[two].fence(2)
    assert collect_garbage(clients, charge).is_fenced


def test_without_a_leader_and_with_one_holder_left_saves_do_not_pile_up(memory: HolderPair, saver: Saver) -> None:
    one, _ = memory.holders
    saver.drain.set_targets((one,), frozenset({one}), 1)
    for step in (10, 20, 30, 40):
        saver.save(RankSave(1, step, 0), arrays(step, SHAPES))
    charge = GcScope((LineageEntry(1, None, 1),), 1, replicas=2, keep=2, domains={h: h.node for h in memory.holders})
    kept = collect_garbage({one: memory.client(one)}, charge)
    assert (kept.watermark, kept.dropped_count) == (None, 2)
    assert memory.saves(one) == [RankSave(1, 30, 0), RankSave(1, 40, 0)]


def attached(epoch: int = 1) -> Attached:
    return Attached(
        job="job", generation=epoch, world_size=1, rank=0, incarnation="me", parent=None, lineage=((epoch, None, 1),),
        servers=(), replicas=1, interval_steps=10, persistent_interval_steps=None, interval_exponent=0,
    )  # fmt: skip


def test_library_mode_saves_to_the_folder_and_keeps_the_newest(tmp_path: Path) -> None:
    keeper = RetentionThread(lambda: folder_tier(tmp_path), (LineageEntry(1, None, 1),), 1, keep=2)
    link = InProcessBackend(attached(), InProcessTargets((PERSISTENT,), lambda _: folder_tier(tmp_path), keeper))
    source = Saver(lambda _: folder_tier(tmp_path), (), options=FAST)
    memory, slots, slot_bytes = link.request_arena(200_000)
    assert (slots, memory.nbytes) == (2, 2 * slot_bytes)
    for step in (10, 20, 30, 40):
        slot = link.wait_for_free_slot(10)
        assert slot is not None
        stream = source.stage(0, RankSave(1, step, 0), arrays(step, SHAPES))
        size = stream.layout.stream_bytes
        values = b'{"plain": 1}'
        begin = slot * slot_bytes
        memory[begin : begin + size + len(values)] = source.memory[: size + len(values)]
        link.hand_over_slot(Staged(slot, step, size, len(values), stream.digest, stream.text))
        assert link.wait_for_flush(10)
        source.drain.wait_until_idle(10)
    del memory
    link.close(40)
    source.close()
    keeper.collect_now()
    assert [m.save.step for m in folder_tier(tmp_path).manifests()] == [30, 40]


class Bucket(MemoryTier):
    """Takes three parts of two chunks at once, and remembers which came and how many were under way."""

    max_concurrent_parts = 3
    chunks_per_part = 2

    def __init__(self, place: MemoryPlace, refuse: int | None = None) -> None:
        super().__init__(place)
        self.refuse = refuse
        self.came: list[int] = []
        self.most = self._under_way = 0
        self._counting = threading.Lock()
        self._full = threading.Event()

    def _part(self, save: RankSave, part: int) -> list[bytes]:
        numbers = range(part * self.chunks_per_part, (part + 1) * self.chunks_per_part)
        return [self._place.parts[save, index] for index in numbers if (save, index) in self._place.parts]

    def list_parts(self, save: RankSave) -> dict[int, int]:
        chunks = [part for s, part in self._place.parts if s == save and isinstance(part, int)]
        return {p: sum(map(len, self._part(save, p))) for p in {chunk // self.chunks_per_part for chunk in chunks}}

    def has_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> bool:
        return self._part(save, part) == [bytes(chunk) for chunk in chunks]

    def put_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> None:
        with self._counting:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            if self.most == self.max_concurrent_parts:
                self._full.set()
        self._full.wait(5)  # until as many as may be are
        if part == self.refuse:
            raise TierUnavailable("the bucket is away")
        for index, chunk in enumerate(chunks, part * self.chunks_per_part):
            super().put_chunk(save, index, chunk)
        with self._counting:
            self._under_way -= 1
            self.came.append(part)


def test_parts_go_up_several_at_once_and_a_copy_goes_on_where_an_earlier_one_ended() -> None:
    source, target = MemoryPlace("memory:a"), MemoryPlace("persistent")
    saver = Saver(lambda _: source.tier(), (MemoryServerInstance("a", "1"),), options=FAST, chunk_blocks=1)
    save = RankSave(1, 10, 0)
    stream = saver.save(save, arrays(10, {f"w{i}": (300, 70) for i in range(8)}))
    saver.close()
    chunks = len(stream.layout.chunk_starts)
    parts = -(-chunks // 2)
    assert parts >= 8
    first = Bucket(target, refuse=5)
    with pytest.raises(TierUnavailable):
        copy_save(save, [source.tier()], first, 1, TokenBucket())
    assert first.most == 3
    assert not target.index
    assert 3 <= len(first.came) < parts
    target.flip(save, first.came[0] * 2)
    second = Bucket(target)
    second._full.set()
    written = copy_save(save, [source.tier()], second, 1, TokenBucket())
    again = {first.came[0]}
    assert sorted(second.came) == sorted(again | (set(range(parts)) - set(first.came))), "the damaged one, and the rest"
    assert written.sent_bytes < stream.layout.stream_bytes
    assert [m.save for m in target.tier().manifests()] == [save]
    for index in range(chunks):
        assert target.parts[save, index] == source.parts[save, index]
