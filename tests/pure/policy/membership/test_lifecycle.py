"""Tests of `policy.membership.lifecycle`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import surefoot_operator
from support.builders import BEGAN, manifest, running, with_node, with_session, with_worker, worker
from support.finished_jobs import KEPT
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.spec import (
    CheckpointPolicy,
    ExitCodes,
    FailurePolicy,
    FailureRule,
    HealthPolicy,
    MemoryTierSpec,
    NumericsPolicy,
    PersistentTierSpec,
    RunPolicy,
)
from surefoot_operator.api.status import Membership, Restart, Rollback
from surefoot_operator.job_snapshot import (
    JobSnapshot,
    ObservedBarrier,
    ObservedExit,
    ObservedPurge,
    ObservedPurgeCall,
    PersistentListing,
)
from surefoot_operator.policy.core.actions import (
    ClearJobMemory,
    DeleteJob,
    DeleteWorker,
    FenceMemoryServer,
    PurgePersistent,
    SetFinalizer,
    ShutDownWorkers,
    UploadSaves,
)
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance
from surefoot_operator.policy.membership.final_checkpoint import RESCUE_SECONDS
from surefoot_operator.policy.membership.lifecycle import (
    MAX_PURGE_ATTEMPTS,
    NO_READY_SERVER_SECONDS,
    PURGE_RETRY_SECONDS,
    PURGE_SECONDS,
    REJECTED_RETRY_FACTOR,
    RETENTION_AFTER_FAILURE_SECONDS,
    UPLOAD_SECONDS,
    is_idle,
)
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

# ---- finalizer -------------------------------------------------------------------------------------------------------
# What becomes of a job that is over or deleted: its pods, its memory, its persistent data, and at last itself.

NOW = BEGAN + 100
DELETE = CheckpointPolicy(persistent=PersistentTierSpec("s3://bucket/prefix", on_job_deletion="Delete"))


def kinds(seen: JobSnapshot, *wanted: type[Any]) -> list[Any]:
    return [a for a in plan(seen).actions if isinstance(a, wanted)]


# ---- over ----------------------------------------------------------------------------------------------------------


def over(phase: Any = "Complete", cleaned: bool = True, **policy: Any) -> JobSnapshot:
    """Ended just now; its workers have left."""
    seen = running(run_policy=RunPolicy(**policy))
    status = replace(seen.status, phase=phase, completion_seconds=NOW, message="every trainer finished")
    workers = tuple(replace(w, phase="Succeeded", exit_code=0) for w in seen.workers)
    holders = () if cleaned else seen.servers
    return replace(
        seen, now_seconds=NOW, status=status, workers=workers, sessions=(), servers=holders, memory_cleared=cleaned
    )


def test_an_ended_job_is_tidied_once_its_memory_is_clean_and_rests() -> None:
    seen = over(cleaned=False)
    made = plan(seen)
    assert [a for a in made.actions if isinstance(a, ClearJobMemory)]
    assert not made.status.memory_cleared
    assert not is_idle(seen.job, made.status, seen.workers)
    made = plan(over())
    assert made.status.memory_cleared
    assert made.actions == ()  # its pods have ended and stay for their logs
    assert is_idle(seen.job, made.status, seen.workers)


def test_a_tidied_job_is_cleaned_no_second_time_by_another_operator() -> None:
    seen = over(cleaned=False)
    assert kinds(replace(seen, status=replace(seen.status, memory_cleared=True)), ClearJobMemory) == []


def test_a_memory_tier_that_never_answers_holds_no_job_up() -> None:
    seen = replace(over(), memory_cleared=False)
    assert not plan(seen).status.memory_cleared
    assert plan(replace(seen, now_seconds=NOW + NO_READY_SERVER_SECONDS)).status.memory_cleared


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
    assert kinds(replace(seen, now_seconds=NOW + 30), DeleteJob)
    assert kinds(over(), DeleteJob) == []
    assert not kinds(replace(over(cleaned=False, ttl_seconds_after_finished=0.0), now_seconds=NOW + 1), DeleteJob)


def test_a_failed_jobs_memory_is_kept_for_a_while_but_no_longer_than_the_job() -> None:
    seen = over("Failed", cleaned=False)
    assert kinds(seen, ClearJobMemory) == []
    assert kinds(replace(seen, now_seconds=NOW + RETENTION_AFTER_FAILURE_SECONDS), ClearJobMemory)
    assert kinds(
        replace(over("Failed", cleaned=False, ttl_seconds_after_finished=5.0), now_seconds=NOW + 5), ClearJobMemory
    )


# ---- deleted -------------------------------------------------------------------------------------------------------


def deleted(*purges: ObservedPurge, workers: bool = False, held: bool = True, **spec: Any) -> JobSnapshot:
    seen = running(**{"checkpoint": DELETE, **spec})
    seen = replace(
        seen, now_seconds=NOW, job=replace(seen.job, deleted=True, has_finalizer=held), purges=purges, sessions=()
    )
    return seen if workers else replace(seen, workers=())


def test_only_a_job_whose_persistent_data_shall_go_with_it_is_held_back() -> None:
    seen = running(checkpoint=DELETE)
    assert kinds(seen, SetFinalizer) == [SetFinalizer(True)]
    held = replace(seen, job=replace(seen.job, has_finalizer=True))
    assert kinds(held, SetFinalizer) == []
    assert kinds(running(), SetFinalizer) == []
    kept = replace(DELETE, persistent=replace(DELETE.persistent, on_job_deletion="Keep"))  # type: ignore[type-var]
    changed = replace(held, job=replace(held.job, spec=replace(held.job.spec, checkpoint=kept)))
    assert kinds(changed, SetFinalizer) == [SetFinalizer(False)]


def test_a_deleted_job_that_nothing_holds_takes_pods_and_memory_along() -> None:
    made = plan(deleted(workers=True, held=False))
    assert len([a for a in made.actions if isinstance(a, DeleteWorker)]) == 3
    assert [a for a in made.actions if isinstance(a, ClearJobMemory)]
    assert not any(isinstance(a, PurgePersistent | SetFinalizer) for a in made.actions)


def test_workers_of_a_deleted_job_hear_that_no_world_is_to_be_left_in_order() -> None:
    seen = replace(deleted(workers=True, held=False), sessions=running(checkpoint=DELETE).sessions)
    (told,) = kinds(seen, ShutDownWorkers)
    assert isinstance(told, ShutDownWorkers)
    assert (told.indexes, told.exit_code, told.reason) == ((0, 1, 2), 0, "the job was deleted")


def test_its_persistent_data_waits_for_workers_that_may_still_write() -> None:
    assert kinds(deleted(workers=True), PurgePersistent, SetFinalizer) == []
    assert kinds(deleted(), PurgePersistent) == [PurgePersistent(1)]


def test_it_is_let_go_once_its_data_is_gone() -> None:
    assert kinds(deleted(ObservedPurge(1, "Running", created_seconds=NOW)), PurgePersistent, SetFinalizer) == []
    made = plan(deleted(ObservedPurge(1, "Succeeded", created_seconds=NOW)))
    assert [a for a in made.actions if isinstance(a, SetFinalizer)] == [SetFinalizer(False)]
    assert [e.message for e in made.events] == ["s3://bucket/prefix/uid-1 was deleted"]


def test_a_deletion_that_failed_is_tried_again_after_a_while() -> None:
    failed = ObservedPurge(1, "Failed", "AccessDenied", NOW - 1)
    made = plan(deleted(failed))
    assert not any(isinstance(a, PurgePersistent | SetFinalizer) for a in made.actions)
    assert made.wake_after_seconds == pytest.approx(PURGE_RETRY_SECONDS - 1)
    late = replace(failed, created_seconds=NOW - PURGE_RETRY_SECONDS)
    assert kinds(deleted(late), PurgePersistent) == [PurgePersistent(2)]


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown"])
def test_one_that_never_ends_counts_as_failed(phase: Any) -> None:
    stuck = ObservedPurge(1, phase, created_seconds=NOW - PURGE_SECONDS)
    assert kinds(deleted(stuck), PurgePersistent) == [PurgePersistent(2)]


def test_nobody_is_stuck_with_what_cannot_be_deleted() -> None:
    made = plan(deleted(ObservedPurge(MAX_PURGE_ATTEMPTS, "Failed", "AccessDenied", NOW - 1)))
    assert [a for a in made.actions if isinstance(a, SetFinalizer)] == [SetFinalizer(False)]
    (event,) = made.events
    assert event.warning
    assert (
        event.message
        == "s3://bucket/prefix/uid-1 was not deleted in 3 attempts (AccessDenied); delete that folder by hand"
    )


QUOTA = "failed quota: team: must specify limits.cpu for: delete (403 Forbidden: …)"


def refused(times: int, ago: float = 0.0, since: float = 0.0, *purges: ObservedPurge, **more: Any) -> JobSnapshot:
    """The fabric refused the next attempt so often, the last time so long ago."""
    attempt = 1 + max((one.attempt for one in purges), default=0)
    call = ObservedPurgeCall(
        rejections=times,
        rejection=QUOTA,
        rejected_attempt=attempt,
        since_seconds=NOW - since,
        last_seconds=NOW - ago,
        **more,
    )
    return replace(deleted(*purges), purge_call=call)


def test_a_job_whose_data_is_not_deleted_yet_does_not_say_that_it_is() -> None:
    assert plan(deleted()).status.message == "the job was deleted; creating a pod that deletes s3://bucket/prefix/uid-1"
    waiting = replace(deleted(), purge_call=ObservedPurgeCall(in_progress=True))
    assert kinds(waiting, PurgePersistent, SetFinalizer) == []
    assert "creating the pod that deletes" in plan(waiting).status.message


def test_a_refused_attempt_says_so_with_the_servers_sentence_first_and_is_made_again() -> None:
    made = plan(refused(1, PURGE_RETRY_SECONDS - 1))
    assert made.status.message.startswith(f"{QUOTA}; so s3://bucket/prefix/uid-1 is not deleted yet (attempt 1 of 3)")
    assert not any(isinstance(a, PurgePersistent | SetFinalizer) for a in made.actions)
    assert made.wake_after_seconds == pytest.approx(1.0)
    made = plan(refused(1, PURGE_RETRY_SECONDS))
    assert [a for a in made.actions if isinstance(a, PurgePersistent)] == [PurgePersistent(1)]
    (event,) = [e for e in made.events if e.reason == "PersistentDataDeletionRejected"]
    assert event.warning
    assert event.message == made.status.message
    assert kinds(refused(2, 2 * PURGE_RETRY_SECONDS), PurgePersistent) == []
    assert kinds(refused(2, REJECTED_RETRY_FACTOR * PURGE_RETRY_SECONDS), PurgePersistent) == [PurgePersistent(1)]


@pytest.mark.parametrize(
    "seen",
    [
        refused(MAX_PURGE_ATTEMPTS),
        refused(1, 0.0, 0.0, ObservedPurge(2, "Failed", "AccessDenied", NOW - 90)),
        refused(0, 5.0, PURGE_SECONDS),  # nobody answered for so long
        refused(1, closing=True),
    ],
    ids=["refused each time", "failed and refused", "no answer", "the namespace is being deleted"],
)
def test_refused_attempts_count_towards_the_same_bound(seen: JobSnapshot) -> None:
    made = plan(seen)
    assert [a for a in made.actions if isinstance(a, SetFinalizer | PurgePersistent)] == [SetFinalizer(False)]
    (event,) = made.events
    assert event.reason == "PersistentDataNotDeleted"
    assert event.message.startswith(QUOTA)
    assert "s3://bucket/prefix/uid-1 was not deleted" in event.message


def test_a_request_that_was_carried_out_without_an_answer_is_no_refusal_of_the_next() -> None:
    made = ObservedPurge(1, "Failed", "AccessDenied", NOW - PURGE_RETRY_SECONDS)
    seen = replace(refused(0, PURGE_SECONDS, PURGE_SECONDS), purges=(made,))
    assert kinds(seen, PurgePersistent, SetFinalizer) == [PurgePersistent(2)]


def test_an_attempt_whose_pod_somebody_removed_is_no_first_one_again() -> None:
    seen = replace(deleted(), purge_call=ObservedPurgeCall(2, NOW - PURGE_RETRY_SECONDS))
    assert kinds(seen, PurgePersistent) == [PurgePersistent(3)]
    seen = replace(deleted(), purge_call=ObservedPurgeCall(MAX_PURGE_ATTEMPTS, NOW - PURGE_RETRY_SECONDS))
    assert kinds(seen, PurgePersistent, SetFinalizer) == [SetFinalizer(False)]
    seen = replace(deleted(ObservedPurge(1, "Running", created_seconds=NOW)), purge_call=ObservedPurgeCall(1, NOW))
    assert kinds(seen, PurgePersistent, SetFinalizer) == []


def test_a_job_that_no_longer_wants_it_is_let_go_with_its_data_kept() -> None:
    seen = deleted(checkpoint=CheckpointPolicy(persistent=PersistentTierSpec("s3://bucket/prefix")))
    assert kinds(seen, PurgePersistent, SetFinalizer) == [SetFinalizer(False)]


# ---- endings ---------------------------------------------------------------------------------------------------------
# Whatever ends a job, its newest complete checkpoint is uploaded to the persistent tier first, while somebody is there to bring it.

NEWEST = Checkpoint(1, 40)
"""Complete in memory; the interval of the persistent tier is 100 steps, so nothing else asks for it."""


def training(**spec: Any) -> JobSnapshot:
    tier = PersistentTierSpec("file:///there", interval_steps=100)
    return running(now=NOW, checkpoint=replace(KEPT, persistent=tier), **spec)


def failed_rank(seen: JobSnapshot, code: int = 3) -> JobSnapshot:
    return with_session(seen, 1, exit=ObservedExit(1, 1, code, "it failed", False, NOW - 0.1))


def odd(seen: JobSnapshot) -> JobSnapshot:
    """Every rank's loss is out of band since step 41."""
    for index in range(3):
        seen = with_session(
            seen, index, anomaly_step=42, anomaly_since_step=41, anomaly_kind="spike", anomaly_text="step 42 is odd"
        )
    return seen


