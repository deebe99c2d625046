"""Tensors that differ between ranks which save them together: named with the ranks, and nobody is accused falsely."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.gloo_world import ended, started

SIZE = 3


@pytest.fixture(scope="module")
def notices(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """What each rank reported, by case."""
    outputs = ended(started("replica_world.py", (), SIZE, tmp_path_factory.mktemp("replicas") / "group"))
    lines: list[Any] = [line for output in outputs for line in output.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def of_case(notices: list[dict[str, list[str]]], case: str) -> list[list[str]]:
    return [rank_notices[case] for rank_notices in notices]


@pytest.mark.parametrize(
    "case",
    [
        "in_ddp",
        "ddp_with_batch_norm",
        "ddp_in_a_module",
        "channels_last",
        "zero_optimizer",
        "fully_sharded",
        "averaged_by_hand",
        "own_experts",
        "described_experts",
        "averaged_weights",
        "ignored",
    ],
)
def test_equal_or_described_tensors_are_not_reported(notices: list[dict[str, list[str]]], case: str) -> None:
    assert of_case(notices, case) == [[]] * SIZE


@pytest.mark.parametrize(
    ("case", "name", "step"),
    [
        ("experts", "model/1.weight", 2),
        ("forgotten_ddp", "model/0.weight", 2),
        ("saved_at_once", "model/0.weight", 1),
        ("local_sgd", "model/0.weight", 2),
    ],
)
def test_ranks_with_different_tensors_are_refused_at_once(
    notices: list[dict[str, list[str]]], case: str, name: str, step: int
) -> None:
    for rank, (text,) in enumerate(of_case(notices, case)):
        low, high = sorted((rank, (rank - 1) % SIZE))
        assert text.startswith(f"step {step}: ")
        assert name in text
        assert f"between ranks {low} and {high}" in text
        assert "per_rank=" in text
        assert "replicas=" in text
        assert "replica_check='warn'" in text


def test_a_policy_of_warnings_reports_once_and_trains_on(notices: list[dict[str, list[str]]]) -> None:
    for found in of_case(notices, "warned"):
        (text,) = found
        assert text.startswith("model/0.bias")
        assert "replica_check" not in text


def test_one_odd_rank_is_named_with_its_neighbours(notices: list[dict[str, list[str]]]) -> None:
    first, equal, odd = of_case(notices, "one_odd_rank")
    assert "model/1.bias differs between ranks 0 and 2" in first[0]
    assert equal == []
    assert "model/1.bias differs between ranks 1 and 2" in odd[0]


def test_a_bit_that_flips_later_is_reported_by_name_and_trains_on(notices: list[dict[str, list[str]]]) -> None:
    _, flipped, neighbour = of_case(notices, "flipped_bit")
    assert "model/0.bias differs between ranks 0 and 1" in flipped[0]
    assert "step" not in flipped[0][:5]
    assert "model/0.bias differs between ranks 1 and 2" in neighbour[0]


@pytest.mark.parametrize(
    ("case", "name"), [("batch_norm_without_ddp", "model/1.running_mean"), ("metric_of_each_rank", "meter/total")]
)
def test_what_one_rank_saves_for_all_is_reported_once_and_not_refused(
    notices: list[dict[str, list[str]]], case: str, name: str
) -> None:
    first, *others = of_case(notices, case)
    assert len(first) == 1
    assert name in first[0]
    assert "a checkpoint has those of one rank" in first[0]
    assert others == [[]] * (SIZE - 1)
