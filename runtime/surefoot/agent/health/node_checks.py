"""Checks a node's disks, network devices, kernel log and memory pressure.

`node_monitor` runs each check in a thread. FolderCheck tests that a worker's folders can be written to: full disks and
file systems that became read-only make logs, ledgers and scripts fail in ways that look like a bug of the program.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from surefoot.agent.health.gpu_checks import xid_finding
from surefoot.fault_files import is_fault_requested
from surefoot.protocol.messages import Blame, NodeFinding
from surefoot.protocol.text import format_bytes

MIN_BYTES = 64 << 20
MIN_SHARE = 0.01


class FolderCheck:
    """Finds folders that are full, that became read-only, or that fail with I/O errors."""

    name = "disk"
    period_seconds = 10.0

    def __init__(self, folders: Iterable[Path], environment: Mapping[str, str] = os.environ) -> None:
        self._folders = tuple(dict.fromkeys(folders))
        self._environment = environment
        self._written: set[Path] = set()

    def find_faults(self) -> Sequence[NodeFinding]:
        return [finding for folder in self._folders if (finding := self._check_folder(folder)) is not None]

    def _check_folder(self, folder: Path) -> NodeFinding | None:
        test_file = folder / f".surefoot-probe-{os.getpid()}"
        try:
            if is_fault_requested(
                "diskfull", self._environment
            ):  # injected, since the machine's disk must not be filled
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            test_file.write_bytes(b"surefoot")
            self._written.add(folder)
            test_file.unlink()
            return self._free_space_finding(folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return NodeFinding("DiskFull", f"{folder} is full", "unknown")
            if error.errno == errno.EIO:
                return NodeFinding("DiskTestFailed", f"{folder} cannot be written to: {error}", "node")
            if error.errno == errno.EROFS:
                # a folder that could never be written to was mounted read-only on purpose
                blame: Blame = "node" if folder in self._written else "unknown"
                return NodeFinding("FilesystemReadOnly", f"{folder} has become read-only", blame)
            return None  # no permission here: the program that needs the folder reports that itself

    def _free_space_finding(self, folder: Path) -> NodeFinding | None:
        space = os.statvfs(folder)
        free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        if free >= min(MIN_BYTES, MIN_SHARE * size):
            return None
        return NodeFinding("DiskFull", f"{folder} has {format_bytes(free)} of {format_bytes(size)} left", "unknown")


# ---- link check ------------------------------------------------------------------------------------------------------
# Checks network devices: InfiniBand ports, link speed, errors. Reads /sys/class only. The state of a port when the agent
# started is the expected one: a port that was never up is no fault.

_MIN_CONSECUTIVE = 3
"""Number of consecutive checks with a port down that make a fault: link retraining takes a port down for a moment."""
_MAX_ERRORS = 1000
"""Number of new errors of one device in one period that makes a fault."""


class LinkCheck:
    """Finds ports that went down, slowed down, or count errors."""

    name = "network"
    period_seconds = 10.0

    def __init__(self, system: Path = Path("/sys/class")) -> None:
        self._system = system
        self._rates: dict[str, float] = {}
        """Highest observed rate of each port or device, in its own unit."""
        self._down: dict[str, int] = {}
        self._errors: dict[str, int] = {}

    def find_faults(self) -> Sequence[NodeFinding]:
        ports = sorted(self._system.glob("infiniband/*/ports/*"))
        devices = sorted(self._system.glob("net/*"))
        findings = [*(self._check_port(port) for port in ports), *(self._check_device(device) for device in devices)]
        return [finding for finding in findings if finding is not None]

    def _check_port(self, port: Path) -> NodeFinding | None:
        name = f"port {port.name} of {port.parents[1].name}"
        active, rate = "ACTIVE" in _read_text(port / "state"), _leading_number(_read_text(port / "rate"))
        if name in self._rates and not active:
            self._down[name] = self._down.get(name, 0) + 1
            if self._down[name] >= _MIN_CONSECUTIVE:
                return NodeFinding("LinkDown", f"{name} was up when this agent started, and is down", "node")
            return None
        self._down[name] = 0
        return self._slow_link_finding(name, rate, "Gb/s") if active else None

    def _check_device(self, device: Path) -> NodeFinding | None:
        if not (device / "device").exists() and not _read_text(device / "speed"):
            return None
        name = f"network device {device.name}"
        errors = sum(int(_leading_number(_read_text(device / f"statistics/{side}_errors"))) for side in ("rx", "tx"))
        new_errors = errors - self._errors.get(name, errors)
        self._errors[name] = errors
        if new_errors >= _MAX_ERRORS:
            text = f"{name} counted {new_errors} errors within {self.period_seconds:g} s"
            return NodeFinding("NetworkErrors", text, "unknown")
        return self._slow_link_finding(name, _leading_number(_read_text(device / "speed")), "Mb/s")

    def _slow_link_finding(self, name: str, rate: float, unit: str) -> NodeFinding | None:
        best = self._rates[name] = max(rate, self._rates.get(name, rate))
        if rate <= 0 or rate >= best:
            return None
        return NodeFinding("LinkDegraded", f"{name} has {rate:g} {unit}, and had {best:g}", "unknown")


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # absent, or of a device that is down


def _leading_number(text: str) -> float:
    """Parses the number at the start of a text; 0 if there is none."""
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return 0.0


# ---- kernel log ------------------------------------------------------------------------------------------------------
# Reads new lines of the kernel's log from /dev/kmsg, without waiting. Most containers have no access to it: then the
# check finds nothing.

_RECORD_BYTES = 8192
"""Size of a read; the kernel rejects one that is smaller than the record."""
_MAX_RECORDS = 4096
"""Most records in one read, so that a flooded log does not block the caller."""


class KernelLog:
    """Yields lines written since it was opened or last read."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self.close()  # no permission, or no such device

    @property
    def readable(self) -> bool:
        return self._file is not None

    def lines(self) -> list[str]:
        """Returns new lines, oldest first; lines that the kernel has overwritten are missing."""
        lines: list[str] = []
        while self._file is not None and len(lines) < _MAX_RECORDS:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten: the next read starts at the oldest one
            except OSError:
                self.close()
                break
            if not record:
                break
            lines += _record_messages(record.decode(errors="replace"))
        return lines

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _record_messages(record: str) -> list[str]:
    """Returns a record's messages, without its priority, number and time, and without its dictionary."""
    return [line.partition(";")[2] or line for line in record.splitlines() if line and not line.startswith(" ")]


