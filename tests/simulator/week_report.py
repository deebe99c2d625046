"""`python -m simulator.week_report`: goodput of a week over fault rates and ways of saving, as a table and a picture (build/week.json, .svg).

Orders are what the real policy asks for at that size (`large_job`), at what a message and a round were measured to cost.
The program's own beginning is taken as equal for all: it is the user's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from simulator.large_job import node_is_lost, trainer_fails, work_of
from simulator.week import Costs, Effect, Fleet, Way, spent

ROUND_SECONDS = 0.025
MESSAGE_SECONDS = 110e-6
"""CPU of the operator: 0.70 s for the 6,000 messages and the rounds of one loss at 2,000 workers."""
SEAL_SECONDS = 0.05
BEGUN_SECONDS = 30.0
"""Process groups of 16,384 ranks, compiled kernels: the program's own, not measured here, equal for all."""
STATE_GB_OF_A_NODE = 405e9 * 16 / 2048 / 1e9
"""405 billion parameters, 16 bytes each: weights, gradients' master copy and two moments."""
RESTORE_GB_PER_SECOND = {"staging": 5.0, "holders": 3.1, "store": 1.0}
"""Of a node: in place and from holders as measured on two cores (5.4 and 3.5 GB/s) or a link of 25 Gb/s, whichever is less; a shared store's 1 GB/s."""
PARTS = ("incidents", "recovering", "repeated", "saving", "missing")
FACTORS = (0.25, 1.0, 4.0)
SEEDS = range(20)
NOTICED: Mapping[Effect, float] = {"trainer fails": 0.1, "ranks hang": 120.0, "node is lost": 5.0, "node is left": 0.0}
"""Of ours: the agent's word; twenty steps; silence of heartbeats; announced."""
RESTARTED: Mapping[Effect, float] = {
    "trainer fails": 10.0,
    "ranks hang": 600.0,
    "node is lost": 60.0,
    "node is left": 0.0,
}
"""Of a job that is begun anew as a whole: a pod's end; NCCL's own time limit; a node's grace cut short to a minute."""


def ways(fleet: Fleet) -> list[Way]:
    """Ours by rule and at fixed intervals; and saves to a shared store with a restart of the whole job."""
    lost, failed = (
        work_of(fleet.nodes, strike).seconds(ROUND_SECONDS, MESSAGE_SECONDS, SEAL_SECONDS)
        for strike in (node_is_lost, trainer_fails)
    )
    size, speed = STATE_GB_OF_A_NODE, RESTORE_GB_PER_SECOND
    ours = Costs(
        stall=0.1,
        arrival=2 * size / speed["holders"],
        detected=NOTICED,
        ordered={"trainer fails": failed, "ranks hang": failed, "node is lost": lost, "node is left": lost},
        restored={
            "trainer fails": size / speed["staging"],
            "ranks hang": size / speed["staging"],
            "node is lost": size / speed["holders"],
            "node is left": size / speed["holders"],
        },
        begun=BEGUN_SECONDS,
    )
    found = [
        Way(f"ours, {name}", ours, every, shrinks=True, holds=True)
        for name, every in (("auto", None), ("10 min", 600.0))
    ]
    for minutes in (5, 15):
        costs = _restarted(size / speed["store"], minutes * 60.0)
        for every in (10, 30, 60):
            found.append(Way(f"store each {every} min, restart in {minutes} min", costs, every * 60.0))
    return found


def _restarted(store_seconds: float, restart_seconds: float) -> Costs:
    """Asynchronous saves to a store; every fault ends all pods, which are scheduled, started and restored anew."""
    every = dict.fromkeys(NOTICED, restart_seconds)
    return Costs(1.0, store_seconds, RESTARTED, every, dict.fromkeys(NOTICED, store_seconds), BEGUN_SECONDS)  # type: ignore[arg-type]  # keys are effects


def rows_of(fleet: Fleet, factors: Sequence[float], seeds: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for way in ways(fleet):
        for factor in factors:
            job = replace(fleet, faults=factor)
            weeks = [spent(job, way, seed) for seed in seeds]
            goodputs = [week.goodput for week in weeks]
            found.append(
                {
                    "way": way.name,
                    "faults": factor,
                    "steps_between_saves": way.steps(job),
                    "goodput": statistics.median(goodputs),
                    "least": min(goodputs),
                    "most": max(goodputs),
                    **{name: statistics.median(getattr(week, name) for week in weeks) for name in PARTS},
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("build/week.json"))
    given = parser.parse_args()
    fleet = Fleet(nodes=given.nodes)
    rows = rows_of(fleet, FACTORS, SEEDS)
    for row in rows:
        print(
            f"{row['way']}, {row['faults']:g} x Llama 3: {100 * row['goodput']:.2f} % ({100 * row['least']:.2f} to {100 * row['most']:.2f});"
            f" {row['incidents']:g} incidents, a save each {row['steps_between_saves']} steps;"
            f" hours recovering {row['recovering'] / 3600:.2f}, repeated {row['repeated'] / 3600:.2f}, saving {row['saving'] / 3600:.2f}"
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"fleet": asdict(fleet), "rows": rows}, indent=2))
    from simulator import week_picture  # matplotlib is among the bench's packages

    week_picture.draw(rows, given.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
