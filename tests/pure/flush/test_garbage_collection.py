"""What an agent that keeps house alone does not drop: it sees a part of the holders, and was told of no good checkpoint."""

from __future__ import annotations

from dataclasses import replace

from support.builders import manifest
from surefoot.flush.garbage_collection import select_rollback_points
from surefoot.protocol.checkpoints.retention import LossHistory
from surefoot.protocol.identities import Checkpoint

ODD = LossHistory(step=18, anomaly_step=18, later_steps=2)
WELL = replace(ODD, anomaly_step=0)
PART = manifest(3, 8, 2, 3)
"""Of the last good checkpoint; its other saves lie on holders that this agent does not know of."""
SICK = [replace(manifest(3, step, rank, 3), suspect=True) for step in (12, 14) for rank in range(3)]


def whole(*steps: int) -> list[Checkpoint]:
    return [Checkpoint(3, step) for step in steps]


def test_a_part_of_a_checkpoint_that_may_be_the_last_good_one_stays() -> None:
    assert select_rollback_points(whole(12, 14), [PART, *SICK], ODD) == {Checkpoint(3, 8)}


def test_behind_one_that_is_proven_nothing_older_stays() -> None:
    saves = [manifest(3, step, rank, 3) for step in (6, 8, 10, 16) for rank in range(3)]
    assert select_rollback_points(whole(6, 8, 10, 16), saves, WELL) == {Checkpoint(3, 16)}
    assert Checkpoint(3, 6) not in select_rollback_points(whole(6, 10), [*saves[:3], PART, *saves[6:9]], WELL)


def test_where_nobody_asks_for_good_ones_the_newest_that_is_not_suspect_stays() -> None:
    assert select_rollback_points(whole(12, 14), [PART, *SICK], None) == frozenset()
    kept = [manifest(3, 10, rank, 3) for rank in range(3)]
    assert select_rollback_points(whole(10, 12, 14), [*kept, *SICK], None) == {Checkpoint(3, 10)}
