"""Multiplies matrices with a known product, on the processor and each GPU, and copies memory.

Small integers and their sums are exact in every format that training uses, so a result that differs in one place is wrong
and no rounding. The known product comes from integer arithmetic, which uses other units of the processor.
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
"""Digest of the known product, in case that integer arithmetic is wrong too."""
_SECONDS = 0.1
_COPY_BYTES = 16 << 20
_FORMATS = ("float32", "float16", "bfloat16")
_SIDE_BY_SIDE = 32
"""Copies of the right matrix on a GPU: a single one would use an eighth of a large GPU's multiprocessors."""


def build_operands() -> tuple[Any, Any, Any]:
    """Returns two matrices of -1, 0 and 1, and their product; no sum reaches 256, up to which every format is exact."""
    matrix_a, matrix_b = _scattered(1), _scattered(2)
    product = np.zeros((SIZE, SIZE), np.int64)
    for value in (-1, 1):  # additions are eight times as fast as an integer product
        for row in range(SIZE):
            product[row] += value * matrix_b[matrix_a[row] == value].sum(axis=0)
    return matrix_a, matrix_b, product


def _scattered(seed: int) -> Any:
    """Returns a pseudorandom matrix of -1, 0 and 1 that is the same on every machine."""
    index = np.arange(SIZE * SIZE, dtype=np.uint64).reshape(SIZE, SIZE) + np.uint64(seed << 32)
    bits = index * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((bits >> np.uint64(33)) % np.uint64(3)).astype(np.int64) - 1


def digest(product: Any) -> str:
    return hashlib.blake2b(product.astype("<i8").tobytes(), digest_size=8).hexdigest()


def try_processor(matrix_a: Any, matrix_b: Any, product: Any) -> NodeTestResult:
    """Checks the processor's product repeatedly for _SECONDS: a rare error is not found by a single one."""
    if digest(product) != PRODUCT:
        return NodeTestResult("matmul", "fails", "CpuComputeError", "the processor adds integers to a wrong sum")
    a, b = matrix_a.astype(np.float32), matrix_b.astype(np.float32)
    start_seconds, count = time.monotonic(), 0
    while (elapsed_seconds := time.monotonic() - start_seconds) < _SECONDS or not count:
        wrong = int((a @ b != product).sum())
        count += 1
        if wrong:
            text = f"the processor multiplies matrices wrong: {wrong} of {SIZE * SIZE} values in product {count}"
            return NodeTestResult("matmul", "fails", "CpuComputeError", text)
    return NodeTestResult("matmul", "well", rate=2e-9 * SIZE**3 * count / elapsed_seconds, unit="GFLOP")


def try_memory() -> NodeTestResult:
    """Copies a known pattern in memory and compares it."""
    pattern = np.arange(_COPY_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    copy = np.empty_like(pattern)
    copy.fill(0)  # map the pages before the time is measured
    start_seconds = time.monotonic()
    np.copyto(copy, pattern)
    elapsed_seconds = max(time.monotonic() - start_seconds, 1e-9)
    wrong = int((copy != pattern).sum())
    if wrong:
        return NodeTestResult(
            "memory", "fails", "MemoryTestFailed", f"of {_COPY_BYTES} bytes copied in memory {8 * wrong} were wrong"
        )
    return NodeTestResult("memory", "well", rate=2e-9 * _COPY_BYTES / elapsed_seconds, unit="GB")


def try_gpus(torch: Any, matrix_a: Any, matrix_b: Any, product: Any) -> Iterator[NodeTestResult]:
    """Checks the product on each device that PyTorch sees, in each format; yields each device's result as it comes.

    Devices are tested in parallel: the first product takes a second, and a device that hangs must not delay the results
    of the others.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(_try_gpu, torch, index, matrix_a, matrix_b, product) for index in range(count)]
        yield from (future.result() for future in as_completed(futures))


def _try_gpu(torch: Any, index: int, matrix_a: Any, matrix_b: Any, product: Any) -> NodeTestResult:
    name, device = f"gpu {index}", f"cuda:{index}"
    rate = 0.0
    try:
        expected = torch.from_numpy(product).to(device).repeat(1, _SIDE_BY_SIDE)
        for dtype in _FORMATS:
            a, b = (torch.from_numpy(matrix).to(device, getattr(torch, dtype)) for matrix in (matrix_a, matrix_b))
            wrong, gpu_rate = _multiplied(a, b.repeat(1, _SIDE_BY_SIDE), expected)
            if wrong:
                text = f"GPU {index} multiplies matrices of {dtype} wrong: {wrong} of {_SIDE_BY_SIDE * SIZE**2} values"
                return NodeTestResult(name, "fails", "GpuComputeError", text)
            rate = max(rate, gpu_rate)
    except RuntimeError as error:  # another process uses the memory, or the driver does not match: proves nothing
        return NodeTestResult(
            name, "unknown", text=f"GPU {index} could not be tested: {str(error).splitlines()[0][:200]}"
        )
    return NodeTestResult(name, "well", rate=rate, unit="GFLOP")


def _multiplied(a: Any, b: Any, expected: Any) -> tuple[int, float]:
    """Returns the number of wrong values in one product, and the rate in GFLOP/s including the comparison.

    The first product is not timed: it loads the library, which may take longer than all others.
    """
    wrong, start_seconds, count = _wrong(a, b, expected), time.monotonic(), 0
    while not wrong and ((elapsed_seconds := time.monotonic() - start_seconds) < _SECONDS or not count):
        wrong, count = _wrong(a, b, expected), count + 1
    return wrong, 0.0 if wrong else 2e-9 * _SIDE_BY_SIDE * SIZE**3 * count / max(elapsed_seconds, 1e-9)


def _wrong(a: Any, b: Any, expected: Any) -> int:
    return int(((a @ b).long() != expected).sum().item())
