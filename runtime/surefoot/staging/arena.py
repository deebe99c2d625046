"""Presents staging memory as arrays: equal slots in one shared mapping.

No torch here except to pin: a slot is bytes. Used by `checkpointer`, which asks its link for the memory.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot import metrics

_log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]


class Arena:
    """`slots` slots of `slot_bytes` each over one writable memory."""

    def __init__(self, memory: memoryview, slots: int, slot_bytes: int) -> None:
        self._bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        if self._bytes.size < slots * slot_bytes:
            raise ValueError(f"an arena of {self._bytes.size} bytes has no room for {slots} slots of {slot_bytes}")
        self.slots, self.slot_bytes = slots, slot_bytes
        self._pinned = False

    def slot(self, index: int) -> Bytes:
        """The bytes of one slot, writable."""
        if not 0 <= index < self.slots:
            raise ValueError(f"slot {index} is not one of {self.slots}")
        return self._bytes[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def pin(self) -> None:
        """Registers the memory with CUDA once; device copies need no bounce buffer.

        Where that is refused (a limit of locked memory), copies go through CUDA's own buffer, and take longer.
        """
        if self._pinned:
            return
        import torch

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(self._bytes.ctypes.data, self._bytes.size, 0))
        except RuntimeError as refused:
            metrics.fallbacks.labels("staging_not_pinned").inc()
            _log.warning("staging memory cannot be pinned, so copies from the device take longer: %s", refused)
            return
        self._pinned = True

    def close(self) -> None:
        """Unpins. The mapping itself belongs to the link."""
        if self._pinned:
            import torch

            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.cuda.check_error(runtime.cudaHostUnregister(self._bytes.ctypes.data))
            self._pinned = False
