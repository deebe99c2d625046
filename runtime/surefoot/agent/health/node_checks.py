"""Checks that a worker's folders can be written to.

Run by `node_monitor` in a thread. Full disks and file systems that the kernel made read-only end logs, ledgers and scripts
in ways that look like a program's own error.
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
    """Finds folders that are full, read-only or fail."""

    name = "disk"
    period_seconds = 10.0

    def __init__(self, folders: Iterable[Path], environment: Mapping[str, str] = os.environ) -> None:
        self._folders = tuple(dict.fromkeys(folders))
        self._environment = environment
        self._written: set[Path] = set()

    def find_faults(self) -> Sequence[NodeFinding]:
        return [finding for folder in self._folders if (finding := self._of(folder)) is not None]

    def _of(self, folder: Path) -> NodeFinding | None:
        test_file = folder / f".surefoot-probe-{os.getpid()}"
        try:
            if is_fault_requested("diskfull", self._environment):  # the machine's own disk is never filled for it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            test_file.write_bytes(b"surefoot")
            self._written.add(folder)
            test_file.unlink()
            return self._filling(folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return NodeFinding("DiskFull", f"{folder} is full", "unknown")
            if error.errno == errno.EIO:
                return NodeFinding("DiskTestFailed", f"{folder} cannot be written to: {error}", "node")
            if error.errno == errno.EROFS:
                # one that never could be written to was mounted so by somebody
                blame: Blame = "node" if folder in self._written else "unknown"
                return NodeFinding("FilesystemReadOnly", f"{folder} has become read-only", blame)
            return None  # not ours to write to: whoever needs it says so

    def _filling(self, folder: Path) -> NodeFinding | None:
        space = os.statvfs(folder)
        free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        if free >= min(MIN_BYTES, MIN_SHARE * size):
            return None
        return NodeFinding("DiskFull", f"{folder} has {format_bytes(free)} of {format_bytes(size)} left", "unknown")


# ---- link check ------------------------------------------------------------------------------------------------------
# Checks network devices: InfiniBand ports, link speed, errors. Run by `node_monitor` in a thread; reads /sys/class
# only. What a port was when the agent began is what it should be: a port that was never up is nobody's loss.

_MIN_CONSECUTIVE = 3
"""Looks in a row: a port that is trained anew is down for a moment."""
_MAX_ERRORS = 1000
"""In one period, on one device."""


class LinkCheck:
    """Finds ports that went down, slowed down, or count errors."""

    name = "network"
    period_seconds = 10.0

    def __init__(self, system: Path = Path("/sys/class")) -> None:
        self._system = system
        self._rates: dict[str, float] = {}
        """The best that each port or device was seen to have."""
        self._down: dict[str, int] = {}
        self._errors: dict[str, int] = {}

    def find_faults(self) -> Sequence[NodeFinding]:
        ports = sorted(self._system.glob("infiniband/*/ports/*"))
        devices = sorted(self._system.glob("net/*"))
        findings = [*(self._port(port) for port in ports), *(self._device(device) for device in devices)]
        return [finding for finding in findings if finding is not None]

    def _port(self, port: Path) -> NodeFinding | None:
        name = f"port {port.name} of {port.parents[1].name}"
        active, rate = "ACTIVE" in _text(port / "state"), _leading(_text(port / "rate"))
        if name in self._rates and not active:
            self._down[name] = self._down.get(name, 0) + 1
            if self._down[name] >= _MIN_CONSECUTIVE:
                return NodeFinding("LinkDown", f"{name} was up when this agent began, and is down", "node")
            return None
        self._down[name] = 0
        return self._slower(name, rate, "Gb/s") if active else None

    def _device(self, device: Path) -> NodeFinding | None:
        if not (device / "device").exists() and not _text(device / "speed"):
            return None
        name = f"network device {device.name}"
        errors = sum(int(_leading(_text(device / f"statistics/{side}_errors"))) for side in ("rx", "tx"))
        new_errors = errors - self._errors.get(name, errors)
        self._errors[name] = errors
        if new_errors >= _MAX_ERRORS:
            text = f"{name} counted {new_errors} errors within {self.period_seconds:g} s"
            return NodeFinding("NetworkErrors", text, "unknown")
        return self._slower(name, _leading(_text(device / "speed")), "Mb/s")

    def _slower(self, name: str, rate: float, unit: str) -> NodeFinding | None:
        best = self._rates[name] = max(rate, self._rates.get(name, rate))
        if rate <= 0 or rate >= best:
            return None
        return NodeFinding("LinkDegraded", f"{name} has {rate:g} {unit}, and had {best:g}", "unknown")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # absent, or of a device that is down


def _leading(text: str) -> float:
    """The number that a text begins with; 0: none."""
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return 0.0


# ---- kernel log ------------------------------------------------------------------------------------------------------
# Reads new lines of the kernel's log from /dev/kmsg, without waiting. In most containers it is closed: then nothing is
# known from it, and nothing is concluded.

_RECORD_BYTES = 8192
"""The kernel refuses a read that is smaller than its record."""
_MAX_RECORDS = 4096
"""In one look: a log that is flooded must not hold up whoever reads it."""


class KernelLog:
    """Yields lines written since it was opened or last read."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self.close()  # not ours to read

    @property
    def readable(self) -> bool:
        return self._file is not None

    def lines(self) -> list[str]:
        """Returns new lines, oldest first, without those overwritten meanwhile."""
        found: list[str] = []
        while self._file is not None and len(found) < _MAX_RECORDS:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten: the next read begins at the oldest one
            except OSError:
                self.close()
                break
            if not record:
                break
            found += _texts(record.decode(errors="replace"))
        return found

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _texts(record: str) -> list[str]:
    """What a record says: behind its priority, number and time, before its dictionary."""
    return [line.partition(";")[2] or line for line in record.splitlines() if line and not line.startswith(" ")]


# ---- kernel words ----------------------------------------------------------------------------------------------------
# Finds faults of the node in new lines of the kernel's log. Run by `node_monitor` in a thread. The log is the whole
# node's: what it says of a disk or a GPU is the node's, what it says of a program may be another pod's, and blames
# nobody.

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
_MAX_KEPT = 16


class KernelLogFindings:
    """Keeps what the kernel said since this agent began."""

    name = "kernel"
    period_seconds = 5.0

    def __init__(self, log: KernelLog | None = None) -> None:
        self._log = log if log is not None else KernelLog()
        self._found: dict[str, NodeFinding] = {}

    def find_faults(self) -> Sequence[NodeFinding]:
        for line in self._log.lines():
            finding = kernel_finding(line)
            if finding is not None and (finding.reason in self._found or len(self._found) < _MAX_KEPT):
                self._found[finding.reason] = finding
        return tuple(self._found.values())


def kernel_finding(line: str) -> NodeFinding | None:
    """Reads one line of the kernel's log; None: it says nothing."""
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
# Reads the kernel's pressure stall information of the node's memory. Run by `node_monitor` in a thread. Memory that
# many programs wait for makes steps slow long before anything is killed; whose fault it is, the figure does not say.

MAX_PERCENT = 20.0
"""Of the last minute in which every program waited for memory."""


class MemoryPressure:
    """Finds a node whose programs wait for memory."""

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
