"""The same small model and optimizer under every way of spreading them over ranks, and their whole state as the
framework itself gathers it. Built inside a process group; used by `layout_world`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Whole = dict[str, torch.Tensor]


class Net(nn.Module):
    """Sizes that four ranks divide and others that they do not, tied weights, experts, a 0-d parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 16), nn.Linear(16, 10), nn.Linear(10, 16)
        self.again = nn.Linear(6, 16)
        self.again.weight = self.first.weight
        self.experts = nn.Parameter(torch.randn(6, 3, 5))
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.zeros(())
        if self.first is not None:
            out = out + torch.tanh(self.second(torch.tanh(self.first(x)))).sum() + self.again(x).sum()
        if self.third is not None:
            experts = self.experts.full_tensor() if hasattr(self.experts, "full_tensor") else self.experts
            scale = self.scale.full_tensor() if hasattr(self.scale, "full_tensor") else self.scale
            out = (
                out
                + torch.tanh(self.third(x.repeat(1, 2)[:, :10])).sum()
                + experts.square().sum()
                + scale.sum() * x.mean()
            )
        return out


@dataclass
class Built:
    """What a Checkpointer would be given, and how to step it and gather it whole."""

    model: Any
    optimizer: Any
    gather: Callable[[], Whole]
    replicas: Any = None
    width: int = 6

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def stepped(built: Built, seed: int) -> None:
    """One real forward, backward and step."""
    torch.manual_seed(seed)
    built.model(torch.randn(4, built.width)).sum().backward()
    built.optimizer.step()
    built.optimizer.zero_grad()


def fresh(seed: int) -> Net:
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        model.seen.fill_(seed)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def mesh(*sizes: int, names: tuple[str, ...] = ("a", "b")) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> Whole:
    """Names as the plain model has them; state behind its parameter's name."""
    found = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = full(value)
    return found


def clean(found: Whole, *prefixes: str) -> Whole:
    for prefix in prefixes:
        found = {name.replace(prefix, ""): value for name, value in found.items()}
    return found


def plain(seed: int) -> Built:
    model = fresh(seed)
    optimizer = adam(model)
    return Built(model, optimizer, lambda: gathered(model, optimizer))


def ddp(seed: int) -> Built:
    model = nn.parallel.DistributedDataParallel(fresh(seed))
    optimizer = adam(model)
    return Built(model, optimizer, lambda: clean(gathered(model, optimizer), "module."))


def compiled(seed: int) -> Built:
    inner = fresh(seed)
    model: Any = torch.compile(inner, backend="eager")
    optimizer = adam(model)
    return Built(model, optimizer, lambda: clean(gathered(model, optimizer), "_orig_mod."))


def fsdp2(seed: int) -> Built:
    return _fully_sharded(seed, mesh(dist.get_world_size()))


def hsdp(seed: int) -> Built:
    return _fully_sharded(seed, mesh(2, dist.get_world_size() // 2))


def _fully_sharded(seed: int, over: Any) -> Built:
    from torch.distributed.fsdp import fully_shard

    model: Any = fresh(seed)
    fully_shard(model.second, mesh=over)
    fully_shard(model, mesh=over)
    optimizer = adam(model)
    return Built(model, optimizer, lambda: gathered(model, optimizer))


def tensor_parallel(seed: int) -> Built:
    model = fresh(seed)
    _cut_for_tensors(model, mesh(dist.get_world_size()))
    optimizer = adam(model)
    return Built(model, optimizer, lambda: gathered(model, optimizer))


def _cut_for_tensors(model: Any, over: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "second": RowwiseParallel(input_layouts=Replicate()),
        "third": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, over, plan)


def fsdp_over_tp(seed: int) -> Built:
    from torch.distributed.fsdp import fully_shard

    model: Any = fresh(seed)
    both = mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    _cut_for_tensors(model, both["tp"])
    fully_shard(model, mesh=both["dp"])
    optimizer = adam(model)
    return Built(model, optimizer, lambda: gathered(model, optimizer))


def pipeline(seed: int) -> Built:
    """Two stages; the ranks of a stage are replicas of each other, and know nothing of the other stage."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    model: Any = fresh(seed)
    if rank < half:
        model.third = model.experts = model.scale = None
    else:
        model.first = model.second = model.again = None
        del model._buffers["seen"]
    optimizer = adam(model)

    def gather() -> Whole:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, gathered(model, optimizer))
        return parts[0] | parts[-1]

    stage = range(half) if rank < half else range(half, 2 * half)
    return Built(model, optimizer, gather, replicas=stage)


def experts(seed: int) -> Built:
    """Experts over half of the mesh as DTensors, everything else the same on all ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = fresh(seed)
    over = mesh(dist.get_world_size() // 2, 2, names=("dp", "ep"))
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), over, [Replicate(), Shard(0)]))
    optimizer = adam(model)
    return Built(
        model, optimizer, lambda: gathered(model, optimizer), replicas={"model/[!e]*": range(dist.get_world_size())}
    )


