"""The benchmark's summary: exactly the agreed keys, ratios from what was measured, and None for what was not."""

from __future__ import annotations

from typing import Any

import pytest
from bench.summary import figures, restore_ratio, summary

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
]


def turn(stall: float, step: float, save: float, **more: Any) -> dict[str, Any]:
    """Steps of 1 s; `step` with a save each time; saves of 1 GB in `save` seconds; a warm copy takes 0.1 s."""
    return {
        "state_bytes": 10**9,
        "warm_copy_seconds": 0.1,
        "warm_copy_seconds_after": 0.1,
        "prepare_seconds": 0.5,
        "spare": {
            "plain_steps": [1.0] * 20,
            "steps_every_1": [9.0, *[step] * 4],
            "stalls_every_1": [2 * stall, *[stall] * 4],
            "steps_every_10": [1.0 + (step - 1.0), *[1.0] * 9] * 2,
            "stalls_every_10": [stall, stall],
        },
        "idle": {"seconds": [save] * 3, "cpu_seconds": [1.0] * 3},
        "peak_extra_bytes": 10**9,
        "incomplete": [],
        **more,
    }


def test_every_key_is_there_and_what_was_not_measured_is_none() -> None:
    found = summary({"surefoot": [{"error": "it broke"}]}, {"error": "too slow"}, {"error": "no torch"})
    assert list(found) == KEYS
    assert set(found.values()) == {None}


def test_ratios_are_of_what_was_measured() -> None:
    turns = {
        "surefoot": [turn(0.02, 1.1, 0.5)],
        "torch.save": [turn(1.0, 2.2, 1.0)],
        "dcp.async_save": [turn(0.05, 1.5, 2.0)],
        "torchsnapshot": [{"error": "it warns too much"}],
        "sagemaker": [turn(0.2, 3.0, 5.0)],
    }
    restores = {"surefoot": {"seconds": [9.0, 0.5, 0.5]}, "dcp.load": {"seconds": [9.0, 1.0, 1.0]}}
    found = summary(turns, restores, {"surefoot": {"each": 2.0}, "dcp": {"each": 5000.0}})
    assert found["stall_over_warm_copy"] == pytest.approx(0.2)
    assert found["first_stall_over_median"] == pytest.approx(2.0)
    assert found["r2_gb_per_second"] == pytest.approx(2.0)
    assert found["r2_over_best_local_peer"] == pytest.approx(2.0)
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
