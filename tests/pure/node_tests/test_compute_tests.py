"""What each trial of a node finds where that part of it is well, wrong, or cannot be tried."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surefoot.node_tests import __main__ as probe
from surefoot.node_tests import compute_tests, host_tests
from surefoot.node_tests.compute_tests import PRODUCT, build_operands, digest, try_gpus, try_memory, try_processor
from surefoot.node_tests.host_tests import NodeTestResult, try_disk, try_loopback

LEFT, RIGHT, KNOWN = build_operands()


def test_the_product_is_known_and_exact_in_every_format() -> None:
    assert digest(KNOWN) == PRODUCT
    assert np.array_equal(LEFT @ RIGHT, KNOWN), "by another way"
    assert np.abs(KNOWN).max() <= 256, "up to where bfloat16 is exact"


def test_a_processor_that_is_well_passes_and_one_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_processor(LEFT, RIGHT, KNOWN).verdict == "well"
    odd = RIGHT.copy()
    odd[3, 5] += 1  # as a flipped bit does
    found = try_processor(LEFT, odd, KNOWN)
    assert (found.verdict, found.reason) == ("fails", "CpuComputeError")
    assert try_processor(LEFT, RIGHT, KNOWN + 1).text == "the processor adds integers to a wrong sum"


def test_memory_that_changes_a_word_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_memory().verdict == "well"

    def copied(into: Any, source: Any) -> None:
        into[:] = source
        into[7] ^= np.uint64(1 << 40)

    monkeypatch.setattr(compute_tests.np, "copyto", copied)
    found = try_memory()
    assert (found.verdict, found.reason, found.text.split()[-4:]) == (
        "fails",
        "MemoryTestFailed",
        ["memory", "8", "were", "wrong"],
    )


class Tensor:
    """An array on a device that calculates as it is told to."""

    def __init__(self, values: Any, wrong: bool) -> None:
        self.values, self.wrong = values, wrong

    def to(self, device: str, kind: object = None) -> Tensor:
        return Tensor(self.values if kind is None else self.values.astype(np.float32), device == "cuda:1")

    def __matmul__(self, other: Tensor) -> Tensor:
        product = self.values @ other.values
        product[0, -1] += self.wrong
        return Tensor(product, self.wrong)

    def repeat(self, rows: int, columns: int) -> Tensor:
        return Tensor(np.tile(self.values, (rows, columns)), self.wrong)

    def long(self) -> Tensor:
        return self

    def __ne__(self, other: object) -> Any:
        assert isinstance(other, Tensor)
        return (self.values != other.values)[()]


def gpus(count: int, failing: bool = False) -> Any:
    def from_numpy(values: Any) -> Tensor:
        if failing:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return Tensor(values, False)

    cuda = SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)
    return SimpleNamespace(cuda=cuda, from_numpy=from_numpy, float32=0, float16=1, bfloat16=2)


def test_each_gpu_is_tried_and_the_one_that_multiplies_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_tests, "_SIDE_BY_SIDE", 2)
    found = sorted(try_gpus(gpus(3), LEFT, RIGHT, KNOWN), key=lambda one: one.name)
    assert [(one.name, one.verdict) for one in found] == [("gpu 0", "well"), ("gpu 1", "fails"), ("gpu 2", "well")]
    assert found[1].text == "GPU 1 multiplies matrices of float32 wrong: 1 of 524288 values"
    assert list(try_gpus(gpus(0), LEFT, RIGHT, KNOWN)) == []


def test_a_gpu_that_cannot_be_tried_proves_nothing() -> None:
    (found,) = try_gpus(gpus(1, failing=True), LEFT, RIGHT, KNOWN)
    assert (found.verdict, found.text) == ("unknown", "GPU 0 could not be tested: CUDA error: out of memory")


def test_a_disk_that_gives_back_what_it_took_is_well(tmp_path: Path) -> None:
    assert try_disk(tmp_path).verdict == "well"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(errno.EIO, "fails"), (errno.ENOSPC, "unknown"), (errno.EROFS, "unknown"), (errno.EACCES, "unknown")],
)
def test_only_a_disks_own_error_is_the_nodes(
    code: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, content: bytes) -> bytes:
        raise OSError(code, "no")

    monkeypatch.setattr(host_tests, "_written_and_read", failing)
    assert try_disk(tmp_path).verdict == verdict


def test_a_disk_that_returns_something_else_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tests, "_written_and_read", lambda path, content: content[:-1] + bytes([content[-1] ^ 1]))
    assert (try_disk(tmp_path).verdict, try_disk(tmp_path).reason) == ("fails", "DiskTestFailed")
    assert try_disk(tmp_path / "absent").verdict == "fails", "the same"
    monkeypatch.undo()
    assert try_disk(tmp_path / "absent").verdict == "unknown"


@pytest.mark.gate_only
def test_a_node_that_does_not_reach_itself_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_loopback("127.0.0.1").verdict == "well"
    monkeypatch.setattr(host_tests, "_PAUSE_SECONDS", 0.0)
    refused = iter([True, False, True, True])

    def sent(address: tuple[str, int], pattern: bytes) -> bytes:
        if next(refused):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        return pattern

    monkeypatch.setattr(host_tests, "_sent_and_received", sent)
    assert try_loopback("127.0.0.1").verdict == "well", "the second time"
    found = try_loopback("127.0.0.1")
    assert (found.verdict, found.reason) == ("fails", "LoopbackTestFailed")
    monkeypatch.setattr(host_tests, "_sent_and_received", lambda address, pattern: pattern[1:])
    assert "came back changed" in try_loopback("127.0.0.1").text


def test_an_address_that_a_node_has_not_proves_nothing() -> None:
    found = try_loopback("192.0.2.1")  # nobody's
    assert (found.verdict, found.text.partition(":")[0]) == ("unknown", "192.0.2.1 is no address of this node")


def test_all_that_can_be_is_tried_and_told_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_GPU_FILE", tmp_path / "none")
    probe.print_results(probe.run_tests("127.0.0.1", tmp_path, is_faulty=False))
    *told, over = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one["name"] for one in told] == ["loopback", "disk", "memory", "matmul"]
    assert {one["verdict"] for one in told} == {"well"}
    assert over == {"over": True}
    assert [t.reason for t in probe.run_tests("127.0.0.1", tmp_path, is_faulty=True) if t.verdict == "fails"] == [
        "CpuComputeError"
    ]


def test_what_a_warm_worker_waits_for_has_its_share_of_a_busy_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Niced beside the warm process' imports it took 9 s of a node with six busy processes, and the worker joined."""
    order: list[str] = []
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    modules = {"surefoot.node_tests.compute_tests": compute_tests, "torch": torch}

    def imported(name: str) -> Any:
        order.append(name)
        return modules[name]

    monkeypatch.setattr(probe, "_GPU_FILE", tmp_path)
    monkeypatch.setattr(probe.importlib, "import_module", imported)
    monkeypatch.setattr(probe.os, "nice", lambda by: order.append(f"niced by {by}"))
    for one in probe.run_tests("127.0.0.1", tmp_path, is_faulty=False):
        order.append(one.name)
    assert order == [
        "loopback",
        "disk",
        "surefoot.node_tests.compute_tests",
        "memory",
        "matmul",
        "niced by 10",
        "torch",
    ]


def test_without_numpy_numbers_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(probe.importlib, "import_module", absent)
    *_, last = probe.run_tests("127.0.0.1", tmp_path, is_faulty=False)
    assert isinstance(last, NodeTestResult)
    assert (last.name, last.verdict) == ("matmul", "unknown")
