"""`python -m bench.encryption [MIB] [SAVES]`: one drain to real holders in clear and over TLS, and the load beside it.

Saves go one after another, no training runs; pages are filled before. Prints a line a figure: GB/s of the median save,
its CPU seconds a GB here and in the servers, and GB/s of reading one save from one holder, unverified.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from surefoot.flush.engine import FlushArena, Flusher, FlushListener
from surefoot.flush.state_machine import StagedSave
from surefoot.format.layouts import Stream, TensorParts, build_layout
from surefoot.geometry import Box
from surefoot.linux_process import cpu_seconds
from surefoot.memory_server import Credentials, MemoryServerClient, server_process
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer, ServerSettings, TlsFiles
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.tiers import Tier
from surefoot_operator.controller.credentials.certificates import CA, CERTIFICATE, KEY, issue_certificate
from surefoot_operator.platforms.local.node_process import find_free_port

JOB, PASSWORD, ACCOUNT = "bench", "of the benchmark", ("bench-user", "of its job")
CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Figures:
    gb_per_second: float
    own_cpu: float
    server_cpu: float
    read_gb_per_second: float


@contextmanager
def holders(folder: Path, count: int, size: int, tls: TlsFiles | None) -> Iterator[list[RunningServer]]:
    with ExitStack() as stack:
        started = []
        for number in range(count):
            room = 3 * size + (64 << 20)
            settings = ServerSettings(
                find_free_port(), room, folder / str(number), password=PASSWORD, tls=tls, prefault_bytes=room * 9 // 10
            )
            one = server_process.start_server(settings, server_process.find_server_program())
            stack.callback(one.kill)
            started.append(one)
        yield started


def measured(folder: Path, replicas: int, size: int, saves: int, tls: TlsFiles | None) -> Figures:
    """The median of `saves` saves of `size` bytes to `replicas` holders."""
    authority = tls.read_authority() if tls is not None else None
    account = Credentials(*ACCOUNT, authority or "")
    with holders(folder, replicas, size, tls) as started:
        endpoints = {}
        for one in started:
            where = one.settings
            MemoryServerAdmin(where.host, where.port, PASSWORD, tls_ca=authority).provision(JOB, account, 1)
            holder = MemoryServerInstance(f"node-{where.port}", one.instance)
            endpoints[holder] = MemoryServerEndpoint(holder, where.host, where.port, holder.node, tls is not None)
        saver = _Saver(endpoints, account, size)
        pids = [one.process.pid for one in started]
        seconds, own, theirs = [], [], []
        for step in range(1, saves + 2):
            before, cpu, there = time.monotonic(), _own_cpu(), _cpu_of(pids)
            saver.save(step)
            seconds.append(time.monotonic() - before)
            own.append(_own_cpu() - cpu)
            theirs.append(_cpu_of(pids) - there)
            saver.drop(step - 1)
        reading = saver.read(saves + 1)
        saver.close()
    gb = size / 1e9

    def median(values: list[float]) -> float:
        return statistics.median(values[1:])  # the first opens the connections

    return Figures(gb / median(seconds), median(own) / gb, median(theirs) / gb, gb / reading)


class _Saver:
    """One rank with one tensor."""

    def __init__(
        self, endpoints: dict[MemoryServerInstance, MemoryServerEndpoint], account: Credentials, size: int
    ) -> None:
        self._endpoints, self._account = endpoints, account
        rows = size // 4096
        tensor = TensorParts("w", "float32", (rows, 1024), (Box((0, 0), (rows, 1024)),))
        self._stream = Stream(build_layout([tensor]))
        self._bytes = rows * 4096
        slot = self._bytes + 4096
        memory = np.random.default_rng(1).integers(0, 255, 2 * slot, dtype=np.uint8)
        self._freed = threading.Event()
        watcher = FlushListener(lambda *_: self._freed.set(), lambda *_: None, print)
        self._drain = Flusher(FlushArena(memory.data, 2, slot), "me", self._open, watcher)
        self._drain.set_targets(tuple(endpoints), frozenset(endpoints), len(endpoints))

    def save(self, step: int) -> None:
        self._freed.clear()
        sealed = StagedSave(RankSave(1, step, 0), 1, "me", self._stream.digest, self._bytes, 2)
        self._drain.add_staged(0, sealed, self._stream.text)
        if not self._drain.wait_until_idle(120.0):
            raise RuntimeError("a save was not drained in 120 s")

    def drop(self, step: int) -> None:
        for endpoint in self._endpoints.values():
            client = MemoryServerClient(endpoint, JOB, self._account, CALL_SECONDS)
            client.delete_save(RankSave(1, step, 0), 1, len(self._stream.layout.chunk_lengths()))
            client.close()

    def read(self, step: int) -> float:
        tier = self._open(next(iter(self._endpoints)))
        began = time.monotonic()
        for number, length in enumerate(self._stream.layout.chunk_lengths()):
            tier.read_chunk(RankSave(1, step, 0), number, 0, length)
        seconds = time.monotonic() - began
        tier.close()
        return seconds

    def close(self) -> None:
        self._drain.close()

    def _open(self, holder: MemoryServerInstance) -> Tier:
        return MemoryServerClient(self._endpoints[holder], JOB, self._account, CALL_SECONDS)


def certificate(folder: Path) -> TlsFiles:
    """As the operator makes it."""
    content = issue_certificate({}, ["surefoot-memory"], time.time())
    for name in (CA, CERTIFICATE, KEY):
        (folder / name).write_bytes(content[name])
    return TlsFiles(folder / CERTIFICATE, folder / KEY, folder / CA)


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _cpu_of(pids: list[int]) -> float:
    return sum(map(cpu_seconds, pids))


def main() -> None:
    size = (int(sys.argv[1]) if len(sys.argv) > 1 else 256) << 20
    saves = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, saves of {size >> 20} MiB")
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as name:
        folder = Path(name)
        tls = certificate(folder)
        for replicas in (1, 2):
            for kind, files in (("clear", None), ("TLS", tls)):
                found = measured(folder / f"{kind}-{replicas}", replicas, size, saves, files)
                print(
                    f"R={replicas} {kind:5}: {found.gb_per_second:.2f} GB/s saved, {found.read_gb_per_second:.2f} read; "
                    f"CPU s/GB {found.own_cpu:.2f} here, {found.server_cpu:.2f} in the servers"
                )
    print(f"load afterwards {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