def watched() -> JobSnapshot:
    return odd(training(health_policy=HealthPolicy(numerics=NumericsPolicy(on_spike="Stop", spike_steps=2))))


def too_many_rollbacks() -> JobSnapshot:
    numerics = NumericsPolicy(on_spike="Rollback", spike_steps=2, max_rollbacks=0)
    return odd(training(health_policy=HealthPolicy(numerics=numerics)))


def no_progress() -> JobSnapshot:
    seen = failed_rank(training(failure_policy=FailurePolicy(max_no_progress_restarts=1)))
    return replace(seen, status=replace(seen.status, no_progress_restarts=1, reached_step=42))


def too_many_lost_nodes() -> JobSnapshot:
    seen = training(failure_policy=FailurePolicy(max_restarts=1))
    seen = replace(seen, status=replace(seen.status, recent_restarts=(Restart(NOW - 5),)))
    gone = with_worker(seen, 1, phase="Failed", message="gone")
    return replace(gone, nodes=tuple(replace(n, ready=n.name != "n1") for n in gone.nodes), sessions=(
        seen.sessions[0], replace(seen.sessions[1], connected=False, since_seconds=NOW - 30, last_message_seconds=NOW - 30), seen.sessions[2],
    ))  # fmt: skip


def claimed(seen: JobSnapshot) -> JobSnapshot:
    """Worker 1 is lost; epoch 2 is claimed and waits for another one. All was read."""
    assert seen.status.membership is not None
    world = Membership(2, "Claimed", None, 3, seen.status.membership.members, "worker 1 was lost", NOW - 20)
    left = replace(seen, workers=(seen.workers[0], seen.workers[2]), sessions=(seen.sessions[0], seen.sessions[2]))
    return read_for(replace(left, status=replace(left.status, membership=world, next_attempt=3)))


