"""Whatever ends a job, its newest complete checkpoint goes to the persistent tier first, while somebody is there to bring it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import surefoot_operator
from support.builders import BEGAN, running, with_session, with_worker, worker
from support.finished_jobs import KEPT
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot_operator.api.spec import (
    ExitCodes,
    FailurePolicy,
    FailureRule,
    HealthPolicy,
    NumericsPolicy,
    PersistentTierSpec,
    RunPolicy,
)
from surefoot_operator.api.status import Restart, Rollback, World
from surefoot_operator.job_snapshot import ExitSeen, Observed, PersistentSeen
from surefoot_operator.policy.core.actions import PromoteSaves, SealHolder
from surefoot_operator.policy.maintenance.maintenance_plan import maintain
from surefoot_operator.policy.membership.final_checkpoint import RESCUE_SECONDS
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = BEGAN + 100
NEWEST = Checkpoint(1, 40)
"""Complete in memory; the interval of the persistent tier is 100 steps, so nothing else asks for it."""


def training(**spec: Any) -> Observed:
    tier = PersistentTierSpec("file:///there", interval_steps=100)
    return running(now=NOW, checkpoint=replace(KEPT, persistent=tier), **spec)


def failed_rank(seen: Observed, code: int = 3) -> Observed:
    return with_session(seen, 1, exit=ExitSeen(1, 1, code, "it failed", False, NOW - 0.1))


def odd(seen: Observed) -> Observed:
    """Every rank's loss is out of band since step 41."""
    for index in range(3):
        seen = with_session(seen, index, odd_step=42, odd_since=41, odd_kind="spike", odd_text="step 42 is odd")
    return seen


def watched() -> Observed:
    return odd(training(health_policy=HealthPolicy(numerics=NumericsPolicy(on_spike="Stop", spike_steps=2))))


def too_many_rollbacks() -> Observed:
    numerics = NumericsPolicy(on_spike="Rollback", spike_steps=2, max_rollbacks=0)
    return odd(training(health_policy=HealthPolicy(numerics=numerics)))


def no_progress() -> Observed:
    seen = failed_rank(training(failure_policy=FailurePolicy(max_no_progress_restarts=1)))
    return replace(seen, status=replace(seen.status, no_progress_restarts=1, reached_step=42))


def too_many_lost_nodes() -> Observed:
    seen = training(failure_policy=FailurePolicy(max_restarts=1))
    seen = replace(seen, status=replace(seen.status, recent_restarts=(Restart(NOW - 5, False, False, True),)))
    gone = with_worker(seen, 1, phase="Failed", message="gone")
    return replace(gone, nodes=tuple(replace(n, ready=n.name != "n1") for n in gone.nodes), sessions=(
        seen.sessions[0], replace(seen.sessions[1], connected=False, since_seconds=NOW - 30, heard_seconds=NOW - 30), seen.sessions[2],
    ))  # fmt: skip


def claimed(seen: Observed) -> Observed:
    """Worker 1 is lost; epoch 2 is claimed and waits for another one. All was read."""
    assert seen.status.world is not None
    world = World(2, "Claimed", None, 3, seen.status.world.members, "worker 1 was lost", NOW - 20)
    left = replace(seen, workers=(seen.workers[0], seen.workers[2]), sessions=(seen.sessions[0], seen.sessions[2]))
    return read_for(replace(left, status=replace(left.status, world=world, next_attempt=3)))


def worn_starts() -> Observed:
    seen = claimed(training(least=3))
    dead = replace(worker(1, 2), phase="Failed", exit_code=1, message="no module", created_seconds=NOW - 15)
    seen = replace(seen, workers=(seen.workers[0], dead, seen.workers[1]))
    return replace(seen, status=replace(seen.status, failed_starts=6, failed_starts_counted=6))


def late(seen: Observed) -> Observed:
    policy = RunPolicy(active_deadline_seconds=99)
    return replace(seen, job=replace(seen.job, spec=replace(seen.job.spec, run_policy=policy)))


