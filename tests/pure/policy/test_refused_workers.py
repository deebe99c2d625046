"""A worker that the fabric takes its time about, or will not make: nobody who could train waits for it."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, holder, job, manifest, running
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import CreateSeen, Observed
from surefoot_operator.policy.core.actions import Action, CreateWorker, SealHolder
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 100
QUOTA = 'pods "gpt-2-7" is forbidden: exceeded quota'


def shrunk(*creates: CreateSeen) -> Observed:
    """Workers 0 and 1 train; worker 2 is not there, and was asked for as `creates` say."""
    seen = running()
    world = seen.status.world
    assert world is not None
    small = replace(world, size=2, members=world.members[:2])
    status = replace(seen.status, world=small, next_attempt=8)
    return replace(seen, status=status, workers=seen.workers[:2], sessions=seen.sessions[:2], creates=creates)


def asked(seen: Observed) -> list[Action]:
    return [a for a in plan(seen).actions if isinstance(a, CreateWorker)]


def condition(seen: Observed, kind: str) -> tuple[str, str, str]:
    return next((c.status, c.reason, c.message) for c in plan(seen).status.conditions if c.type == kind)


def test_what_is_under_way_is_not_asked_for_again_under_another_attempt() -> None:
    assert asked(shrunk()) == [CreateWorker(2, 8)]
    made = plan(shrunk(CreateSeen(2, 7, under_way=True)))
    assert [a for a in made.actions if isinstance(a, CreateWorker)] == []
    assert made.status.next_attempt == 8


def test_what_was_refused_is_asked_for_again_under_its_own_attempt_once_that_is_due() -> None:
    early = shrunk(CreateSeen(2, 7, False, QUOTA, until_seconds=NOW + 4))
    made = plan(early)
    assert asked(early) == []
    assert made.wake_after_seconds is not None
    assert made.wake_after_seconds <= 4.0
    due = shrunk(CreateSeen(2, 7, False, QUOTA, until_seconds=NOW))
    assert asked(due) == [CreateWorker(2, 7)]
    assert plan(due).status.next_attempt == 8


def test_the_refusals_own_words_stand_on_the_job_and_are_told_once() -> None:
    seen = shrunk(CreateSeen(2, 7, False, QUOTA, until_seconds=NOW + 4))
    assert condition(seen, "PodsScheduled") == (
        "False",
        "Refused",
        f"2 of 3 workers have a node; worker 2 was refused: {QUOTA}",
    )
    first = plan(seen)
    assert [e.message for e in first.events if e.reason == "WorkerRefused"] == [
        f"2 of 3 workers have a node; worker 2 was refused: {QUOTA}; the operator tries again"
    ]
    assert "WorkerRefused" not in {e.reason for e in plan(replace(seen, status=first.status)).events}


def test_a_refusal_that_a_later_worker_overtook_means_nothing_any_more() -> None:
    seen = running()
    assert plan(replace(seen, creates=(CreateSeen(2, 1, False, QUOTA),))).actions == plan(seen).actions


def beginning(refusal: CreateSeen) -> Observed:
    first = plan(Observed(now=NOW, term_seconds=NOW, job=job(3, 1), status=JobStatus()))
    return Observed(now=NOW, term_seconds=NOW, job=job(3, 1), status=first.status, creates=(refusal,))


def test_a_pod_that_can_never_be_made_fails_a_job_that_has_no_other_with_the_servers_sentence() -> None:
    never = "the API server refused to POST pods: 422 Invalid: spec.containers[0].image: Required value"
    made = plan(beginning(CreateSeen(0, 1, False, never, lasting=True)))
    assert made.status.phase == "Failed"
    assert made.status.message == f"worker 0 can never be made as the job asks for it: {never}"


def test_a_quota_fails_nobody_however_long_it_lasts() -> None:
    late = replace(beginning(CreateSeen(0, 1, False, QUOTA)), now=NOW + 86_400)
    assert plan(late).status.phase != "Failed"
    never = replace(shrunk(CreateSeen(2, 7, False, QUOTA, lasting=True)), now=NOW)
    assert plan(never).status.phase == "Running", "others train: they are not failed for the one that cannot be made"


def test_survivors_are_sealed_for_and_assigned_while_the_replacement_is_refused() -> None:
    """The world of two is committed although worker 2 was asked for and refused ever since."""
    saved = [manifest(1, 40, rank, 3) for rank in range(3)]
    seen = shrunk(CreateSeen(2, 7, False, QUOTA, until_seconds=NOW + 9))
    world = seen.status.world
    assert world is not None
    claimed = replace(world, epoch=2, state="Claimed", reason="node n2 is gone", changed_seconds=NOW)
    status = replace(seen.status, world=claimed)
    stopped = tuple(replace(s, stopped=2, warm=True) for s in seen.sessions)
    seen = replace(seen, status=status, sessions=stopped)
    sealing = plan(replace(seen, holders=(holder("n0"), holder("n1"))))
    assert {a.holder.node for a in sealing.actions if isinstance(a, SealHolder)} == {"n0", "n1"}
    gone = holder("n2", state="Gone")
    read = plan(replace(seen, holders=(holder("n0", 2, *saved), holder("n1", 2, *saved), gone)))
    assert read.status.world is not None
    assert (read.status.world.state, len(read.status.world.members)) == ("Committed", 2)


def test_a_worker_that_was_asked_to_be_deleted_gets_no_rank() -> None:
    """The call was not answered, and may be carried out late: the world would lose it a moment after its commit."""
    seen = shrunk()
    full = running()
    spare = replace(seen, workers=full.workers, sessions=full.sessions)
    assert not plan(spare).reason.startswith("epoch 1 runs"), "it is warm, and the world grows by it"
    asked_to_go = replace(spare, deletions=frozenset({full.workers[2].uid}))
    made = plan(asked_to_go)
    assert made.status.world == spare.status.world
    assert [(c.index, c.attempt) for c in made.actions if isinstance(c, CreateWorker)] == [(2, 8)]


def test_a_member_that_was_asked_to_be_deleted_is_left_in_order() -> None:
    full = running()
    made = plan(replace(full, deletions=frozenset({full.workers[2].uid})))
    assert "worker 2 was asked to be deleted" in made.reason
    assert "hold" in made.reason