def worn_starts() -> JobSnapshot:
    seen = claimed(training(least=3))
    dead = replace(worker(1, 2), phase="Failed", exit_code=1, message="no module", created_seconds=NOW - 15)
    seen = replace(seen, workers=(seen.workers[0], dead, seen.workers[1]))
    return replace(seen, status=replace(seen.status, failed_starts=6, failed_starts_counted=6))


def late(seen: JobSnapshot) -> JobSnapshot:
    policy = RunPolicy(active_deadline_seconds=99)
    return replace(seen, job=replace(seen.job, spec=replace(seen.job.spec, run_policy=policy)))


ENDINGS: dict[str, Callable[[], JobSnapshot]] = {
    "activeDeadlineSeconds of a world that trains": lambda: late(training()),
    "activeDeadlineSeconds of a world that waits": lambda: late(claimed(training(least=3))),
    "backoffLimit": lambda: failed_rank(training(run_policy=RunPolicy(backoff_limit=0))),
    "maxNoProgressRestarts": no_progress,
    "maxRestarts": too_many_lost_nodes,
    "a rule": lambda: failed_rank(
        training(failure_policy=FailurePolicy(rules=(FailureRule("three", "FailJob", ExitCodes((3,))),)))
    ),
    "numerics: Stop": watched,
    "maxRollbacks": too_many_rollbacks,
    "workers that end before they train": worn_starts,
}


