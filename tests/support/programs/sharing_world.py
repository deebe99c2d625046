"""One rank of a gloo world that saves into real holders, or restores from them reading together with its replicas.

sharing_world.py save|restore FOLDER     RANK, WORLD_SIZE, GROUP (a store), KIND, HOLDERS (JSON), FAULT, STEP and WIDTH in
the environment. FAULT is what befalls rank 1 in the exchange: die, stall (until FOLDER/go is there), spoil or differ.
Restoring prints one JSON object: bytes by source, fallbacks, seconds, and what differs from what was saved.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.fakes.fake_link import FakeLink
from support.gloo_world import leave
from support.saved_streams import merged, saved
from support.saves import put_save
from support.servers import redis_server
from surefoot import Checkpointer, metrics
from surefoot.checkpointer import restoring
from surefoot.format.layouts import Stream
from surefoot.ipc.trainer_messages import Attached
from surefoot.memory_server.client import MemoryServerClient
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.restore import exchange
from surefoot.settings import JobSettings, job_environment
from surefoot.state import Program

JOB = "sharing"
STEP = int(os.environ.get("STEP", "3"))
ACCOUNT = redis_server.account("sharing-user", "a password")
REASONS = ("exchange", "peer", "corrupt", "missing", "unreachable")


def objects() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    width, world = int(os.environ.get("WIDTH", "640")), dist.get_world_size()
    torch.manual_seed(dist.get_rank() if sys.argv[1] == "restore" else 7)
    model: Any = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
    if os.environ["KIND"] == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, width)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def endpoints() -> tuple[MemoryServerEndpoint, ...]:
    given = json.loads(os.environ["HOLDERS"])
    return tuple(
        MemoryServerEndpoint(MemoryServerInstance(f"node-{n}", i), "127.0.0.1", p, f"node-{n}")
        for n, (i, p) in enumerate(given)
    )


def save(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    stream = saved(Program(objects(), (rank, world)), rank, STEP)
    (folder / f"stream.{rank}").write_bytes(pickle.dumps(stream))
    for endpoint in endpoints():
        tier = MemoryServerClient(endpoint, JOB, ACCOUNT, 5.0)
        put_save(tier, RankSave(1, STEP, rank), world, Stream(stream.layout), stream.data, stream.values)
        tier.close()


def restore(folder: Path) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    parent, holders = Checkpoint(1, STEP), endpoints()
    about = Attached(JOB, 2, world, rank, "me", parent, ((1, None, 1), (2, parent, world)), holders, 2, STEP, None, 0)
    told = JobSettings(JOB, STEP, 2, 2, ACCOUNT.user, ACCOUNT.password, memory_call_timeout_seconds=5.0)
    os.environ |= job_environment(told) | {"SUREFOOT_NODE": f"node-{rank % 2}"}
    wait = float(os.environ.get("WAIT", "60"))
    share = (
        restoring.ShareReads(min_bytes=1 << 16, timeout_seconds=wait) if os.environ.get("SHARE", "1") == "1" else False
    )
    checkpointer = Checkpointer(**objects(), link=FakeLink(about), share_reads=share)
    if rank == 1 and os.environ.get("FAULT"):
        strike(os.environ["FAULT"], folder)
    dist.barrier()
    began = time.perf_counter()
    assert checkpointer.restore() == STEP
    seconds = time.perf_counter() - began
    return {
        "bytes": {k: metrics.restore_bytes.labels(k)._value.get() for k in ("staging", "memory", "persistent", "peer")},
        "fallbacks": {r: n for r in REASONS if (n := metrics.restore_fallbacks.labels(r)._value.get())},
        "seconds": seconds,
        "wrong": wrong(checkpointer._program, folder),
    }


def wrong(mine: Program, folder: Path) -> list[str]:
    """Names of tensors of which this rank has not the very bytes that were saved."""
    whole = merged([pickle.loads(path.read_bytes()) for path in sorted(folder.glob("stream.*"))])
    found = []
    for entry in mine.entries():
        box = entry.location.box
        saved_part = whole[entry.name][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
        if not torch.equal(entry.local_part(), saved_part):
            found.append(entry.name)
    return found


def strike(fault: str, folder: Path) -> None:
    """Befalls this rank in its first round of data; `differ` before the first."""
    if fault == "differ":
        exchange.digest_plan = lambda *_: "something else"  # type: ignore[assignment]  # a fault
        return
    honest, rounds = restoring.GlooPeers.exchange_buffers, []

    def swap(line: restoring.GlooPeers, sent: memoryview, into: Sequence[memoryview]) -> Callable[[], None]:
        if sent.nbytes > exchange.HEADER_BYTES:
            rounds.append(sent.nbytes)
        if sent.nbytes > exchange.HEADER_BYTES and len(rounds) == 1:
            if fault == "die":
                os._exit(9)
            if fault == "stall":
                until((folder / "go").exists)
            if fault == "spoil":
                sent[sent.nbytes // 2] ^= 1
        return honest(line, sent, into)

    restoring.GlooPeers.exchange_buffers = swap  # type: ignore[method-assign]  # a fault


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def main() -> None:
    folder = Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ["GROUP"], rank=rank, world_size=world)
    if sys.argv[1] == "save":
        save(folder)
        dist.barrier()
    else:
        print(json.dumps(restore(folder)), flush=True)
        (folder / f"restored.{rank}").touch()
    if os.environ.get("FAULT") != "die":
        total = torch.ones(1)
        dist.all_reduce(total)  # the group that training goes on with is as it was
        assert total.item() == world
    leave()


if __name__ == "__main__":
    main()
