"""`PYTHONPATH=tests python -m simulator.judgement`: whether who is at fault is named, and nobody else.

Jobs whose ranks hang; jobs on nodes that are sick, with programs that err and with what all nodes find at once; jobs with nodes and
ranks that are slow, for good or for a moment; nodes and ranks that fail one job again and again, with no word of why. Writes build/judgement.json. A healthy node that is left, or another rank that
is named for one that hangs or is slow, is a violation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

from simulator import failing, pace_watch, sickness
from simulator.settings import Settings
from simulator.world import Outcome, simulate

HANGING = Settings(nodes=6, workers=3, least_workers=2, steps=400, interval=5, step_seconds=0.1, faults=2, fault_span_seconds=40.0,
                   kinds=("trainer hangs",), persistent_interval=None, memory_server_timeout_seconds=5.0)  # fmt: skip
SICK = Settings(nodes=4, workers=3, least_workers=2, steps=160, interval=50, faults=3, fault_span_seconds=8.0,
                kinds=tuple(sickness.KINDS))  # fmt: skip
SLOW = Settings(nodes=4, workers=3, least_workers=2, steps=130, interval=20, step_seconds=0.8, faults=2, fault_span_seconds=12.0,
                kinds=tuple(pace_watch.KINDS), persistent_interval=None, deadline_seconds=2000.0, paced=True)  # fmt: skip
FAILING = Settings(nodes=6, workers=4, least_workers=3, steps=160, interval=5, step_seconds=0.5, faults=3, fault_span_seconds=20.0,
                   kinds=(*failing.KINDS, "trainer dies"), persistent_interval=None, deadline_seconds=2000.0)  # fmt: skip
WORKERS = (3, 4, 6)
"""Of two ranks that wait for each other none is the odd one: a world of two is not asked for."""
JOBS_AT_ONCE = 20


def run(seed: int) -> Outcome:
    """One job: ranks that hang, sick nodes, what fails again, and what is slow, by turns."""
    workers = WORKERS[seed // 4 % len(WORKERS)]
    match seed % 4:
        case 0:
            return simulate(seed, replace(HANGING, workers=workers))
        case 1:
            return simulate(seed, SICK)
        case 2:
            least = workers - seed // 12 % 2
            return simulate(seed, replace(FAILING, workers=workers, nodes=workers + 1, least_workers=least))
        case _:
            asked: Literal["Warn", "Replace"] = "Replace" if seed // 4 % 2 else "Warn"
            return simulate(seed, replace(SLOW, workers=workers, nodes=workers + 1, on_straggler=asked))


def share_named(named: Counter[str]) -> float:
    """Of those at fault whom something could be known of."""
    right = sum(count for what, count in named.items() if what.endswith((", named", ", left")))
    wrong = sum(count for what, count in named.items() if what.endswith((", nobody", ", kept")))
    return right / (right + wrong) if right + wrong else 0.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="simulator.judgement", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="so many faults at least (default 1000)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    struck, named, jobs, violations = Counter[str](), Counter[str](), 0, list[str]()
    seconds = list[float]()
    with multiprocessing.Pool(options.processes) as pool:
        while sum(struck.values()) < options.faults:
            for outcome in pool.map(run, range(jobs, jobs + JOBS_AT_ONCE)):
                struck.update(outcome.faults)
                named.update(outcome.named)
                seconds += outcome.named_seconds
                if outcome.violation is not None:
                    violations.append(f"seed {outcome.seed}: {outcome.violation}")
            jobs += JOBS_AT_ONCE
    healthy = sum("healthy node" in violation for violation in violations)
    told = {"jobs": jobs, "healthy_nodes_left": healthy, "faults": dict(struck), "named": dict(named), "share_named": round(share_named(named), 4),
            "median_seconds_to_a_stragglers_name": round(statistics.median(seconds), 1) if seconds else None}  # fmt: skip
    path = Path("build") / "judgement.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**told, "violations": violations}, indent=1))
    print(
        f"{sum(struck.values())} faults in {jobs} jobs; {share_named(named):.1%} named; {healthy} healthy nodes left; {path}"
    )
    for what, count in sorted(named.items()):
        print(f"  {count:5}  {what}")
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
