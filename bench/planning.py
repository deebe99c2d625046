"""What planning a save costs at many ranks, and how many bytes a reshard reads; both for Surefoot and for DCP.

`python -m bench.planning TASK OUT`. No world is started: Surefoot's part runs on real DTensors under torch's fake
process group, on one rank, as it would on each; DCP's is what its rank 0 does with the plans of all ranks.
"""

from __future__ import annotations

import json
import pickle
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from surefoot.checkpointer.saving import Saver
from surefoot.format.layouts import DIGEST_BYTES, Stream, TensorParts, build_layout
from surefoot.format.manifests import build_manifest
from surefoot.geometry import Box
from surefoot.geometry.sharding import shard_box
from surefoot.protocol.identities import RankSave
from surefoot.restore.read_plan import WantedBox, plan_reads
from surefoot.state import Program

RANKS = 256
WORLDS = (8, 64, 256, 2_048, 16_384)
MOST_RANKS = WORLDS[-1]
"""Rows of each tensor where worlds are compared: every rank has one at least."""
ROWS, WIDTH = 1024, 16
PAIRS = ((2, 3), (2, 4), (4, 3), (1, 8), (8, 1))
RESHARDED = ((1024, 1024), (4096, 1024), (1024, 4096), (2052, 1024), (1024,), (4096,))
"""Shapes of the model that is resharded: width 1,024, and one of uneven rows."""


def surefoot_plan(tensors: int, ranks: int = RANKS, rows: int = ROWS) -> dict[str, float]:
    """The plan on one of so many ranks: milliseconds of the first and of each later save, bytes of its records."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = torch.nn.ParameterList(
        torch.nn.Parameter(DTensor.from_local(torch.empty(rows // ranks, WIDTH), mesh, [Shard(0)], run_check=False))
        for _ in range(tensors)
    )
    program = Program({"model": model}, (0, ranks))
    silent: Any = None
    saver = Saver(program, silent, 0)

    def planned() -> float:
        began = time.perf_counter()
        saver._plan_for(program.entries())
        return (time.perf_counter() - began) * 1e3

    first = planned()
    found = {"first": first, "each": statistics.median(planned() for _ in range(9))}
    made = saver._plan_for(program.entries())
    stream = Stream(made.layout)
    table = bytes(DIGEST_BYTES * stream.blocks)
    manifest = build_manifest(RankSave(1, 1, 0), ranks, "bench", stream, (table, program.values(1)), 0.0)
    found |= {"layout_bytes": len(made.layout_json), "manifest_bytes": len(manifest.to_json())}
    saver.close()
    dist.destroy_process_group()
    return found


def by_ranks(tensors: int, dcp_ranks: list[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Surefoot's plan on one rank, and DCP's on its rank 0, of the same program at growing worlds."""
    return {
        "surefoot": {str(ranks): surefoot_plan(tensors, ranks, MOST_RANKS) for ranks in WORLDS},
        "dcp": {str(ranks): dcp_plan_at(tensors, ranks, MOST_RANKS) for ranks in dcp_ranks},
    }


def dcp_plan(tensors: int, caches: bool) -> dict[str, float]:
    """Milliseconds of DCP's rank 0: duplicates, global plan, checks, pickled metadata; without its cache, and with it."""
    plans = _dcp_plans(tensors, RANKS, ROWS)
    each, size = _dcp_planned(DefaultSavePlanner(), plans)
    found: dict[str, float] = {"each": each, "metadata_bytes": size}
    if caches:
        caching = DefaultSavePlanner(enable_plan_caching=True)
        _dcp_planned(caching, plans)
        found["each_with_its_cache"], _ = _dcp_planned(caching, [SavePlan([], usable=False) for _ in plans])
    return found


def dcp_plan_at(tensors: int, ranks: int, rows: int) -> dict[str, float]:
    """Without its cache, which belongs to the class: one world's plans would be merged into another's."""
    each, size = _dcp_planned(DefaultSavePlanner(), _dcp_plans(tensors, ranks, rows))
    return {"each": each, "metadata_bytes": size}


def _dcp_plans(tensors: int, ranks: int, rows: int) -> list[SavePlan]:
    paths = {f"model.{n}": (f"model.{n}",) for n in range(tensors)}
    return [
        SavePlan([_write_item(n, rank, rows // ranks, rows) for n in paths], planner_data=paths)
        for rank in range(ranks)
    ]


def _dcp_planned(planner: DefaultSavePlanner, given: list[SavePlan]) -> tuple[float, int]:
    planner.set_up_planner({}, None, True)
    began = time.perf_counter()
    _, metadata = planner.create_global_plan(given)
    pickled = pickle.dumps(metadata)
    return (time.perf_counter() - began) * 1e3, len(pickled)


def _write_item(name: str, rank: int, rows: int, of: int) -> WriteItem:
    offsets, sizes = torch.Size([rank * rows, 0]), torch.Size([rows, WIDTH])
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(), torch.Size([of, WIDTH]))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def amplification(dimension: int) -> dict[str, dict[str, float]]:
    """Bytes read over bytes needed, summed over the ranks that read, by `N→M`. Saved along dimension 0.

    DCP's reader fetches each stored chunk that has anything of what it wants whole (`FileSystemReader.read_data`).
    """
    found: dict[str, dict[str, float]] = {}
    for before, after in PAIRS:
        ours = theirs = needed = 0
        streams = {rank: Stream(build_layout(_parts(before, rank))) for rank in range(before)}
        for rank in range(after):
            boxes = [_box(shape, min(dimension, len(shape) - 1), after, rank) for shape in RESHARDED]
            wanted = [
                WantedBox(_name(n), "float32", s, boxes[n], 4) for n, s in enumerate(RESHARDED) if boxes[n].volume
            ]
            planned = plan_reads(wanted, streams)
            ours += planned.read_bytes
            needed += planned.wanted_bytes
            theirs += sum(_dcp_bytes(w, before) for w in wanted)
        found[f"{before}→{after}"] = {"surefoot": ours / needed, "dcp": theirs / needed}
    return found


def _dcp_bytes(wanted: WantedBox, before: int) -> int:
    boxes = [_box(wanted.shape, 0, before, rank) for rank in range(before)]
    chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.lengths)) for b in boxes]
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(wanted.shape), chunks)
    local = ChunkStorageMetadata(torch.Size(wanted.box.offsets), torch.Size(wanted.box.lengths))
    items = create_read_items_for_chunk_list(wanted.name, stored, [local])
    touched = {tuple(item.storage_index.offset or ()) for item in items}
    return sum(box.volume * 4 for box in boxes if box.offsets in touched)


def _parts(ranks: int, rank: int) -> list[TensorParts]:
    return [TensorParts(_name(n), "float32", s, (_box(s, 0, ranks, rank),)) for n, s in enumerate(RESHARDED)]


def _box(shape: tuple[int, ...], dimension: int, parts: int, index: int) -> Box:
    return shard_box(shape, dimension, parts, index)


def _name(number: int) -> str:
    return f"model/{number}"


def main() -> None:
    task = json.loads(sys.argv[1])
    tensors = task["plan_tensors"]
    found = {
        "ranks": RANKS,
        "tensors": tensors,
        "surefoot": surefoot_plan(tensors),
        "dcp": dcp_plan(tensors, task["dcp_caches"]),
        "by_ranks": by_ranks(tensors, task["dcp_ranks"]),
        "amplification": {"same_dimension": amplification(0), "other_dimension": amplification(1)},
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
