"""An agent is killed in the middle of a promotion to S3: the next one finishes it, and sends nothing twice.

Real Redis, a real S3 server, kill -9. The trainer is gone before either begins: what is promoted lies in the memory tier.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.saves import Saver, arrays
from support.servers import redis_server, s3_server
from support.servers.s3_server import S3Server
from surefoot.flush.engine import FlushOptions
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.identities import RankSave
from surefoot.tiers import ObjectStoreTier, open_persistent
from surefoot.tiers.tier import read_digest_table, read_stream, read_verified_chunk

DIES_AT = 6
"""With four under way at once, at least two parts are there by then."""
SAVE = RankSave(1, 10, 0)
PASSWORD = "a password"


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server.running(tmp_path) as server:
        if server.engine == "moto":
            pytest.skip("moto keeps no checksums, by which what is there is known again")
        yield server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RunningServer]:
    (tmp_path / "redis").mkdir()
    with redis_server.running(tmp_path / "redis") as server:
        yield server


class Job:
    """One rank save of some tens of small chunks on one holder; promotions of it in processes of their own."""

    def __init__(self, redis: RunningServer, s3: S3Server, folder: Path) -> None:
        self.uid, self.s3, self.folder = str(uuid4()), s3, folder
        endpoint = redis_server.endpoint(redis, "node-1")
        account = Credentials(f"user-{self.uid}", PASSWORD)
        MemoryServerAdmin(endpoint.host, endpoint.port, redis_server.ADMIN_PASSWORD).provision(self.uid, account, 1)
        options = FlushOptions()
        saver = Saver(
            lambda _: MemoryServerClient(endpoint, self.uid, account), (endpoint.instance,), 1, options, chunk_blocks=1
        )
        self.stream = saver.save(SAVE, arrays(10, {f"w{i}": (300, 70) for i in range(8)}))
        saver.close()
        self.given = {
            "persistent": asdict(s3.settings()),
            "job": self.uid,
            "user": account.user,
            "password": PASSWORD,
            "node": endpoint.instance.node,
            "instance": endpoint.instance.run_id,
            "host": endpoint.host,
            "port": endpoint.port,
            "ranks": 1,
        }

    def promote(self, die_at_part: int = 0) -> subprocess.CompletedProcess[str]:
        arguments = self.folder / "arguments.json"
        arguments.write_text(json.dumps({**self.given, "die_at_part": die_at_part}))
        return subprocess.run(
            [sys.executable, "-m", "support.programs.dying_promoter", str(arguments)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def finished(self) -> dict[str, Any]:
        """What a promotion that is not killed says."""
        done = self.promote()
        assert done.returncode == 0, done.stderr[-2000:]
        told: dict[str, Any] = json.loads(done.stdout)
        assert told["errors"] == [None]
        return told

    def tier(self) -> ObjectStoreTier:
        return open_persistent(self.s3.settings(), self.uid)


@pytest.fixture
def job(redis: RunningServer, s3: S3Server, tmp_path: Path) -> Job:
    return Job(redis, s3, tmp_path)


OTHERS = ("layout", "layout beside the save", "digests", "values", "manifest", "newest")
REPLACED_BY = 2
"""PutObject requests for one damaged part: a create, which the server refuses since an object has that name, and then,
once the checksum differs and no manifest names the part, the one that replaces it. A whole part costs none."""
READS = {"GetObject", "HeadObject", "ListObjectsV2"}


def test_a_promotion_outlives_its_agent_and_sends_no_part_twice(job: Job) -> None:
    parts = -(-len(job.stream.layout.chunk_starts) // ObjectStoreTier.chunks_per_part)
    assert parts > DIES_AT + ObjectStoreTier.max_concurrent_parts
    assert job.promote(DIES_AT).returncode == -signal.SIGKILL
    tier = job.tier()
    kept = tier.list_parts(SAVE)
    assert DIES_AT - ObjectStoreTier.max_concurrent_parts <= len(kept) < parts
    assert tier.manifests() == ()
    assert tier.read_newest_manifests() == ()
    told = job.finished()
    assert told["requests"]["PutObject"] == parts - len(kept) + len(OTHERS)
    (manifest,) = tier.read_newest_manifests()
    stream, table = read_stream(tier, manifest), read_digest_table(tier, manifest)
    assert stream.digest == job.stream.digest
    for index in range(manifest.chunks):
        read_verified_chunk(tier, manifest, stream, table, index)  # raises unless every block is what was saved
    tier.close()
    requests = job.finished()["requests"]
    assert requests["GetObject"] > 0, "it read the manifest that is there"
    assert requests.keys() <= READS, "again is success, and writes nothing"


def test_what_an_interrupted_promotion_left_damaged_is_sent_again(job: Job) -> None:
    assert job.promote(DIES_AT).returncode == -signal.SIGKILL
    tier = job.tier()
    kept = tier.list_parts(SAVE)
    path, size = tier._names.part(SAVE, min(kept)), kept[min(kept)]
    tier._store.put(path, bytes(size))
    parts = -(-len(job.stream.layout.chunk_starts) // ObjectStoreTier.chunks_per_part)
    assert job.finished()["requests"]["PutObject"] == parts - len(kept) + REPLACED_BY + len(OTHERS)
    (manifest,) = tier.read_newest_manifests()
    stream, table = read_stream(tier, manifest), read_digest_table(tier, manifest)
    for index in range(ObjectStoreTier.chunks_per_part):
        read_verified_chunk(tier, manifest, stream, table, index)
    tier.close()
