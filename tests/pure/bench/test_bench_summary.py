"""The benchmark's summary: exactly the agreed keys, ratios from what was measured, and None for what was not."""

from __future__ import annotations

from typing import Any

import pytest
from bench.summary import all_figures, figures, restore_ratio, summary

KEYS = [
    "stall_over_warm_copy",
    "stall_over_warm_copy_no_spare_core",
    "first_stall_over_median",
    "r2_gb_per_second",
    "r2_over_best_local_peer",
    "r2_over_sagemaker",
    "lost_step_percent_every_10",
    "lost_step_percent_every_1",
    "best_peer_lost_step_percent_every_10",
    "end_to_end_speedup_over_torch_save",
    "stall_reduction_over_torch_save",
    "read_amplification_worst",
    "read_amplification_worst_other_dimension",
    "dcp_read_amplification_worst",
    "restore_over_dcp_load",
    "plan_milliseconds_256_ranks",
    "dcp_plan_milliseconds_256_ranks",
    "stall_milliseconds_10000_tensors",
    "prepare_seconds_10000_tensors",
    "restore_seconds_10000_tensors",
    "bytes_sent_95_percent_frozen",
    "drain_cpu_seconds_per_gb",
    "end_to_end_speedup_paced_store",
    "stall_reduction_paced_store",
    "first_stall_over_median_unprepared",
    "agent_cpu_4_ranks_over_1",
]


def part(stall: float, step: float) -> dict[str, Any]:
    """Steps of 1 s; `step` with a save. The first save of all takes twice as long."""
    plain = {"interval": 0, "seconds": [1.0] * 4, "stalls": [], "left_seconds": 0.0}
    first = {"interval": 1, "seconds": [9.0, step], "stalls": [2 * stall, stall], "left_seconds": 0.0}
    dense = {"interval": 1, "seconds": [5.0, *[step] * 4], "stalls": [stall] * 5, "left_seconds": 0.5}
    sparse = {"interval": 10, "seconds": [step, 1.0, 1.0, 1.0], "stalls": [stall], "left_seconds": 0.0}
    return {"stretches": [first, plain, sparse, plain, dense, plain, sparse, plain]}


def turn(stall: float, step: float, save: float, **more: Any) -> dict[str, Any]:
    """With saves of 1 GB in `save` seconds; a warm copy takes 0.1 s."""
    return {
        "state_bytes": 10**9,
        "warm_copy_seconds": 0.1,
        "warm_copy_seconds_after": 0.1,
        "prepare_seconds": 0.5,
        "spare": part(stall, step),
        "idle": {"seconds": [save] * 3, "cpu_seconds": [1.0] * 3},
        "peak_extra_bytes": 10**9,
        "incomplete": [],
        **more,
    }


def test_every_key_is_there_and_what_was_not_measured_is_none() -> None:
    broken = {"error": "too slow"}
    sections = dict.fromkeys(("restores", "planning", "frozen_weights", "agent_ranks"), broken)
    lists = {"small_tensors": [broken], "unprepared": [broken]}
    found = summary({"surefoot": [{"error": "it broke"}]}, {**sections, **lists})
    assert list(found) == KEYS
    assert set(found.values()) == {None}


