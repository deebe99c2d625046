"""What NVML says of GPUs: hardware is the node's, a program's Xid is not, and what is unsupported or absent says nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.fakes.fake_nvml import FakeEvent, FakeNvml, NVMLError
from surefoot.agent.health.gpu_checks import XIDS, GpuCheck, xid_finding
from surefoot.protocol.messages import NodeFinding

DOCUMENT = Path(__file__).parents[4] / "docs" / "node-health.md"


def check(nvml: FakeNvml) -> GpuCheck:
    return GpuCheck(lambda: nvml)


def told(found: Sequence[NodeFinding]) -> list[tuple[str, str]]:
    return [(one.reason, one.blame) for one in found]


@pytest.mark.parametrize(
    ("code", "blame"),
    [(79, "node"), (48, "node"), (95, "node"), (119, "node"), (13, "application"), (31, "application"), (43, "application"),
     (45, "application"), (94, "unknown"), (63, "unknown"), (109, "unknown"), (9999, "unknown")],
)  # fmt: skip
def test_an_xid_is_told_for_good_with_whose_it_is(code: int, blame: str) -> None:
    nvml = FakeNvml(gpus=2)
    gpus = check(nvml)
    assert gpus.find_faults() == ()
    nvml.events.append(FakeEvent(1, code))
    for _ in range(2):
        (found,) = gpus.find_faults()
        assert (found.reason, found.blame) == (f"GpuXid{code}", blame)
        assert found.text.startswith(f"GPU 1 reported Xid {code}: ")


def test_the_document_has_the_table() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(code): (blame, meaning) for code, blame, meaning in rows} == XIDS


def test_every_xid_of_an_application_by_nvidia_s_device_plugin_moves_nobody() -> None:
    assert all(xid_finding(code, "GPU 0").blame != "node" for code in (13, 31, 43, 45, 68, 109))


def test_a_row_that_cannot_be_remapped_is_the_node_s_and_one_that_waits_is_only_told() -> None:
    assert told(check(FakeNvml(rows={0: (0, 1, 0, 1)})).find_faults()) == [("GpuRowRemapFailed", "node")]
    assert told(check(FakeNvml(rows={0: (0, 1, 1, 0)})).find_faults()) == [("GpuRowRemapPending", "unknown")]


def test_uncorrected_errors_count_from_the_agent_s_beginning() -> None:
    nvml = FakeNvml(uncorrected={0: 7})
    gpus = check(nvml)
    assert gpus.find_faults() == ()
    nvml.uncorrected[0] = 9
    (found,) = gpus.find_faults()
    assert (found.reason, found.blame) == ("GpuUncorrectedEcc", "unknown")
    assert "counted 2 uncorrected" in found.text


@pytest.mark.parametrize("value", [15, 16])
def test_a_lost_device_is_the_node_s_and_stays_so(value: int) -> None:
    nvml = FakeNvml()
    gpus = check(nvml)
    gpus.find_faults()
    nvml.broken = value
    assert told(gpus.find_faults()) == [("GpuLost", "node")]
    nvml.broken = 0
    assert told(gpus.find_faults()) == [("GpuLost", "node")]


def test_heat_is_told_when_it_lasts_and_blames_nobody() -> None:
    nvml = FakeNvml(clocks={0: 0x40 | 0x4})
    gpus = check(nvml)
    found = [gpus.find_faults() for _ in range(12)]
    assert [told(one) for one in found[:11]] == [[]] * 11
    assert told(found[11]) == [("GpuThrottled", "unknown")]
    nvml.clocks[0] = 0x4
    assert gpus.find_faults() == (), "a power cap is how it is set up"


def test_what_a_device_does_not_support_is_not_asked_again() -> None:
    nvml = FakeNvml(rows={0: NVMLError(3)})
    gpus = check(nvml)
    gpus.find_faults()
    gpus.find_faults()
    assert nvml.asked.count("rows") == 1
    assert nvml.asked.count("ecc") == 2


@pytest.mark.parametrize("value", [999, 4, 2])
def test_any_other_error_proves_nothing(value: int) -> None:
    nvml = FakeNvml()
    nvml.broken = value
    assert check(nvml).find_faults() == ()


def test_without_library_or_driver_nothing_is_found() -> None:
    def absent() -> FakeNvml:
        raise ModuleNotFoundError("pynvml")

    assert GpuCheck(absent).find_faults() == ()
    assert check(FakeNvml(gpus=-1)).find_faults() == ()
