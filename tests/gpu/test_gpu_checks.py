"""What is said of a real device: its trial before a worker joins, NVML's readings, its collectives in the flight recorder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.device_work import keep_busy
from surefoot.agent.health.gpu_checks import GpuCheck
from surefoot.ipc.agent_client import describe_collectives
from surefoot.node_tests.compute_tests import build_operands, try_gpus
from surefoot.protocol.hangs import Collective

SECONDS = 60.0


@pytest.fixture
def card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available here: run `pytest -m gpu tests/gpu` on a machine with a CUDA device")


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
def test_a_card_that_is_well_passes_and_one_wrong_operand_is_found() -> None:
    left, right, product = build_operands()
    found = list(try_gpus(torch, left, right, product))
    assert [one.verdict for one in found] == ["well"] * torch.cuda.device_count()
    right[3, 5] += 1  # as a flipped bit does
    assert {one.reason for one in try_gpus(torch, left, right, product)} == {"GpuComputeError"}


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
def test_nvml_answers_every_question_and_finds_nothing_on_a_card_that_is_well() -> None:
    pytest.importorskip("pynvml")
    check = GpuCheck()
    assert [*check.find_faults(), *check.find_faults()] == []
    assert len(check._devices) >= torch.cuda.device_count()
    assert check._events is not None


def latest(call: str) -> Collective:
    told = describe_collectives(0, 1)
    assert told.reason == ""
    return next(one for one in told.collectives if one.call == call)


def test_a_collective_waits_behind_a_kernel_until_it_is_over(device: torch.device, tmp_path: Path) -> None:
    """NCCL's is only queued when the call returns; gloo's has ended by then, and is told so a moment later."""
    cuda = device.type == "cuda"
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        numbers = torch.ones(4, 2, device=device)
        dist.all_reduce(numbers)  # makes the communicator, which waits for the device
        for _ in range(10):
            keep_busy(device)
        dist.all_reduce(numbers)
        one = latest("all_reduce")
        assert (one.number, one.tensors) == (2, "Float[4, 2]")
        assert one.is_waiting or not cuda
        limit = time.monotonic() + SECONDS
        while latest("all_reduce").is_waiting and time.monotonic() < limit:
            time.sleep(0.05)
        assert latest("all_reduce").state == "finished"
    finally:
        dist.destroy_process_group()
