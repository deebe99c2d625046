"""Rules by which memory and the persistent tier are kept: what is safe, what goes, what is copied and uploaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.dropping import Dropping
from simulator.mutations.mutation import (
    ENDING,
    FRAGILE,
    PARTED,
    PROMOTING,
    REFUSING,
    ROUGH,
    UPLOADING,
    Mutation,
    constant,
)
from simulator.world import Decisions
from surefoot.protocol.checkpoints import completeness, retention
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.maintenance import maintenance_plan as upkeep
from surefoot_operator.policy.maintenance import upload_plan
from surefoot_operator.policy.membership import final_checkpoint
from surefoot_operator.policy.membership.restore_decisions import DropsInProgress

_gone, _standing, _copies = retention.deletable_checkpoints, upkeep.retention_inputs, upkeep.count_copies
_persistent_drops, _upkeep = retention.persistent_checkpoints_to_delete, upkeep.plan_maintenance


def _everything_superseded(held: Any, standing: retention.RetentionInputs, keep: int) -> set[Checkpoint]:
    """Retention that takes the newest checkpoint seen for safe, however few copies it has."""
    newest = completeness.newest_checkpoint(Checkpoint(*key) for key in held)
    return _gone(held, replace(standing, watermark=newest), keep)


def _forgetful(held: Any, standing: retention.RetentionInputs, keep: int) -> set[Checkpoint]:
    """Retention that lets the parent go at once."""
    return _gone(held, standing, keep) | {c for key in held if (c := Checkpoint(*key)) == standing.parent}


def _missed_already(said: ClosedSteps, step: int) -> bool:
    """What a rank has not handed over yet counts as something that it never will."""
    return step not in said.handed_over


def _missed_lately(said: ClosedSteps, step: int) -> bool:
    """What a rank has forgotten counts as something that it never had."""
    return step <= said.closed_up_to and step not in said.handed_over[-1:]


def _unpinned(facts: Any, full: Any, floor: Any, pinned: Checkpoint | None) -> retention.RetentionInputs:
    """The memory tier does not hear of what is being uploaded."""
    return _standing(facts, full, floor, None)


def _of_the_best(checkpoint: Checkpoint, reading: Any, domains: Any) -> int:
    """As many copies as the rank that has most of them."""
    count: dict[int, set[str]] = {}
    for holder, manifests in reading.servers.items():
        for m in manifests:
            if m.save.checkpoint == checkpoint:
                count.setdefault(m.save.rank, set()).add(domains[holder])
    return max(map(len, count.values()), default=0)


def _newest_seen_stays(complete: Any, seen: Any, standing: retention.RetentionInputs, keep: int, *more: Any) -> Any:
    """The persistent tier keeps the newest that it has parts of."""
    order = sorted({*seen, *complete}, key=lambda c: c.step)
    return order[:-1]


def _during_a_claim(seen: JobSnapshot, pinned: Checkpoint | None, going: DropsInProgress) -> upkeep.MaintenancePlan:
    """House is kept while the next world is being chosen, by the last one's rules."""
    world = seen.status.membership
    if world is None or world.state == "Committed" or not seen.status.lineage:
        return _upkeep(seen, pinned, going)
    last = seen.status.lineage[-1]
    before = replace(world, generation=world.generation, state="Committed", parent=last.parent)
    kept = _upkeep(replace(seen, status=replace(seen.status, membership=before)), pinned, going)
    return replace(kept, status=seen.status)


def _hasty_floor(facts: Any) -> Checkpoint | None:
    """A checkpoint counts as complete in the persistent tier once any rank's save is there."""
    return completeness.newest_checkpoint(facts.uploaded) or facts.status.last_uploaded


def _steps_of_its_own(facts: Any) -> Checkpoint | None:
    """What a program ended with counts only where its last epoch made it."""
    found = _final(facts)
    return found if found is not None and found.generation == facts.membership.generation else None


_final = final_checkpoint.final_checkpoint


def _never_lost(facts: Any) -> Any:
    """What cannot be uploaded any more is not missed."""
    found = _outstanding(facts)
    return None if isinstance(found, Failure) else found


_outstanding = final_checkpoint.check_final_checkpoint


KEEPING = (
    Mutation("one copy makes a watermark", patches=((upkeep, "effective_replicas", constant(1)),)),
    Mutation("copies are those of the best rank", patches=((upkeep, "count_copies", _of_the_best),)),
    Mutation("the newest seen counts as safe", patches=((retention, "deletable_checkpoints", _everything_superseded),)),
    Mutation("the parent is dropped at once", patches=((retention, "deletable_checkpoints", _forgetful),)),
    Mutation("a save that may still come is not awaited", patches=((ClosedSteps, "is_missing", _missed_already),), settings=REFUSING),
    Mutation("a save that was handed over counts as missing", patches=((ClosedSteps, "is_missing", _missed_lately),), settings=REFUSING),
    Mutation("the pinned checkpoint is not spared in memory", patches=((upkeep, "retention_inputs", _unpinned),), settings=PROMOTING),
    Mutation("drops go on while a holder is being sealed", patches=((upkeep, "_plan_fences", constant(())),),
             settings=replace(PARTED, steps=60, faults=14, fault_span_seconds=16.0)),
    Mutation("house is kept while an epoch is claimed", decisions=Decisions(maintain=_during_a_claim),
             patches=((Dropping, "_due", constant(True)),)),
    Mutation("the persistent tier keeps the newest that it has parts of",
             patches=((retention, "persistent_checkpoints_to_delete", _newest_seen_stays),), settings=PROMOTING),
    Mutation("the floor rises with the first rank", patches=((upload_plan, "_newest_uploaded", _hasty_floor),), settings=PROMOTING),
    Mutation("a floor may lie off the lineage", patches=((upload_plan, "is_on_lineage", constant(True)),), settings=UPLOADING),
    Mutation("a job that finished does not wait for its last checkpoint",
             patches=((final_checkpoint, "check_final_checkpoint", constant(None)), (final_checkpoint, "upload_before_failing", constant(None))),
             settings=ENDING),  # both: every ending uploads first, so one of the two alone is missed by nobody
    Mutation("an epoch without a step of its own has no last checkpoint",
             patches=((final_checkpoint, "final_checkpoint", _steps_of_its_own),), settings=ENDING),
    Mutation("a last checkpoint that went from memory is not made again",
             patches=((final_checkpoint, "check_final_checkpoint", _never_lost),), settings=FRAGILE),
    Mutation("nothing is ever dropped", patches=((retention, "deletable_checkpoints", constant(set())),), settings=replace(ROUGH, steps=60)),
    Mutation("what can never become complete stays", patches=((upkeep, "unrecoverable_checkpoints", constant(())),),
             settings=replace(ROUGH, refused=0.8, steps=60, faults=0)),
    Mutation("nothing is uploaded", patches=((upload_plan, "_assign_uploads", constant(())),), settings=ENDING),
    Mutation("nothing is deleted from the persistent tier", patches=((retention, "persistent_checkpoints_to_delete", constant([])),),
             settings=replace(PROMOTING, persistent_interval=1, steps=450, faults=0)),
)  # fmt: skip
