"""`python -m surefoot.node_tests PARENT_PID HOST FOLDER` tries this node.

It writes a line of JSON for each trial. Started by the agent beside the warm process, and ended by it after its time. Cheap trials,
which a warm worker may wait for, have their fair share of a busy node: at low priority they came too late beside the warm process'
imports, and a node that calculates wrong was joined. PyTorch is imported for GPUs alone, behind them and at low priority.
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
    """Tries one part after the other, the quick ones first.

    `damaged`: the processor is taken to calculate wrong.
    """
    yield try_loopback(host)
    yield try_disk(folder)
    try:
        compute = importlib.import_module("surefoot.node_tests.compute_tests")
    except ImportError as error:
        yield NodeTestResult("matmul", "unknown", text=f"numbers could not be tried: {error}")
        return
    matrix_a, matrix_b, product = compute.operands()
    yield compute.try_memory()
    yield compute.try_processor(matrix_a, matrix_b, product + is_faulty)
    if _GPU_FILE.exists():
        os.nice(NICENESS)
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            return  # a program without PyTorch brings its own library for GPUs, and none is known here
        yield from compute.try_gpus(torch, matrix_a, matrix_b, product)


def print_result(results: Iterable[NodeTestResult]) -> None:
    for result in results:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()
    sys.stdout.write('{"over": true}\n')
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    parent, host, folder = arguments
    die_with_parent(int(parent))
    print_result(run_tests(host, Path(folder), is_fault_requested("sick")))


if __name__ == "__main__":
    main(sys.argv[1:])
