"""Losing every checkpoint is a state that waits and says so, until something comes back or a person ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, endpoint, holder, running, with_holder
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import Condition, JobStatus, Membership
from surefoot_operator.job_snapshot import JobSnapshot, PersistentListing
from surefoot_operator.policy.core.actions import ClearJobMemory, FenceMemoryServer, ListPersistentTier, Plan
from surefoot_operator.policy.maintenance.memory_tier_rollout import judge_job_safety
from surefoot_operator.policy.membership.restore_point import LATE_UPLOAD_WAIT_SECONDS
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

NOW = BEGAN + 100
MEMORY = MemoryTierSpec(interval_steps=10)


def decided(seen: JobSnapshot) -> Plan:
    made = plan(seen)
    check_plan(made, seen)
    return made


def lost(policy: str = "Wait", ago: float = 60.0, accepted: str = "", persistent: bool = False) -> JobSnapshot:
    """Epoch 2 is claimed, every holder was read, and none has anything of the job."""
    tier = PersistentTierSpec("file:///tmp/checkpoints") if persistent else None
    seen = running(checkpoint=CheckpointPolicy(MEMORY, tier, on_total_loss=policy))  # type: ignore[arg-type]
    world = seen.status.membership
    assert world is not None
    claim = replace(
        world, generation=2, state="Claimed", reason="all nodes lost their power", changed_seconds=NOW - ago
    )
    return replace(
        seen,
        job=replace(seen.job, accepted_loss=accepted),
        status=replace(seen.status, membership=claim, phase="Recovering"),
        sessions=tuple(replace(s, stopped=2, saved=None, copies=0) for s in seen.sessions),
        servers=tuple(replace(h, fence=2, read_generation=2, entries=()) for h in seen.servers),
        persistent=PersistentListing(2, (), NOW - 1) if persistent else PersistentListing(),
    )


def condition(made: Plan | JobStatus) -> Condition | None:
    status = made.status if isinstance(made, Plan) else made
    return next((c for c in status.conditions if c.type == "CheckpointLost"), None)


def test_a_holder_that_went_a_moment_before_the_others_is_told_as_one_that_had_it() -> None:
    seen = lost()
    rest = tuple(e for e in seen.status.assigned_servers if e.instance.node != "n0")
    assert len(rest) < len(seen.status.assigned_servers)
    seen = replace(seen, status=replace(seen.status, assigned_servers=rest))
    found = condition(decided(seen))
    assert found is not None
    assert "it was on the memory servers of n0, n1, n2" in found.message


@pytest.mark.parametrize("ago", [60.0, 7 * 86400.0])
def test_a_total_loss_waits_and_says_what_is_lost_and_what_may_be_done(ago: float) -> None:
    made = decided(lost(ago=ago))
    assert made.status.phase == "Recovering"
    assert made.status.membership is not None
    assert made.status.membership.state == "Claimed"
    found = condition(made)
    assert found is not None
    assert found.status == "True"
    for word in ("step 40", "n0", "n1", "n2", "surefoot.dev/accept-loss", '"2"', "onTotalLoss"):
        assert word in found.message, word
    (event,) = [e for e in made.events if e.reason == "CheckpointLost"]
    assert event.warning
    assert not any(isinstance(a, ClearJobMemory) for a in made.actions)
    again = decided(replace(lost(ago=ago), status=made.status, now_seconds=NOW + 3600))
    assert not [e for e in again.events if e.reason == "CheckpointLost"], "told once"
    kept = condition(again)
    assert kept is not None
    assert kept.last_transition_seconds == NOW


def test_it_goes_on_by_itself_when_a_holder_comes_back_with_its_data() -> None:
    seen = lost()
    waiting = replace(seen, status=decided(seen).status)
    back = tuple(replace(h, fence=1, read_generation=None) for h in running().servers)
    made = decided(replace(waiting, servers=back))
    assert sum(isinstance(a, FenceMemoryServer) for a in made.actions) == 3
    assert condition(made) is not None, "not over yet"
    read = tuple(replace(h, fence=2, read_generation=2) for h in running().servers)
    made = decided(replace(waiting, servers=read))
    assert made.status.membership is not None
    assert made.status.membership.parent == Checkpoint(1, 40)
    assert condition(made) is None


def test_the_persistent_tier_is_listed_again_while_it_waits_and_the_condition_stays() -> None:
    seen = lost(persistent=True)
    made = decided(seen)
    assert condition(made) is not None
    assert not any(isinstance(a, ListPersistentTier) for a in made.actions)
    later = replace(seen, status=made.status, persistent=PersistentListing(2, (), NOW - 61))
    assert any(isinstance(a, ListPersistentTier) for a in decided(later).actions)
    asked = replace(later, persistent=PersistentListing(requested_seconds=NOW))
    assert condition(decided(asked)) == condition(made)


def test_a_person_accepts_the_loss_of_this_very_epoch() -> None:
    made = decided(lost(accepted="2"))
    assert made.status.membership is not None
    assert (made.status.membership.state, made.status.membership.parent) == ("Committed", None)
    assert condition(made) is None
    assert any(e.reason == "CheckpointLost" and "begins again" in e.message for e in made.events)


@pytest.mark.parametrize("accepted", ["1", "3", "yes", "２", " 2", "-2", "2.0", "9" * 400])
def test_what_was_accepted_for_another_epoch_or_cannot_be_read_ends_nothing_and_is_said(accepted: str) -> None:
    made = decided(lost(accepted=accepted))
    found = condition(made)
    assert found is not None
    assert accepted[:20] in found.message
    assert len(found.message) < 2000


def test_accepting_also_ends_the_wait_for_holders_that_live_and_are_not_seen() -> None:
    seen = lost(accepted="2")
    refusing = (replace(h, state="Unreachable", since_seconds=NOW - 50, rejects_operator=True) for h in seen.servers)
    made = decided(replace(seen, servers=tuple(refusing)))
    assert made.status.membership is not None
    assert made.status.membership.state == "Committed"


def test_a_job_may_fail_or_begin_again_by_itself_if_it_says_so() -> None:
    assert decided(lost("Fail")).status.phase == "Failed"
    world = decided(lost("Restart")).status.membership
    assert world is not None
    assert (world.state, world.parent) == ("Committed", None)


def given_up(made: Plan) -> bool:
    """Whether the job ended, or began again without a checkpoint."""
    world = made.status.membership
    assert world is not None
    return made.status.phase == "Failed" or world.state == "Committed"


@pytest.mark.parametrize("policy", ["Fail", "Restart"])
def test_an_upload_that_had_begun_is_waited_for_before_a_job_is_given_up(policy: str) -> None:
    early = decided(lost(policy, ago=LATE_UPLOAD_WAIT_SECONDS - 20, persistent=True))
    assert not given_up(early)
    assert "still arrives" in early.reason
    assert early.wake_after_seconds is not None
    assert early.wake_after_seconds <= 20

    due = lost(policy, ago=LATE_UPLOAD_WAIT_SECONDS + 5, persistent=True)
    before = decided(replace(due, persistent=PersistentListing(2, (), NOW - 6)))
    assert any(isinstance(a, ListPersistentTier) for a in before.actions), "what was listed then does not know"
    assert not given_up(before)
    assert given_up(decided(replace(due, persistent=PersistentListing(2, (), NOW - 4))))


def test_a_job_that_was_suspended_over_a_reboot_waits_when_it_is_resumed() -> None:
    seen = running()
    world = Membership(3, "Claimed", Checkpoint(1, 40), 0, (), "the job is resumed", NOW - 12)
    lineage = (LineageEntry(1, None, 3), LineageEntry(2, Checkpoint(1, 40), 0))
    fresh = tuple(replace(holder(f"n{i}", 3), endpoint=endpoint(f"n{i}", "i1")) for i in range(3))
    status = replace(seen.status, membership=world, lineage=lineage, phase="Pending")
    made = decided(replace(seen, status=status, servers=fresh, sessions=(), workers=()))
    assert made.status.phase == "Recovering"
    assert condition(made) is not None


def test_a_job_that_is_suspended_while_it_waits_gives_its_workers_back() -> None:
    seen = lost()
    seen = replace(seen, job=replace(seen.job, spec=replace(seen.job.spec, suspend=True)))
    made = decided(seen)
    assert condition(made) is not None
    assert [a for a in made.actions if type(a).__name__ in ("DeleteWorker", "RetireWorkers")]


def test_a_holder_that_was_given_up_for_newer_steps_is_waited_for_once_the_others_are_lost() -> None:
    """It was given up as nothing but newer steps were missing; by now what it has may be the last copy."""
    seen = lost("Fail", ago=1.0)
    rest = tuple(e for e in seen.status.assigned_servers if e.instance.node != "n0")
    gone = next(e.instance.run_id for e in seen.status.assigned_servers if e.instance.node == "n0")
    seen = replace(seen, status=replace(seen.status, assigned_servers=rest, lost_servers=(gone,)))
    silent = tuple(
        replace(h, state="Unreachable", since_seconds=NOW - 50, read_generation=None)
        if h.endpoint.instance.node == "n0"
        else h
        for h in seen.servers
    )
    waiting = decided(replace(seen, servers=silent))
    assert waiting.status.phase != "Failed"
    assert "n0" in waiting.reason
    assert "which the operator cannot reach" in waiting.reason
    known_gone = tuple(h for h in silent if h.endpoint.instance.node != "n0")
    assert decided(replace(seen, servers=known_gone)).status.phase == "Failed"


def test_what_is_lost_holds_up_no_upgrade_of_the_memory_tier() -> None:
    seen = lost()
    answer = judge_job_safety(seen, decided(seen).status, None)
    assert answer.is_safe, answer.reason
    assert answer.servers_read_by_node == {"n0": 1, "n1": 1, "n2": 1}, "each was read, and has nothing"


def test_what_a_holder_that_is_away_may_have_is_not_lost_by_an_upgrade() -> None:
    seen = with_holder(lost(ago=3600), "n0", state="Unreachable", since_seconds=NOW - 3600, read_generation=None)
    seen = replace(seen, sessions=())
    status = decided(seen).status
    assert condition(status) is not None, "nobody knows of it that it lives"
    assert not judge_job_safety(seen, status, None).is_safe, "other ranks' parts, of use with what it has, are kept"
