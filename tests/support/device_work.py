"""Work that a device is still at when the host goes on, and streams to queue it on; on the CPU the same, done at once."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import torch

from surefoot.staging import Arena, CopySource

ROUNDS = 60
"""Products of two 4,096² matrices: some tenths of a second on a large GPU, longer on a small one."""


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Everything in it is queued on a stream of its own, as a trainer may do; what follows waits for it."""
    if device.type != "cuda":
        yield
        return
    stream, outside = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        yield
    outside.wait_stream(stream)


def keep_busy(device: torch.device) -> None:
    """Queues a long kernel on the current stream; what is queued behind it begins late."""
    if device.type == "cuda":
        matrix = torch.eye(4096, device=device)
        for _ in range(ROUNDS):
            matrix = matrix @ matrix


def size_of(device: torch.device) -> int:
    """Bytes of a tensor whose copy from the device outlasts what the host does meanwhile."""
    return (256 << 20) if device.type == "cuda" else (1 << 20)


@contextlib.contextmanager
def arena(size: int, device: torch.device) -> Iterator[Arena]:
    """Two slots of mapped memory as an agent gives it, pinned for a CUDA device; unpinned again."""
    memory = mmap.mmap(-1, 2 * size)
    made = Arena(memoryview(memory), 2, size)
    if device.type == "cuda":
        made.pin()
    try:
        yield made
    finally:
        made.close()


def whole(name: str, tensor: torch.Tensor, start: int = 0) -> CopySource:
    """One tensor as one piece and one tile."""
    size = tensor.numel() * tensor.element_size()
    return CopySource(name, lambda: tensor, lambda: tensor, tuple(tensor.shape), start, start + size)
