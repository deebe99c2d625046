"""From measurements to the keys of `summary`. Pure: a figure that was not measured is None, never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

OURS = "surefoot"
LOCAL = (
    "torch.save",
    "dcp.save",
    "dcp.async_save",
    "dcp.async_save stager",
    "dcp.async_save process",
    "torchsnapshot",
    "torch_checkpointing",
)
ASYNCHRONOUS = LOCAL[2:]

Turns = Mapping[str, list[dict[str, Any]]]
"""System → its turns; a turn that failed has `error` and is left out of every figure."""


def summary(turns: Turns, restores: Mapping[str, Any], planning: Mapping[str, Any]) -> dict[str, float | None]:
    each = {name: figures(found) for name, found in turns.items()}
    ours, saving = each.get(OURS, {}), each.get("torch.save", {})
    lost = [each[n].get("lost_step_percent_every_10") for n in ASYNCHRONOUS if n in each]
    rates = [each[n].get("gb_per_second") for n in LOCAL if n in each]
    resharding = planning.get("amplification", {})
    return {
        "stall_over_warm_copy": ours.get("stall_over_warm_copy"),
        "stall_over_warm_copy_no_spare_core": ours.get("stall_over_warm_copy_no_spare_core"),
        "first_stall_over_median": ours.get("first_stall_over_median"),
        "r2_gb_per_second": ours.get("gb_per_second"),
        "r2_over_best_local_peer": ratio(ours.get("gb_per_second"), best(rates, max)),
        "r2_over_sagemaker": ratio(ours.get("gb_per_second"), each.get("sagemaker", {}).get("gb_per_second")),
        "lost_step_percent_every_10": ours.get("lost_step_percent_every_10"),
        "lost_step_percent_every_1": ours.get("lost_step_percent_every_1"),
        "best_peer_lost_step_percent_every_10": best(lost, min),
        "end_to_end_speedup_over_torch_save": ratio(
            saving.get("relative_step_every_1"), ours.get("relative_step_every_1")
        ),
        "stall_reduction_over_torch_save": ratio(saving.get("stall_over_warm_copy"), ours.get("stall_over_warm_copy")),
        "read_amplification_worst": _worst(resharding.get("same_dimension"), OURS),
        "read_amplification_worst_other_dimension": _worst(resharding.get("other_dimension"), OURS),
        "dcp_read_amplification_worst": _worst(resharding.get("same_dimension"), "dcp"),
        "restore_over_dcp_load": restore_ratio(restores),
        "plan_milliseconds_256_ranks": planning.get("surefoot", {}).get("each"),
        "dcp_plan_milliseconds_256_ranks": planning.get("dcp", {}).get("each"),
    }


def figures(turns: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """One system's figures: the median over its turns, of those that it has."""
    found = [_of_turn(turn) for turn in turns if "error" not in turn]
    keys = {key for one in found for key in one}
    return {key: best([one.get(key) for one in found], median) for key in sorted(keys)}


def _of_turn(turn: Mapping[str, Any]) -> dict[str, float | None]:
    copy = median([turn["warm_copy_seconds"], turn["warm_copy_seconds_after"]])
    spare, idle = turn["spare"], turn["idle"]
    stalls = [*spare["stalls_every_1"], *spare["stalls_every_10"]]
    warm = median(stalls[1:])
    gigabytes = turn["state_bytes"] / 1e9
    counts = not turn["incomplete"]
    found: dict[str, float | None] = {
        "first_stall_seconds": stalls[0],
        "stall_seconds": warm,
        "stall_over_warm_copy": warm / copy,
        "first_stall_over_median": stalls[0] / warm,
        "warm_copy_seconds": copy,
        "prepare_seconds": turn["prepare_seconds"],
        "gb_per_second": gigabytes / median(idle["seconds"]) if counts else None,
        "cpu_seconds_per_gb": sum(idle["cpu_seconds"]) / len(idle["cpu_seconds"]) / gigabytes,
        "peak_extra_bytes_over_state": turn["peak_extra_bytes"] / turn["state_bytes"],
    }
    if counts:
        found |= _lost(spare, "")
    if turn.get("load_seconds"):
        found["load_gb_per_second"] = gigabytes / median(turn["load_seconds"])
    if "none" in turn:
        found["stall_over_warm_copy_no_spare_core"] = (
            median([*turn["none"]["stalls_every_1"], *turn["none"]["stalls_every_10"]]) / copy
        )
        if not turn["none_incomplete"]:
            found |= _lost(turn["none"], "_no_spare_core")
    return found


def _lost(steps: Mapping[str, list[float]], suffix: str) -> dict[str, float | None]:
    """Lost step time in percent, from whole stretches: a save's cost may show in later steps than its own."""
    plain = steps["plain_steps"]
    if not plain:
        return {}
    base = sum(plain) / len(plain)
    dense = steps["steps_every_1"][1:]  # the first save of all is reported apart
    found: dict[str, float | None] = {"step_seconds" + suffix: base}
    if steps["steps_every_10"]:
        every_10 = sum(steps["steps_every_10"]) / len(steps["steps_every_10"])
        found["lost_step_percent_every_10" + suffix] = 100 * (every_10 / base - 1)
    if dense:
        found["relative_step_every_1" + suffix] = sum(dense) / len(dense) / base
        found["lost_step_percent_every_1" + suffix] = 100 * (sum(dense) / len(dense) / base - 1)
    return found


def restore_ratio(restores: Mapping[str, Any]) -> float | None:
    """How many times as fast as dcp.load; the first of each is left out."""
    if "error" in restores or not restores:
        return None
    ours, theirs = restores[OURS]["seconds"][1:], restores["dcp.load"]["seconds"][1:]
    return median(theirs) / median(ours)


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def best(values: Iterable[float | None], choose: Any) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _worst(pairs: Mapping[str, Mapping[str, float]] | None, system: str) -> float | None:
    return max((pair[system] for pair in pairs.values()), default=None) if pairs else None
