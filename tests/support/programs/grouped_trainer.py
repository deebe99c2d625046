"""One rank of a gloo world that trains on groups of like length; prints its parameters behind each step as JSON.

grouped_trainer.py STEPS      RANK, WORLD_SIZE, GROUP (a store) in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from support.gloo_world import leave
from surefoot import ElasticStream
from surefoot.data.sources import Items


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["GROUP"], rank=rank, world_size=world)
    rows = [torch.arange(1 + n * 7 % 5, dtype=torch.float64) + n for n in range(60)]
    stream = ElasticStream(
        Items(rows),
        global_batch_size=2,
        max_tokens=12,
        shuffle_window=8,
        seed=3,
        collate_fn=list,
        rank=rank,
        num_replicas=world,
    )
    torch.manual_seed(5)
    linear = torch.nn.Linear(1, 1).double()
    model: Any = torch.nn.parallel.DistributedDataParallel(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    found = []
    for _, batch in zip(range(int(sys.argv[1])), stream, strict=False):
        # every rank calls its model once, also one that has no lanes: its group is another's, with weight 0
        tokens = torch.cat([row for group in batch.data for row in group])
        summed = (model(tokens.unsqueeze(1)).squeeze(1) - 2 * tokens).square().sum()
        (summed / max(1, batch.tokens) * stream.token_weight(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([p.item() for p in linear.parameters()])
    print(json.dumps({"parameters": found, "empty": batch.tokens == 0}))
    leave()


if __name__ == "__main__":
    main()