def test_ratios_are_of_what_was_measured() -> None:
    turns = {
        "surefoot": [turn(0.02, 1.1, 0.5)],
        "torch.save": [turn(1.0, 2.2, 1.0)],
        "dcp.async_save": [turn(0.05, 1.5, 2.0)],
        "torchsnapshot": [{"error": "it warns too much"}],
        "torch.save paced": [turn(2.0, 3.3, 2.0)],
        "sagemaker": [turn(0.2, 3.0, 5.0)],
    }
    restores = {"surefoot": {"seconds": [9.0, 0.5, 0.5]}, "dcp.load": {"seconds": [9.0, 1.0, 1.0]}}
    one = {
        "in_call_seconds": [9.0, 0.02, 0.03, 0.04],
        "join_seconds": [9.0, 0.001, 0.001, 0.001],
        "prepare_seconds": 0.5,
        "restore_seconds": [0.3, 0.4, 0.8],
    }
    small = [one, {"error": "too slow"}, {**one, "prepare_seconds": 0.7}]
    cpu = {"1": [2.0, 2.0, 9.0], "2": [5.0], "4": [12.0]}
    found = summary(
        turns,
        {
            "restores": restores,
            "planning": {"surefoot": {"each": 2.0}, "dcp": {"each": 5000.0}},
            "small_tensors": small,
            "frozen_weights": {"bytes_sent": [1.0, 0.06, 0.06]},
            "unprepared": [{"spare": part(0.02, 1.1)}, {"error": "it broke"}],
            "agent_ranks": {ranks: {"agent_cpu_seconds": seconds} for ranks, seconds in cpu.items()},
        },
    )
    assert found["drain_cpu_seconds_per_gb"] == pytest.approx(1.0)
    assert found["end_to_end_speedup_paced_store"] == pytest.approx(3.0)
    assert found["stall_reduction_paced_store"] == pytest.approx(100.0)
    assert found["first_stall_over_median_unprepared"] == pytest.approx(2.0)
    assert found["agent_cpu_4_ranks_over_1"] == pytest.approx(1.5), "a GB, not a save"
    assert found["bytes_sent_95_percent_frozen"] == pytest.approx(0.06)
    assert found["stall_milliseconds_10000_tensors"] == pytest.approx(31.0)
    assert found["prepare_seconds_10000_tensors"] == pytest.approx(0.6)
    assert found["restore_seconds_10000_tensors"] == pytest.approx(0.4)
    assert found["stall_over_warm_copy"] == pytest.approx(0.2)
    assert found["first_stall_over_median"] == pytest.approx(2.0)
    assert found["r2_gb_per_second"] == pytest.approx(2.0)
    assert found["r2_over_best_local_peer"] == pytest.approx(2.0), "a paced store is no peer of a rate"
    assert found["r2_over_sagemaker"] == pytest.approx(10.0)
    assert found["lost_step_percent_every_10"] == pytest.approx(1.0)
    assert found["lost_step_percent_every_1"] == pytest.approx(10.0)
    assert found["best_peer_lost_step_percent_every_10"] == pytest.approx(5.0), "torch.save is not asynchronous"
    assert found["end_to_end_speedup_over_torch_save"] == pytest.approx(2.0)
    assert found["stall_reduction_over_torch_save"] == pytest.approx(50.0)
    assert found["restore_over_dcp_load"] == pytest.approx(2.0)
    assert found["plan_milliseconds_256_ranks"] == 2.0


def test_a_save_that_did_not_become_safe_leaves_no_throughput_and_no_lost_time() -> None:
    found = figures([turn(0.02, 1.1, 0.5, incomplete=["step 3 has not two copies"])])
    assert found["gb_per_second"] is None
    assert "lost_step_percent_every_10" not in found
    assert found["stall_over_warm_copy"] == pytest.approx(0.2)


def test_several_turns_give_their_median_and_failed_ones_none() -> None:
    found = figures([turn(0.01, 1.1, 0.5), turn(0.02, 1.1, 0.5), turn(0.09, 1.1, 0.5), {"error": "gone"}])
    assert found["stall_seconds"] == pytest.approx(0.02)
    assert restore_ratio({}) is None


def test_lost_time_is_the_median_of_every_turns_comparisons_and_needs_all_saves_safe() -> None:
    turns = [turn(0.01, step, 0.5) for step in (1.1, 1.2, 1.9)]
    assert figures(turns)["lost_step_percent_every_10"] == pytest.approx(2.0)
    assert figures(turns)["lost_step_spread_percent_every_10"] == pytest.approx(8.0)
    turns[0]["incomplete"] = ["step 3 has not two copies"]
    assert "lost_step_percent_every_10" not in figures(turns)


def test_with_no_core_to_spare_the_best_asynchronous_peer_stands_beside_ours() -> None:
    def both(step: float, without: float) -> dict[str, Any]:
        return turn(0.01, step, 0.5, none=part(0.02, without), none_incomplete=[])

    turns = {
        "surefoot": [both(1.1, 1.3)],
        "torch.save": [both(1.1, 1.2)],
        "dcp.async_save": [both(1.1, 1.9)],
        "torchsnapshot": [both(1.1, 1.6)],
        "torch_checkpointing": [turn(0.01, 1.1, 0.5, none_error="too slow")],
    }
    found = all_figures(turns)["surefoot"]
    assert found["lost_step_percent_every_10_no_spare_core"] == pytest.approx(3.0)
    assert found["best_peer_lost_step_percent_every_10_no_spare_core"] == pytest.approx(6.0)
    assert found["best_peer_lost_step_percent_every_1_no_spare_core"] == pytest.approx(60.0)
    assert found["stall_over_warm_copy_no_spare_core"] == pytest.approx(0.2)
