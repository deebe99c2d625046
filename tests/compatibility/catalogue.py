"""All cases."""

from __future__ import annotations

from compatibility import averages, loaders, optimizers, schedulers, scripted, wrappers

CASES = (*optimizers.CASES, *schedulers.CASES, *averages.CASES, *wrappers.CASES, *loaders.CASES, *scripted.CASES)
