"""Which bad checkpoints a status remembers: those that could be chosen again, and never without end."""

from __future__ import annotations

from dataclasses import replace

from support.builders import running, with_session
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.policy.membership.restore_decisions import MOST_REMEMBERED, may_be_forgotten, with_bad
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

IMPORTED = Checkpoint(-1, 5)


def test_what_lies_below_the_floor_is_forgotten_and_an_older_jobs_never() -> None:
    status = replace(running().status, floor=Checkpoint(1, 30), bad=(IMPORTED, Checkpoint(1, 10), Checkpoint(1, 40)))
    assert with_bad(status, Checkpoint(1, 50)) == (IMPORTED, Checkpoint(1, 40), Checkpoint(1, 50))
    assert with_bad(status, None) == status.bad
    unread = replace(status, bad=(*status.bad, Checkpoint(1, 30)))
    assert Checkpoint(1, 10) in with_bad(unread, Checkpoint(1, 50)), "a floor that is bad itself binds nobody"
    assert not may_be_forgotten(IMPORTED, status)
    assert not may_be_forgotten(Checkpoint(1, 40), status)


def test_a_job_on_bad_disks_remembers_so_many_and_its_plans_hold() -> None:
    seen = running()
    for step in range(0, 10 * MOST_REMEMBERED, 5):
        found = with_session(seen, 1, unreadable=(Checkpoint(1, step), False, "bits"))
        made = plan(found)
        check(made, found)
        assert made.status.bad[-1] == Checkpoint(1, step)
        assert len(made.status.bad) <= MOST_REMEMBERED
        seen = replace(seen, status=replace(seen.status, bad=made.status.bad))
    assert len(seen.status.bad) == MOST_REMEMBERED
