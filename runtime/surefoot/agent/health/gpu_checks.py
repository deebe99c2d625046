"""Checks GPUs through NVML for Xid events, lost devices, ECC errors, row remapping and throttling.

`nvidia-ml-py` is optional: without it, or without a driver, the check finds nothing. `node_monitor` runs it in a thread.
A query that NVML does not support on a device is not repeated.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from surefoot.protocol.messages import Blame, NodeFinding

_log = logging.getLogger(__name__)


# ---- xid table -------------------------------------------------------------------------------------------------------
# Lists which Xids blame the hardware and which a program. Pure data. Sources: NVIDIA's Xid catalog
# (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), the codes that its device plugin takes for
# applications' (github.com/NVIDIA/k8s-device-plugin, `additionalxids`), those for which the EKS node monitoring agent
# has a node repaired (github.com/aws/eks-node-monitoring-agent, `WellKnownXidCodes`). Where they disagree, or a code is
# not listed, the blame is unknown. docs/node-health.md has the same table; a test compares them.

XIDS: dict[int, tuple[Blame, str]] = {
    13: ("application", "graphics engine exception, as by an access out of bounds"),
    31: ("application", "GPU memory page fault"),
    32: ("unknown", "invalid or corrupted push buffer stream"),
    43: ("application", "a channel was reset: the program's kernel failed"),
    45: ("application", "the program's channels were torn down, as after an earlier error"),
    46: ("node", "GPU stopped processing"),
    48: ("node", "double-bit ECC error"),
    54: ("node", "auxiliary power is not connected"),
    62: ("node", "internal micro-controller halt"),
    63: ("unknown", "a memory row is recorded for remapping at the next reset"),
    64: ("node", "a memory row could not be remapped"),
    68: ("application", "video processor exception"),
    74: ("node", "NVLink error"),
    79: ("node", "GPU has fallen off the bus"),
    92: ("unknown", "high rate of corrected ECC errors"),
    94: ("unknown", "contained ECC error: the program that used the memory ends, the GPU continues"),
    95: ("node", "uncontained ECC error"),
    109: ("unknown", "context switch timeout"),
    110: ("node", "security fault"),
    119: ("node", "GSP does not answer"),
    120: ("node", "GSP error"),
    136: ("node", "link training failed"),
    140: ("node", "unrecovered ECC error"),
    142: ("node", "GPU initialization error"),
    143: ("node", "GPU initialization failure"),
    154: ("unknown", "the recovery action changed"),
    158: ("node", "fatal timeout"),
}


def xid_finding(code: int, device: str) -> NodeFinding:
    """Returns the finding for one Xid event on a device."""
    blame, meaning = XIDS.get(code, ("unknown", "a code that is not in the table"))
    return NodeFinding(f"GpuXid{code}", f"{device} reported Xid {code}: {meaning}", blame)


# ---- gpu checks ------------------------------------------------------------------------------------------------------

_MIN_CONSECUTIVE = 12
"""Number of consecutive checks with throttling that make a fault: a moment of heat is none."""
_MAX_EVENTS = 64


class GpuCheck:
    """Finds faults of the GPUs that are visible to this process."""

    name = "gpu"
    period_seconds = 5.0

    def __init__(self, library: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._library = library
        self._nvml: Any = None
        self._absent = False
        self._devices: dict[str, Any] = {}
        self._events: Any = None
        self._unsupported: set[tuple[str, str]] = set()
        self._uncorrected: dict[str, int] = {}
        self._slow: dict[str, int] = {}
        self._lasting_findings: dict[str, NodeFinding] = {}
        """Xids and lost devices by reason; they stay findings for as long as this agent runs."""

    def find_faults(self) -> Sequence[NodeFinding]:
        if self._nvml is None and not self._absent:
            self._open_nvml()
        if self._nvml is None:
            return ()
        self._read_events()
        findings = [finding for device in self._devices for finding in self._device_findings(device)]
        return (*self._lasting_findings.values(), *findings)

    def _open_nvml(self) -> None:
        try:
            nvml = self._library()
            nvml.nvmlInit()
        except Exception as error:  # noqa: BLE001  no library, or no driver: this node has no GPU of this kind
            self._absent = True
            _log.info("GPUs are not checked on this node: %s: %s", type(error).__name__, error)
            return
        self._nvml = nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                self._devices[f"GPU {index}"] = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                self._record_error(f"GPU {index}", error)
        self._register_xid_events()

    def _register_xid_events(self) -> None:
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
            for device in self._devices.values():
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError as error:
            self._events = None
            _log.info("Xid events cannot be received on this node, other GPU checks continue: %s", error)

    def _read_events(self) -> None:
        nvml = self._nvml
        for _ in range(_MAX_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    self._events = None
                    _log.warning(
                        "Xid events can no longer be received on this node, other GPU checks continue: %s", error
                    )
                return
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                finding = xid_finding(int(event.eventData), self._device_name(event.device))
                self._lasting_findings[finding.reason] = finding

    def _device_name(self, handle: Any) -> str:
        try:
            return f"GPU {self._nvml.nvmlDeviceGetIndex(handle)}"
        except self._nvml.NVMLError:
            return "a GPU"

    def _device_findings(self, device: str) -> list[NodeFinding]:
        handle, nvml = self._devices[device], self._nvml
        findings = []
        errors = self._query(
            device, "ecc", lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        )  # fmt: skip
        if errors is not None and errors > self._uncorrected.setdefault(device, errors):
            text = (
                f"{device} counted {errors - self._uncorrected[device]} uncorrected ECC errors since this agent started"
            )
            findings.append(NodeFinding("GpuUncorrectedEcc", text, "unknown"))
        rows = self._query(device, "rows", lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        if rows is not None and rows[3]:
            findings.append(NodeFinding("GpuRowRemapFailed", f"{device} failed to remap a memory row", "node"))
        elif rows is not None and rows[2]:
            text = f"{device} remaps a memory row at its next reset; until then it is contained"
            findings.append(NodeFinding("GpuRowRemapPending", text, "unknown"))
        return [*findings, *self._throttle_findings(device)]

    def _throttle_findings(self, device: str) -> list[NodeFinding]:
        handle, nvml = self._devices[device], self._nvml
        reasons = self._query(device, "clocks", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        slowdown_bits = {
            "its temperature": nvml.nvmlClocksEventReasonHwThermalSlowdown,
            "its power supply": nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        }
        causes = [cause for cause, bit in slowdown_bits.items() if reasons is not None and reasons & bit]
        self._slow[device] = self._slow.get(device, 0) + 1 if causes else 0
        if self._slow[device] < _MIN_CONSECUTIVE:
            return []
        seconds = self.period_seconds * _MIN_CONSECUTIVE
        text = f"{device} has been slowed down by its hardware for {seconds:g} s and more, for {' and '.join(causes)}"
        return [NodeFinding("GpuThrottled", text, "unknown")]

    def _query(self, device: str, feature: str, read: Callable[[], Any]) -> Any:
        if (device, feature) in self._unsupported:
            return None
        try:
            return read()
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                self._unsupported.add((device, feature))
            else:
                self._record_error(device, error)
            return None

    def _record_error(self, device: str, error: Any) -> None:
        """Records a lost device, which NVML reports for every query; any other error proves nothing."""
        nvml = self._nvml
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            self._lasting_findings["GpuLost"] = NodeFinding("GpuLost", f"{device} is lost: {error}", "node")
