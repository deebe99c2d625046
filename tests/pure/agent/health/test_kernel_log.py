"""The kernel's log is read from a moment on, without waiting, and closed logs say nothing."""

import os
from pathlib import Path

from surefoot.agent.health.node_checks import KernelLog


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
