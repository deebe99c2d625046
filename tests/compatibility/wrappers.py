"""The usual ways of spreading a model over ranks, at the same and at another number of them.

The small model and its builders are those of `support.layout_kinds`; DeepSpeed's and Megatron's own classes have a file
of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compatibility.case import Case, Context, Training, Unrun
from support.layout_kinds import KINDS
from support.layout_model import Built, adam, fresh, gathered


def _three_dimensional(seed: int) -> Built:
    """Replicas of shards of tensor-parallel pairs, on eight ranks; of pairs alone on four."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from support.layout_kinds import _cut_for_tensors

    model: Any = fresh(seed)
    sizes, names = (2, dist.get_world_size() // 4, 2), ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    _cut_for_tensors(model, mesh["tp"])
    fully_shard(model.second, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = adam(model)
    return Built(model, optimizer, lambda: gathered(model, optimizer))


def _building(make: Callable[[int], Built]) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        torch.set_default_dtype(torch.float64)
        built = make(context.seed)

        def advance(step: int) -> float:
            generator = torch.Generator().manual_seed(step)
            loss = built.model(torch.randn(4, built.width, generator=generator)).square().sum() * 1e-3
            loss.backward()
            built.optimizer.step()
            built.optimizer.zero_grad()
            return float(loss.detach())

        options = {} if built.replicas is None else {"replicas": built.replicas}
        return Training(built.objects(), advance, picture=built.gather, options=options)

    return build


SPREAD: tuple[tuple[str, Callable[[int], Built], int, tuple[int, ...]], ...] = (
    ("torch.compile", KINDS["compiled"], 1, (1,)),
    ("DDP", KINDS["ddp"], 2, (2, 3)),
    ("FSDP1", KINDS["fsdp1"], 2, (2, 3)),
    ("FSDP1, original parameters", KINDS["fsdp1_original"], 3, (3, 2)),
    ("FSDP1, hybrid", KINDS["fsdp1_hybrid"], 4, (4,)),
    ("FSDP2", KINDS["fsdp2"], 3, (3, 2)),
    ("HSDP (FSDP2)", KINDS["hsdp"], 4, (4, 2)),
    ("tensor parallel", KINDS["tensor_parallel"], 2, (2, 4)),
    ("FSDP2 × tensor parallel", KINDS["fsdp_over_tp"], 4, (4, 2)),
    ("3-D: HSDP × tensor parallel, 2×2×2", _three_dimensional, 8, (8, 4)),
    ("experts over half of the ranks", KINDS["experts"], 4, (4, 2)),
    ("ZeroRedundancyOptimizer (torch)", KINDS["zero_redundancy"], 2, (2, 3)),
)
QUICK = ("DDP", "FSDP2")


_DEEPSPEED_RESULT = (
    "run by hand with deepspeed 0.19.8 (it compiles its own operators at the start), one rank: rejected at the first step,"
    " parts.optimizer.loss_scaler is a LossScaler, which cannot be saved as a plain value; its inner optimizer is rejected too,"
    " as its flat parameters belong to no model (surefoot.describe_flat can declare their contents)"
)
BY_HAND = tuple(Unrun("wrapper", f"DeepSpeed, ZeRO-{stage}", _DEEPSPEED_RESULT) for stage in (1, 2))
NOT_ON_A_CPU = Unrun(
    "wrapper",
    "Megatron's distributed optimizer",
    "not run: megatron-core 0.16.1 needs CUDA's current device to allocate its gradient buffers"
    " (param_and_grad_buffer.py), so its DistributedDataParallel cannot be built on a CPU",
)

CASES = (
    *(
        Case("wrapper", name, _building(make), ranks=ranks, resumed=to, quick=name in QUICK and to != ranks)
        for name, make, ranks, targets in SPREAD
        for to in targets
    ),
    *BY_HAND,
    NOT_ON_A_CPU,
)
