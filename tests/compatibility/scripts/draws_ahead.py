"""As nanoGPT trains: batches from the global generator, the next one drawn before the step ends."""

import torch
from tell import FOLDER, STEPS, tell

import surefoot

TEXT = torch.randint(0, 65, (4000,), generator=torch.Generator().manual_seed(0))


def get_batch():
    starts = torch.randint(len(TEXT) - 17, (4,)).tolist()
    return torch.stack([TEXT[i : i + 16] for i in starts]), torch.stack([TEXT[i + 1 : i + 17] for i in starts])


model = torch.nn.Sequential(torch.nn.Embedding(65, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 65)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpointer = surefoot.Checkpointer(model=model, optimizer=optimizer, folder=FOLDER, interval_steps=1)
step = checkpointer.restore()
x, y = get_batch()
while step < STEPS:
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    with checkpointer.prefetching():
        x, y = get_batch()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step = checkpointer.step(loss)
    tell(step, loss)
