"""Loaders of libraries that cannot be installed beside the others: run by `python -m compatibility --apart`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from compatibility.case import Context, Training
from compatibility.loader_cases import SIZE, cases_of, per_rank, training_of
from support.streamed_files import MOSAIC

CLUSTER_SECONDS = 80
RAY = "Ray Data's iterator of a rank"


def _mosaic(workers: int) -> Callable[[Context], Training]:
    """MosaicML's own loader over its own shards, as its documents have it; ranks of one node share its memory by name."""

    def build(context: Context) -> Training:
        os.environ |= {
            "RANK": str(context.rank),
            "LOCAL_RANK": str(context.rank),
            "WORLD_SIZE": str(context.world),
            "LOCAL_WORLD_SIZE": str(context.world),
        }
        import streaming

        rows: Any = streaming.StreamingDataset(
            local=str(MOSAIC), batch_size=per_rank(context), shuffle=True, shuffle_seed=3, num_canonical_nodes=12
        )
        loader: Any = streaming.StreamingDataLoader(
            rows, batch_size=per_rank(context), num_workers=workers, collate_fn=_numbers
        )

        def batches() -> Iterator[list[int]]:
            while True:
                yield from (batch.tolist() for batch in loader)

        return training_of(loader, batches, context.world)

    return build


def _numbers(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([int(row["id"]) for row in rows])


def _ray(context: Context) -> Training:
    """A rank's part of a data set of Ray's, on a cluster that the first rank begins."""
    os.environ["RAY_raylet_start_wait_time_s"] = f"{CLUSTER_SECONDS}"  # noqa: SIM112  # as Ray reads it
    import ray

    told = context.scratch / f"ray-{context.world}"
    if context.rank == 0:
        started = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        told.write_text(started.address_info["address"])
    else:
        deadline = time.monotonic() + CLUSTER_SECONDS
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        ray.init(address=told.read_text(), log_to_driver=False)
    loader: Any = ray.data.range(SIZE).iterator()

    def batches() -> Iterator[list[int]]:
        return (batch["id"].tolist() for batch in loader.iter_batches(batch_size=per_rank(context)))

    return training_of(loader, batches, context.world)


APART = (
    *cases_of("MosaicML's StreamingDataLoader", _mosaic(0)),
    *cases_of("MosaicML's StreamingDataLoader, two worker processes", _mosaic(2)),
    *cases_of(RAY, _ray),
)
