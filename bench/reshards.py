"""Restoring at another world size, N→M: real gloo ranks with FSDP2, from two Redis holders; with dcp.load from tmpfs.

`python -m bench.reshards TASK OUT`, with the holders of `bench.holders` in the environment. Ranks are forked from a
process that has torch imported and started no thread yet. A time is that of the slowest rank from a common start;
before each restore the tensors are overwritten, after it every rank compares each byte of its own.

Bytes read are measured where they pass: what the holders sent (their own count; protocol, manifests, layouts and
digests with it), and what dcp.load's ranks read from files (`rchar` of the kernel).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import skip_init
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.holders import JOB, PASSWORD
from bench.planning import PAIRS
from surefoot import Checkpointer
from surefoot.checkpointer import restoring
from surefoot.checkpointer.backends import connect_agent
from surefoot.checkpointer.library_mode.in_process_backend import InProcessBackend, InProcessTargets
from surefoot.geometry.sharding import shard_box
from surefoot.ipc.trainer_messages import Attached
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials, RespConnection, worker_credentials
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance
from surefoot.settings import job_settings
from surefoot.state import Program

SAVED = {1: 1, 2: 2, 4: 3, 8: 4}
"""Epoch of each saved world, by its ranks."""
WIDTH = 1024
READING_EPOCH = 9
CALL_SECONDS = 30.0
WORLD_SECONDS = 120.0
SYSTEMS = ("surefoot", "dcp.load")


def state_bytes(blocks: int, width: int = WIDTH) -> int:
    """Parameters and two moments in float32, of twelve width² each a block."""
    return 3 * 4 * 12 * width**2 * blocks


class Trained:
    """The matrices of transformer blocks under FSDP2 over all ranks, and AdamW with both moments."""

    def __init__(self, width: int, blocks: int) -> None:
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        # its values come with `fill`
        layers = [skip_init(nn.Linear, *shape, bias=False) for _ in range(blocks) for shape in shapes]
        self.model: Any = nn.Sequential(*layers)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._saved = [_expected(tensor, number) for number, tensor in enumerate(self.tensors().values())]

    def tensors(self) -> dict[str, DTensor]:
        """What is saved, by name; a plain dict of it is what DCP is given."""
        found: dict[str, DTensor] = {}
        for number, parameter in enumerate(self.model.parameters()):
            state = self.optimizer.state[parameter]
            found |= {
                f"{number}": parameter,
                f"{number}.first": state["exp_avg"],
                f"{number}.second": state["exp_avg_sq"],
            }
        return found

    def fill(self, with_saved: bool) -> None:
        with torch.no_grad():
            for tensor, saved in zip(self.tensors().values(), self._saved, strict=True):
                local = tensor.to_local()
                local.copy_(saved) if with_saved else local.fill_(-1)

    def check(self, name: str) -> None:
        for tensor, saved in zip(self.tensors().values(), self._saved, strict=True):
            if not torch.equal(tensor.to_local(), saved):
                raise AssertionError(f"{name} brought back other bytes than were saved")


def _expected(tensor: DTensor, number: int) -> torch.Tensor:
    """This rank's rows of the tensor: each element says where it stands."""
    box = shard_box(tuple(tensor.shape), 0, dist.get_world_size(), dist.get_rank())
    begin, width = box.offsets[0] * tensor.shape[1], tensor.shape[1]
    flat = torch.arange(begin, begin + box.lengths[0] * width, dtype=torch.int64)
    return (flat * (2 * number + 1) % 16_777_213).to(torch.float32).reshape(box.lengths[0], width)


