"""Rules by which a run whose numbers went wrong goes back to good ones, and not to the same data again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.mutations.mutation import ROUGH, Mutation, constant
from surefoot.protocol.retention import SoundSteps
from surefoot_operator.policy import check, plan
from surefoot_operator.policy.maintenance import good_checkpoint
from surefoot_operator.policy.world import claim, restore_point

HEALED = replace(ROUGH, steps=50, faults=6, fault_span_seconds=10.0, good_after=3,
                 kinds=("data is no number", "model becomes no number", "losses leap", "trainer dies"))  # fmt: skip

_gone_back = claim.gone_back


def _told_nobody(status: Any, lineage: Any) -> Any:
    """The commit forgets what its loaders were to leave out."""
    return replace(_gone_back(status, lineage), skipped=())


def _so_far(sound: SoundSteps, checkpoint: Any) -> bool:
    """A checkpoint counts as good as soon as it is there."""
    return checkpoint.step <= sound.step


HEALING = (
    Mutation("a rollback restores the newest", settings=HEALED,
             patches=((restore_point, "ceiling", constant(None)), (check, "ceiling", constant(None)))),
    Mutation("a checkpoint is good at once", patches=((SoundSteps, "prove", _so_far),), settings=HEALED),
    Mutation("good checkpoints go like others", patches=((good_checkpoint, "spared", constant(frozenset())),), settings=HEALED),
    Mutation("loaders do not hear what to leave out", patches=((claim, "gone_back", _told_nobody),), settings=HEALED),
    Mutation("a loss that is no number is looked at by nobody", patches=((plan, "heal", constant(None)),), settings=HEALED),
)  # fmt: skip