def read_for(seen: JobSnapshot) -> JobSnapshot:
    """What a claim asks for is done: trainers have stopped, holders were sealed and read, the persistent tier is empty."""
    world = seen.status.membership
    assert world is not None
    return replace(
        seen,
        sessions=tuple(replace(s, stopped=world.generation) for s in seen.sessions),
        servers=tuple(replace(h, fence=world.generation, read_generation=world.generation) for h in seen.servers),
        persistent=PersistentListing(world.generation, (), requested_seconds=seen.now_seconds),
    )


def uploading(seen: JobSnapshot) -> JobSnapshot:
    """Plans on until an upload is asked for; what plans ask of others is done at once."""
    for _ in range(6):
        made = plan(seen)
        check_plan(made, seen)
        assert made.status.phase != "Failed", made.reason
        kept = plan_maintenance(replace(seen, status=made.status, upload_now=made.uploads))
        if made.uploads and any(isinstance(a, UploadSaves) for a in kept.actions):
            assert kept.pinned == NEWEST
            assert "is uploaded to the persistent tier first" in made.reason
            assert made.wake_after_seconds is not None
            assert 1.0 < made.wake_after_seconds <= RESCUE_SECONDS
            return replace(seen, status=kept.status)
        seen = read_for(replace(seen, status=made.status))
    raise AssertionError(f"no upload was asked for: {made.reason}")