class World:
    """One rank of a saved or a restoring world."""

    def __init__(self, task: dict[str, Any], endpoints: tuple[MemoryServerEndpoint, ...]) -> None:
        self.task, self.endpoints = task, endpoints
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.trained = Trained(task["width"], task["blocks"])

    def save(self, folder: Path) -> dict[str, Any]:
        self.trained.fill(with_saved=True)
        link = self._link(SAVED[self.ranks], None)
        made = Checkpointer(model=self.trained.model, optimizer=self.trained.optimizer, link=link)
        made.restore()
        made._step = 1
        if not (made.save_now() and link.wait_for_flush(WORLD_SECONDS)) or link.lost:
            raise RuntimeError("the save to restore from failed")
        made._end(flush_seconds=0.0)
        dcp.save(self.trained.tensors(), checkpoint_id=folder / str(self.ranks))
        return {}

    def restored(self, before: int, folder: Path) -> dict[str, Any]:
        parent = Checkpoint(SAVED[before], 1)
        program = Program({"model": self.trained.model, "optimizer": self.trained.optimizer}, (self.rank, self.ranks))
        connected = connect_agent(self._link(READING_EPOCH, parent), job_settings(), None)
        state: dict[str, Any] = dict(self.trained.tensors())
        source = folder / str(before)
        ways: dict[str, tuple[Callable[[], object], Callable[[], int]]] = {
            "surefoot": (lambda: restoring.restore(program, connected), self._sent),
            "dcp.load": (lambda: dcp.load(state, checkpoint_id=source), _file_bytes),
        }
        found: dict[str, Any] = {name: {"seconds": [], "read_bytes": []} for name in ways}
        for _ in range(self.task["times"] + 1):
            for name, (way, counted) in ways.items():
                self.trained.fill(with_saved=False)
                seconds, read = self._timed(way, counted)
                found[name]["seconds"].append(seconds)
                found[name]["read_bytes"].append(read)
                self.trained.check(name)
        connected.close(1)
        return found

    def _timed(self, way: Callable[[], object], counted: Callable[[], int]) -> tuple[float, int]:
        """The slowest rank's time, and what all of them read."""
        before = counted()
        dist.barrier()
        began = time.monotonic()
        way()
        seconds = time.monotonic() - began
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, seconds)
        slowest = max(told)
        dist.all_gather_object(told, counted() - before)
        return slowest, sum(told)

    def _sent(self) -> int:
        """By both holders to anybody; asked by one rank, for all."""
        if self.rank != 0:
            return 0
        total = 0
        for endpoint in self.endpoints:
            wire = RespConnection(endpoint.host, endpoint.port, Credentials("", PASSWORD), CALL_SECONDS)
            total += int(wire.info("stats")["total_net_output_bytes"])
            wire.close()
        return total

    def _link(self, epoch: int, parent: Checkpoint | None) -> InProcessBackend:
        holders = tuple(e.instance for e in self.endpoints)
        by_holder = {e.instance: e for e in self.endpoints}
        lineage = (
            ((parent.generation, None, self.ranks), (epoch, parent, self.ranks))
            if parent
            else ((epoch, None, self.ranks),)
        )
        about = Attached(
            job=JOB, generation=epoch, world_size=self.ranks, rank=self.rank, incarnation="bench", parent=parent, lineage=lineage,
            servers=self.endpoints, replicas=len(holders), interval_steps=1,
            persistent_interval_steps=None, interval_exponent=0,
        )  # fmt: skip

        def opened(holder: MemoryServerInstance) -> Any:
            return MemoryServerClient(by_holder[holder], JOB, worker_credentials(job_settings()), CALL_SECONDS)

        return InProcessBackend(about, InProcessTargets(holders, opened))


def _file_bytes() -> int:
    """What this process has read from files, whatever was in memory of them."""
    rows = dict(row.split(": ") for row in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"])


def _rank(rank: int, ranks: int, group: Path, work: Callable[[], dict[str, Any]], out: Path) -> None:
    """A forked process: joins its world, works, and leaves what the first of them found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=ranks)
    found = work()
    dist.barrier()
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def in_a_world(ranks: int, folder: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the first of so many forked ranks found; nobody is left."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        group, out = Path(name) / "group", Path(name) / "out.json"
        fork = multiprocessing.get_context("fork")
        world = [fork.Process(target=_rank, args=(rank, ranks, group, work, out)) for rank in range(ranks)]
        for process in world:
            process.start()
        deadline = time.monotonic() + WORLD_SECONDS
        try:
            for process in world:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.exitcode != 0:
                    raise RuntimeError(
                        f"a rank of a world of {ranks} ended with {process.exitcode}; its error stands above"
                    )
        finally:
            for process in world:
                process.kill()
                process.join()
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def summed(found: dict[str, Any], size: int) -> dict[str, Any]:
    """Figures of one pair: medians without the first of each."""
    result: dict[str, Any] = {}
    for name in SYSTEMS:
        seconds = statistics.median(found[name]["seconds"][1:])
        result[name] = {
            "seconds": seconds,
            "gb_per_second": size / seconds / 1e9,
            "read_over_wanted": statistics.median(found[name]["read_bytes"][1:]) / size,
            "each": found[name]["seconds"],
        }
    return {**result, "times_as_fast": result["dcp.load"]["seconds"] / result["surefoot"]["seconds"]}


def _import_all() -> None:
    """What torch imports at the first use of each part: once, here, instead of in every rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    Trained(8, 1)
    dist.destroy_process_group()


def _saved(task: dict[str, Any], endpoints: tuple[MemoryServerEndpoint, ...], folder: Path) -> dict[str, Any]:
    return World(task, endpoints).save(folder)


def _restored(
    task: dict[str, Any], endpoints: tuple[MemoryServerEndpoint, ...], folder: Path, before: int
) -> dict[str, Any]:
    return World(task, endpoints).restored(before, folder)


def measured(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    endpoints = tuple(
        MemoryServerEndpoint(MemoryServerInstance(node, instance), host, port, node)
        for node, instance, host, port in json.loads(os.environ["BENCH_ENDPOINTS"])
    )
    _import_all()
    size = state_bytes(task["blocks"], task["width"])
    result: dict[str, Any] = {"state_bytes": size}
    for before in sorted({before for before, _ in PAIRS}):
        in_a_world(before, folder, partial(_saved, task, endpoints, folder))
        for after in [after for known, after in PAIRS if known == before]:
            found = in_a_world(after, folder, partial(_restored, task, endpoints, folder, before))
            result[f"{before}→{after}"] = summed(found, size)
    return result


def main() -> None:
    task = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-", dir=task["folder"]) as folder:
        found = measured(task, Path(folder))
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
