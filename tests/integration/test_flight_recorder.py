"""What a real rank says of its collectives while its main thread waits in one: gloo, with the recorder on and off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, threading
import torch, torch.distributed as dist
from surefoot.ipc.agent_client import describe_collectives as answer

rank, recorded = int(os.environ["RANK"]), os.environ.get("TORCH_FR_BUFFER_SIZE") != "0"
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
other = dist.new_group(group_desc="other")
value = torch.ones(3)
for _ in range(5):
    dist.all_reduce(value)
dist.all_reduce(value, group=other)

# gloo gives a collective back before its thread tells the recorder that it is over.
while any(one.is_waiting for one in answer(rank, 1).collectives):
    pass

def tell():
    found = answer(rank, 1)
    while recorded and not any(one.is_waiting for one in found.collectives):
        found = answer(rank, 1)
    print(*sorted(f"{one.state} {one}" for one in found.collectives), found.reason, sep="\\n")
    store.set("told", "1")

if rank == 0:
    teller = threading.Thread(target=tell)
    teller.start()
    dist.all_reduce(value)
    teller.join()
else:
    store.wait(["told"])  # rank 0 has told where it waits
    dist.all_reduce(value)
"""


def said(folder: Path, **environment: str) -> list[str]:
    """By rank 0, while rank 1 does not come."""
    command = [sys.executable, "-c", PROGRAM, str(folder / "store")]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, "RANK": str(rank), **environment}, stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        told, _ = ranks[0].communicate(timeout=60)
        ranks[1].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
    return told.splitlines()


@pytest.mark.parametrize("size", [{}, {"TORCH_FR_BUFFER_SIZE": "3"}], ids=["as it is", "a ring that is full"])
def test_a_rank_that_waits_in_a_collective_tells_it(size: dict[str, str], tmp_path: Path) -> None:
    before, waits, why = said(tmp_path, **size)
    assert before.startswith("finished all_reduce #1 of other ")
    assert waits == "scheduled all_reduce #6 of default_pg (Float[3])"
    assert why == ""


def test_a_recorder_that_its_program_switched_off_stays_off(tmp_path: Path) -> None:
    assert said(tmp_path, TORCH_FR_BUFFER_SIZE="0") == ["its flight recorder is empty"]