def local_experts(seed: int) -> Built:
    """Experts as plain tensors that say themselves which box they are (torch's CheckpointableTensor)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = fresh(seed)
    begin = rank % 2 * 3
    mine: Any = nn.Parameter(model.experts.detach()[begin : begin + 3].clone())
    mine.global_shape, mine.global_offsets = (6, 3, 5), ((begin, 0, 0),)
    mine.local_offsets, mine.local_sizes = ((0, 0, 0),), ((3, 3, 5),)
    model.experts = mine
    optimizer = adam(model)

    def gather() -> Whole:
        found = gathered(model, optimizer)
        for name in [n for n in found if n.startswith("experts") and found[n].dim()]:
            parts = [torch.empty_like(found[name]) for _ in range(world)]
            dist.all_gather(parts, found[name])
            found[name] = torch.cat(parts[:2])
        return found

    same = range(rank % 2, world, 2)
    return Built(model, optimizer, gather, replicas={"model/experts": same})


def fsdp1(seed: int) -> Built:
    return _flat(seed, original=False)


def fsdp1_original(seed: int) -> Built:
    return _flat(seed, original=True)


def _flat(seed: int, original: bool) -> Built:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp import StateDictType

    model: Any = fresh(seed)
    model.second = Fsdp(model.second, use_orig_params=original, device_id=torch.device("cpu"))
    model = Fsdp(model, use_orig_params=original, device_id=torch.device("cpu"))
    optimizer = adam(model)

    def gather() -> Whole:
        with Fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            found = {name: value.clone() for name, value in model.state_dict().items()}
            state = (
                _of_shards(model, optimizer, found) if original else Fsdp.optim_state_dict(model, optimizer)["state"]
            )
        for name, values in state.items():
            found |= {f"{name}/{key}": value.clone() for key, value in values.items()}
        found.pop("again.weight")
        return found

    return Built(model, optimizer, gather)


def _of_shards(model: nn.Module, optimizer: Any, wholes: Whole) -> dict[str, Whole]:
    """Optimizer state put together by hand: torch 2.15's optim_state_dict hands out one buffer twice on the CPU."""
    names = {id(p): n.replace("_fsdp_wrapped_module.", "") for n, p in model.named_parameters()}
    mine = {names[id(p)]: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    found: dict[str, Whole] = {}
    for name in names.values():
        having = [part[name] for part in parts if name in part]
        found[name] = {
            key: torch.cat([h[key] for h in having]).view_as(wholes[name]) if value.dim() else value
            for key, value in having[0].items()
        }
    return found


def zero_redundancy(seed: int) -> Built:
    """torch's ZeRO-1: each rank has the state of some parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(fresh(seed))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)

    def gather() -> Whole:
        found = clean({n: p.detach().clone() for n, p in model.named_parameters()}, "module.")
        found["seen"] = model.module.seen.clone()
        states: list[Any] = [None] * dist.get_world_size()
        names = {id(p): n.removeprefix("module.") for n, p in model.named_parameters()}
        mine = {names[id(p)]: dict(state) for p, state in optimizer.optim.state.items()}
        dist.all_gather_object(states, mine)
        for name, state in (item for one in states for item in one.items()):
            found |= {f"{name}/{key}": value for key, value in state.items()}
        return found

    return Built(model, optimizer, gather)


class FlatAdam(torch.optim.AdamW):
    """A ZeRO-1/2-style optimizer of its own: all weights in one flat float32 tensor, a part of it on each rank."""

    def __init__(self, model: nn.Module) -> None:
        from surefoot.state import describe_flat

        self.live = dict(model.named_parameters())
        rank, world = dist.get_rank(), dist.get_world_size()
        whole = torch.cat([p.detach().flatten() for p in self.live.values()])
        size = -(-whole.numel() // world)
        self.begin = rank * size
        padded = torch.nn.functional.pad(whole, (0, size * world - whole.numel()))
        self.flat = nn.Parameter(padded[self.begin : self.begin + size].clone())
        ranges, position = [], 0
        for name, p in self.live.items():
            low, high = max(position, self.begin), min(position + p.numel(), self.begin + size)
            if low < high:
                ranges.append((f"model/{name}", p.shape, low - position, high - position, low - self.begin))
            position += p.numel()
        super().__init__([self.flat], lr=0.01)
        describe_flat(self.flat, ranges)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # returns no loss
        grads = torch.cat([p.grad.flatten() for p in self.live.values() if p.grad is not None])
        self.flat.grad = torch.nn.functional.pad(grads, (0, self.flat.numel() * dist.get_world_size() - grads.numel()))[
            self.begin : self.begin + self.flat.numel()
        ].clone()
        super().step()
        self.publish()

    def publish(self) -> None:
        whole, position = self.gathered(self.flat.detach()), 0
        with torch.no_grad():
            for p in self.live.values():
                p.copy_(whole[position : position + p.numel()].view_as(p))
                position += p.numel()

    def gathered(self, mine: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.live.values():
            p.grad = None


def flat_partition(seed: int) -> Built:
    model = fresh(seed)
    optimizer = FlatAdam(model)

    def gather() -> Whole:
        found = {name: p.detach().clone() for name, p in model.named_parameters()} | {"seen": model.seen.clone()}
        state = optimizer.state[optimizer.flat]
        wholes = {key: optimizer.gathered(state[key]) for key in ("exp_avg", "exp_avg_sq")}
        wholes["master"] = optimizer.gathered(optimizer.flat.detach())
        position = 0
        for name, p in optimizer.live.items():
            for key, whole in wholes.items():
                found[f"{name}/{key}"] = whole[position : position + p.numel()].view_as(p).clone()
            found[f"{name}/step"] = state["step"].clone()
            position += p.numel()
        return found

    return Built(model, optimizer, gather)


def float8(seed: int) -> Built:
    """torchao's Float8 training with its weights all-gathered in float8: a subclass inside FSDP2's DTensors."""
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 16))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    fully_shard(model, mesh=mesh(dist.get_world_size()))
    optimizer = adam(model)

    def gather() -> Whole:
        found = {}
        for name, parameter in model.named_parameters():
            for key, value in {"": parameter, **optimizer.state.get(parameter, {})}.items():
                local = getattr(value, "_local_tensor", value)
                found[f"{name}/{key}"] = _gathered_rows(getattr(local, "_tensor", local).detach(), value)
        return found

    return Built(model, optimizer, gather, width=16)


def _gathered_rows(local: torch.Tensor, of: Any) -> torch.Tensor:
    if not hasattr(of, "_local_tensor"):
        return local.clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local.clone())
    return torch.cat(parts)


KINDS: dict[str, Callable[[int], Built]] = {
    "plain": plain,
    "ddp": ddp,
    "compiled": compiled,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tensor_parallel": tensor_parallel,
    "fsdp_over_tp": fsdp_over_tp,
    "pipeline": pipeline,
    "experts": experts,
    "local_experts": local_experts,
    "fsdp1": fsdp1,
    "fsdp1_original": fsdp1_original,
    "zero_redundancy": zero_redundancy,
    "flat_partition": flat_partition,
    "float8": float8,
}

ALONE = ("flat_partition", "float8")
"""Kinds whose state has other tensors than the rest: restored into their own kind only."""
