"""`surefoot local` with a job of fixed size: what replaces a lost worker gives the same bits as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_whole, faults, run


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_replacement_at_the_same_world_size_is_bit_exact_in_float32_and_float64(tmp_path: Path) -> None:
    job = Job(steps=140, trainer=("--first-dtype", "float32", "--pace", "0.03"))
    struck = faults("node:1@step=40,for=1", "trainer:0@step=90")
    found = run(tmp_path, job, *struck, "--compare").report
    assert_whole(found, 140)
    assert [incident["kind"] for incident in found["incidents"]] == ["node-lost", "trainer-failed"]
    assert [generation["world_size"] for generation in found["generations"]] == [2, 2, 2]
    # each rank saved half of what both have: its own half lies in its node's staging memory, unless that was lost
    assert [generation["restored_from"] for generation in found["generations"]] == [None, *["staging+memory"] * 2]
    assert found["max_loss_difference"] == 0.0
    assert found["max_parameter_difference"] == 0.0
    assert found["parameters_bit_exact"] is True
