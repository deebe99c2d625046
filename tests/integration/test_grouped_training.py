"""The mean over tokens of groups, with the collective of real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.gloo_world import started, told

STEPS = "6"


def trained(size: int, folder: Path) -> list[dict[str, Any]]:
    return told(started("grouped_trainer.py", [STEPS], size, folder / f"of-{size}"))


def test_ranks_of_any_number_step_by_the_mean_over_all_tokens(tmp_path: Path) -> None:
    """Two groups a step: of three ranks one has none, and takes part in the collective all the same."""
    (alone,) = trained(1, tmp_path)
    three = trained(3, tmp_path)
    assert sorted(rank["empty"] for rank in three) == [False, False, True]
    for rank in three:
        for mine, whole in zip(rank["parameters"], alone["parameters"], strict=True):
            assert mine == pytest.approx(whole, rel=1e-12)
    assert alone["parameters"][0] != alone["parameters"][-1]
