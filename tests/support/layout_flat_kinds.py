"""Layouts whose local tensors are flat or partitioned: FSDP1, torch's ZeRO-1, and an optimizer's own flat partition."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.layout_model import Built, Whole, adam, clean, fresh, mesh


def fsdp1(seed: int) -> Built:
    return _flat(seed, original=False)


def fsdp1_original(seed: int) -> Built:
    return _flat(seed, original=True)


def fsdp1_hybrid(seed: int) -> Built:
    """Shards within each pair of ranks, the pairs replicas of each other. (Torch shards nothing within pairs of one.)"""
    from torch.distributed.fsdp import ShardingStrategy

    over = mesh(dist.get_world_size() // 2, 2)
    return _flat(seed, original=False, device_mesh=over, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def _flat(seed: int, original: bool, **how: Any) -> Built:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp import StateDictType

    model: Any = fresh(seed)
    how |= {"use_orig_params": original, "device_id": torch.device("cpu")}
    model.second = Fsdp(model.second, **how)
    model = Fsdp(model, **how)
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