def uploaded(seen: JobSnapshot) -> JobSnapshot:
    """Every rank's part is there, and status says so."""
    made = plan(seen)
    there = {NEWEST: frozenset(RankSave(1, 40, rank) for rank in range(3))}
    kept = plan_maintenance(replace(seen, status=made.status, upload_now=made.uploads, uploaded=there))
    assert kept.status.last_uploaded == NEWEST
    assert [e.reason for e in kept.events] == ["CheckpointUploaded"]
    return replace(seen, status=kept.status)


def later(seen: JobSnapshot, seconds: float) -> JobSnapshot:
    now = seen.now_seconds + seconds
    heard = (replace(s, last_message_seconds=now) if s.connected else s for s in seen.sessions)
    return replace(seen, now_seconds=now, sessions=tuple(heard))


@pytest.mark.parametrize("name", ENDINGS)
def test_what_a_job_ends_with_is_uploaded_before_it_ends(name: str) -> None:
    seen = uploading(ENDINGS[name]())
    over = plan(uploaded(seen))
    assert over.status.phase == "Failed"
    assert over.status.ending is None
    assert over.status.message
    assert "persistent tier first" not in over.status.message, "the cause, and not what was waited for"
    assert "JobFailed" in [e.reason for e in over.events]


@pytest.mark.parametrize("name", ENDINGS)
def test_an_upload_that_does_not_come_holds_the_end_up_for_a_while_only(name: str) -> None:
    seen = uploading(ENDINGS[name]())
    assert plan(later(seen, RESCUE_SECONDS - 60)).status.phase != "Failed"
    assert plan(later(seen, RESCUE_SECONDS + 1)).status.phase == "Failed"


