"""One rank that saves and loads through torch.distributed.checkpoint; on rank 0 the first look for what is there fails.

dcp_faltering.py FOLDER     RANK, WORLD_SIZE and GROUP (a file store) in the environment
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from support.gloo_world import leave
from surefoot.errors import TierUnavailable
from surefoot.integrations import dcp as adapter
from surefoot.integrations.dcp import SurefootReader, SurefootWriter

COLLECTIVE_SECONDS = 20.0
"""How long a rank waits for one that went on without it."""


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", init_method=os.environ["GROUP"], rank=rank, world_size=world, timeout=limit)
    dcp.save({"w": torch.ones(3)}, storage_writer=SurefootWriter(sys.argv[1]), checkpoint_id="step-1")
    if rank == 0:
        looking, looks = adapter.read_catalogue, []

        def look(*arguments: Any) -> Any:
            looks.append(arguments)
            if len(looks) == 1:
                raise TierUnavailable("the disk was away")
            return looking(*arguments)

        adapter.read_catalogue = look  # type: ignore[assignment]
    try:
        dcp.load({"w": torch.zeros(3)}, storage_reader=SurefootReader(sys.argv[1]), checkpoint_id="step-1")
    except BaseException as error:  # noqa: BLE001  # DCP's own is no Exception
        print(type(error).__name__, error)
    leave()


if __name__ == "__main__":
    main()
