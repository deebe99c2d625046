"""Checks network devices: InfiniBand ports, link speed, errors.

Run by `node_monitor` in a thread; reads /sys/class only. What a port was when the agent began is what it should be: a port
that was never up is nobody's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.protocol.node_findings import NodeFinding

_LASTING = 3
"""Looks in a row: a port that is trained anew is down for a moment."""
_MOST_ERRORS = 1000
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

    def find(self) -> Sequence[NodeFinding]:
        ports = sorted(self._system.glob("infiniband/*/ports/*"))
        devices = sorted(self._system.glob("net/*"))
        found = [*(self._port(port) for port in ports), *(self._device(device) for device in devices)]
        return [one for one in found if one is not None]

    def _port(self, port: Path) -> NodeFinding | None:
        name = f"port {port.name} of {port.parents[1].name}"
        active, rate = "ACTIVE" in _text(port / "state"), _leading(_text(port / "rate"))
        if name in self._rates and not active:
            self._down[name] = self._down.get(name, 0) + 1
            if self._down[name] >= _LASTING:
                return NodeFinding("LinkDown", f"{name} was up when this agent began, and is down", "node")
            return None
        self._down[name] = 0
        return self._slower(name, rate, "Gb/s") if active else None

    def _device(self, device: Path) -> NodeFinding | None:
        if not (device / "device").exists() and not _text(device / "speed"):
            return None
        name = f"network device {device.name}"
        errors = sum(int(_leading(_text(device / f"statistics/{side}_errors"))) for side in ("rx", "tx"))
        grown = errors - self._errors.get(name, errors)
        self._errors[name] = errors
        if grown >= _MOST_ERRORS:
            text = f"{name} counted {grown} errors within {self.period_seconds:g} s"
            return NodeFinding("NetworkErrors", text, "unknown")
        return self._slower(name, _leading(_text(device / "speed")), "Mb/s")

    def _slower(self, name: str, rate: float, unit: str) -> NodeFinding | None:
        best = self._rates[name] = max(rate, self._rates.get(name, rate))
        if rate <= 0 or rate >= best:
            return None
        return NodeFinding("LinkSlower", f"{name} has {rate:g} {unit}, and had {best:g}", "unknown")


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
