"""`PYTHONPATH=tests python -m simulator`: many seeds, one seed with its trace, or every schedule of small scopes."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from simulator import exhaustive
from simulator.world import Outcome, simulate

SHOWN = 10


def _replay(seed: int) -> int:
    outcome = simulate(seed, tracing=True)
    for line in outcome.trace:
        print(line)
    print(f"seed {seed}: {outcome.violation or outcome.phase} after {outcome.seconds:.1f} virtual seconds")
    return 1 if outcome.violation else 0


def _many(first: int, count: int, processes: int) -> int:
    began = time.monotonic()
    phases: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    lossless: Counter[str] = Counter()
    failed: list[Outcome] = []
    with multiprocessing.Pool(processes) as pool:
        for outcome in pool.imap_unordered(simulate, range(first, first + count), chunksize=10):
            phases[outcome.phase] += 1
            totals.update(events=outcome.events, epochs=outcome.epochs, drops=outcome.drops, deletes=outcome.deletes)
            struck.update(outcome.faults)
            lossless.update(outcome.lossless)
            if outcome.violation is not None:
                failed.append(outcome)
                if len(failed) <= SHOWN:
                    print(f"seed {outcome.seed}: {outcome.violation}")
                    print(f"  replay: PYTHONPATH=tests python -m simulator --replay {outcome.seed}", flush=True)
    seconds = time.monotonic() - began
    figures = ", ".join(f"{value:,} {name}" for name, value in totals.items())
    print(f"{count} seeds in {seconds:.0f} s ({count / seconds:.1f} a second): {figures}; ended {dict(phases)}")
    print("faults: " + ", ".join(f"{kind} {number:,}" for kind, number in sorted(struck.items())))
    print("judged to cost no step: " + ", ".join(f"{kind} {number:,}" for kind, number in sorted(lossless.items())))
    print(f"{len(failed)} violations" if failed else "no violation")
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="simulator", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--seeds", type=int, metavar="N", help="run N seeds")
    choice.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print what happened")
    choice.add_argument("--exhaustive", action="store_true", help="search every schedule of small scopes to the end")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="begin with this seed (default 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    if given.exhaustive:
        return exhaustive.main()
    return _replay(given.replay) if given.replay is not None else _many(given.first, given.seeds, given.processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
