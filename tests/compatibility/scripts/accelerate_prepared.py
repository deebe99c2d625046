"""Accelerate with a loader that it has prepared itself."""

import torch
from accelerate import Accelerator
from tell import FOLDER, STEPS, tell

import surefoot

SAMPLES = torch.randn(100, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1).double()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
loader = torch.utils.data.DataLoader(SAMPLES, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
checkpointer = surefoot.Checkpointer(model=model, optimizer=optimizer, loader=loader, folder=FOLDER, interval_steps=1)
checkpointer.restore()
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    tell(step := checkpointer.step(loss), loss)
    if step >= STEPS:
        break
