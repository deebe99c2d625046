"""`python -m gate [--nightly]` (PYTHONPATH=tests): runs the stages of stages.py, lane by lane.

Each stage's output goes to build/gate/NAME.log while it runs, and to the terminal behind the stage's name. In the gate
the first failure ends all other stages; with KEEP_GOING=1, and in the nightly run, the others go on. No process outlives
the run. A nightly run skips the stages that an earlier run of the same commit passed. build/gate.json and
build/nightly.json record each stage's result, its seconds, and why it did not run or pass.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gate import stages
from gate.nightly_rows import write_tried
from gate.runner import Result, Runner
from gate.summary import busy_seconds, counts, failures, spin_seconds
from support.machine_speed import REFERENCE_SPIN_SECONDS, SPIN_SECONDS
from surefoot.linux_process import die_with_parent

TEST_SECONDS = 300.0
"""Time limit of a test without a `timeout` marker, on the reference machine; a slower one gets more."""
NIGHTLY_RECORD = stages.ROOT / "build" / "nightly.json"
GATE_RECORD = stages.ROOT / "build" / "gate.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gate", description=__doc__)
    parser.add_argument("--nightly", action="store_true", help="the gate, and everything that it leaves to the night")
    parser.add_argument("--only", nargs="*", default=[], metavar="STAGE", help="these stages alone")
    options = parser.parse_args()
    die_with_parent(os.getppid(), signal.SIGTERM)  # if `make` is killed, the gate ends and with it every stage
    stages.BUILD.mkdir(parents=True, exist_ok=True)
    lanes = (*stages.GATE, *stages.NIGHTLY) if options.nightly else stages.GATE
    speed = spin_seconds()
    print(f"this machine runs a loop of ten million turns in {speed:.2f} s", flush=True)
    # trainers start in a second because bytecode is written once for all stages
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {
        "PYTHONPATH": "tests",
        SPIN_SECONDS: f"{speed:.3f}",
        "PYTEST_TIMEOUT": f"{TEST_SECONDS * max(1.0, speed / REFERENCE_SPIN_SECONDS):.0f}",
    }
    commit = _commit()  # before the run: write_tried() below changes a file, and these results are still this commit's
    passed_before = _passed_before(commit) if options.nightly else {}
    runner = Runner(stages.BUILD, environment, keep_going=bool(os.environ.get("KEEP_GOING")) or options.nightly)
    began, busy_before = time.monotonic(), busy_seconds()
    results = runner.run(lanes, skip=frozenset(passed_before), only=frozenset(options.only))
    if "nightly-simulation" in results and results["nightly-simulation"].outcome == "passed":
        write_tried()
    busy_after = busy_seconds()
    record = {
        "commit": commit,
        "loopSeconds": round(speed, 2),
        "wallSeconds": round(time.monotonic() - began, 1),
        "cpuSeconds": round(sum(result.cpu_seconds for result in results.values()), 1),
        # of all processes on the machine, including those that have nothing to do with the gate
        "machineCpuSeconds": None if busy_before is None or busy_after is None else round(busy_after - busy_before, 1),
        "stages": passed_before | {name: result.record() for name, result in results.items()},
    }
    _write_record(NIGHTLY_RECORD if options.nightly else GATE_RECORD, record)
    return _report(results, record)


def _commit() -> str:
    """Returns the commit under test, with "+changes" if the tree has uncommitted or untracked files."""
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=stages.ROOT, capture_output=True, text=True, check=False
    )
    changes = subprocess.run(
        ["git", "status", "--porcelain"], cwd=stages.ROOT, capture_output=True, text=True, check=False
    )
    return revision.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def _passed_before(commit: str) -> dict[str, dict[str, object]]:
    """Stages that an earlier, interrupted nightly run of this very commit passed."""
    try:
        record = json.loads(NIGHTLY_RECORD.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if record.get("commit") != commit or commit.endswith("+changes"):
        return {}
    return {name: stage for name, stage in record["stages"].items() if stage["result"] == "passed"}


def _write_record(path: Path, record: dict[str, object]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _report(results: dict[str, Result], record: dict[str, object]) -> int:
    for name, result in results.items():
        print(
            f"{name:20} {result.outcome:10} {result.wall_seconds:7.0f} s wall {result.cpu_seconds:7.0f} s CPU  {result.why}"
        )
    print(
        f"{record['wallSeconds']} s wall, {record['cpuSeconds']} s CPU of stages, {record['machineCpuSeconds']} s of the machine"
    )
    passed, failed, skipped = counts(stages.BUILD / f"{name}.xml" for name in results)
    is_green = all(result.outcome == "passed" for result in results.values())
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    # printed last: whoever reads only the end of a log must see the failures
    for name in results:
        for line in failures(stages.BUILD / f"{name}.xml"):
            print(f"FAILED {name}: {line}")
    sys.stdout.flush()
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
