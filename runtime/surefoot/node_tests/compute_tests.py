"""Multiplies matrices whose product is known, and copies memory.

Small whole numbers are exact in every format that training uses, and so are their sums: a result that differs in one place is
wrong, and no rounding. The known product comes from whole-number arithmetic, which goes another way through a processor.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from surefoot.node_tests.host_tests import NodeTestResult

SIZE = 512
PRODUCT = "f6d2ad68cf45aa45"
"""Of the known product, in case that the way to it is damaged too."""
_SECONDS = 0.1
_COPY_BYTES = 16 << 20
_FORMATS = ("float32", "float16", "bfloat16")
_SIDE_BY_SIDE = 32
"""Copies of the right matrix: one alone gives work to an eighth of a large GPU's multiprocessors."""


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


def try_processor(left: Any, right: Any, product: Any) -> NodeTestResult:
    """Repeats the product for a moment.

    What fails seldom is not found by one.
    """
    if digest(product) != PRODUCT:
        return NodeTestResult("matmul", "fails", "CpuComputeError", "the processor adds whole numbers to a wrong sum")
    a, b = left.astype(np.float32), right.astype(np.float32)
    began, count = time.monotonic(), 0
    while (passed := time.monotonic() - began) < _SECONDS or not count:
        wrong = int((a @ b != product).sum())
        count += 1
        if wrong:
            text = f"the processor multiplies matrices wrong: {wrong} of {SIZE * SIZE} values, the {count}. time"
            return NodeTestResult("matmul", "fails", "CpuComputeError", text)
    return NodeTestResult("matmul", "well", rate=2e-9 * SIZE**3 * count / passed, unit="GFLOP")


def try_memory() -> NodeTestResult:
    """Copies a known pattern and reads it back."""
    pattern = np.arange(_COPY_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    copy = np.empty_like(pattern)
    copy.fill(0)  # mapped in before the time counts
    began = time.monotonic()
    np.copyto(copy, pattern)
    passed = max(time.monotonic() - began, 1e-9)
    wrong = int((copy != pattern).sum())
    if wrong:
        return NodeTestResult(
            "memory", "fails", "MemoryTestFailed", f"of {_COPY_BYTES} bytes copied in memory {8 * wrong} came out wrong"
        )
    return NodeTestResult("memory", "well", rate=2e-9 * _COPY_BYTES / passed, unit="GB")


def try_gpus(torch: Any, left: Any, right: Any, product: Any) -> Iterator[NodeTestResult]:
    """The same product on each device that PyTorch sees, in each format.

    Side by side, and each told as it ends: the first product of a device takes a second, and one that hangs must not
    keep what others found.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return
    with ThreadPoolExecutor(count) as pool:
        trials = [pool.submit(_try_gpu, torch, index, left, right, product) for index in range(count)]
        yield from (one.result() for one in as_completed(trials))


def _try_gpu(torch: Any, index: int, left: Any, right: Any, product: Any) -> NodeTestResult:
    name, device = f"gpu {index}", f"cuda:{index}"
    rate = 0.0
    try:
        known = torch.from_numpy(product).to(device).repeat(1, _SIDE_BY_SIDE)
        for kind in _FORMATS:
            a, b = (torch.from_numpy(one).to(device, getattr(torch, kind)) for one in (left, right))
            wrong, reached = _multiplied(a, b.repeat(1, _SIDE_BY_SIDE), known)
            if wrong:
                text = f"GPU {index} multiplies matrices of {kind} wrong: {wrong} of {_SIDE_BY_SIDE * SIZE**2} values"
                return NodeTestResult(name, "fails", "GpuComputeError", text)
            rate = max(rate, reached)
    except RuntimeError as error:  # out of memory that somebody else has, a driver that does not fit: no proof
        return NodeTestResult(
            name, "unknown", text=f"GPU {index} could not be tried: {str(error).splitlines()[0][:200]}"
        )
    return NodeTestResult(name, "well", rate=rate, unit="GFLOP")


def _multiplied(a: Any, b: Any, known: Any) -> tuple[int, float]:
    """How many values of one product were wrong, and GFLOP/s with the comparison.

    The first product loads the library and counts for no time: it alone may take longer than all others should.
    """
    wrong, began, count = _wrong(a, b, known), time.monotonic(), 0
    while not wrong and ((passed := time.monotonic() - began) < _SECONDS or not count):
        wrong, count = _wrong(a, b, known), count + 1
    return wrong, 0.0 if wrong else 2e-9 * _SIDE_BY_SIDE * SIZE**3 * count / max(passed, 1e-9)


def _wrong(a: Any, b: Any, known: Any) -> int:
    return int(((a @ b).long() != known).sum().item())
