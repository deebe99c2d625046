"""Many ranks restore from the only holder that is left, which is full, in a cgroup of its container's limit.

Every rank must get its part, and the kernel must not end the server: its copy is the last one.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from support.saves import put_save
from support.servers import redis_server
from support.servers.memory_cgroup import container_bytes, limited_to
from surefoot.errors import SurefootError
from surefoot.format.layouts import Stream, TensorParts, build_layout
from surefoot.geometry import Box
from surefoot.memory_server import MemoryServerClient
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, RankSave
from surefoot.restore.catalogue import read_catalogue, server_sources
from surefoot.restore.fetch import Destination
from surefoot.restore.reader import CheckpointReader, ReadOptions

JOB, ACCOUNT = "many", redis_server.account("user-many", "a password")
CHECKPOINT = Checkpoint(1, 10)
MEMORY_BYTES, SAVE_BYTES = 512 << 20, 470 << 20
CLIENT_BYTES = 128 << 20
"""The least that the chart takes: a quarter of what 32 ranks ask for at full speed."""


class Restore:
    """One checkpoint of one tensor, of which each rank reads its own rows."""

    def __init__(self, where: MemoryServerEndpoint, rank_count: int) -> None:
        self.where, self.rank_count = where, rank_count
        self.rows = SAVE_BYTES // (rank_count * 4096)
        self.shape = (self.rows * rank_count, 1024)
        self.parts = [bytearray(self.rows * 4096) for _ in range(rank_count)]
        self.errors: list[Exception] = []
        self.together = threading.Barrier(rank_count)

    def save(self) -> None:
        stream = Stream(build_layout([TensorParts("w", "float32", self.shape, (Box.whole(self.shape),))]))
        row = bytes(range(256)) * 16
        client = MemoryServerClient(self.where, JOB, ACCOUNT, 30.0)
        put_save(client, RankSave(1, 10, 0), 1, stream, row * (stream.layout.stream_bytes // len(row)))
        client.close()

    def read(self, rank: int) -> None:
        box = Box((rank * self.rows, 0), (self.rows, 1024))
        wanted = Destination("w", "float32", self.shape, box, memoryview(self.parts[rank]))
        try:
            sources = server_sources([self.where], "many", ACCOUNT, None, 10.0)
            options = ReadOptions(reader_rank=rank, patience_seconds=20.0)
            with CheckpointReader(CHECKPOINT, read_catalogue(sources, CHECKPOINT), options) as reader:
                reader.layouts.list_tensors(reader.world_size)
                self.together.wait(60.0)
                reader.read([wanted])
        except (SurefootError, threading.BrokenBarrierError) as error:
            self.together.abort()
            self.errors.append(error)

    def run(self) -> None:
        threads = [threading.Thread(target=self.read, args=(rank,)) for rank in range(self.rank_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
            assert not thread.is_alive(), "a rank waits for ever"


@pytest.mark.parametrize("rank_count", [24, 32])
@pytest.mark.parametrize("program", redis_server.PROGRAMS)
def test_every_rank_restores_from_the_last_holder(program: str, rank_count: int, tmp_path: Path) -> None:
    with (
        limited_to(container_bytes(MEMORY_BYTES, CLIENT_BYTES)) as group,
        redis_server.running(
            tmp_path,
            redis_server.program(program),
            MEMORY_BYTES,
            client_bytes=CLIENT_BYTES,
            before_exec=group.join,
        ) as server,
    ):
        admin = redis_server.admin_of(server)
        admin.provision(JOB, ACCOUNT, 1)
        admin.close()
        restore = Restore(redis_server.endpoint(server), rank_count)
        restore.save()
        restore.run()
        assert server.process.poll() is None, f"killed {group.kill_count} times, at {group.peak_bytes} bytes"
        assert restore.errors == []
        row = bytes(range(256)) * 16
        assert all(part == row * restore.rows for part in restore.parts)
        assert group.kill_count == 0
