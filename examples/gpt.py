"""A byte-level GPT, sharded with FSDP2, learns the source of the standard library of the running interpreter.

Real text that is on every machine, a real model; on GPUs where there are any, else on the CPU. Run it any way:

    python examples/gpt.py --steps 50                                    one process
    torchrun --nproc-per-node 2 examples/gpt.py --steps 50               torchrun, without a coordinator
    surefoot local -f examples/gpt.yaml --nodes 3                        nodes that may die

Surefoot is the import, the Checkpointer with its restore(), and one call a step. With --dtype float64 the losses of
two runs agree to 1e-10 whatever happened to the world in between: the same samples, the same weights, another order of
summation.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import surefoot

SIZES = {"1M": (5, 128, 4), "3M": (6, 192, 6), "10M": (6, 384, 6), "30M": (10, 512, 8), "100M": (14, 768, 12)}
"""Layers, width and heads for about so many parameters."""

BYTES = 256
COLLECTIVE_SECONDS = 60


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(nn.functional.gelu(self.widen(self.before_perceptron(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the embedding is also the output matrix."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Windows:
    """The text as a map-style dataset: sample i is the i-th run of context + 1 bytes."""

    def __init__(self, text: bytes, context: int) -> None:
        self._text, self._context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._context
        return self._text[start : start + self._context + 1].long()


def standard_library(limit_bytes: int = 4 * 1024 * 1024) -> bytes:
    """The source of the running interpreter's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    if not text:
        raise SystemExit("this Python has no standard library in source form to learn from")
    return bytes(text[:limit_bytes])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1M", help="parameters, about")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=8, help="samples a step, whatever the world size")
    parser.add_argument("--context", type=int, default=128, help="bytes a sample")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU where there is one"
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="auto: nccl where each rank has a GPU, else gloo. Say gloo where nodes on one machine share a GPU",
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--checkpoints", default="build/gpt", help="folder, when no surefoot agent is there")
    parser.add_argument("--every", type=int, default=10, help="steps between two saves, when no agent is there")
    return parser.parse_args()


def chosen_device(asked: str) -> torch.device:
    """The CPU, or this rank's GPU among those of its node."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_group(device: torch.device, asked: str) -> None:
    """A launcher's process group, or one of this process alone."""
    alone = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    backend = asked if asked != "auto" else "nccl" if alone else "gloo"
    limit = timedelta(seconds=COLLECTIVE_SECONDS)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


def sharded_model(options: argparse.Namespace, device: torch.device) -> GPT:
    """Built alike on every rank from the seed, then sharded in place."""
    torch.manual_seed(options.seed)
    model = GPT(*SIZES[options.size], context=options.context).to(device, getattr(torch, options.dtype))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        if options.compile:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def loss_of(model: GPT, batch: surefoot.Batch, device: torch.device) -> torch.Tensor:
    """The mean over this rank's samples, weighted so that the mean over ranks is the mean over the global batch."""
    data = batch.data.to(device)
    inputs, targets = data[:, :-1], data[:, 1:]
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) * batch.weight


def main() -> None:
    options = arguments()
    device = chosen_device(options.device)
    join_group(device, options.backend)
    model = sharded_model(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    dataset = Windows(standard_library(), options.context)
    loader = surefoot.ElasticLoader(dataset, options.global_batch, seed=options.seed)

    checkpointer = surefoot.Checkpointer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        seed=options.seed,
        folder=options.checkpoints,
        interval_steps=options.every,
    )
    start = checkpointer.restore()
    if dist.get_rank() == 0:
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{count / 1e6:.1f} M parameters, world {dist.get_world_size()} on {device.type}, from step {start}",
            flush=True,
        )

    for step, batch in zip(range(start + 1, options.steps + 1), loader, strict=False):
        loss = loss_of(model, batch, device)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        checkpointer.step(mean)
        if dist.get_rank() == 0:
            bits = float(mean) / math.log(2)
            print(f"step {step}  loss {float(mean):.12f}  ({bits:.3f} bits a byte)", flush=True)

    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
