"""A stand-in for `pynvml`: as many GPUs as are given, whose answers a test changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class NVMLError(Exception):
    """As of pynvml: a number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeEvent:
    device: int
    eventData: int  # noqa: N815  pynvml's own name
    eventType: int = 8  # noqa: N815


@dataclass
class FakeNvml:
    """What the checks ask of the library, and nothing else."""

    gpus: int = 1
    events: list[FakeEvent] = field(default_factory=list)
    uncorrected: dict[int, Any] = field(default_factory=dict)
    rows: dict[int, Any] = field(default_factory=dict)
    clocks: dict[int, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    broken: int = 0
    """Every call but the first raises this error."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815
    nvmlClocksEventReasonHwThermalSlowdown = 0x40  # noqa: N815
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80  # noqa: N815

    def nvmlInit(self) -> None:  # noqa: N802
        if self.gpus < 0:
            raise NVMLError(9)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        return handle

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:  # noqa: N802
        assert kinds == self.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: object, milliseconds: int) -> FakeEvent:  # noqa: N802
        assert milliseconds == 0, "a check does not wait"
        if not self.events:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        return self.events.pop(0)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802
        return int(self._answer("ecc", self.uncorrected.get(handle, 0)))

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:  # noqa: N802
        found: tuple[int, int, int, int] = self._answer("rows", self.rows.get(handle, (0, 0, 0, 0)))
        return found

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        return int(self._answer("clocks", self.clocks.get(handle, 0)))

    def _answer(self, what: str, value: Any) -> Any:
        self.asked.append(what)
        if self.broken:
            raise NVMLError(self.broken)
        if isinstance(value, Exception):
            raise value
        return value
