"""`python -m bench [--quick] [--only SYSTEM …] [--out FOLDER]`: runs the sections, writes checkpoint.json and .svg."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from bench import floor, holders, persistent, picture, reshards
from bench.settings import FULL, QUICK, Size
from bench.summary import ASYNCHRONOUS, OURS, figures, summary
from bench.worker import SYSTEMS

SHARED_MEMORY = "/dev/shm"
STEP_OVER_DRAIN = 1.1
"""A plain step outlasts the drain of a save by this much, as measured while training. There are two slots, so one drain may
take longer."""
EVERYWHERE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Compute threads that wait do not spin: they would take cores from whatever saves."""
PACKAGES = (
    "torch",
    "redis",
    "xxhash",
    "torchsnapshot",
    "torch-checkpointing",
    "amzn-sagemaker-checkpointing",
    "s3torchconnector",
)


class Run:
    """One run; `task` is what workers are told."""

    def __init__(self, size: Size, names: list[str], folder: str) -> None:
        self.size, self.names, self.folder = size, names, folder
        self.began = time.monotonic()
        self.task: dict[str, Any] = {
            "width": size.width,
            "layers": size.layers,
            "sequences": 1,
            "pairs": size.pairs,
            "steps_every_1": size.steps_every_1,
            "mode": "spare",
            "idle_saves": size.idle_saves,
            "loads": 1,
            "folder": folder,
        }
        # parameters and two moments of about 12·width² each a layer, and the embeddings
        self.state_bytes = 12 * (size.layers * 12 * size.width**2 + 1024 * size.width)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def job(self, module: str, arguments: list[str], environment: dict[str, str], seconds: float) -> dict[str, Any]:
        """What a process of its own found, or `error`."""
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder) / "out.json", Path(folder) / "log"
            with log.open("wb") as to:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments, str(out)],
                    env={**os.environ, **environment, **EVERYWHERE},
                    stdout=to,
                    stderr=to,
                    start_new_session=True,
                )
                try:
                    code = process.wait(seconds)
                except subprocess.TimeoutExpired:
                    return {"error": f"ended after {seconds:g} s"}
                finally:
                    _end_group(process)
            if code == 0 and out.exists():
                found: dict[str, Any] = json.loads(out.read_text())
                return found
            last = [text for text in log.read_text(errors="replace").splitlines() if text.strip()][-3:]
            return {"error": f"exit code {code}: {' | '.join(last)}"}

    def calibrate(self) -> dict[str, Any]:
        """Chooses the batch: a plain step is a little longer than a drain under training."""
        probe = {**self.task, "sequences": 2, "pairs": 1, "steps_every_1": 3, "idle_saves": 1, "loads": 0}
        found = self.turn(OURS, probe)
        if "error" in found:
            return found
        steps = found["spare"]["plain_steps"]
        step, drain = median(steps), median(found["drains"][:-1])  # the last was with nothing else running
        advance = found["advance_seconds"]
        each = (step - advance) / probe["sequences"]
        wanted = STEP_OVER_DRAIN * drain
        self.task["sequences"] = max(1, -(-(wanted - advance) // each)) if each > 0 else 1
        self.task["sequences"] = int(self.task["sequences"])
        return {"drain_seconds_while_training": drain, "sequences": self.task["sequences"]}

    def turn(self, name: str, task: dict[str, Any]) -> dict[str, Any]:
        arguments = [name, json.dumps(task)]
        if name != OURS:
            return self.job("bench.worker", arguments, {}, self.size.system_seconds)
        with holders.running(self.state_bytes) as tier:
            return self.job("bench.worker", arguments, tier.environment(), self.size.system_seconds)

    def turns(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names}
        for number in range(self.size.rounds):
            for name in self.names:
                turn = self.turn(name, self._task_of(name))
                error = turn.get("error")
                if not error and (name == OURS or (name in ASYNCHRONOUS and self.size.rounds > 1)):
                    # a turn of its own: on a busy machine it may not end in time, and takes nothing else with it
                    without = self.turn(
                        name, {**self._task_of(name), "mode": "none", "pairs": 1, "idle_saves": 0, "loads": 0}
                    )
                    error = without.get("error")
                    turn |= (
                        {"none_error": error}
                        if error
                        else {"none": without["none"], "none_incomplete": without["incomplete"]}
                    )
                found[name].append(turn)
                self.say(f"{name}, turn {number + 1} of {self.size.rounds}{': ' + error if error else ''}")
        return found

    def _task_of(self, name: str) -> dict[str, Any]:
        """The same for all, but: nobody asks for a blocking system's every tenth step, and the slowest saves less."""
        task = dict(self.task)
        if name != OURS and self.size.rounds == 1:
            task |= {"pairs": 0 if name == "dcp.save" else 1, "steps_every_1": 3}
        if name == "sagemaker":
            task |= {"pairs": 0, "idle_saves": max(2, self.size.idle_saves // 2)}
        return task

    def restores(self) -> dict[str, Any]:
        size = self.size
        task = {"width": size.width, "layers": size.restore_layers, "restores": size.restores, "folder": self.folder}
        state = 12 * (size.restore_layers * 12 * size.width**2 + 1024 * size.width)
        with holders.running(state // 2) as tier:
            return self.job("bench.restores", [json.dumps(task)], tier.environment(), size.system_seconds * 2)

    def reshards(self) -> dict[str, Any]:
        """Every saved world's checkpoint stays in the holders until the end."""
        size = self.size
        task = {
            "width": reshards.WIDTH,
            "blocks": size.reshard_blocks,
            "times": size.reshards,
            "folder": self.folder,
        }
        state = reshards.state_bytes(size.reshard_blocks)
        with holders.running(len(reshards.SAVED) * state * 11 // 10 // 3) as tier:
            return self.job("bench.reshards", [json.dumps(task)], tier.environment(), size.system_seconds * 2)


def measured(size: Size, names: list[str], folder: str) -> dict[str, Any]:
    run = Run(size, names, folder)
    run.say(
        f"{run.state_bytes / 1e9:.2f} GB of state, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    )
    load = [os.getloadavg()]
    calibration = run.calibrate()
    run.say(f"batch: {calibration}")
    turns = run.turns()
    base = floor.replicated_seconds(run.state_bytes, size.idle_saves)
    run.say("sockets")
    restores = run.restores()
    run.say("restores" + (": " + restores["error"] if "error" in restores else ""))
    resharding = run.reshards()
    run.say("reshards" + (": " + resharding["error"] if "error" in resharding else ""))
    task = {"plan_tensors": size.plan_tensors, "dcp_ranks": size.plan_dcp_ranks}
    planning = run.job("bench.planning", [json.dumps(task)], {}, size.system_seconds * 2)
    run.say("plans" + (": " + planning["error"] if "error" in planning else ""))
    to_s3 = persistent.section(run.job, size.rounds == 1, folder)
    run.say("S3" + (": " + to_s3["error"] if "error" in to_s3 else ""))
    load.append(os.getloadavg())
    return {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
            "load_average_before_and_after": load,
        },
        "size": {**size.as_json(), "state_bytes": run.state_bytes},
        "calibration": calibration,
        "figures": {name: figures(found) for name, found in turns.items()},
        "errors": {name: _errors(found) for name, found in turns.items() if _errors(found)},
        "floor": {"replicated_gb_per_second": run.state_bytes / sorted(base)[len(base) // 2] / 1e9},
        "restores": restores,
        "reshards": resharding,
        "planning": planning,
        "persistent": to_s3,
        "turns": turns,
        "summary": summary(turns, restores, planning),
    }


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The worker, and whatever helpers of its system outlive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _errors(found: list[dict[str, Any]]) -> list[str]:
    return [turn[key] for turn in found for key in ("error", "none_error") if key in turn]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions of less state: under five minutes")
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-", dir=SHARED_MEMORY) as folder:
        found = measured(QUICK if options.quick else FULL, options.only, folder)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint.json").write_text(json.dumps(found, indent=1) + "\n")
    picture.draw(found["figures"], options.out / "checkpoint.svg")
    print(json.dumps(found["summary"], indent=1))


if __name__ == "__main__":
    main()
