"""By which library two nodes try each other."""

from __future__ import annotations

import pytest

from surefoot.launcher.pair_test import chosen_backend


@pytest.mark.parametrize(
    ("shared", "own", "others", "has_nccl", "backend"),
    [
        (1, ["a"], ["b"], True, "nccl"),
        (2, ["a", "b"], ["c", "d"], True, "nccl"),
        (1, ["a"], [], True, "nccl"),  # a partner of a version that does not name its GPUs
        (0, [], ["b"], True, "gloo"),
        (1, ["a"], ["b"], False, "gloo"),
        (1, ["a"], ["a"], True, "gloo"),
        (1, ["a", "b"], ["b"], True, "gloo"),
    ],
)
def test_nccl_is_for_nodes_with_gpus_of_their_own(
    shared: int, own: list[str], others: list[str], has_nccl: bool, backend: str
) -> None:
    assert chosen_backend(shared, own, others, has_nccl) == backend
