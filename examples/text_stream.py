"""A byte-level GPT learns from a stream of text: files read by lines, tokenised, packed, at any world size.

    python examples/text_stream.py --steps 50                             one process
    surefoot local -f examples/text_stream.yaml --nodes 3                 nodes that may die

The files are the source of the standard library of the running interpreter; --text names others, with patterns, local or
in S3. With --dtype float64 the losses of two runs agree to 1e-10 whatever happened to the world in between.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, join_group
from torch import nn

import surefoot
from surefoot.data.sources import TextLines

END = 10
"""The byte behind each line."""


def tokenised(line: str, _: torch.Generator) -> list[int]:
    """A line's bytes; put your tokenizer here. The generator is the line's own, for what is random about it."""
    return [*line.encode(), END]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=str(Path(sysconfig.get_path("stdlib")) / "[a-c]*.py"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=8, help="rows a step, whatever the world size")
    parser.add_argument("--context", type=int, default=64, help="bytes a row")
    parser.add_argument("--workers", type=int, default=0, help="processes of each rank that read ahead")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--checkpoints", default="build/text_stream", help="folder, when no surefoot agent is there")
    options = parser.parse_args()

    join_group()
    torch.manual_seed(7)
    model = GPT(layers=2, width=64, heads=2, context=options.context).to(getattr(torch, options.dtype))
    trained = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stream = surefoot.ElasticStream(
        TextLines(options.text),
        global_batch_size=options.global_batch,
        transform=tokenised,
        sequence_length=options.context + 1,
        shuffle_window=64,
        lane_groups=2,
        num_workers=options.workers,
        seed=7,
    )
    checkpointer = surefoot.Checkpointer(
        model=model, optimizer=optimizer, loader=stream, folder=options.checkpoints, interval_steps=10
    )
    start = checkpointer.restore()
    for step, batch in zip(range(start + 1, options.steps + 1), stream, strict=False):
        logits = trained(batch.data[:, :-1].long())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.data[:, 1:].flatten().long()) * batch.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        checkpointer.step(mean)
        if dist.get_rank() == 0:
            print(f"step {step}  world {dist.get_world_size()}  loss {float(mean):.12f}", flush=True)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