@pytest.mark.parametrize("name", ["activeDeadlineSeconds of a world that waits", "workers that end before they train"])
def test_a_claim_that_is_not_read_yet_is_read_before_the_job_ends(name: str) -> None:
    seen = ENDINGS[name]()
    unread = replace(seen, servers=tuple(replace(h, read_generation=1) for h in seen.servers))
    made = plan(unread)
    assert made.status.ending is not None
    assert {type(a) for a in made.actions} == {FenceMemoryServer}
    assert plan(later(replace(unread, status=made.status), RESCUE_SECONDS + 1)).status.phase == "Failed"
    uploading(replace(seen, status=made.status))


@pytest.mark.parametrize("name", ENDINGS)
def test_where_nobody_is_left_to_upload_it_or_it_is_there_the_job_ends_at_once(name: str) -> None:
    seen = uploading(ENDINGS[name]())
    kept = replace(seen, status=replace(seen.status, last_uploaded=NEWEST))
    assert plan(kept).status.phase == "Failed"
    away = tuple(replace(s, connected=False, since_seconds=NOW) for s in seen.sessions)
    if seen.status.ending is not None:
        assert plan(replace(seen, sessions=away)).status.phase == "Failed"


def test_an_ending_that_was_decided_is_not_taken_back() -> None:
    seen = uploading(watched())
    assert seen.status.ending is not None
    assert "step 42 is odd" in seen.status.ending.reason
    calm = tuple(replace(s, progress=replace(s.progress, anomaly_step=0)) for s in seen.sessions)
    assert plan(uploaded(replace(seen, sessions=calm))).status.phase == "Failed"


def test_what_a_job_uploads_that_is_stopped_for_its_loss_is_from_before_that() -> None:
    seen = watched()
    for index in range(3):
        seen = with_session(seen, index, anomaly_since_step=35)
    made = plan(seen)
    assert made.status.rollback == Rollback(1, 34, 42, 35, "step 42 is odd (workers 0, 1, 2, since step 35)", 1, False)
    claim = read_for(replace(seen, status=made.status))
    made = plan(claim)
    assert plan_maintenance(replace(claim, status=made.status, upload_now=made.uploads)).pinned == Checkpoint(1, 30)


def test_a_claim_that_waits_for_long_uploads_what_it_will_restore() -> None:
    seen = claimed(training(least=3))
    early = plan(seen)
    assert not early.uploads, "a recovery of seconds pays for no upload"
    assert early.wake_after_seconds is not None
    assert early.wake_after_seconds <= 10.0
    assert not plan_maintenance(replace(seen, status=early.status)).actions
    seen = later(seen, 11)
    made = plan(seen)
    assert made.uploads
    kept = plan_maintenance(replace(seen, status=made.status, upload_now=made.uploads))
    assert kept.pinned == NEWEST
    assert {a.generation for a in kept.actions if isinstance(a, UploadSaves)} == {2}
    status = uploaded(seen).status
    after = plan(replace(seen, status=status))
    assert after.status.phase not in ("Complete", "Failed"), "it goes on to wait"
    assert not plan_maintenance(replace(seen, status=after.status, upload_now=after.uploads)).actions


