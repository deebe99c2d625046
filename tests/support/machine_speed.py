"""Scales the deadlines of tests by the speed of this machine.

A deadline says when a condition that should come in a moment will not come any more. On a machine half as fast it comes twice as
late, which is no finding. The gate measures the speed once and hands it on; a test that runs alone measures it itself.
"""

from __future__ import annotations

import os

from gate.summary import spin_seconds

SPIN_SECONDS = "SUREFOOT_TEST_SPIN_SECONDS"
"""Environment variable with the CPU seconds of a loop of ten million turns on this machine."""
REFERENCE_SPIN_SECONDS = 0.4
"""Of the machine whose deadlines the tests state: two quiet cores of a virtual machine of 2025."""


def _slowness() -> float:
    if SPIN_SECONDS not in os.environ:
        os.environ[SPIN_SECONDS] = f"{spin_seconds():.3f}"
    return max(1.0, float(os.environ[SPIN_SECONDS]) / REFERENCE_SPIN_SECONDS)


SLOWNESS = _slowness()
"""How many times longer this machine takes than the reference; at least 1."""


def scaled(seconds: float) -> float:
    """Returns a deadline of the reference machine as this machine needs it."""
    return seconds * SLOWNESS
