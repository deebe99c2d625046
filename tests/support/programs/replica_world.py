"""One rank of a gloo world that trains programs of which some tensors differ between ranks, one after another.

RANK, WORLD_SIZE and GROUP (a file store) in the environment. Prints one JSON object: by case, the notices of this rank, and the error
that ended the case.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.fakes.fake_link import FakeLink, attached
from support.gloo_world import leave
from surefoot import Checkpointer
from surefoot.checkpointer import replica_check
from surefoot.errors import ConfigurationError

os.environ["SUREFOOT_JOB_UID"] = "replicas"
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 6


class Run:
    """A model with its optimizer, and the batches of this rank."""

    def __init__(self, *extra: nn.Module, width: int = 96) -> None:
        torch.manual_seed(3)
        self.model: Any = nn.Sequential(nn.Linear(4, width), *extra, nn.Linear(width, 1))
        self.options: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        self.interval = 2
        self.averages = False
        self.after_step: Callable[[int], None] = lambda step: None

    def train(self, kind: Any = torch.optim.AdamW) -> list[str]:
        link = FakeLink(replace(attached(self.interval), rank=RANK, world_size=SIZE))
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        objects = {"model": self.model, "optimizer": self.optimizer} | self.objects
        checkpointer = Checkpointer(**objects, **self.options, link=link)
        checkpointer.restore()
        batches = torch.Generator().manual_seed(RANK)
        try:
            for step in range(1, STEPS + 1):
                loss = self.model(torch.randn(8, 4, generator=batches)).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                if self.averages:
                    for parameter in self.model.parameters():
                        dist.all_reduce(parameter.grad)
                self.optimizer.step()
                self.after_step(step)
                checkpointer.step(loss)
        except ConfigurationError as error:
            return [*notices(link), f"step {step}: {error}"]
        finally:
            checkpointer.close(save=False)
        return notices(link)


def notices(link: FakeLink) -> list[str]:
    return [text for reason, text in link.said if reason == "ReplicasDiffer"]


def ddp(run: Run, **options: Any) -> Run:
    run.model = DistributedDataParallel(run.model, **options)
    return run


def in_ddp() -> list[str]:
    return ddp(Run(nn.Dropout())).train()


def ddp_with_batch_norm() -> list[str]:
    return ddp(Run(nn.BatchNorm1d(96))).train()


def ddp_in_a_module() -> list[str]:
    run = ddp(Run(nn.BatchNorm1d(96)))
    run.model = nn.Sequential(run.model, nn.Identity())
    return run.train()


def channels_last() -> list[str]:
    run = Run()
    run.model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.Flatten(), nn.Linear(8, 1))
    run.model.to(memory_format=torch.channels_last)
    return ddp(run).train()


def zero_optimizer() -> list[str]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ddp(Run()).train(lambda p, lr: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=lr))


def fully_sharded() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run = Run()
    fully_shard(run.model, mesh=init_device_mesh("cpu", (SIZE,)))
    return run.train()


def averaged_by_hand() -> list[str]:
    run = Run()
    run.averages = True
    return run.train()


def experts(**options: Any) -> list[str]:
    expert = nn.Linear(96, 96)
    torch.nn.init.constant_(expert.weight, float(RANK))
    run = Run(expert)
    run.model._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]
    run.options = options
    return ddp(run).train()


def own_experts() -> list[str]:
    return experts(per_rank=("*/1.weight*", "*/1.bias*"))


def described_experts() -> list[str]:
    return experts(replicas={"model/1.*": [RANK]})


def without_ddp() -> Run:
    """Its ranks keep pace, as those of a program with collectives of its own do."""
    run = Run()
    run.after_step = lambda step: dist.barrier()
    return run


def forgotten_ddp() -> list[str]:
    return without_ddp().train()


def saved_at_once() -> list[str]:
    run = Run()
    run.interval = 1
    return run.train()


def local_sgd() -> list[str]:
    run = Run()

    def average(step: int) -> None:
        dist.barrier()
        if step % 4 == 0:
            for parameter in run.model.parameters():
                dist.all_reduce(parameter.data)

    run.after_step = average
    return run.train()


def warned() -> list[str]:
    run = without_ddp()
    run.options = {"replica_check": "warn"}
    return run.train()


def ignored() -> list[str]:
    run = without_ddp()
    run.options = {"replica_check": "off"}
    return run.train()


def one_odd_rank() -> list[str]:
    run = Run()
    run.averages = True
    run.options = {"replica_check": "warn"}  # refused ranks would leave the third one alone in its reductions
    if RANK == SIZE - 1:
        run.model[1].bias.data.fill_(5.0)
    return run.train()


def flipped_bit() -> list[str]:
    run = ddp(Run())

    def flip(step: int) -> None:
        if step == 4 and RANK == 1:
            run.model.module[0].bias.data.view(torch.int32)[7] ^= 1

    run.after_step = flip
    return run.train()


def batch_norm_without_ddp() -> list[str]:
    run = Run(nn.BatchNorm1d(96))
    run.averages = True
    return run.train()


class Meter:
    """Sums of this rank alone."""

    def __init__(self) -> None:
        self.total = torch.tensor(float(RANK))

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def metric_of_each_rank() -> list[str]:
    run = ddp(Run())
    run.objects = {"meter": Meter()}
    return run.train()


def averaged_weights() -> list[str]:
    run = ddp(Run())
    run.objects = {"ema": copy.deepcopy(run.model.module)}
    return run.train()


CASES: tuple[Callable[[], list[str]], ...] = (
    in_ddp,
    ddp_with_batch_norm,
    ddp_in_a_module,
    channels_last,
    zero_optimizer,
    fully_sharded,
    averaged_by_hand,
    own_experts,
    described_experts,
    averaged_weights,
    ignored,
    experts,
    forgotten_ddp,
    saved_at_once,
    local_sgd,
    warned,
    one_odd_rank,
    flipped_bit,
    batch_norm_without_ddp,
    metric_of_each_rank,
)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ["GROUP"], rank=RANK, world_size=SIZE)
    replica_check.CHECK_SAVES = replica_check.MIN_CHECK_STEPS = 2  # type: ignore[misc]  # every fourth step
    found = {}
    for case in CASES:
        found[case.__name__] = case()
        dist.barrier()
    print(json.dumps(found), flush=True)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
