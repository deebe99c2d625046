"""Asks the kernel to kill this process when its parent dies.

The zygote and every trainer do so first."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when the thread that made it ends; ends it at once if `parent` is already gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: a trainer could outlive its agent")
    # the parent may have died between fork and prctl: then no signal will ever come
    if os.getppid() != parent:
        os._exit(1)
