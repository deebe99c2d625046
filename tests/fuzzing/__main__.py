"""`python -m fuzzing --documents 100000 --seed 7`: so many documents judged; the first that is neither understood nor
refused ends it, with its traceback and the document, shrunk."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings

from fuzzing.documents import documents
from fuzzing.judging import judge

_ROUND = 5000
"""Hypothesis remembers what it tried: rounds bound that memory."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    tried = understood = 0
    begun = time.process_time()

    def one(document: Any) -> None:
        nonlocal tried, understood
        tried += 1
        understood += judge(document) is not None

    print(f"fuzzing {asked.documents} documents from seed {seed}", flush=True)
    rounds = 0
    while tried < asked.documents:
        few = settings(
            max_examples=min(_ROUND, asked.documents - tried),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        hypothesis.seed(seed + rounds)(few(given(documents())(one)))()
        rounds += 1
    seconds = time.process_time() - begun
    print(f"{tried} documents from seed {seed}: {understood} understood, {tried - understood} refused, 0 tracebacks,"
          f" {seconds:.0f} s of one core")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
