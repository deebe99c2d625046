"""A plain loop whose steps go to TensorBoard, each once, whatever happens to the nodes.

    python examples/integrations/logged_loop.py                                     one process
    surefoot local -f examples/integrations/logged_loop.yaml --nodes 3              nodes that may die

Steps that a new world runs again take the place of those that the old one had logged.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

import surefoot
from surefoot.integrations.step_log import StepLog, tensorboard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoints", default="build/logged", help="folder, when no surefoot agent is there")
    parser.add_argument("--logs", default="build/logged-events", help="a folder that every node sees")
    options = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    ).double()
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    points = torch.randn(256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(points, points.sum(dim=1, keepdim=True))
    loader = surefoot.ElasticLoader(data, 12, seed=7)
    checkpointer = surefoot.Checkpointer(
        model=model, optimizer=optimizer, loader=loader, folder=options.checkpoints, interval_steps=5
    )
    log = StepLog(checkpointer, tensorboard(os.path.join(options.logs, os.environ.get("SUREFOOT_JOB_UID", "alone"))))
    start = checkpointer.restore()
    for step, batch in zip(range(start + 1, options.steps + 1), loader, strict=False):
        loss = torch.nn.functional.mse_loss(model(batch.data[0]), batch.data[1]) * batch.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        print(f"step {step}  loss {float(mean):.12f}", flush=True)
        log.step(mean, rate=optimizer.param_groups[0]["lr"])
    log.close()
    checkpointer.close()


if __name__ == "__main__":
    main()