def test_a_job_that_is_suspended_while_it_waits_uploads_first() -> None:
    seen = claimed(training(least=3, suspend=True))
    made = plan(seen)
    assert made.uploads
    assert made.status.membership is not None
    assert (made.status.membership.state, made.status.phase) == ("Claimed", "Resizing")
    done = plan(uploaded(seen)).status
    assert done.membership is not None
    assert (done.membership.state, done.membership.members) == ("Committed", ())


def test_no_ending_goes_past_the_function_that_uploads_first() -> None:
    """`lifecycle.with_completion` writes Complete and Failed, and only `lifecycle.end_job` calls it."""
    callers = []
    for path in Path(surefoot_operator.__path__[0]).rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        names = (ast.unparse(node.func) for node in calls)
        callers += [path.name for name in names if name in ("with_completion", "lifecycle.with_completion")]
    assert callers == ["lifecycle.py"]


# ---- suspension ------------------------------------------------------------------------------------------------------
# A suspension is done when its checkpoint is where it survives the nodes, or says that it is not.

GOAL = Checkpoint(1, 44)
MEMORY = MemoryTierSpec(interval_steps=10)


def halting(persistent: bool = True, floor: int | None = None, ago: float = 5.0) -> JobSnapshot:
    """Every rank waits at step 44 because the job is suspended; that save is on two holders each."""
    tier = PersistentTierSpec("file:///there", interval_steps=20) if persistent else None
    seen = running(step=44, suspend=True, checkpoint=CheckpointPolicy(MEMORY, tier))
    saves = [manifest(1, 44, r, 3) for r in range(3)]
    return replace(
        seen,
        barrier=ObservedBarrier(Barrier(1, 44, "bound"), NOW - ago),
        sessions=tuple(replace(s, barrier_step=44, saved=GOAL) for s in seen.sessions),
        servers=tuple(
            replace(h, entries=(*h.entries, *(m for m in saves if n in (m.save.rank, (m.save.rank + 1) % 3))))
            for n, h in enumerate(seen.servers)
        ),
        status=replace(seen.status, last_uploaded=Checkpoint(1, floor) if floor is not None else None),
    )


def state(seen: JobSnapshot) -> str:
    world = plan(seen).status.membership
    assert world is not None
    return world.state


def test_the_step_of_a_suspension_is_uploaded_before_the_workers_go() -> None:
    seen = halting(floor=40)
    made = plan(seen)
    assert state(seen) == "Committed"
    assert "is uploaded to the persistent tier first" in made.reason
    assert plan_maintenance(replace(seen, status=made.status)).pinned == GOAL
    assert state(halting(floor=44)) == "Claimed"


def test_a_store_that_does_not_answer_holds_no_nodes_for_ever() -> None:
    assert state(halting(floor=40, ago=UPLOAD_SECONDS - 1)) == "Committed"
    assert state(halting(floor=40, ago=UPLOAD_SECONDS + 1)) == "Claimed"
    seen = halting(floor=40)
    away = replace(seen, sessions=tuple(replace(s, connected=False, since_seconds=NOW) for s in seen.sessions))
    assert "persistent tier first" not in plan(away).reason, "nobody is there who could upload it"


def test_without_a_persistent_tier_nothing_is_waited_for() -> None:
    assert state(halting(persistent=False)) == "Claimed"


def suspended(floor: int | None) -> JobSnapshot:
    seen = halting(floor=floor)
    world = seen.status.membership
    assert world is not None
    empty = replace(world, generation=2, parent=GOAL, world_size=0, members=(), reason="the job is suspended")
    return replace(
        seen,
        barrier=None,
        sessions=(),
        workers=(),
        servers=tuple(replace(h, fence=2, read_generation=2) for h in seen.servers),
        status=replace(seen.status, membership=empty, phase="Suspended"),
    )


def test_a_suspended_job_says_where_its_checkpoint_lies_where_that_is_in_memory_alone() -> None:
    made = plan(suspended(None))
    condition = next(c for c in made.status.conditions if c.type == "Suspended")
    assert condition.status == "True"
    assert "step 44 of generation 1, which is in memory only" in condition.message
    assert "n0, n1, n2" in condition.message
    assert "memory only" not in plan(suspended(44)).status.message
