"""Whole programs whose tensors lie on a device: saved, restored, saved again, in one process and under FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.device_work import arena, side_stream
from support.fakes.fake_link import FakeLink, attached
from support.saved_streams import Stream, merged
from surefoot import Checkpointer
from surefoot.protocol.checkpoints.records import Layout


def parts(device: torch.device, seed: int, width: int = 300) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Dropout(), torch.nn.BatchNorm1d(width))
    model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, device: torch.device, width: int = 300) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(4, width, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything as it is now, on the host."""
    found = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = value.detach().cpu().clone()
    return found


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    unlike = [name for name in one if not torch.equal(one[name], two[name])]
    assert not unlike


def test_a_slot_is_pinned_while_the_arena_is_open(device: torch.device) -> None:
    cuda = device.type == "cuda"
    source = torch.arange(1 << 16, dtype=torch.uint8, device=device)
    with arena(1 << 16, device) as memory:
        slot = torch.from_numpy(memory.slot_view(1))
        assert not cuda or slot.is_pinned()
        slot.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
        assert torch.equal(slot, source.cpu())
    assert not (cuda and slot.is_pinned())


def test_a_program_goes_on_as_if_it_had_not_stopped(device: torch.device, tmp_path: Path) -> None:
    """Parameters, moments, batch statistics, and the device's random numbers: dropout draws the same."""
    model, optimizer = parts(device, 1)
    with Checkpointer(model=model, optimizer=optimizer, folder=str(tmp_path), interval_steps=2) as checkpointer:
        assert checkpointer.restore() == 0
        for _ in range(4):
            checkpointer.step(train(model, optimizer, device))
    saved = state(model, optimizer)
    wanted = [train(model, optimizer, device).item() for _ in range(3)]

    model, optimizer = parts(device, 2)
    with Checkpointer(model=model, optimizer=optimizer, folder=str(tmp_path), interval_steps=2) as checkpointer:
        assert checkpointer.restore() == 4
        assert_same(state(model, optimizer), saved)
        found = []
        for _ in range(3):
            loss = train(model, optimizer, device)
            found.append(loss.item())
            checkpointer.step(loss)
    assert found == wanted


def test_each_save_is_the_state_of_its_step_where_training_has_a_stream_of_its_own(device: torch.device) -> None:
    """The hook ahead of the optimizer waits on the stream that steps, whichever that is."""
    model, optimizer = parts(device, 3, width=1024)
    link, kept = FakeLink(attached(1)), {}
    with side_stream(device):
        checkpointer = Checkpointer(model=model, optimizer=optimizer, link=link)
        assert checkpointer.restore() == 0
        for step in range(1, 7):
            checkpointer.step(train(model, optimizer, device, width=1024))
            kept[step] = [tensor.detach().clone() for tensor in model.state_dict().values()]
        checkpointer.close()
    assert [said for said in link.said if said[0] == "SaveFailed"] == []
    assert [message.step for message, _, _ in link.saves] == list(range(1, 7))
    layout = Layout.from_json(link.saves[0][0].layout_json or "")
    for message, data, values in link.saves:
        found = merged([Stream(layout, data, values)])
        for name, tensor in zip(model.state_dict(), kept[message.step], strict=True):
            assert torch.equal(found[f"model/{name}"], tensor.cpu()), (message.step, name)


class Strided(torch.nn.Module):
    """Tensors that lie in memory in other orders than they are counted."""

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.turned = torch.nn.Parameter(torch.randn(300, 700, device=device).t())
        self.register_buffer("every_other", torch.randn(64, 512, device=device)[:, ::2])
        self.register_buffer("from_within", torch.randn(9, 40, 50, device=device)[1:8, 3:33, 5:45])
        self.register_buffer(
            "channels_last", torch.randn(8, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
        )
        self.register_buffer("spread", torch.randn(1, 96, device=device).expand(4, 96).clone().t())
        self.register_buffer("narrow", torch.randn(130, 70, device=device).bfloat16().t())
        self.register_buffer("waves", torch.randn(33, 17, dtype=torch.complex64, device=device).t())
        self.register_buffer("scalar", torch.randn((), device=device))
        self.register_buffer("nothing", torch.empty(0, 5, device=device))


def test_strided_tensors_come_back_as_they_lie(device: torch.device, tmp_path: Path) -> None:
    model = Strided(device, 1)
    with Checkpointer(model=model, folder=str(tmp_path), interval_steps=1) as checkpointer:
        checkpointer.restore()
        checkpointer.step()
    again = Strided(device, 2)
    with Checkpointer(model=again, folder=str(tmp_path), interval_steps=1) as checkpointer:
        assert checkpointer.restore() == 1
    for (name, saved), found in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(saved, found), name
        assert saved.stride() == found.stride(), name
        assert found.device.type == device.type


@pytest.fixture
def group(device: torch.device, tmp_path: Path) -> Iterator[None]:
    """A world of one: NCCL on a device, gloo on the host."""
    where: dict[str, Any] = {"init_method": f"file://{tmp_path}/group", "rank": 0, "world_size": 1}
    if device.type == "cuda":
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0), **where)
    else:
        dist.init_process_group("gloo", **where)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_sharded_program_comes_back_in_a_world_of_one(device: torch.device, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (1,))

    def sharded(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model, _ = parts(device, seed)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def whole(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        found = {name: p.full_tensor().detach().cpu().clone() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            found[f"{name}/first"] = optimizer.state[parameter]["exp_avg"].full_tensor().cpu().clone()
        return found

    folder = str(tmp_path / "checkpoints")
    model, optimizer = sharded(1)
    with Checkpointer(model=model, optimizer=optimizer, folder=folder, interval_steps=1) as checkpointer:
        checkpointer.restore()
        for _ in range(3):
            checkpointer.step(train(model, optimizer, device))
    wanted = whole(model, optimizer)
    model, optimizer = sharded(2)
    with Checkpointer(model=model, optimizer=optimizer, folder=folder, interval_steps=1) as checkpointer:
        assert checkpointer.restore() == 3
        assert_same(whole(model, optimizer), wanted)
