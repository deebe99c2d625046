"""`python -m cluster.scenarios.bench [PART…]`: how long things take, several times over; medians go to build/cluster.json.

Close other work on the machine first. A part that fails is said, and the others go on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

from cluster import engines
from cluster.scenarios import faults, resting, rows, stock
from cluster.scenarios.job import Job
from cluster.scenarios.measuring import Struck
from cluster.scenarios.rows import Row
from cluster.scenarios.shapes import ELASTIC, FIXED, Shape
from cluster.scenarios.stage import Stage

TIMES = 5
REST_STEPS = 15
MEASURED = (
    "detected_seconds",
    "decided_seconds",
    "pods_asked_after_decision_seconds",
    "committed_seconds",
    "first_step_seconds",
    "whole_again_seconds",
    "steps_lost",
)


def trainer(stage: Stage, job: Job) -> tuple[Struck, Callable[[], None]]:
    return faults.kill_trainer(job, stage.installed), _nothing


def pod(stage: Stage, job: Job) -> tuple[Struck, Callable[[], None]]:
    return faults.delete_pod(job), _nothing


def crash(stage: Stage, job: Job) -> tuple[Struck, Callable[[], None]]:
    node = faults.victim(job, stage.installed)
    struck = faults.on_node(job, lambda name: stage.engine.crash(name, silently=True), node)
    return struck, lambda: stage.engine.return_node(node)


def partition(stage: Stage, job: Job) -> tuple[Struck, Callable[[], None]]:
    node = faults.victim(job, stage.installed)
    return faults.on_node(job, stage.engine.partition, node), lambda: stage.engine.heal(node)


def _nothing() -> None:
    return None


FAULTS: dict[str, tuple[Shape, Callable[[Stage, Job], tuple[Struck, Callable[[], None]]]]] = {
    "trainer": (ELASTIC, trainer),
    "pod": (ELASTIC, pod),
    "node crash": (ELASTIC, crash),
    "partition": (ELASTIC, partition),
    "node crash, fixed size": (FIXED, crash),
}


def measured(stage: Stage, name: str, times: int) -> dict[str, Any]:
    """The same fault, so many times, on one job that is held against the undisturbed one at the end."""
    shape, hurt = FAULTS[name]
    found: list[Row] = []
    stage.undisturbed(shape)
    job = stage.training(f"bench-{name.split(',')[0].replace(' ', '-')}", shape)
    for number in range(times):
        job.wait_training(shape.workers, REST_STEPS)
        job.wait("its checkpoint is protected", job.is_protected)
        struck, mend = hurt(stage, job)
        struck.wait()
        mend()
        row = struck.row(name)
        row.whole_again_seconds = stage.whole_again(job, struck)
        found.append(row)
        print(f"  {name} {number + 1}: detected {row.detected_seconds:.2f}, first step {row.first_step_seconds:.2f} s")
    result = stage.finish(job)
    return {**_medians(found), "result": result.shown()}


def _medians(found: list[Row]) -> dict[str, Any]:
    each: dict[str, list[float]] = {name: [] for name in MEASURED}
    for row in found:
        values = {**row.__dict__, "pods_asked_after_decision_seconds": _gap(row)}
        for name in MEASURED:
            if values[name] is not None:
                each[name].append(values[name])
    medians = {name: round(statistics.median(several), 3) for name, several in each.items() if several}
    return {"times": len(found), "medians": medians, "each": {n: [round(v, 3) for v in s] for n, s in each.items()}}


def _gap(row: Row) -> float | None:
    if row.pods_asked_seconds is None or row.decided_seconds is None:
        return None
    return row.pods_asked_seconds - row.decided_seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.scenarios.bench", description=__doc__)
    parts = (*FAULTS, "300 pods", "operator at rest", "stock")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all, or some of: {', '.join(parts)}")
    parser.add_argument("--times", type=int, default=TIMES)
    options = parser.parse_args()
    wanted = options.parts or parts
    for name in wanted:
        if name not in parts:
            parser.error(f"there is no part {name!r}; there are {', '.join(parts)}")
    engine = engines.choose()
    failed: list[str] = []
    if wanted != ["stock"]:
        stage = Stage(engine).open()
        try:
            failed += [name for name in wanted if name != "stock" and not _tried(stage, name, options.times)]
        finally:
            stage.close()
    if "stock" in wanted:
        print("stock", flush=True)
        rows.update("stock", "node crash", stock.node_crash(engine))
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


def _tried(stage: Stage, name: str, times: int) -> bool:
    print(name, flush=True)
    try:
        if name in FAULTS:
            rows.update("medians", name, measured(stage, name, times))
        else:
            rows.update("bench", name, resting.pods_asked(stage) if name == "300 pods" else resting.at_rest(stage))
    except (AssertionError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        stage.make_well()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
