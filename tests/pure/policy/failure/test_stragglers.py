"""Tests of `policy.failure.stragglers`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from support.builders import running, with_session
from support.paces import decided, paced
from surefoot.protocol.progress import RankActivity
from surefoot_operator.api.status import Condition, JobStatus
from surefoot_operator.coordinator.sessions import MIN_WINDOW_OBSERVATIONS
from surefoot_operator.job_snapshot import MAX_WINDOWS, ActivityHistory, JobSnapshot, Timings
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.stragglers import find_slow_ranks, update_stragglers
from surefoot_operator.policy.planning.plan import plan

# ---- slow ranks ------------------------------------------------------------------------------------------------------
# Who waits far less than its peers is found, and nobody where the looks do not show it.

LOOKS = MIN_WINDOW_OBSERVATIONS


def paces(*shares: float, work: int = 100, samples: tuple[int, ...] = ()) -> list[RankActivity]:
    consumed = samples or (64,) * len(shares)
    return [RankActivity(rank, work, LOOKS, round(share * LOOKS), consumed[rank]) for rank, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        ("one of three", paces(0.3, 0.95, 0.32), [1]),
        ("one of eight", paces(*[0.6] * 7, 0.97), [7]),
        ("one of a hundred", paces(*[0.6] * 99, 0.97), [99]),
        ("two of eight", paces(0.95, *[0.4] * 6, 0.95), [0, 7]),
        ("two ranks alone", paces(0.2, 0.95), []),
        ("half of them", paces(0.3, 0.3, 0.95, 0.95), []),
        ("a tie", paces(0.9, 0.9, 0.9), []),
        ("less than a tenth of a step", paces(0.05, 0.05, 0.12), []),
        ("less than a quarter more", paces(0.8, 0.8, 0.97), []),
        ("peers that differ as much", paces(0.2, 0.35, 0.5, 0.65, 0.8), []),
        ("a stage of another size", [*paces(0.3, 0.3), RankActivity(2, 7, LOOKS, LOOKS, 64)], []),
        ("the larger part of an uneven batch", paces(0.95, 0.48, 0.48, samples=(128, 64, 64)), []),
        ("slow with the larger part", paces(0.95, 0.3, 0.3, samples=(80, 64, 64)), [0]),
        ("no looks", [RankActivity(rank, 1, 0, 0, 0) for rank in range(4)], []),
    ],
)
def test_ranks_that_stand_out(name: str, given: list[RankActivity], found: list[int]) -> None:
    assert [one.rank for one in find_slow_ranks([given] * MAX_WINDOWS)] == found, name


def test_it_takes_every_window() -> None:
    slow, other, nobody = paces(0.3, 0.95, 0.3), paces(0.3, 0.3, 0.95), paces(0.3, 0.3, 0.3)
    assert find_slow_ranks([]) == ()
    assert find_slow_ranks([slow, nobody, slow, slow]) == ()
    assert find_slow_ranks([slow, slow, other, slow]) == ()
    (found,) = find_slow_ranks([slow] * 4)
    assert (found.rank, round(found.ratio, 1)) == (1, 3.3)


def _in(pace: RankActivity, *counts: int, first: int = 40) -> RankActivity:
    return pace._replace(lines=tuple((first + at, 3, count) for at, count in enumerate(counts)))


@pytest.mark.parametrize(
    ("name", "peer", "slow", "line"),
    [
        ("longer for what all do", (8, 6), (26, 18), None),
        ("rank 0 writes its logs", (8, 6), (8, 6, 31), 42),
        ("it evaluates in two lines", (8, 6), (8, 6, 10, 21), 43),
        ("slower, with a little of its own", (8, 6), (22, 16, 7), None),
        ("a line that takes hardly any of its peers' time, by a disk or link that is slow", (10, 4), (10, 34), None),
        ("versions that tell no lines", (), (), None),
        ("what it does alone while they load", (), (0, 0, 40), 42),
    ],
)
def test_who_does_what_no_peer_does_is_told_from_who_is_slow(
    name: str, peer: tuple[int, ...], slow: tuple[int, ...], line: int | None
) -> None:
    given = [_in(one, *peer) for one in paces(0.3, 0.3, 0.3, 0.95)]
    given[3] = _in(given[3], *slow)
    (found,) = find_slow_ranks([given] * MAX_WINDOWS)
    assert (found.rank, found.divergent_line) == (3, None if line is None else (line, 3)), name


def test_windows_of_unlike_length_are_no_larger_part_of_the_batch() -> None:
    """Who has half as much again of each step's samples works half as long again, however long it was looked at."""
    window = paces(0.5, 0.5, 0.76, samples=(64, 64, 96))
    shorter = window[2]._replace(observations=LOOKS * 2 // 3, busy_observations=round(LOOKS * 2 / 3 * 0.76), samples=64)
    assert find_slow_ranks([[*window[:2], shorter]] * MAX_WINDOWS) == ()


def _drawn(rng: random.Random, shares: list[float]) -> list[RankActivity]:
    return [
        RankActivity(r, 1, LOOKS, sum(rng.random() < one for _ in range(LOOKS)), 64) for r, one in enumerate(shares)
    ]


@pytest.mark.parametrize("unlike", [0.0, 0.02], ids=["equal", "a little unlike"])
def test_the_noise_of_looks_names_nobody(unlike: float) -> None:
    rng = random.Random(5)
    for _ in range(400):
        size, share = rng.randint(3, 32), rng.uniform(0.05, 0.95)
        shares = [min(1.0, max(0.0, share + rng.gauss(0.0, unlike))) for _ in range(size)]
        assert find_slow_ranks([_drawn(rng, shares) for _ in range(MAX_WINDOWS)]) == ()


def test_a_rank_that_takes_half_as_long_again_is_found_through_the_noise() -> None:
    """Within twice as many windows as it takes at least: they roll on."""
    rng, found = random.Random(6), 0
    for _ in range(200):
        size = rng.randint(3, 16)
        slow = rng.randrange(size)
        shares = [0.97 if rank == slow else 0.97 / 1.5 for rank in range(size)]
        windows = [_drawn(rng, shares) for _ in range(2 * MAX_WINDOWS)]
        named = [find_slow_ranks(windows[at : at + MAX_WINDOWS]) for at in range(MAX_WINDOWS + 1)]
        ranks = {one.rank for once in named for one in once}
        assert ranks <= {slow}
        found += bool(ranks)
    assert found >= 190


# ---- stragglers ------------------------------------------------------------------------------------------------------
# A straggler is named once with its worker and node, and taken back once.


def even(status: JobStatus) -> Condition | None:
    return next((c for c in status.conditions if c.type == "NoStragglers"), None)


def events(seen: JobSnapshot) -> list[tuple[str, str]]:
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
        windows = (*before.timings.activity.windows[:1], *after.timings.activity.windows[1:])
        timings = replace(after.timings, activity=ActivityHistory(windows=windows))
        mixed = with_session(mixed, after.index, timings=timings)
    assert decided(replace(mixed, status=status)).stragglers == status.stragglers
    over = replace(quick, status=status)
    found = even(decided(over))
    assert found is not None
    assert found.status == "True"
    assert events(over) == [("StragglerResolved", "rank 2 on node n2 is no longer slower than its peers")]
    assert events(replace(quick, status=decided(over))) == []


def test_too_few_windows_and_a_worker_that_tells_nothing_name_nobody() -> None:
    assert update_stragglers(build_facts(paced(0.32, 0.32, 0.96, windows=MAX_WINDOWS - 1))) == ()
    silent = with_session(paced(0.32, 0.32, 0.96), 1, timings=Timings())
    assert update_stragglers(build_facts(silent)) == ()
    assert even(decided(paced(0.32, 0.32, 0.32))) is None


def test_in_a_new_epoch_it_is_known_until_it_is_judged_there_and_only_in_its_place() -> None:
    status = decided(paced(0.32, 0.32, 0.96))
    unjudged = replace(running(), status=status)
    assert decided(unjudged).stragglers == status.stragglers
    world = status.membership
    assert world is not None
    elsewhere = (*world.members[:2], replace(world.members[2], node="n9"))
    moved = replace(status, membership=replace(world, members=elsewhere))
    assert update_stragglers(build_facts(replace(running(), status=moved))) == ()
    smaller = replace(status, membership=replace(world, world_size=2, members=world.members[1:]))
    assert update_stragglers(build_facts(replace(running(), status=smaller))) == (), (
        "a world of two tells nothing of who is usual"
    )
