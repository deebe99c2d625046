"""What is still running on the device when a save begins, and what is queued behind it, never tears a snapshot."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from support.device_work import arena, keep_busy, side_stream, size_of, whole
from surefoot.staging import CopyOutcome, Stager


@pytest.fixture
def stager() -> Any:
    owner = Stager()
    yield owner
    owner.close()


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_a_kernel_that_still_writes_the_tensor_is_waited_for(stager: Stager, device: torch.device, lazy: bool) -> None:
    size, outcomes = size_of(device), list[CopyOutcome]()
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    with arena(size, device) as memory, side_stream(device):
        keep_busy(device)
        tensor.fill_(7)  # on a device it begins when the products are done
        sources = [whole("weight", tensor)]
        stager.start_save(memory.slot_view(0), [] if lazy else sources, sources if lazy else [], outcomes.append)
        stager.join_copies()
        tensor.fill_(9)  # the optimizer's step
        stager.wait_for_save()
        snapshot = torch.from_numpy(memory.slot_view(0)).clone()
    assert set(snapshot.unique().tolist()) == {7}
    assert outcomes == [CopyOutcome()]
    assert set(tensor.unique().tolist()) == {9}


def test_a_step_that_the_host_queues_while_the_device_still_copies_is_no_change(
    stager: Stager, device: torch.device
) -> None:
    """Versions grow on the host at once, long before the device is done with the copy ahead of the step."""
    size, ended = size_of(device), threading.Event()
    outcomes: list[CopyOutcome] = []

    def done(outcome: CopyOutcome) -> None:
        outcomes.append(outcome)
        ended.set()

    tensors = [torch.full((size // 4,), n, dtype=torch.uint8, device=device) for n in range(4)]
    with arena(size, device) as memory:
        sources = [whole(f"t{n}", tensor, n * (size // 4)) for n, tensor in enumerate(tensors)]
        for turn in range(3):
            ended.clear()
            stager.start_save(memory.slot_view(turn % 2), [], sources, done)
            stager.join_copies()
            for tensor in tensors:
                tensor.add_(1)
            assert ended.wait(60)
            parts = torch.from_numpy(memory.slot_view(turn % 2)).reshape(4, -1)
            assert [set(part.unique().tolist()) for part in parts] == [{n + turn} for n in range(4)]
    assert outcomes == [CopyOutcome()] * 3


@pytest.mark.parametrize("elsewhere", [False, True], ids=["own stream", "another stream"])
@pytest.mark.parametrize("stays", [False, True], ids=["is undone", "stays"])
def test_what_is_written_behind_the_step_is_never_sealed(
    stager: Stager, device: torch.device, elsewhere: bool, stays: bool
) -> None:
    """Whether it comes before the copy, in its middle or behind it is the device's affair."""
    size, outcomes = size_of(device), list[CopyOutcome]()
    tensors = [torch.full((size // 4,), n, dtype=torch.uint8, device=device) for n in range(4)]
    with arena(size, device) as memory:
        sources = [whole(f"t{n}", tensor, n * (size // 4)) for n, tensor in enumerate(tensors)]
        for turn in range(6):
            stager.start_save(memory.slot_view(turn % 2), [], sources, outcomes.append)
            with side_stream(device) if elsewhere else contextlib.nullcontext():
                for tensor in tensors:
                    tensor.data.add_(100)
                if not stays:
                    keep_busy(device)
                    for tensor in tensors:
                        tensor.data.sub_(100)
            stager.wait_for_save()
            if stays:
                for tensor in tensors:
                    tensor.data.sub_(100)
            if outcomes[-1].is_complete:
                parts = torch.from_numpy(memory.slot_view(turn % 2)).reshape(4, -1)
                assert [set(part.unique().tolist()) for part in parts] == [{0}, {1}, {2}, {3}]
    assert all(outcome.error is None for outcome in outcomes)


@pytest.mark.filterwarnings("ignore")  # torch's own, of its own stager
def test_dcp_s_stager_beside_it(device: torch.device, record_property: Any) -> None:
    """For comparison: DCP's asynchronous stager is right once the caller has waited for the device. What it holds
    without that stands in the report (`--junitxml`): its own stream does not wait for the one that computes."""
    cuda = device.type == "cuda"
    options = StagingOptions(
        use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=cuda
    )
    for waits in (False, True):
        tensor = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        other = DefaultStager(options)
        try:
            with side_stream(device):
                keep_busy(device)
                tensor.fill_(7)
                if waits and cuda:
                    torch.cuda.synchronize()
                answer: Any = other.stage({"weight": tensor})
                found = answer.result()["weight"]
        finally:
            other.close()
        values = set(found.cpu().unique().tolist())
        record_property(f"dcp_stager_{'after_waiting' if waits else 'at_once'}", sorted(values))
        if waits:
            assert values == {7}
