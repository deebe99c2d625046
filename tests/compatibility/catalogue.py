"""All cases."""

from __future__ import annotations

from compatibility import apart, averages, loaders, optimizers, schedulers, scripted, wrappers

CASES = (*optimizers.CASES, *schedulers.CASES, *averages.CASES, *wrappers.CASES, *loaders.CASES, *scripted.CASES)
APART = apart.APART
"""Those of libraries that need an environment of their own."""
