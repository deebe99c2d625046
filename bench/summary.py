"""From measurements to the keys of `summary`. Pure: a figure that was not measured is None, never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from bench.lost import DENSE, SPARSE, lost_figures

OURS = "surefoot"
BLOCKING = ("torch.save", "dcp.save")
ASYNCHRONOUS = (
    "dcp.async_save",
    "dcp.async_save stager",
    "dcp.async_save process",
    "torchsnapshot",
    "torch_checkpointing",
)
PACED = "torch.save paced"
"""To a store of 1 GB/s a node, against which the field measures; not among those to beat by rate."""
LOCAL = (*BLOCKING, *ASYNCHRONOUS)

Turns = Mapping[str, list[dict[str, Any]]]
"""System → its turns; a turn that failed has `error` and is left out of every figure."""


def summary(turns: Turns, sections: Mapping[str, Any]) -> dict[str, float | None]:
    """`sections`: restores, planning, small_tensors (its turns), frozen_weights, unprepared (its turns), agent_ranks."""
    planning, small = sections.get("planning", {}), sections.get("small_tensors", [])
    each = all_figures(turns)
    ours, saving, paced = each.get(OURS, {}), each.get("torch.save", {}), each.get(PACED, {})
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
        "best_peer_lost_step_percent_every_10": best_peer(each, "lost_step_percent_every_10"),
        "end_to_end_speedup_over_torch_save": ratio(
            saving.get("relative_step_every_1"), ours.get("relative_step_every_1")
        ),
        "stall_reduction_over_torch_save": ratio(saving.get("stall_over_warm_copy"), ours.get("stall_over_warm_copy")),
        "read_amplification_worst": _worst(resharding.get("same_dimension"), OURS),
        "read_amplification_worst_other_dimension": _worst(resharding.get("other_dimension"), OURS),
        "dcp_read_amplification_worst": _worst(resharding.get("same_dimension"), "dcp"),
        "restore_over_dcp_load": restore_ratio(sections.get("restores", {})),
        "plan_milliseconds_256_ranks": planning.get("surefoot", {}).get("each"),
        "dcp_plan_milliseconds_256_ranks": planning.get("dcp", {}).get("each"),
        **_of_small_tensors([turn for turn in small if "error" not in turn]),
        "bytes_sent_95_percent_frozen": best(sections.get("frozen_weights", {}).get("bytes_sent", ())[1:], median),
        "drain_cpu_seconds_per_gb": ours.get("cpu_seconds_per_gb"),
        "end_to_end_speedup_paced_store": ratio(paced.get("relative_step_every_1"), ours.get("relative_step_every_1")),
        "stall_reduction_paced_store": ratio(paced.get("stall_over_warm_copy"), ours.get("stall_over_warm_copy")),
        "first_stall_over_median_unprepared": _first_over_median(sections.get("unprepared", [])),
        "agent_cpu_4_ranks_over_1": over_one_rank(sections.get("agent_ranks", {}), 4),
    }


def over_one_rank(found: Mapping[str, Any], ranks: int) -> float | None:
    """An agent's CPU a GB with so many ranks over that with one, medians."""
    if str(ranks) not in found or "1" not in found:
        return None
    many, one = (median(found[str(n)]["agent_cpu_seconds"]) / n for n in (ranks, 1))
    return many / one


def _first_over_median(turns: Iterable[Mapping[str, Any]]) -> float | None:
    """Of turns in which nothing was prepared: the first stall, in medians of those behind it."""
    stalls = [_stalls(turn["spare"]) for turn in turns if "error" not in turn]
    return best([one[0] / median(one[1:]) for one in stalls], median)


def _of_small_tensors(turns: list[Mapping[str, Any]]) -> dict[str, float | None]:
    """Medians over all turns; the first save of each, which proves the state restorable, is left out."""
    calls = [1e3 * (call + join) for t in turns for call, join in _later(t["in_call_seconds"], t["join_seconds"])]
    return {
        "stall_milliseconds_10000_tensors": best(calls, median),
        "prepare_seconds_10000_tensors": best([t["prepare_seconds"] for t in turns], median),
        "restore_seconds_10000_tensors": best([s for t in turns for s in t["restore_seconds"]], median),
    }


def _later(*columns: list[float]) -> Iterable[tuple[float, ...]]:
    return list(zip(*columns, strict=True))[1:]


def all_figures(turns: Turns) -> dict[str, dict[str, float | None]]:
    """Every system's figures, and beside ours the best asynchronous peer's where it is measured with no core to spare."""
    each = {name: figures(found) for name, found in turns.items()}
    if OURS in each:
        for interval in (SPARSE, DENSE):
            key = f"lost_step_percent_every_{interval}_no_spare_core"
            each[OURS][f"best_peer_{key}"] = best_peer(each, key)
    return each


def best_peer(each: Mapping[str, Mapping[str, float | None]], key: str) -> float | None:
    """The least of any asynchronous peer."""
    return best([each[name].get(key) for name in ASYNCHRONOUS if name in each], min)


def figures(turns: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """One system's figures: the median over its turns, of those that it has; lost step time from all of them at once."""
    ran = [turn for turn in turns if "error" not in turn]
    found = [_of_turn(turn) for turn in ran]
    keys = {key for one in found for key in one}
    result = {key: best([one.get(key) for one in found], median) for key in sorted(keys)}
    if not any(turn["incomplete"] for turn in ran):
        result |= lost_figures([turn["spare"]["stretches"] for turn in ran])
    without = [turn for turn in ran if "none" in turn]
    if not any(turn["none_incomplete"] for turn in without):
        result |= lost_figures([turn["none"]["stretches"] for turn in without], "_no_spare_core")
    return result


def _of_turn(turn: Mapping[str, Any]) -> dict[str, float | None]:
    copy = median([turn["warm_copy_seconds"], turn["warm_copy_seconds_after"]])
    idle, stalls = turn["idle"], _stalls(turn["spare"])
    warm = median(stalls[1:])
    gigabytes = turn["state_bytes"] / 1e9
    found: dict[str, float | None] = {
        "first_stall_seconds": stalls[0],
        "stall_seconds": warm,
        "stall_over_warm_copy": warm / copy,
        "first_stall_over_median": stalls[0] / warm,
        "warm_copy_seconds": copy,
        "prepare_seconds": turn["prepare_seconds"],
        "gb_per_second": None if turn["incomplete"] else gigabytes / median(idle["seconds"]),
        "cpu_seconds_per_gb": sum(idle["cpu_seconds"]) / len(idle["cpu_seconds"]) / gigabytes,
        "peak_extra_bytes_over_state": turn["peak_extra_bytes"] / turn["state_bytes"],
    }
    if turn.get("load_seconds"):
        found["load_gb_per_second"] = gigabytes / median(turn["load_seconds"])
    if "none" in turn:
        found["stall_over_warm_copy_no_spare_core"] = median(_stalls(turn["none"])) / copy
    return found


def _stalls(part: Mapping[str, Any]) -> list[float]:
    """Of every save, the first one first."""
    return [stall for stretch in part["stretches"] for stall in stretch["stalls"]]


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
