"""`python -m cluster.scenarios.soak --minutes 30 --seed 1`: one job under a random fault of any kind each half minute.

What it came to is held against the undisturbed job: every loss, every sample, the parameters at the end. Everything goes to
build/soak.json, the seed too. Each fault is mended after some seconds; none waits until the job is whole again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster import engines, layout
from cluster.scenarios.job import Job
from cluster.scenarios.shapes import Shape
from cluster.scenarios.soak_faults import FAULTS, Mend
from cluster.scenarios.stage import Stage
from surefoot_operator.api.time_spent import goodput, seconds_spent

REPORT = layout.PROJECT / "build" / "soak.json"
EVERY_SECONDS = 30.0
HOLD_SECONDS = (3.0, 12.0)
"""How long a fault lasts that has to be mended."""
PACE_SECONDS = 0.3
READY_SECONDS = 180.0
SPEC: dict[str, Any] = {
    # most faults here are done to trainers: what ends a job of a user after six would end this one
    "runPolicy": {"backoffLimit": 1000},
    "healthPolicy": {"stepTimeoutSeconds": 30},
}


@dataclass
class Strike:
    """One fault, as it was done and what the operator noted until the next."""

    kind: str
    at_seconds: float
    """Since the first."""
    target: str = ""
    held_seconds: float = 0.0
    waited_seconds: float = 0.0
    """Until the job trained, so that there was something to strike."""
    incidents: tuple[str, ...] = ()
    steps_lost: int = 0
    trains_after_seconds: float | None = None
    """Until the first step of the world that answered it; None: no world ended."""
    load: float = 0.0


def drawn(seed: int, count: int) -> list[str]:
    """Kinds in the order of a shuffled pack, pack after pack: in half an hour none is left out."""
    rng, kinds = random.Random(seed), list[str]()
    while len(kinds) < count:
        pack = sorted(FAULTS)
        rng.shuffle(pack)
        kinds += pack
    return kinds[:count]


def soaked(stage: Stage, minutes: float, seed: int) -> dict[str, Any]:
    """Strikes until the time is over, ends the job, and compares."""
    count = max(1, round(minutes * 60.0 / EVERY_SECONDS))
    shape = Shape(3, (2, 3), steps=round(minutes * 60.0 / PACE_SECONDS) + 400)
    straight = stage.job("undisturbed", shape, pace=0.0, trace=True)
    straight.wait("the undisturbed job is complete", lambda: straight.status.phase == "Complete", 900.0)
    stage.adopt(straight)
    job = stage.training("soak", shape, pace=PACE_SECONDS, spec=SPEC)
    rng, began, strikes = random.Random(seed), time.time(), list[Strike]()
    for number, kind in enumerate(drawn(seed, count)):
        due = began + number * EVERY_SECONDS
        stage.space.wait("the next fault is due", lambda due=due: time.time() >= due, 2 * EVERY_SECONDS)  # type: ignore[misc]
        strikes.append(_struck(stage, job, kind, rng, began))
        print(f"{strikes[-1].at_seconds:7.1f} s  {kind} {strikes[-1].target}", flush=True)
    stage.make_well()
    stage.wait_led(job)
    job.wait("it trains at its full size", lambda: job.trains(shape.workers), READY_SECONDS)
    told = _noted(job, strikes, began)
    job.finish()
    status = job.status  # it is gone with the comparison
    found = stage.finish(job)
    spent = seconds_spent(status.time_spent, status.completion_seconds or time.time())
    return {
        "minutes": minutes,
        "seed": seed,
        "strikes": [asdict(strike) for strike in told],
        "summary": {
            "strikes": len(told),
            "kinds": dict(Counter(strike.kind for strike in told)),
            "epochs": len(job.lineage()),
            "incidents": dict(Counter(i.kind for i in job.incidents())),
            "steps": found.steps,
            "steps_lost": sum(strike.steps_lost for strike in told),
            "samples_lost": found.samples_lost,
            "samples_repeated": found.samples_repeated,
            "max_loss_difference": found.max_loss_difference,
            "max_parameter_difference": found.max_parameter_difference,
            "goodput": goodput(spent),
            "seconds": {name: round(seconds, 3) for name, seconds in spent.items() if seconds},
            "load": [round(one, 2) for one in os.getloadavg()],
        },
    }


def _struck(stage: Stage, job: Job, kind: str, rng: random.Random, began: float) -> Strike:
    """Does it, keeps it for some seconds, and mends it."""
    asked = time.time()
    job.wait("it trains", lambda: job.world > 0 and job.step > 0, READY_SECONDS)
    strike = Strike(kind, time.time() - began, waited_seconds=time.time() - asked, load=os.getloadavg()[0])
    mend: Mend | None = None
    try:
        strike.target, mend = FAULTS[kind](stage, job, rng)
        if mend is not None:
            strike.held_seconds = rng.uniform(*HOLD_SECONDS)
            until = time.time() + strike.held_seconds
            stage.space.wait("the fault has lasted", lambda: time.time() >= until, 60.0)
    finally:
        if mend is not None:
            mend()
    return strike


def _noted(job: Job, strikes: list[Strike], began: float) -> list[Strike]:
    """Gives each strike the incidents that were noted between it and the next."""
    known = job.incidents()
    for number, strike in enumerate(strikes):
        end = strikes[number + 1].at_seconds if number + 1 < len(strikes) else float("inf")
        own = [i for i in known if strike.at_seconds <= i.detected_seconds - began < end]
        strike.incidents = tuple(f"{i.kind}: {i.reason}"[:200] for i in own)
        strike.steps_lost = sum(i.steps_lost or 0 for i in own)
        first = next((i.first_step_seconds for i in own if i.first_step_seconds is not None), None)
        strike.trains_after_seconds = None if first is None else round(first - began - strike.at_seconds, 2)
    return strikes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.scenarios.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=REPORT)
    given = parser.parse_args()
    stage = Stage(engines.choose()).open()
    try:
        report = soaked(stage, given.minutes, given.seed)
    except BaseException:
        stage.make_well()
        raise
    finally:
        stage.close()
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
