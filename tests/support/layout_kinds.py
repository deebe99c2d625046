"""The same small model and optimizer under every way of spreading them over ranks, and their whole state as the
framework itself gathers it. Built inside a process group; used by `layout_world`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.layout_flat_kinds import flat_partition, fsdp1, fsdp1_hybrid, fsdp1_original, zero_redundancy
from support.layout_model import Built, Whole, adam, clean, fresh, gathered, mesh


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
    "fsdp1_hybrid": fsdp1_hybrid,
    "zero_redundancy": zero_redundancy,
    "flat_partition": flat_partition,
    "float8": float8,
}

ALONE = ("flat_partition", "float8")
"""Kinds whose state has other tensors than the rest: restored into their own kind only."""
