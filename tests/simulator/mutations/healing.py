"""Rules by which a run whose numbers went wrong goes back to good ones, and not to the same data again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.mutations.mutation import ROUGH, Mutation, constant
from surefoot.protocol.checkpoints.retention import LossHistory
from surefoot.protocol.progress import AnomalyRun
from surefoot_operator.policy.failure import memory_server_liveness
from surefoot_operator.policy.failure.memory_server_liveness import unreachable_servers
from surefoot_operator.policy.maintenance import last_good
from surefoot_operator.policy.membership import claim, restore_point
from surefoot_operator.policy.planning import plan, plan_invariants

HEALED = replace(ROUGH, steps=50, faults=6, fault_span_seconds=10.0, good_after=3,
                 kinds=("data is no number", "model becomes no number", "losses leap", "trainer dies"))  # fmt: skip

FORGETFUL = replace(HEALED, interval=2, kinds=("losses leap", "losses leap", "trainer dies", "operator dies"))
LOSING = replace(
    HEALED, interval=4, replicas=1, faults=8, kinds=("data is no number", "holder restarts", "model becomes no number")
)
RETURNING = replace(HEALED, nodes=4, workers=4, interval=4, faults=10, fault_span_seconds=14.0,
                    kinds=("model becomes no number", "line breaks for long", "operator loses a holder for long", "node dies",
                           "holder restarts"))  # fmt: skip

_gone_back = claim.record_rollback


def _told_nobody(status: Any, lineage: Any, told_step: int) -> Any:
    """The commit forgets what its loaders were to leave out."""
    return replace(_gone_back(status, lineage, told_step), skipped_data=())


def _so_far(sound: LossHistory, checkpoint: Any) -> bool:
    """A checkpoint counts as good as soon as it is there."""
    return checkpoint.step <= sound.step


HEALING = (
    Mutation("a rollback restores the newest", settings=HEALED,
             patches=((restore_point, "restore_limit", constant(None)), (plan_invariants, "restore_limit", constant(None)))),
    Mutation("a checkpoint is good at once", patches=((LossHistory, "is_known_good", _so_far),), settings=HEALED),
    Mutation("good checkpoints go like others", patches=((last_good, "checkpoints_kept_for_rollback", constant(frozenset())),), settings=HEALED),
    Mutation("loaders do not hear what to leave out", patches=((claim, "record_rollback", _told_nobody),), settings=HEALED),
    Mutation("a restart forgets which steps were odd", patches=((AnomalyRun, "from_stored_values", constant(AnomalyRun())),), settings=FORGETFUL),
    Mutation("what a rollback goes back to is lost, and nothing else is tried", patches=((restore_point, "find_later_target", constant(None)),),
             settings=LOSING),
    Mutation("who was given up is never waited for again", patches=((memory_server_liveness, "may_still_have_data", unreachable_servers),),
             settings=RETURNING),
    Mutation("a loss that is no number is looked at by nobody", patches=((plan, "decide_rollback", constant(None)),), settings=HEALED),
)  # fmt: skip