# ---- faults in the kernel log ----------------------------------------------------------------------------------------
# Finds faults of the node in new lines of the kernel's log. The log is that of the whole node: a message about a disk or a
# GPU is about this node, but one about a program may be about another pod's and blames none.

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
_MAX_FINDINGS = 16


class KernelLogFindings:
    """Finds faults in the kernel's log; each stays a finding for as long as this agent runs."""

    name = "kernel"
    period_seconds = 5.0

    def __init__(self, log: KernelLog | None = None) -> None:
        self._log = log if log is not None else KernelLog()
        self._findings: dict[str, NodeFinding] = {}

    def find_faults(self) -> Sequence[NodeFinding]:
        for line in self._log.lines():
            finding = kernel_finding(line)
            if finding is not None and (finding.reason in self._findings or len(self._findings) < _MAX_FINDINGS):
                self._findings[finding.reason] = finding
        return tuple(self._findings.values())


def kernel_finding(line: str) -> NodeFinding | None:
    """Returns the fault that a line of the kernel's log reports; None: it reports none."""
    xid = _XID.search(line)
    if xid is not None:
        return xid_finding(int(xid.group(2)), f"the GPU at {xid.group(1)}")
    lower = line.lower()
    if "remounting filesystem read-only" in lower:
        return NodeFinding("FilesystemReadOnly", f"the kernel made a file system read-only: {line}", "node")
    if "i/o error, dev " in lower:
        return NodeFinding("DiskErrors", f"the kernel could not read or write a disk: {line}", "unknown")
    if "mce: [hardware error]" in lower or "machine check" in lower:
        return NodeFinding("MachineCheck", f"the processor reported a hardware error: {line}", "unknown")
    return None


# ---- memory pressure -------------------------------------------------------------------------------------------------
# Reads the kernel's pressure stall information of the node's memory. Programs that wait for memory make steps slow long
# before any process is killed; which program causes it, the figure does not show.

MAX_PERCENT = 20.0
"""Share of the last minute in which all programs waited for memory, above which it is a fault, in percent."""


class MemoryPressure:
    """Finds out whether all programs of the node often wait for memory."""

    name = "memory"
    period_seconds = 10.0

    def __init__(self, path: Path = Path("/proc/pressure/memory")) -> None:
        self._path = path

    def find_faults(self) -> Sequence[NodeFinding]:
        try:
            lines = self._path.read_text().splitlines()
        except OSError:
            return ()  # a kernel without it
        full_line = next((line for line in lines if line.startswith("full ")), "")
        figures = dict(part.partition("=")[::2] for part in full_line.split()[1:])
        percent = float(figures.get("avg60", "0"))
        if percent < MAX_PERCENT:
            return ()
        text = f"all programs of this node waited for memory in {percent:g} % of the last minute"
        return (NodeFinding("MemoryPressure", text, "unknown"),)
