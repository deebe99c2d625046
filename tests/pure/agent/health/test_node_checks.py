"""Tests of `agent.health.node_checks`."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from surefoot.agent.health.node_checks import (
    FolderCheck,
    KernelLog,
    KernelLogFindings,
    LinkCheck,
    MemoryPressure,
    kernel_finding,
)

# ---- machine checks --------------------------------------------------------------------------------------------------
# Kernel log, memory pressure, folders and links: what each finds, and whom that names.


@pytest.mark.parametrize(
    ("line", "reason", "blame"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.", "GpuXid79", "node"),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008", "GpuXid31", "application"),
        ("EXT4-fs (nvme0n1p1): Remounting filesystem read-only", "FilesystemReadOnly", "node"),
        ("blk_update_request: I/O error, dev nvme1n1, sector 8", "DiskErrors", "unknown"),
        ("mce: [Hardware Error]: Machine check events logged", "MachineCheck", "unknown"),
    ],
)
def test_the_kernel_s_words_name_the_node_or_nobody(line: str, reason: str, blame: str) -> None:
    found = kernel_finding(line)
    assert found is not None
    assert (found.reason, found.blame) == (reason, blame)


@pytest.mark.parametrize(
    "line", ["", "usb 1-1: new device", "NVRM: loading NVIDIA UNIX", "oom-kill:constraint=CONSTRAINT_NONE"]
)
def test_other_lines_say_nothing(line: str) -> None:
    assert kernel_finding(line) is None


def test_what_the_kernel_said_stays_found(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("")
    words = KernelLogFindings(KernelLog(path))
    assert words.find_faults() == ()
    path.write_text("3,1,1,-;NVRM: Xid (PCI:0000:3b:00): 48, DBE\n")
    assert [one.reason for one in words.find_faults()] == [one.reason for one in words.find_faults()] == ["GpuXid48"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("some avg10=90.00 avg60=80.00 avg300=1.00 total=1\nfull avg10=60.00 avg60=42.50 avg300=1.00 total=1\n", True),
        ("some avg10=90.00 avg60=80.00 avg300=1.00 total=1\nfull avg10=0.00 avg60=3.00 avg300=0.00 total=1\n", False),
        ("", False),
    ],
)
def test_pressure_is_told_where_every_program_waits(text: str, found: bool, tmp_path: Path) -> None:
    (tmp_path / "memory").write_text(text)
    assert [one.blame for one in MemoryPressure(tmp_path / "memory").find_faults()] == ["unknown"] * found
    assert MemoryPressure(tmp_path / "none").find_faults() == ()


def test_a_folder_that_can_be_written_to_is_well_and_left_as_it_was(tmp_path: Path) -> None:
    assert FolderCheck([tmp_path, tmp_path]).find_faults() == []
    assert list(tmp_path.iterdir()) == []
    assert FolderCheck([tmp_path / "none"]).find_faults() == [], "whoever needs it says so"


@pytest.mark.parametrize(
    ("number", "before", "reason", "blame"),
    [
        (errno.ENOSPC, True, "DiskFull", "unknown"),
        (errno.EDQUOT, True, "DiskFull", "unknown"),
        (errno.EIO, True, "DiskTestFailed", "node"),
        (errno.EROFS, True, "FilesystemReadOnly", "node"),
        (errno.EROFS, False, "FilesystemReadOnly", "unknown"),
    ],
)
def test_a_folder_that_refuses_says_whose_fault_it_is(
    number: int, before: bool, reason: str, blame: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = FolderCheck([tmp_path])
    if before:
        folders.find_faults()

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    (found,) = folders.find_faults()
    assert (found.reason, found.blame) == (reason, blame)


def test_a_disk_that_shall_be_full_is_so_for_the_node_that_is_named_alone(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults/diskfull-n1").touch()
    told = {"SUREFOOT_INJECTED_FAULTS_FOLDER": str(tmp_path / "faults")}
    struck = FolderCheck([tmp_path], {**told, "SUREFOOT_NODE": "n1"})
    (found,) = struck.find_faults()
    assert (found.reason, found.blame) == ("DiskFull", "unknown")
    assert FolderCheck([tmp_path], {**told, "SUREFOOT_NODE": "n2"}).find_faults() == []
    assert FolderCheck([tmp_path], {"SUREFOOT_NODE": "n1"}).find_faults() == []
    (tmp_path / "faults/diskfull-n1").unlink()
    assert struck.find_faults() == []


def test_a_folder_that_is_nearly_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Space:
        f_bavail, f_blocks, f_frsize = 10, 1_000_000, 4096

    monkeypatch.setattr("os.statvfs", lambda path: Space)
    (found,) = FolderCheck([tmp_path]).find_faults()
    assert (found.reason, found.blame) == ("DiskFull", "unknown")
    assert "41.0 kB of 4.10 GB left" in found.text or "left" in found.text


def infiniband(root: Path, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> Path:
    port = root / "infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True, exist_ok=True)
    (port / "state").write_text(state + "\n")
    (port / "rate").write_text(rate + "\n")
    return port


def ethernet(root: Path, speed: int, errors: int) -> None:
    device = root / "net/eth0"
    (device / "statistics").mkdir(parents=True, exist_ok=True)
    (device / "device").mkdir(exist_ok=True)
    (device / "speed").write_text(f"{speed}\n")
    (device / "statistics/rx_errors").write_text(f"{errors}\n")
    (device / "statistics/tx_errors").write_text("0\n")


def test_a_port_that_goes_down_and_stays_so_is_the_node_s(tmp_path: Path) -> None:
    links = LinkCheck(tmp_path)
    infiniband(tmp_path)
    assert links.find_faults() == []
    infiniband(tmp_path, state="1: DOWN")
    assert [len(links.find_faults()) for _ in range(3)] == [0, 0, 1]
    (found,) = links.find_faults()
    assert (found.reason, found.blame) == ("LinkDown", "node")
    infiniband(tmp_path)
    assert links.find_faults() == []


def test_a_port_that_was_never_up_is_nobody_s_loss(tmp_path: Path) -> None:
    infiniband(tmp_path, state="1: DOWN")
    links = LinkCheck(tmp_path)
    assert [links.find_faults() for _ in range(5)] == [[]] * 5


def test_a_link_that_is_slower_than_it_was_and_errors_are_told_and_blame_nobody(tmp_path: Path) -> None:
    links = LinkCheck(tmp_path)
    infiniband(tmp_path)
    ethernet(tmp_path, 100_000, 5)
    assert links.find_faults() == []
    infiniband(tmp_path, rate="200 Gb/sec (4X HDR)")
    ethernet(tmp_path, 100_000, 2005)
    found = links.find_faults()
    assert [(one.reason, one.blame) for one in found] == [("LinkDegraded", "unknown"), ("NetworkErrors", "unknown")]
    assert found[0].text == "port 1 of mlx5_0 has 200 Gb/s, and had 400"
    ethernet(tmp_path, 10_000, 2005)
    assert "network device eth0 has 10000 Mb/s, and had 100000" in links.find_faults()[1].text


def test_a_machine_without_such_devices_has_nothing_to_tell(tmp_path: Path) -> None:
    assert LinkCheck(tmp_path).find_faults() == []


# ---- kernel log ------------------------------------------------------------------------------------------------------
# The kernel's log is read from a moment on, without waiting, and closed logs say nothing.


def test_only_what_was_written_since_is_read_and_once(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("6,1,10,-;before\n")
    log = KernelLog(path)
    assert log.readable
    assert log.lines() == []
    with path.open("a") as file:
        file.write(
            "4,2,20,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n SUBSYSTEM=pci\n3,3,21,-;two\n"
        )
    assert log.lines() == ["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "two"]
    assert log.lines() == []
    log.close()
    assert log.lines() == []


def test_a_log_that_may_not_be_read_says_nothing(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "none")
    assert not log.readable
    assert log.lines() == []


def test_a_log_that_writes_nothing_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    log = KernelLog(pipe)
    assert log.lines() == []
    log.close()
