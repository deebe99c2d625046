"""Hashes what the simulator does with each seed: every line of its trace and every figure of its outcome."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
from collections.abc import Iterable, Mapping
from typing import Any

from simulator.world import simulate

SEEDS = 60


def trace_line(seed: int) -> str:
    """Runs one seed; returns its number, how it ended, and the hash."""
    outcome = simulate(seed, tracing=True)
    figures = [_ordered(getattr(outcome, field.name)) for field in dataclasses.fields(outcome)]
    digest = hashlib.sha256(json.dumps(figures, ensure_ascii=False).encode()).hexdigest()[:32]
    return f"{seed:03} {outcome.phase} {digest}"


def trace_lines(seeds: Iterable[int]) -> list[str]:
    """Returns the line of each seed, in their order; two processes run them."""
    with multiprocessing.Pool(2) as pool:
        return list(pool.imap(trace_line, seeds, chunksize=5))


def _ordered(value: Any) -> Any:
    return sorted(value.items()) if isinstance(value, Mapping) else value