ENDINGS: dict[str, Callable[[], Observed]] = {
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


def read_for(seen: Observed) -> Observed:
    """What a claim asks for is done: trainers have stopped, holders were sealed and read, the persistent tier is empty."""
    world = seen.status.world
    assert world is not None
    return replace(
        seen,
        sessions=tuple(replace(s, stopped=world.epoch) for s in seen.sessions),
        holders=tuple(replace(h, fence=world.epoch, read_epoch=world.epoch) for h in seen.holders),
        persistent=PersistentSeen(world.epoch, (), asked_seconds=seen.now),
    )


def uploading(seen: Observed) -> Observed:
    """Plans on until an upload is asked for; what plans ask of others is done at once."""
    for _ in range(6):
        made = plan(seen)
        check(made, seen)
        assert made.status.phase != "Failed", made.reason
        kept = maintain(replace(seen, status=made.status, uploads=made.uploads))
        if made.uploads and any(isinstance(a, PromoteSaves) for a in kept.actions):
            assert kept.pinned == NEWEST
            assert "goes to the persistent tier first" in made.reason
            assert made.wake_after_seconds is not None
            assert 1.0 < made.wake_after_seconds <= RESCUE_SECONDS
            return replace(seen, status=kept.status)
        seen = read_for(replace(seen, status=made.status))
    raise AssertionError(f"no upload was asked for: {made.reason}")


def uploaded(seen: Observed) -> Observed:
    """Every rank's part is there, and status says so."""
    made = plan(seen)
    there = {NEWEST: frozenset(RankSave(1, 40, rank) for rank in range(3))}
    kept = maintain(replace(seen, status=made.status, uploads=made.uploads, promoted=there))
    assert kept.status.floor == NEWEST
    assert [e.reason for e in kept.events] == ["CheckpointPromoted"]
    return replace(seen, status=kept.status)


def later(seen: Observed, seconds: float) -> Observed:
    now = seen.now + seconds
    heard = (replace(s, heard_seconds=now) if s.connected else s for s in seen.sessions)
    return replace(seen, now=now, sessions=tuple(heard))


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
    unread = replace(seen, holders=tuple(replace(h, read_epoch=1) for h in seen.holders))
    made = plan(unread)
    assert made.status.ending is not None
    assert {type(a) for a in made.actions} == {SealHolder}
    assert plan(later(replace(unread, status=made.status), RESCUE_SECONDS + 1)).status.phase == "Failed"
    uploading(replace(seen, status=made.status))


@pytest.mark.parametrize("name", ENDINGS)
def test_where_nobody_is_left_to_upload_it_or_it_is_there_the_job_ends_at_once(name: str) -> None:
    seen = uploading(ENDINGS[name]())
    kept = replace(seen, status=replace(seen.status, floor=NEWEST))
    assert plan(kept).status.phase == "Failed"
    away = tuple(replace(s, connected=False, since_seconds=NOW) for s in seen.sessions)
    if seen.status.ending is not None:
        assert plan(replace(seen, sessions=away)).status.phase == "Failed"


def test_an_ending_that_was_decided_is_not_taken_back() -> None:
    seen = uploading(watched())
    assert seen.status.ending is not None
    assert "step 42 is odd" in seen.status.ending.reason
    calm = tuple(replace(s, progress=replace(s.progress, odd_step=0)) for s in seen.sessions)
    assert plan(uploaded(replace(seen, sessions=calm))).status.phase == "Failed"


def test_what_a_job_uploads_that_is_stopped_for_its_loss_is_from_before_that() -> None:
    seen = watched()
    for index in range(3):
        seen = with_session(seen, index, odd_since=35)
    made = plan(seen)
    assert made.status.rollback == Rollback(1, 34, 42, 35, "step 42 is odd (workers 0, 1, 2, since step 35)", 1, False)
    claim = read_for(replace(seen, status=made.status))
    made = plan(claim)
    assert maintain(replace(claim, status=made.status, uploads=made.uploads)).pinned == Checkpoint(1, 30)


def test_a_claim_that_waits_for_long_uploads_what_it_will_restore() -> None:
    seen = claimed(training(least=3))
    early = plan(seen)
    assert not early.uploads, "a recovery of seconds pays for no upload"
    assert early.wake_after_seconds is not None
    assert early.wake_after_seconds <= 10.0
    assert not maintain(replace(seen, status=early.status)).actions
    seen = later(seen, 11)
    made = plan(seen)
    assert made.uploads
    kept = maintain(replace(seen, status=made.status, uploads=made.uploads))
    assert kept.pinned == NEWEST
    assert {a.epoch for a in kept.actions if isinstance(a, PromoteSaves)} == {2}
    status = uploaded(seen).status
    after = plan(replace(seen, status=status))
    assert after.status.phase not in ("Complete", "Failed"), "it goes on to wait"
    assert not maintain(replace(seen, status=after.status, uploads=after.uploads)).actions


def test_a_job_that_is_suspended_while_it_waits_uploads_first() -> None:
    seen = claimed(training(least=3, suspend=True))
    made = plan(seen)
    assert made.uploads
    assert made.status.world is not None
    assert (made.status.world.state, made.status.phase) == ("Claimed", "Resizing")
    done = plan(uploaded(seen)).status
    assert done.world is not None
    assert (done.world.state, done.world.members) == ("Committed", ())


def test_no_ending_goes_past_the_function_that_uploads_first() -> None:
    """`lifecycle.with_completion` writes Complete and Failed, and only `lifecycle.end_job` calls it."""
    callers = []
    for path in Path(surefoot_operator.__path__[0]).rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        names = (ast.unparse(node.func) for node in calls)
        callers += [path.name for name in names if name in ("with_completion", "lifecycle.with_completion")]
    assert callers == ["lifecycle.py"]
