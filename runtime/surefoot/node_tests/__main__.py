"""`python -m surefoot.node_tests PARENT_PID HOST FOLDER` tests this node.

It writes a line of JSON for each test. The agent starts it at the same time as the fork server and ends it after a
timeout. Cheap tests, for which a warm worker may wait, run first and at normal priority: at low priority they ended too
late on a node that is busy with the fork server's imports, and a node with wrong results got a rank. PyTorch is only
imported for GPUs, after the other tests and at low priority.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from surefoot.fault_files import is_fault_requested
from surefoot.linux_process import die_with_parent
from surefoot.node_tests.host_tests import NodeTestResult, try_disk, try_loopback

NICENESS = 10
_GPU_FILE = Path("/dev/nvidiactl")


def run_tests(host: str, folder: Path, is_faulty: bool) -> Iterator[NodeTestResult]:
    """Runs the node tests one after the other, the quick ones first; `is_faulty` injects a wrong product."""
    yield try_loopback(host)
    yield try_disk(folder)
    try:
        compute = importlib.import_module("surefoot.node_tests.compute_tests")
    except ImportError as error:
        yield NodeTestResult("matmul", "unknown", text=f"the processor could not be tested: {error}")
        return
    matrix_a, matrix_b, product = compute.build_operands()
    yield compute.try_memory()
    yield compute.try_processor(matrix_a, matrix_b, product + is_faulty)
    if _GPU_FILE.exists():
        os.nice(NICENESS)
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            return  # a program without PyTorch uses another GPU library, which this test does not know
        yield from compute.try_gpus(torch, matrix_a, matrix_b, product)


def print_results(results: Iterable[NodeTestResult]) -> None:
    """Prints each result as a line of JSON as it comes, then a line that marks the end."""
    for result in results:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()
    sys.stdout.write('{"over": true}\n')
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    parent, host, folder = arguments
    die_with_parent(int(parent))
    print_results(run_tests(host, Path(folder), is_fault_requested("sick")))


if __name__ == "__main__":
    main(sys.argv[1:])
