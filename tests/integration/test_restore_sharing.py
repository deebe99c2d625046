"""Real gloo ranks restore from real holders, each stored byte read once for all replicas; and what a peer does wrong."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.gloo_world import Ranks, started, told
from support.programs.sharing_world import ACCOUNT, JOB
from support.servers import redis_server
from support.warm_pair import LIMIT_SECONDS


@dataclass
class World:
    """Runs worlds against the same holders; `folder` has what was saved, of each kind its own step."""

    folder: Path
    holders: str
    kind: str
    step: int
    runs: int = 0

    def start(self, what: str, size: int, **given: str) -> Ranks:
        self.runs += 1
        for done in self.folder.glob("restored.*"):
            done.unlink()
        group = self.folder / f"group-{self.runs}"
        given = {"KIND": self.kind, "STEP": str(self.step), "HOLDERS": self.holders, **given}
        return started("sharing_world.py", [what, str(self.folder)], size, group, **given)

    def run(self, what: str, size: int, **given: str) -> list[dict[str, Any]]:
        return told(self.start(what, size, **given))


@pytest.fixture(scope="module")
def holders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("holders")
    for name in ("a", "b"):
        (folder / name).mkdir()
    with (
        redis_server.running(folder / "a", memory_bytes=256 << 20) as first,
        redis_server.running(folder / "b", memory_bytes=256 << 20) as second,
    ):
        for server in (first, second):
            admin = redis_server.admin_of(server)
            admin.provision(JOB, ACCOUNT, 1)
            admin.close()
        yield json.dumps([(s.instance, s.settings.port) for s in (first, second)])


@pytest.fixture(scope="module")
def replicated(holders: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A model under DDP, saved by two ranks."""
    made = World(tmp_path_factory.mktemp("ddp"), holders, "ddp", step=3)
    made.run("save", 2)
    return made


@pytest.fixture(scope="module")
def hybrid(holders: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    """HSDP of two replicas of two shards, saved by its four ranks."""
    made = World(tmp_path_factory.mktemp("hsdp"), holders, "hsdp", step=4)
    made.run("save", 4)
    return made


def state_bytes(world: World) -> int:
    streams = [pickle.loads(path.read_bytes()) for path in world.folder.glob("stream.*")]
    return sum(len(stream.data) for stream in streams)


def total(results: list[dict[str, Any]], source: str) -> float:
    return sum(r["bytes"][source] for r in results)


@pytest.mark.parametrize(
    ("kind", "ranks", "copies"),
    [("replicated", 2, 2), pytest.param("replicated", 4, 4, marks=pytest.mark.nightly), ("hybrid", 4, 2)],
)
def test_each_stored_byte_is_read_once_for_all_replicas(
    kind: str, ranks: int, copies: int, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(kind)
    results = world.run("restore", ranks)
    assert [(r["wrong"], r["fallbacks"]) for r in results] == [([], {})] * ranks
    size = state_bytes(world)
    assert size <= total(results, "memory") <= 1.02 * size  # and each rank's own plain values and small tensors
    assert total(results, "memory") + total(results, "peer") >= copies * size


def test_without_sharing_each_replica_reads_everything(replicated: World) -> None:
    results = replicated.run("restore", 2, SHARE="0")
    assert total(results, "memory") >= 2 * state_bytes(replicated)
    assert total(results, "peer") == 0


def test_a_member_killed_in_mid_exchange_holds_nobody_up(replicated: World) -> None:
    results = told(replicated.start("restore", 4, FAULT="die"), killed=1)
    assert [r["wrong"] for r in results] == [[]] * 3
    assert all(r["fallbacks"]["exchange"] >= 1 for r in results)


def test_a_member_that_stalls_is_left_behind_and_restores_too_when_it_goes_on(replicated: World) -> None:
    ranks = replicated.start("restore", 4, FAULT="stall", WAIT="8")
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all((replicated.folder / f"restored.{rank}").exists() for rank in (0, 2, 3)):
        assert time.monotonic() < deadline
        assert all(rank.code in (None, 0) for rank in ranks), told(ranks)
        time.sleep(0.05)
    assert not (replicated.folder / "restored.1").exists()
    (replicated.folder / "go").touch()
    results = told(ranks)
    assert [r["wrong"] for r in results] == [[]] * 4
    assert all(r["fallbacks"]["exchange"] >= 1 for r in results)


@pytest.mark.parametrize(("fault", "reason"), [("spoil", "peer"), ("differ", "exchange")])
def test_damage_and_disagreement_end_in_direct_reads(fault: str, reason: str, replicated: World) -> None:
    results = replicated.run("restore", 4, FAULT=fault)
    assert [r["wrong"] for r in results] == [[]] * 4
    hurt = [r for r in results if r["fallbacks"].get(reason)]
    assert len(hurt) == (3 if fault == "spoil" else 4)
    if fault == "differ":
        assert total(results, "peer") == 0
