"""Multiplies matrices whose product is known, and copies memory.

Small whole numbers are exact in every format that training uses, and so are their sums: a result that differs in one place is
wrong, and no rounding. The known product comes from whole-number arithmetic, which goes another way through a processor.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np

from surefoot.node_probe.trial import Trial

SIZE = 512
PRODUCT = "f6d2ad68cf45aa45"
"""Of the known product, in case that the way to it is damaged too."""
_SECONDS = 0.1
_COPY_BYTES = 16 << 20
_FORMATS = ("float32", "float16", "bfloat16")


def operands() -> tuple[Any, Any, Any]:
    """Two matrices of -1, 0 and 1, and their product.

    No sum comes near 256, up to where every format is exact.
    """
    left, right = _scattered(1), _scattered(2)
    product = np.zeros((SIZE, SIZE), np.int64)
    for value in (-1, 1):  # as additions: eight times as fast as a product of whole numbers
        for row in range(SIZE):
            product[row] += value * right[left[row] == value].sum(axis=0)
    return left, right, product


def _scattered(seed: int) -> Any:
    """Like chance, and the same everywhere."""
    place = np.arange(SIZE * SIZE, dtype=np.uint64).reshape(SIZE, SIZE) + np.uint64(seed << 32)
    mixed = place * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(33)) % np.uint64(3)).astype(np.int64) - 1


def digest(product: Any) -> str:
    return hashlib.blake2b(product.astype("<i8").tobytes(), digest_size=8).hexdigest()


def try_processor(left: Any, right: Any, product: Any) -> Trial:
    """Repeats the product for a moment.

    What fails seldom is not found by one.
    """
    if digest(product) != PRODUCT:
        return Trial("matmul", "fails", "ComputesWrong", "the processor adds whole numbers to a wrong sum")
    a, b = left.astype(np.float32), right.astype(np.float32)
    began, count = time.monotonic(), 0
    while (passed := time.monotonic() - began) < _SECONDS or not count:
        wrong = int((a @ b != product).sum())
        count += 1
        if wrong:
            text = f"the processor multiplies matrices wrong: {wrong} of {SIZE * SIZE} values, the {count}. time"
            return Trial("matmul", "fails", "ComputesWrong", text)
    return Trial("matmul", "well", rate=2e-9 * SIZE**3 * count / passed, unit="GFLOP")


def try_memory() -> Trial:
    """Copies a known pattern and reads it back."""
    pattern = np.arange(_COPY_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    copy = np.empty_like(pattern)
    copy.fill(0)  # mapped in before the time counts
    began = time.monotonic()
    np.copyto(copy, pattern)
    passed = max(time.monotonic() - began, 1e-9)
    wrong = int((copy != pattern).sum())
    if wrong:
        return Trial(
            "memory", "fails", "MemoryWrong", f"of {_COPY_BYTES} bytes copied in memory {8 * wrong} came out wrong"
        )
    return Trial("memory", "well", rate=2e-9 * _COPY_BYTES / passed, unit="GB")


def try_gpus(torch: Any, left: Any, right: Any, product: Any) -> list[Trial]:
    """The same product on each device that PyTorch sees, in each format."""
    if not torch.cuda.is_available():
        return []
    return [_try_gpu(torch, index, left, right, product) for index in range(torch.cuda.device_count())]


def _try_gpu(torch: Any, index: int, left: Any, right: Any, product: Any) -> Trial:
    name = f"gpu {index}"
    try:
        known = torch.from_numpy(product).to(f"cuda:{index}")
        rate = 0.0
        for kind in _FORMATS:
            a, b = (torch.from_numpy(one).to(f"cuda:{index}", getattr(torch, kind)) for one in (left, right))
            began, count = time.monotonic(), 0
            while (passed := time.monotonic() - began) < _SECONDS or not count:
                wrong = int(((a @ b).long() != known).sum().item())
                count += 1
                if wrong:
                    text = f"GPU {index} multiplies matrices of {kind} wrong: {wrong} values"
                    return Trial(name, "fails", "GpuComputesWrong", text)
            rate = max(rate, 2e-9 * SIZE**3 * count / passed)
    except RuntimeError as error:  # out of memory that somebody else has, a driver that does not fit: no proof
        return Trial(name, "unknown", text=f"GPU {index} could not be tried: {str(error).splitlines()[0][:200]}")
    return Trial(name, "well", rate=rate, unit="GFLOP")
