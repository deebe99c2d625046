"""One flipped byte anywhere, in either tier: found, named, read from another copy, and healed; or, with no copy left,
a refusal that names it. On two real Redis servers and a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from support.saves import Saver, arrays
from support.servers import redis_server
from surefoot.errors import TierUnavailable, Unreadable
from surefoot.flush.bandwidth import TokenBucket
from surefoot.flush.uploader import copy_save
from surefoot.format.layouts import Stream
from surefoot.geometry import Box
from surefoot.memory_server import scripts
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials, RespConnection
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.restore import (
    CheckpointReader,
    Destination,
    ReadOptions,
    SaveSource,
    persistent_source,
    read_catalogue,
    server_sources,
)
from surefoot.settings import PersistentSettings
from surefoot.tiers import open_persistent

SHAPES: dict[str, tuple[int, ...]] = {"weight": (1200, 1100), "bias": (70,), "count": ()}
SAVE = RankSave(1, 10, 0)
PARTS = ["chunk 0", "chunk 1", "digest table", "values", "layout", "index entry"]
VALUES = b'{"plain": 1}'


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    with (
        redis_server.running(tmp_path_factory.mktemp("one")) as one,
        redis_server.running(tmp_path_factory.mktemp("two")) as two,
    ):
        yield [one, two]


class Stored:
    """One rank save on two holders and in a folder, and a way to damage any part of any copy."""

    def __init__(self, servers: list[RunningServer], folder: Path) -> None:
        self.job = str(uuid4())
        self.account = Credentials(f"user-{self.job}", "a password")
        self.settings = PersistentSettings(uri=folder.as_uri())
        self.folder = folder
        self.endpoints: dict[MemoryServerInstance, MemoryServerEndpoint] = {}
        for number, server in enumerate(servers):
            endpoint = redis_server.endpoint(server, f"node-{number}")
            MemoryServerAdmin(endpoint.host, endpoint.port, redis_server.ADMIN_PASSWORD).provision(
                self.job, self.account, 1
            )
            self.endpoints[endpoint.instance] = endpoint
        self.tensors = arrays(10, SHAPES)
        saver = Saver(
            lambda h: MemoryServerClient(self.endpoints[h], self.job, self.account),
            tuple(self.endpoints),
            slot_bytes=8 << 20,
        )
        self.stream: Stream = saver.save(SAVE, self.tensors, values=VALUES)
        saver.close()
        assert len(self.stream.layout.chunk_starts) == 2
        source = MemoryServerClient(next(iter(self.endpoints.values())), self.job, self.account)
        copy_save(SAVE, [source], open_persistent(self.settings, self.job, create_root=True), 1, TokenBucket())
        source.close()

    def remove(self) -> None:
        for endpoint in self.endpoints.values():
            admin = MemoryServerAdmin(endpoint.host, endpoint.port, redis_server.ADMIN_PASSWORD)
            admin.remove_job(self.job, self.account.user)

    def sources(self) -> list[SaveSource]:
        memory = server_sources(self.endpoints.values(), self.job, self.account, "node-0")
        return [*memory, persistent_source(self.settings, self.job)]

    def flip(self, place: str, part: str) -> None:
        """`place`: node-0, node-1 or persistent."""
        if place == "persistent":
            for path in self._paths(part):
                data = bytearray(path.read_bytes())
                first, length = self._chunk(part) or (0, len(data))
                data[first + length // 2] ^= 1
                path.write_bytes(data)
            return
        endpoint = next(e for h, e in self.endpoints.items() if h.node == place)
        wire = RespConnection(endpoint.host, endpoint.port, Credentials("", redis_server.ADMIN_PASSWORD), 1.0)
        if part == "index entry":
            name = scripts.index_field(SAVE)
            text = bytearray(wire.call("HGET", scripts.index_key(self.job), name))
            text[len(text) // 2] ^= 1
            wire.call("HSET", scripts.index_key(self.job), name, bytes(text))
        else:
            data = bytearray(wire.call("GET", self._key(part)))
            data[len(data) // 2] ^= 1
            wire.call("SET", self._key(part), bytes(data))
        wire.close()

    def lose(self, place: str, part: str) -> None:
        """Removes a part from under its index entry."""
        if place == "persistent":
            for path in self._paths(part):
                path.unlink(missing_ok=True)
            return
        endpoint = next(e for h, e in self.endpoints.items() if h.node == place)
        wire = RespConnection(endpoint.host, endpoint.port, Credentials("", redis_server.ADMIN_PASSWORD), 1.0)
        assert wire.call("DEL", self._key(part)) == 1
        wire.close()

    def _chunk(self, part: str) -> tuple[int, int] | None:
        """Where a chunk lies in the first part, which holds all of them."""
        match part.split():
            case ["chunk", number]:
                layout = self.stream.layout
                return layout.chunk_starts[int(number)], layout.chunk_lengths()[int(number)]
        return None

    def _key(self, part: str) -> str:
        match part.split():
            case ["chunk", number]:
                return scripts.chunk_key(self.job, SAVE, int(number))
            case ["layout"]:
                return scripts.layout_key(self.job, self.stream.digest)
            case ["values"]:
                return scripts.values_key(self.job, SAVE)
        return scripts.digests_key(self.job, SAVE)

    def _paths(self, part: str) -> list[Path]:
        """Every file that has it: a layout is there twice."""
        folder = self.folder / self.job / "10-1" / "rank-0"
        match part.split():
            case ["chunk", _]:
                return [folder / "p0000"]
            case ["layout"]:
                return [self.folder / self.job / "layouts" / f"{self.stream.digest}.json", folder / "layout"]
            case ["index", _]:
                return [folder.with_name("rank-0.json")]
            case ["values"]:
                return [folder / "values"]
        return [folder / "digests"]


@pytest.fixture
def stored(servers: list[RunningServer], tmp_path: Path) -> Iterator[Stored]:
    made = Stored(servers, tmp_path / "persistent")
    yield made
    made.remove()


def restore(stored: Stored, sources: list[SaveSource]) -> tuple[list[str], int]:
    """Reads everything, compares it, heals; what was told, and how many ranges fell back."""
    into = {name: np.zeros(shape, "float32") for name, shape in SHAPES.items()}
    goals = [
        Destination(n, "float32", SHAPES[n], Box.whole(SHAPES[n]), memoryview(a.reshape(-1).view(np.uint8)))
        for n, a in into.items()
    ]
    with CheckpointReader(SAVE.checkpoint, read_catalogue(sources), ReadOptions(patience_seconds=5)) as reader:
        assert reader.read_values(0) == VALUES
        restored = reader.read(goals)
        told = reader.heal(1)
    for name, array in into.items():
        assert np.array_equal(array, stored.tensors[name]), name
    return told, restored.damage_count


def first_of_all(sources: list[SaveSource]) -> list[SaveSource]:
    """The first of them is asked for everything, to meet its damage: copies of one tier would share the reads."""
    return [replace(sources[0], kind="memory"), *(replace(source, kind="persistent") for source in sources[1:])]


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_byte_in_memory_is_named_read_elsewhere_and_healed(stored: Stored, part: str) -> None:
    stored.flip("node-0", part)
    told, _ = restore(stored, first_of_all(stored.sources()))
    assert len(told) == 1, told
    assert told[0].startswith(f"{part} of {SAVE} at memory:node-0")
    assert told[0].endswith("is healed")
    assert restore(stored, stored.sources()[:1]) == ([], 0), "the damaged copy alone is good again"


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_byte_in_the_persistent_tier_is_named_read_elsewhere_and_healed(stored: Stored, part: str) -> None:
    stored.flip("persistent", part)
    told, _ = restore(stored, first_of_all([stored.sources()[-1], stored.sources()[1]]))
    assert told[0].startswith(f"{part} of {SAVE} at persistent")
    assert all(sentence.endswith("is healed") for sentence in told)
    # without a layout that can be read this tier finds no chunk either
    assert len(told) == 1 or part == "layout", told
    assert restore(stored, stored.sources()[-1:]) == ([], 0), "the damaged copy alone is good again"


@pytest.mark.parametrize("part", PARTS)
def test_with_both_memory_copies_damaged_the_persistent_one_is_read_and_both_are_healed(
    stored: Stored, part: str
) -> None:
    stored.flip("node-0", part)
    stored.flip("node-1", part)
    told, _ = restore(stored, stored.sources())
    assert [t.endswith("is healed") for t in told] == [True, True]
    assert restore(stored, stored.sources()[1:2]) == ([], 0)


@pytest.mark.parametrize("part", PARTS)
def test_with_no_good_copy_left_the_refusal_names_what_is_unreadable(stored: Stored, part: str) -> None:
    for place in ("node-0", "node-1", "persistent"):
        stored.flip(place, part)
    with pytest.raises(Unreadable) as refusal:
        restore(stored, stored.sources())
    assert str(SAVE) in str(refusal.value) or "step 10" in str(refusal.value)
    if part != "index entry":
        assert part in str(refusal.value)
        assert not refusal.value.absent


@pytest.mark.parametrize("part", [p for p in PARTS if p != "index entry"])
def test_a_hole_under_an_index_entry_is_damage_and_not_absence(stored: Stored, part: str) -> None:
    for place in ("node-0", "node-1", "persistent"):
        stored.lose(place, part)
    with pytest.raises(Unreadable) as refusal:
        restore(stored, stored.sources())
    assert not refusal.value.absent, "reading the indexes anew would find the same checkpoint, again and again"


def test_a_hole_in_one_copy_is_read_elsewhere_and_healed(stored: Stored) -> None:
    stored.lose("node-0", "chunk 0")
    told, _ = restore(stored, first_of_all(stored.sources()))
    assert [t.endswith("is healed") for t in told] == [True], told
    assert restore(stored, stored.sources()[:1]) == ([], 0), "the copy alone is whole again"


def test_different_blocks_damaged_on_each_copy_still_make_one_good_restore(stored: Stored) -> None:
    stored.flip("node-0", "chunk 0")
    stored.flip("node-1", "chunk 1")
    told, fallbacks = restore(stored, stored.sources()[:2])
    assert fallbacks >= 1
    assert all(t.endswith("is healed") for t in told)


def test_a_save_that_no_tier_has_is_absent_and_a_silent_tier_is_waited_for(stored: Stored) -> None:
    other = RankSave(1, 99, 0)
    with (
        CheckpointReader(other.checkpoint, read_catalogue(stored.sources())) as reader,
        pytest.raises(Unreadable) as refusal,
    ):
        reader.read_values(0)
    assert refusal.value.absent
    gone = MemoryServerEndpoint(MemoryServerInstance("node-9", "x"), "127.0.0.1", 1, "node-9")
    silent = server_sources([gone], stored.job, stored.account, None, call_seconds=0.2)
    with (
        CheckpointReader(
            other.checkpoint, read_catalogue([*stored.sources(), *silent]), ReadOptions(patience_seconds=0.3)
        ) as reader,
        pytest.raises(TierUnavailable, match="memory:node-9 does not answer"),
    ):
        reader.read_values(0)


def test_a_source_that_answers_again_is_used(stored: Stored) -> None:
    tries = iter(range(10))

    def sometimes() -> SaveSource:
        good = stored.sources()[0]

        def open_tier():  # type: ignore[no-untyped-def]  # as Source.open
            if next(tries) < 3:
                raise TierUnavailable("not yet")
            return good.open()

        return SaveSource(good.name, "memory", open_tier)

    told, _ = restore(stored, [sometimes()])
    assert told == []
