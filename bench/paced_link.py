"""What a training's steps pay for the copies of its saves on a slow link, without a limit and with one.

`python -m bench.paced_link --out build/paced_link.json` (root). Two network namespaces joined by a link of 400 Mbit/s
(tc tbf): here a training that exchanges 1 MB with a peer in each step and drains 96 MB to a real Redis there, in turns
without a save, with an unlimited copy, and with `checkpoint.memory.bandwidth`. Step times are those while a copy is
under way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.saves import Saver, arrays
from surefoot.flush.bandwidth import TokenBucket
from surefoot.flush.engine import FlushOptions
from surefoot.memory_server import server_process
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import ServerSettings
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, RankSave

HERE, THERE = "sf-bench-here", "sf-bench-there"
ADDRESSES = {HERE: "10.231.7.1", THERE: "10.231.7.2"}
LINK = "400mbit"
LINK_BYTES = 50_000_000
EXCHANGED = 1 << 20
ELEMENTS = 24_000_000
"""Of float32: 96 MB."""
PASSWORD, ACCOUNT = "of the benchmark", Credentials("bench-user", "of the benchmark's job")
PEER_PORT, HOLDER_PORT = 7301, 7302
LIMITS = {"unlimited": 0.0, "a half of the link": LINK_BYTES / 2, "a fifth of the link": LINK_BYTES / 5}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextmanager
def link() -> Iterator[None]:
    """Both namespaces and the slow link between them; removed again, also what a killed run left."""
    _remove()
    for name in ADDRESSES:
        _ip("netns", "add", name)
    try:
        _ip("link", "add", "sfb0", "netns", HERE, "type", "veth", "peer", "name", "sfb0", "netns", THERE)
        for name, address in ADDRESSES.items():
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "sfb0")
            _ip("-n", name, "link", "set", "sfb0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            shaped = ["tc", "qdisc", "add", "dev", "sfb0", "root", "tbf"]
            limits = ["rate", LINK, "burst", "128kb", "latency", "100ms"]
            subprocess.run(["ip", "netns", "exec", name, *shaped, *limits], check=True, timeout=20)
        yield
    finally:
        _remove()


def _remove() -> None:
    for name in ADDRESSES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=20)


def _received(line: socket.socket, size: int) -> None:
    while size:
        size -= len(line.recv(min(size, 1 << 20)) or _ended())


def _ended() -> bytes:
    raise ConnectionError("the peer ended")


def peer() -> None:
    """The other rank: a Redis beside it, and each exchange is answered in kind."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server((ADDRESSES[THERE], PEER_PORT)) as server,
    ):
        where = ServerSettings(HOLDER_PORT, 2 << 30, Path(folder), ADDRESSES[THERE], PASSWORD)
        holder = server_process.start_server(where, server_process.find_server_program())
        try:
            print(holder.instance, flush=True)
            line, _ = server.accept()
            answer = bytes(EXCHANGED)
            with line:
                while True:
                    _received(line, EXCHANGED)
                    line.sendall(answer)
        except ConnectionError:
            pass
        finally:
            holder.stop()


def steps(line: socket.socket, until: threading.Event) -> list[float]:
    """Seconds of each step until then: both directions at once, as a collective does."""
    taken, data = [], bytes(EXCHANGED)
    while not until.is_set():
        began = time.monotonic()
        sender = threading.Thread(target=line.sendall, args=(data,))
        sender.start()
        _received(line, EXCHANGED)
        sender.join()
        taken.append(time.monotonic() - began)
    return taken


def trainer(instance: str, tries: int) -> list[dict[str, Any]]:
    """All rows, in alternation."""
    holder = MemoryServerInstance(THERE, instance)
    endpoint = MemoryServerEndpoint(holder, ADDRESSES[THERE], HOLDER_PORT, THERE)
    MemoryServerAdmin(endpoint.host, endpoint.port, PASSWORD).provision("bench", ACCOUNT, 1)
    tensors, rows, number = arrays(1, {"weight": (ELEMENTS,)}), [], 0
    with socket.create_connection((ADDRESSES[THERE], PEER_PORT)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(tries):
            rows.append(_row("without a save", 3.0, steps(line, _after(3.0))))
            for name, rate in LIMITS.items():
                number += 10
                options = FlushOptions(rate_limit=TokenBucket(rate), node=HERE)
                opened = lambda _: MemoryServerClient(endpoint, "bench", ACCOUNT, 20.0)  # noqa: E731
                saver = Saver(opened, (holder,), 1, options, slot_bytes=100_000_000)
                saver.stage(0, RankSave(1, number, 0), tensors)
                over, began = threading.Event(), time.monotonic()
                waiter = threading.Thread(target=lambda s=saver, o=over: (s.drain.flush(120.0), o.set()))
                waiter.start()
                taken = steps(line, over)
                rows.append(_row(name, time.monotonic() - began, taken))
                waiter.join()
                saver.close()
                MemoryServerClient(endpoint, "bench", ACCOUNT, 20.0).delete_save(RankSave(1, number, 0), 1, 4096)
    return rows


def _after(seconds: float) -> threading.Event:
    over = threading.Event()
    threading.Timer(seconds, over.set).start()
    return over


def _row(name: str, seconds: float, taken: list[float]) -> dict[str, Any]:
    ordered = sorted(taken)
    return {
        "row": name,
        "load": os.getloadavg()[0],
        "copy_seconds": seconds,
        "steps": len(taken),
        "step_ms": statistics.median(taken) * 1e3,
        "step_p95_ms": ordered[int(0.95 * (len(ordered) - 1))] * 1e3,
    }


def _inside(name: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "bench.paced_link", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--role", choices=("peer", "trainer"))
    parser.add_argument("--instance", default="")
    given = parser.parse_args()
    if given.role == "peer":
        peer()
        return
    if given.role == "trainer":
        print(json.dumps(trainer(given.instance, given.tries)))
        return
    with link():
        other = _inside(THERE, "--role", "peer")
        try:
            assert other.stdout is not None
            instance = other.stdout.readline().strip()
            this = _inside(HERE, "--role", "trainer", "--instance", instance, "--tries", str(given.tries))
            rows = json.loads(this.communicate(timeout=900)[0])
        finally:
            other.send_signal(signal.SIGTERM)
            other.wait(20)
    names = list(dict.fromkeys(row["row"] for row in rows))
    for name in names:
        own = [row for row in rows if row["row"] == name]
        ms, p95, took = ([row[key] for row in own] for key in ("step_ms", "step_p95_ms", "copy_seconds"))
        print(
            f"{name}: step {statistics.median(ms):.1f} ms ({min(ms):.1f}-{max(ms):.1f}), p95 {statistics.median(p95):.1f},"
            f" copy {statistics.median(took):.1f} s; load {own[-1]['load']:.1f}"
        )
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
