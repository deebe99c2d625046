"""A loop as Accelerate's documents have it, with accumulation."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from tell import FOLDER, STEPS, tell

import surefoot

SAMPLES = torch.randn(100, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# a batch here is one of all ranks: else the scheduler would go on by as many steps as there are ranks
split = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=split)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
loader = surefoot.ElasticLoader(SAMPLES, 12, seed=1, batches_per_step=2)
checkpointer = surefoot.Checkpointer(
    model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, folder=FOLDER, interval_steps=1
)
start, total = checkpointer.restore(), 0.0
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch.data).square().mean() * batch.weight
        total = total + loss.detach()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        tell(step := checkpointer.step(total), total)
        total = 0.0
        if step >= STEPS:
            break
