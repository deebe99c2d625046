"""The sections of a run, one after the other, and what stands in `checkpoint.json`. Called by `__main__`.

What the sections import is imported here, once, for all their processes (`jobs`).
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

from bench import agent_ranks, floor, frozen_weights, holders, persistent, reshards, small_tensors, step_lengths
from bench.jobs import attempt, run_module
from bench.lost import DENSE
from bench.settings import PROBE, PROBE_SAVING, Size
from bench.significance import spreads
from bench.summary import OURS, PACED, all_figures, summary
from bench.systems import UNPREPARED

SHARED = ("torch._dynamo", "bench.systems.dcp", "bench.systems.surefoot", "bench.worker", "bench.restores")
"""Beside what the line above imports. Peers' own packages are left to their turns: some start threads."""
STEP_OVER_DRAIN = 1.25
"""A plain step outlasts the median drain of a save by this much, as measured while training."""
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
            "steps": size.steps.as_json(),
            "folder": folder,
        }
        # parameters and two moments of about 12·width² each a layer, and the embeddings
        self.state_bytes = 12 * (size.layers * 12 * size.width**2 + 1024 * size.width)
        self._sequences_for: Callable[[float], int] = lambda drains: 1
        """The batch whose steps last so many drains; of one, until that is known."""
        for name in SHARED:
            importlib.import_module(name)

    def said(self, text: str, found: dict[str, Any]) -> dict[str, Any]:
        """Says what has just ended, and at which second of the run; gives back what it found."""
        error = found.get("error") or found.get("none_error")
        print(f"{time.monotonic() - self.began:6.1f} s  {text}{f': {error}' if error else ''}", flush=True)
        return found

    def calibrate(self) -> dict[str, Any]:
        """Chooses the batch: a plain step is a little longer than a drain under training."""
        probe = {**self._with_a_core(OURS), "sequences": 2, "steps": PROBE.as_json(), "saving": PROBE_SAVING}
        found = self.turn(OURS, {**probe, "idle_saves": 0, "loads": 0})
        if "error" in found:
            return found
        steps = [s for stretch in found["spare"]["stretches"] if not stretch["interval"] for s in stretch["seconds"]]
        step, drain = median(steps), median(found["drains"][PROBE.first :])
        advance = found["advance_seconds"]
        each = (step - advance) / probe["sequences"]
        self._sequences_for = lambda drains: max(1, int(-(-(drains * drain - advance) // each))) if each > 0 else 1
        self.task["sequences"] = self._sequences_for(STEP_OVER_DRAIN)
        return {"drain_seconds_while_training": drain, "sequences": self.task["sequences"]}

    def turn(self, name: str, task: dict[str, Any]) -> dict[str, Any]:
        arguments = [name, json.dumps(task)]
        if name not in (OURS, UNPREPARED):
            return attempt(lambda: run_module("bench.worker", arguments, {}, self.size.system_seconds))
        return self._beside_holders(self.state_bytes, "bench.worker", arguments, self.size.system_seconds)

    def turns(self) -> dict[str, list[dict[str, Any]]]:
        """Every system has its turn before anyone has the next."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names}
        for number in range(self.size.rounds):
            for name in self.names:
                turn = self.said(f"{name}, turn {number + 1}", self.turn(name, self._with_a_core(name)))
                if "error" not in turn and self.size.saving_without.of(name):
                    # a process of its own: on a busy machine it may not end in time, and takes nothing else with it
                    turn |= _of_none(self.turn(name, self._with_none(name)))
                    self.said(f"{name}, no core to spare", turn)
                found[name].append(turn)
        return found

    def _with_a_core(self, name: str) -> dict[str, Any]:
        """The same for all, but for the stretches; the slowest saves less with nothing running."""
        idle = max(2, self.size.idle_saves // 2) if name == "sagemaker" else self.size.idle_saves
        return {**self.task, "mode": "spare", "saving": self.size.saving.of(name), "idle_saves": idle, "loads": 1}

    def _with_none(self, name: str) -> dict[str, Any]:
        saving = self.size.saving_without.of(name)
        return {**self.task, "mode": "none", "saving": saving, "idle_saves": 0, "loads": 0}

    def unprepared(self) -> list[dict[str, Any]]:
        """Jobs whose first step saves, with nothing prepared; a process each."""
        task = {**self.task, "mode": "spare", "saving": [], "idle_saves": 0, "loads": 0}
        return [self.turn(UNPREPARED, task) for _ in range(self.size.rounds)]

    def step_lengths(self) -> list[dict[str, Any]]:
        """A save each step, at steps shorter and longer than a drain."""
        found = []
        for drains in self.size.step_lengths:
            task = {**self.task, "mode": "spare", "saving": [DENSE], "idle_saves": 0, "loads": 0}
            task["sequences"] = self._sequences_for(drains)
            turns = {name: self.turn(name, task) for name in (OURS, "torch.save", PACED) if name in self.names}
            found.append(step_lengths.row(drains, turns))
        return found

    def agent_ranks(self) -> dict[str, Any]:
        task = agent_ranks.TASK
        room = task["rank_bytes"] * max(task["ranks"])
        return self._beside_holders(room, "bench.agent_ranks", [json.dumps(task)], self.size.system_seconds)

    def restores(self) -> dict[str, Any]:
        size = self.size
        task = {"width": size.width, "layers": size.restore_layers, "restores": size.restores, "folder": self.folder}
        state = 12 * (size.restore_layers * 12 * size.width**2 + 1024 * size.width)
        return self._one_that_stays(state, "bench.restores", task)

    def reshards(self) -> dict[str, Any]:
        """Every saved world's checkpoint stays in the holders until the end."""
        size = self.size
        task = {"width": reshards.WIDTH, "blocks": size.reshard_blocks, "times": size.reshards, "folder": self.folder}
        state = len(reshards.SAVED) * reshards.state_bytes(size.reshard_blocks)
        return self._one_that_stays(state, "bench.reshards", task)

    def planning(self) -> dict[str, Any]:
        size = self.size
        task = {
            "plan_tensors": size.plan_tensors,
            "dcp_ranks": size.plan_dcp_ranks,
            "dcp_caches": size.plan_dcp_caches,
        }
        return attempt(lambda: run_module("bench.planning", [json.dumps(task)], {}, size.system_seconds * 2))

    def small_tensors(self) -> list[dict[str, Any]]:
        task = json.dumps(small_tensors.TASK)
        state = small_tensors.TASK["tensors"] * small_tensors.TASK["elements"] * 4
        seconds = self.size.system_seconds
        return [
            self._beside_holders(state, "bench.small_tensors", [task], seconds) for _ in range(self.size.small_turns)
        ]

    def frozen_weights(self) -> dict[str, Any]:
        task = frozen_weights.TASK
        state = frozen_weights.state_bytes(task)
        return self._beside_holders(state, "bench.frozen_weights", [json.dumps(task)], self.size.system_seconds)

    def persistent(self) -> dict[str, Any]:
        size = self.size
        layers, width = size.persistent_layers, persistent.WIDTH
        task = {"width": width, "layers": layers, "saves": size.persistent_saves, "folder": self.folder}
        state = 12 * (layers * 12 * width**2 + 1024 * width)
        return self._beside_holders(state, "bench.persistent", [json.dumps(task)], size.system_seconds * 2)

    def floor(self) -> dict[str, Any]:
        return {"seconds": floor.replicated_seconds(self.state_bytes, self.size.idle_saves)}

    def _one_that_stays(self, state_bytes: int, module: str, task: dict[str, Any]) -> dict[str, Any]:
        """With holders that have room for this and a tenth more, not for three of it."""
        room = state_bytes * 11 // 10 // 3
        return self._beside_holders(room, module, [json.dumps(task)], self.size.system_seconds * 2)

    def _beside_holders(self, state_bytes: int, module: str, arguments: list[str], seconds: float) -> dict[str, Any]:
        def part() -> dict[str, Any]:
            with holders.running(state_bytes) as tier:
                return run_module(module, arguments, tier.environment(), seconds)

        return attempt(part)


def _of_none(turn: dict[str, Any]) -> dict[str, Any]:
    """What a turn with no core to spare adds to its system's turn with one."""
    if "error" in turn:
        return {"none_error": turn["error"]}
    return {"none": turn["none"], "none_incomplete": turn["incomplete"]}


def measured(size: Size, names: list[str], folder: str, although_busy: bool = False) -> dict[str, Any]:
    """`although_busy`: that somebody asked for figures beside other work; the result says it."""
    run = Run(size, names, folder)
    cores = len(os.sched_getaffinity(0))
    run.said(f"{run.state_bytes / 1e9:.2f} GB of state, {cores} cores, load {os.getloadavg()[0]:.1f}", {})
    load = [os.getloadavg()]
    calibration = attempt(run.calibrate)
    run.said(f"batch: {calibration}", {})
    turns = run.turns()
    unprepared = run.unprepared()
    run.said("first saves, nothing prepared", next((turn for turn in unprepared if "error" in turn), {}))
    lengths = run.step_lengths()
    ranks = run.said("ranks of an agent", run.agent_ranks())
    base = run.said("sockets", attempt(run.floor))
    restores = run.said("restores", run.restores())
    resharding = run.said("reshards", run.reshards())
    planning = run.said("plans", run.planning())
    small = run.small_tensors()
    run.said("small tensors", next((turn for turn in small if "error" in turn), {}))
    frozen = run.said("frozen weights", run.frozen_weights())
    to_s3 = run.said("S3", run.persistent())
    sections = {
        "floor": base,
        "restores": restores,
        "reshards": resharding,
        "planning": planning,
        "persistent": to_s3,
        "frozen_weights": frozen,
        "agent_ranks": ranks,
    }
    lists = {"small_tensors": small, "unprepared": unprepared}
    load.append(os.getloadavg())
    return {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": cores,
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
            "load_average_before_and_after": load,
            "measured_although_busy": although_busy,
        },
        "size": {**size.as_json(), "state_bytes": run.state_bytes},
        "calibration": calibration,
        "figures": all_figures(turns),
        "errors": _errors(
            {
                **turns,
                "calibration": [calibration],
                **lists,
                **{name: [one] for name, one in sections.items()},
            }
        ),
        **sections,
        "floor": _rate(run.state_bytes, base),
        **lists,
        "step_lengths": lengths,
        "turns": turns,
        "summary": summary(turns, {**sections, **lists}),
        "spreads": spreads(turns, sections),
    }


def _errors(parts: dict[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    """Of each part that did not do all it was to do, what it said."""
    found = {
        name: [one[key] for one in each for key in ("error", "none_error") if key in one]
        for name, each in parts.items()
    }
    return {name: said for name, said in found.items() if said}


def _rate(size_bytes: int, base: dict[str, Any]) -> dict[str, Any]:
    return base if "error" in base else {"replicated_gb_per_second": size_bytes / median(base["seconds"]) / 1e9}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
