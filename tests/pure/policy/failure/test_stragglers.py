"""A straggler is named once with its worker and node, and taken back once."""

from __future__ import annotations

from dataclasses import replace

from support.builders import running, with_session
from support.paces import decided, paced
from surefoot_operator.api.status import Condition, JobStatus
from surefoot_operator.job_snapshot import MOST_WINDOWS, Observed, PaceSeen, Timings
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.failure.stragglers import judged
from surefoot_operator.policy.planning.plan import plan


def even(status: JobStatus) -> Condition | None:
    return next((c for c in status.conditions if c.type == "RanksEven"), None)


def events(seen: Observed) -> list[tuple[str, str]]:
    return [(e.reason, e.message) for e in plan(seen).events if e.reason.startswith("Straggler")]


def test_it_is_named_once_with_its_worker_its_node_and_what_it_costs() -> None:
    seen = paced(0.32, 0.32, 0.96)
    status = decided(seen)
    found = even(status)
    assert found is not None
    assert (found.status, found.reason) == ("False", "Straggler")
    text = (
        "rank 2 on worker 2 (node n2) is persistently slower, since step 40 or before: it works 3 times as long as its"
        " peers, and all others wait 0.064 s in each step for it"
    )
    assert found.message == text
    assert events(seen) == [("Straggler", text)]
    later = replace(paced(0.32, 0.32, 0.94, begun=80), status=status)
    assert (even(decided(later)), events(later)) == (found, []), "as it was seen first"
    worse = decided(replace(paced(0.2, 0.2, 0.96, begun=80), status=status))
    assert [(one.slowdown_ratio, one.since_step) for one in worse.stragglers] == [(4.8, 40)]


def test_it_is_taken_back_once_when_it_stands_out_in_no_window() -> None:
    status = decided(paced(0.32, 0.32, 0.96))
    quick, slow = paced(0.32, 0.32, 0.32), paced(0.32, 0.32, 0.96)
    mixed = quick
    for before, after in zip(slow.sessions, quick.sessions, strict=True):
        windows = (*before.timings.pace.windows[:1], *after.timings.pace.windows[1:])
        timings = replace(after.timings, pace=PaceSeen(windows=windows))
        mixed = with_session(mixed, after.index, timings=timings)
    assert decided(replace(mixed, status=status)).stragglers == status.stragglers
    over = replace(quick, status=status)
    found = even(decided(over))
    assert found is not None
    assert found.status == "True"
    assert events(over) == [("StragglerGone", "rank 2 is no straggler on node n2 any more")]
    assert events(replace(quick, status=decided(over))) == []


def test_too_few_windows_and_a_worker_that_tells_nothing_name_nobody() -> None:
    assert judged(gather(paced(0.32, 0.32, 0.96, windows=MOST_WINDOWS - 1))) == ()
    silent = with_session(paced(0.32, 0.32, 0.96), 1, timings=Timings())
    assert judged(gather(silent)) == ()
    assert even(decided(paced(0.32, 0.32, 0.32))) is None


def test_in_a_new_epoch_it_is_known_until_it_is_judged_there_and_only_in_its_place() -> None:
    status = decided(paced(0.32, 0.32, 0.96))
    unjudged = replace(running(), status=status)
    assert decided(unjudged).stragglers == status.stragglers
    world = status.world
    assert world is not None
    elsewhere = (*world.members[:2], replace(world.members[2], node="n9"))
    moved = replace(status, world=replace(world, members=elsewhere))
    assert judged(gather(replace(running(), status=moved))) == ()
    smaller = replace(status, world=replace(world, size=2, members=world.members[1:]))
    assert judged(gather(replace(running(), status=smaller))) == (), "a world of two tells nothing of who is usual"
