"""A loop as Accelerate's documents have it, with accumulation and a scheduler, at any world size.

    python examples/integrations/accelerate_loop.py                                     one process
    surefoot local -f examples/integrations/accelerate_loop.yaml --nodes 3              nodes that may die

What Accelerate prepared is given to Checkpointer as it is; the loader stays out of `prepare`.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration

import surefoot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoints", default="build/accelerate", help="folder, when no surefoot agent is there")
    options = parser.parse_args()

    # a batch here is one of all ranks: else the scheduler would go on by as many steps as there are ranks
    split = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=split)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    points = torch.randn(256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(points, points.sum(dim=1, keepdim=True))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader = surefoot.ElasticLoader(data, 12, seed=7, batches_per_step=2)
    checkpointer = surefoot.Checkpointer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        folder=options.checkpoints,
        interval_steps=5,
    )
    checkpointer.restore()
    total = torch.zeros((), dtype=torch.float64)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch.data[0]), batch.data[1]) * batch.weight
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += loss.detach() / 2
        if accelerator.sync_gradients:
            mean = accelerator.reduce(total, "mean")
            total = torch.zeros_like(total)
            step = checkpointer.status.step + 1
            accelerator.print(f"step {step}  world {accelerator.num_processes}  loss {float(mean):.12f}", flush=True)
            checkpointer.step(mean)
            if step == options.steps:
                break
    checkpointer.close()


if __name__ == "__main__":
    main()
