"""What becomes of a job that is over or deleted: its pods, its memory, its persistent data, and at last itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, running, with_node
from surefoot_operator.api.spec import CheckpointPolicy, PersistentTierSpec, RunPolicy
from surefoot_operator.job_snapshot import Observed, PurgeCallSeen, PurgeSeen
from surefoot_operator.policy.core.actions import (
    CleanMemory,
    DeleteJob,
    DeleteWorker,
    PurgePersistent,
    RetireWorkers,
    SetFinalizer,
)
from surefoot_operator.policy.membership.lifecycle import (
    AGAIN_SECONDS,
    KEPT_AFTER_FAILURE_SECONDS,
    PURGE_ATTEMPTS,
    PURGE_SECONDS,
    REFUSED_TIMES,
    UNHEARD_SECONDS,
    is_idle,
)
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 100
DELETE = CheckpointPolicy(persistent=PersistentTierSpec("s3://bucket/prefix", on_job_deletion="Delete"))


def kinds(seen: Observed, *wanted: type[Any]) -> list[Any]:
    return [a for a in plan(seen).actions if isinstance(a, wanted)]


# ---- over ----------------------------------------------------------------------------------------------------------


def over(phase: Any = "Complete", cleaned: bool = True, **policy: Any) -> Observed:
    """Ended just now; its workers have left."""
    seen = running(run_policy=RunPolicy(**policy))
    status = replace(seen.status, phase=phase, completion_seconds=NOW, message="every trainer finished")
    workers = tuple(replace(w, phase="Succeeded", exit_code=0) for w in seen.workers)
    holders = () if cleaned else seen.holders
    return replace(seen, now=NOW, status=status, workers=workers, sessions=(), holders=holders, memory_cleaned=cleaned)


def test_an_ended_job_is_tidied_once_its_memory_is_clean_and_rests() -> None:
    seen = over(cleaned=False)
    made = plan(seen)
    assert [a for a in made.actions if isinstance(a, CleanMemory)]
    assert not made.status.tidied
    assert not is_idle(seen.job, made.status, seen.workers)
    made = plan(over())
    assert made.status.tidied
    assert made.actions == ()  # its pods have ended and stay for their logs
    assert is_idle(seen.job, made.status, seen.workers)


def test_a_tidied_job_is_cleaned_no_second_time_by_another_operator() -> None:
    seen = over(cleaned=False)
    assert kinds(replace(seen, status=replace(seen.status, tidied=True)), CleanMemory) == []


def test_a_memory_tier_that_never_answers_holds_no_job_up() -> None:
    seen = replace(over(), memory_cleaned=False)
    assert not plan(seen).status.tidied
    assert plan(replace(seen, now=NOW + UNHEARD_SECONDS)).status.tidied


def test_all_pods_go_where_that_is_asked_for() -> None:
    seen = over(clean_pod_policy="All")
    assert len(kinds(seen, DeleteWorker)) == 3
    assert kinds(over(), DeleteWorker) == []


def test_a_pod_that_was_ending_when_its_node_died_is_forgotten_by_force() -> None:
    seen = over()
    ending = replace(seen.workers[0], phase="Running", exit_code=None, deleting=True)
    seen = replace(seen, workers=(ending, *seen.workers[1:]))
    assert kinds(seen, DeleteWorker) == []
    (delete,) = kinds(with_node(seen, "n0", ready=False), DeleteWorker)
    assert delete.force


def test_a_job_is_deleted_when_its_time_after_the_end_is_up_and_not_before() -> None:
    seen = over(ttl_seconds_after_finished=30.0)
    made = plan(seen)
    assert not any(isinstance(a, DeleteJob) for a in made.actions)
    assert made.wake_after_seconds == pytest.approx(30.0)
    assert kinds(replace(seen, now=NOW + 30), DeleteJob)
    assert kinds(over(), DeleteJob) == []
    assert not kinds(replace(over(cleaned=False, ttl_seconds_after_finished=0.0), now=NOW + 1), DeleteJob)


def test_a_failed_jobs_memory_is_kept_for_a_while_but_no_longer_than_the_job() -> None:
    seen = over("Failed", cleaned=False)
    assert kinds(seen, CleanMemory) == []
    assert kinds(replace(seen, now=NOW + KEPT_AFTER_FAILURE_SECONDS), CleanMemory)
    assert kinds(replace(over("Failed", cleaned=False, ttl_seconds_after_finished=5.0), now=NOW + 5), CleanMemory)


# ---- deleted -------------------------------------------------------------------------------------------------------


def deleted(*purges: PurgeSeen, workers: bool = False, held: bool = True, **spec: Any) -> Observed:
    seen = running(**{"checkpoint": DELETE, **spec})
    seen = replace(seen, now=NOW, job=replace(seen.job, deleted=True, held=held), purges=purges, sessions=())
    return seen if workers else replace(seen, workers=())


def test_only_a_job_whose_persistent_data_shall_go_with_it_is_held_back() -> None:
    seen = running(checkpoint=DELETE)
    assert kinds(seen, SetFinalizer) == [SetFinalizer(True)]
    held = replace(seen, job=replace(seen.job, held=True))
    assert kinds(held, SetFinalizer) == []
    assert kinds(running(), SetFinalizer) == []
    kept = replace(DELETE, persistent=replace(DELETE.persistent, on_job_deletion="Keep"))  # type: ignore[type-var]
    changed = replace(held, job=replace(held.job, spec=replace(held.job.spec, checkpoint=kept)))
    assert kinds(changed, SetFinalizer) == [SetFinalizer(False)]


def test_a_deleted_job_that_nothing_holds_takes_pods_and_memory_along() -> None:
    made = plan(deleted(workers=True, held=False))
    assert len([a for a in made.actions if isinstance(a, DeleteWorker)]) == 3
    assert [a for a in made.actions if isinstance(a, CleanMemory)]
    assert not any(isinstance(a, PurgePersistent | SetFinalizer) for a in made.actions)


def test_workers_of_a_deleted_job_hear_that_no_world_is_to_be_left_in_order() -> None:
    seen = replace(deleted(workers=True, held=False), sessions=running(checkpoint=DELETE).sessions)
    (told,) = kinds(seen, RetireWorkers)
    assert isinstance(told, RetireWorkers)
    assert (told.indexes, told.exit_code, told.reason) == ((0, 1, 2), 0, "the job was deleted")


def test_its_persistent_data_waits_for_workers_that_may_still_write() -> None:
    assert kinds(deleted(workers=True), PurgePersistent, SetFinalizer) == []
    assert kinds(deleted(), PurgePersistent) == [PurgePersistent(1)]


def test_it_is_let_go_once_its_data_is_gone() -> None:
    assert kinds(deleted(PurgeSeen(1, "Running", created_seconds=NOW)), PurgePersistent, SetFinalizer) == []
    made = plan(deleted(PurgeSeen(1, "Succeeded", created_seconds=NOW)))
    assert [a for a in made.actions if isinstance(a, SetFinalizer)] == [SetFinalizer(False)]
    assert [e.message for e in made.events] == ["s3://bucket/prefix/uid-1 was deleted"]


def test_a_deletion_that_failed_is_tried_again_after_a_while() -> None:
    failed = PurgeSeen(1, "Failed", "AccessDenied", NOW - 1)
    made = plan(deleted(failed))
    assert not any(isinstance(a, PurgePersistent | SetFinalizer) for a in made.actions)
    assert made.wake_after_seconds == pytest.approx(AGAIN_SECONDS - 1)
    late = replace(failed, created_seconds=NOW - AGAIN_SECONDS)
    assert kinds(deleted(late), PurgePersistent) == [PurgePersistent(2)]


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown"])
def test_one_that_never_ends_counts_as_failed(phase: Any) -> None:
    stuck = PurgeSeen(1, phase, created_seconds=NOW - PURGE_SECONDS)
    assert kinds(deleted(stuck), PurgePersistent) == [PurgePersistent(2)]


def test_nobody_is_stuck_with_what_cannot_be_deleted() -> None:
    made = plan(deleted(PurgeSeen(PURGE_ATTEMPTS, "Failed", "AccessDenied", NOW - 1)))
    assert [a for a in made.actions if isinstance(a, SetFinalizer)] == [SetFinalizer(False)]
    (event,) = made.events
    assert event.warning
    assert (
        event.message
        == "s3://bucket/prefix/uid-1 was not deleted in 3 attempts (AccessDenied); delete that folder by hand"
    )


QUOTA = "failed quota: team: must specify limits.cpu for: delete (403 Forbidden: …)"


def refused(times: int, ago: float = 0.0, since: float = 0.0, *purges: PurgeSeen, **more: Any) -> Observed:
    """The fabric refused the next attempt so often, the last time so long ago."""
    attempt = 1 + max((one.attempt for one in purges), default=0)
    call = PurgeCallSeen(
        refusals=times,
        refusal=QUOTA,
        refused_attempt=attempt,
        since_seconds=NOW - since,
        last_seconds=NOW - ago,
        **more,
    )
    return replace(deleted(*purges), purge_call=call)


def test_a_job_whose_data_is_not_deleted_yet_does_not_say_that_it_is() -> None:
    assert (
        plan(deleted()).status.message == "the job was deleted; a pod is created that deletes s3://bucket/prefix/uid-1"
    )
    waiting = replace(deleted(), purge_call=PurgeCallSeen(under_way=True))
    assert kinds(waiting, PurgePersistent, SetFinalizer) == []
    assert "is being created" in plan(waiting).status.message


def test_a_refused_attempt_says_so_with_the_servers_sentence_first_and_is_made_again() -> None:
    made = plan(refused(1, AGAIN_SECONDS - 1))
    assert made.status.message.startswith(f"{QUOTA}; so s3://bucket/prefix/uid-1 is not deleted yet (attempt 1 of 3)")
    assert not any(isinstance(a, PurgePersistent | SetFinalizer) for a in made.actions)
    assert made.wake_after_seconds == pytest.approx(1.0)
    made = plan(refused(1, AGAIN_SECONDS))
    assert [a for a in made.actions if isinstance(a, PurgePersistent)] == [PurgePersistent(1)]
    (event,) = [e for e in made.events if e.reason == "PersistentDataDeletionRefused"]
    assert event.warning
    assert event.message == made.status.message
    assert kinds(refused(2, 2 * AGAIN_SECONDS), PurgePersistent) == []
    assert kinds(refused(2, REFUSED_TIMES * AGAIN_SECONDS), PurgePersistent) == [PurgePersistent(1)]


@pytest.mark.parametrize(
    "seen",
    [
        refused(PURGE_ATTEMPTS),
        refused(1, 0.0, 0.0, PurgeSeen(2, "Failed", "AccessDenied", NOW - 90)),
        refused(0, 5.0, PURGE_SECONDS),  # nobody answered for so long
        refused(1, closing=True),
    ],
    ids=["refused each time", "failed and refused", "no answer", "the namespace is being deleted"],
)
def test_refused_attempts_count_towards_the_same_bound(seen: Observed) -> None:
    made = plan(seen)
    assert [a for a in made.actions if isinstance(a, SetFinalizer | PurgePersistent)] == [SetFinalizer(False)]
    (event,) = made.events
    assert event.reason == "PersistentDataLeft"
    assert event.message.startswith(QUOTA)
    assert "s3://bucket/prefix/uid-1 was not deleted" in event.message


def test_a_request_that_was_carried_out_without_an_answer_is_no_refusal_of_the_next() -> None:
    made = PurgeSeen(1, "Failed", "AccessDenied", NOW - AGAIN_SECONDS)
    seen = replace(refused(0, PURGE_SECONDS, PURGE_SECONDS), purges=(made,))
    assert kinds(seen, PurgePersistent, SetFinalizer) == [PurgePersistent(2)]


def test_an_attempt_whose_pod_somebody_removed_is_no_first_one_again() -> None:
    seen = replace(deleted(), purge_call=PurgeCallSeen(2, NOW - AGAIN_SECONDS))
    assert kinds(seen, PurgePersistent) == [PurgePersistent(3)]
    seen = replace(deleted(), purge_call=PurgeCallSeen(PURGE_ATTEMPTS, NOW - AGAIN_SECONDS))
    assert kinds(seen, PurgePersistent, SetFinalizer) == [SetFinalizer(False)]
    seen = replace(deleted(PurgeSeen(1, "Running", created_seconds=NOW)), purge_call=PurgeCallSeen(1, NOW))
    assert kinds(seen, PurgePersistent, SetFinalizer) == []


def test_a_job_that_no_longer_wants_it_is_let_go_with_its_data_kept() -> None:
    seen = deleted(checkpoint=CheckpointPolicy(persistent=PersistentTierSpec("s3://bucket/prefix")))
    assert kinds(seen, PurgePersistent, SetFinalizer) == [SetFinalizer(False)]
