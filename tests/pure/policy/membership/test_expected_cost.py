"""Waiting, shrinking and growing are chosen by what the job's own incidents say that they cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from support.builders import BEGAN, job, running, session, worker
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.spec import ElasticPolicy
from surefoot_operator.api.status import Incident
from surefoot_operator.job_snapshot import JobSnapshot, ObservedNode, PendingCreate
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.membership.expected_cost import IncidentHistory, estimate_wait_costs, incident_history_of
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 10_000


def loss(at: float, replaced: float | None, kind: str = "node-lost") -> Incident:
    """Worker 2 of three was lost, and two went on after three seconds."""
    return Incident(
        kind, "node n2 is gone", 2, "n2", 1, at, at, at + 1, at + 1, at + 1, at + 3, 42, 40, 2, "memory", 3, 2,
        replaced_seconds=None if replaced is None else at + replaced,
    )  # fmt: skip


def grown(at: float, seconds: float) -> Incident:
    return Incident(
        "planned", "grow from 2 to 3 workers", None, None, 2, at, at, at, at, at, at + seconds, world_size_before=2
    )


def known(arrival: float | None, change: float | None, times: int = 3) -> tuple[Incident, ...]:
    """So often a worker was lost, long ago; its replacement came after `arrival`, and growing again took `change`."""
    found: list[Incident] = []
    for row in range(times):
        at = BEGAN + 1000 * row
        found.append(loss(at, arrival))
        found += [grown(at + arrival, change)] if change is not None and arrival is not None else []
    return tuple(found)


def two_of_three(incidents: tuple[Incident, ...], now: float = NOW) -> JobSnapshot:
    """A claim after the loss of worker 2: two are ready, and the third's replacement has a node."""
    seen = running(now=now)
    world = replace(
        seen.status.membership, generation=2, state="Claimed", reason="node n2 is gone", changed_seconds=NOW
    )  # type: ignore[type-var]
    holders = tuple(replace(h, fence=2, read_generation=2) for h in seen.servers)
    sessions = tuple(replace(s, generation=1, stopped=2, last_message_seconds=now) for s in seen.sessions[:2])
    workers = (*seen.workers[:2], worker(2, 5, node="n3", phase="Pending", created_seconds=NOW))
    nodes = (*seen.nodes[:2], ObservedNode("n3", "n3", True))
    status = replace(seen.status, membership=world, incidents=incidents, start_seconds=BEGAN, next_attempt=6)
    return replace(seen, status=status, servers=holders, sessions=sessions, workers=workers, nodes=nodes, free_nodes=1)


def members_after(seen: JobSnapshot) -> int:
    """Workers of the world that is committed now; 0: none is."""
    world = plan(seen).status.membership
    assert world is not None
    return len(world.members) if world.state == "Committed" else 0


@pytest.mark.parametrize(
    ("name", "arrival", "change", "waits"),
    [
        ("replacements come sooner than a change takes", 2.0, 4.0, True),
        ("they take longer than a change", 40.0, 4.0, False),
        ("changes are dear", 40.0, 60.0, True),
        ("nothing came yet", None, 4.0, False),
        ("nothing grew yet, and the losses say what a change takes", 1.0, None, True),
    ],
)
def test_a_loss_waits_where_that_is_cheaper(
    name: str, arrival: float | None, change: float | None, waits: bool
) -> None:
    seen = two_of_three(known(arrival, change))
    assert members_after(seen) == (0 if waits else 2), name
    if waits:
        made = plan(seen)
        assert "of training" in made.reason
        assert made.wake_after_seconds is not None


def test_the_first_loss_does_not_wait_for_what_nobody_has_measured() -> None:
    assert members_after(two_of_three(())) == 2


def test_waiting_ends_with_the_limit_and_says_the_sums() -> None:
    seen = two_of_three(known(2.0, 4.0))
    late = plan(two_of_three(known(2.0, 4.0), NOW + 4.1))
    assert members_after(replace(seen, now_seconds=NOW + 3.9)) == 0
    assert late.status.membership is not None
    assert len(late.status.membership.members) == 2
    told = next(e.message for e in late.events if "with 2 ranks" in e.message)
    assert "replacements took 2.0 s (3 of 3 came) and a change of size 4.0 s" in told


@pytest.mark.parametrize(
    "hinder",
    [
        lambda seen: replace(
            seen, workers=seen.workers[:2], creates=(PendingCreate(2, 5, False, "exceeded quota", False, NOW + 9),)
        ),
        lambda seen: replace(
            seen,
            workers=(*seen.workers[:2], worker(2, 5, node=None, phase="Pending", message="0/3 nodes are available")),
        ),
        lambda seen: replace(seen, workers=(*seen.workers[:2], replace(seen.workers[2], start_blocker="ErrImagePull"))),
        lambda seen: replace(seen, workers=seen.workers[:2], free_nodes=0),
    ],
)
def test_nobody_waits_for_what_is_known_not_to_come(hinder: Callable[[JobSnapshot], JobSnapshot]) -> None:
    assert members_after(two_of_three(known(2.0, 4.0))) == 0
    assert members_after(hinder(two_of_three(known(2.0, 4.0)))) == 2


def test_a_time_that_the_job_asks_for_is_what_counts() -> None:
    for seconds, size in ((0.0, 2), (5.0, 0)):
        seen = two_of_three(known(40.0, 4.0) if seconds else known(2.0, 4.0), NOW + 1)
        policy = ElasticPolicy(1, 3, faulty_scale_down_timeout_seconds=seconds)
        assert members_after(replace(seen, job=job(3, elastic_policy=policy))) == size


def growing(incidents: tuple[Incident, ...], now: float = NOW) -> JobSnapshot:
    """Two train, and a third is warm."""
    seen = running(now=now, workers=2)
    return replace(
        seen,
        job=job(3, least=1),
        status=replace(seen.status, incidents=incidents, start_seconds=BEGAN),
        workers=(*seen.workers, worker(2)),
        sessions=(*seen.sessions, session(2, now=now)),
        nodes=(*seen.nodes, ObservedNode("n2", "n2", True)),
    )


def proposed(seen: JobSnapshot) -> bool:
    return any(isinstance(action, Barrier) for action in plan(seen).actions)


def test_a_world_grows_where_that_pays_before_the_next_incident() -> None:
    assert proposed(growing(()))
    assert proposed(growing(known(10.0, 4.0)))
    often = tuple(i for row in range(5) for i in (loss(NOW - 10 - 20 * row, 5.0), grown(NOW - 3 - 20 * row, 60.0)))[
        ::-1
    ]
    made = plan(growing(often))
    assert not made.actions
    assert "would gain less than that before the next incident" in made.reason
    due = (
        NOW - 90 + 5 * 180
    )  # a third more pays for a minute in three; five incidents in so long are one each three minutes
    assert not proposed(growing(often, due - 1))
    assert proposed(growing(often, due + 1)), "time without an incident makes the next one less likely"


def test_a_job_at_its_deadline_does_not_grow_any_more() -> None:
    seen = growing(known(10.0, 30.0))
    ending = job(3, least=1, run_policy=replace(seen.job.spec.run_policy, active_deadline_seconds=10_000 + 60.0))
    assert not proposed(replace(seen, job=ending))
    assert proposed(replace(seen, job=ending, now_seconds=NOW - 1000, sessions=growing((), NOW - 1000).sessions))


def test_workers_that_come_together_make_one_change() -> None:
    seen = growing(known(10.0, 8.0))
    coming = worker(3, node="n3", created_seconds=NOW - 7)
    seen = replace(
        seen, job=job(4, least=1), workers=(*seen.workers, coming), nodes=(*seen.nodes, ObservedNode("n3", "n3", True))
    )
    made = plan(seen)
    assert not made.actions
    assert "1 more on their way" in made.reason
    late = replace(seen, workers=(*seen.workers[:-1], replace(coming, created_seconds=NOW - 21)))
    assert proposed(late), "who takes twice as long as usual is not counted on"


def test_a_loss_records_when_it_was_made_good() -> None:
    seen = growing((replace(loss(NOW - 30, None), world_size_before=3),))
    (incident,) = plan(seen).status.incidents
    assert incident.replaced_seconds == NOW
    assert (
        incident_history_of(
            build_facts(replace(seen, status=replace(seen.status, incidents=(incident,))))
        ).arrival_seconds
        == 30
    )
    (short,) = plan(replace(seen, sessions=seen.sessions[:2])).status.incidents
    assert short.replaced_seconds is None
    (other,) = plan(growing((loss(NOW - 30, None, "trainer-failed"),))).status.incidents
    assert other.replaced_seconds is None, "nobody had to come"


def _spent(limit: float, arrival: float, change: float, lacking: float) -> float:
    """Seconds of training that a loss costs whoever waits so long."""
    return arrival if arrival <= limit else limit + (arrival - limit) * lacking + change


def test_the_choice_costs_less_than_every_fixed_one() -> None:
    rng = random.Random(3)
    totals = {
        "never waits": 0.0,
        "waits a minute": 0.0,
        "waits as long as it takes": 0.0,
        "chosen": 0.0,
        "who knew": 0.0,
    }
    for _ in range(400):
        usual, change, full = 10 ** rng.uniform(0, 2.8), 10 ** rng.uniform(0, 2), rng.choice([2, 3, 8, 64])
        lacking, arrivals = 1.0 / full, list[float]()
        for _ in range(6):
            arrival = usual * rng.lognormvariate(0.0, 0.4)
            record = IncidentHistory(change if arrivals else None, sorted(arrivals)[len(arrivals) // 2] if arrivals else None,
                            len(arrivals), len(arrivals))  # fmt: skip
            costs = estimate_wait_costs(record, full - 1, full)
            chosen = (
                costs.limit_seconds if costs is not None and costs.waiting_seconds < costs.shrinking_seconds else 0.0
            )
            for name, limit in (
                ("never waits", 0.0),
                ("waits a minute", 60.0),
                ("waits as long as it takes", 1e9),
                ("chosen", chosen),
            ):
                totals[name] += _spent(limit, arrival, change, lacking)
            totals["who knew"] += min(_spent(limit, arrival, change, lacking) for limit in (0.0, 1e9))
            arrivals.append(arrival)
    best_fixed = min(totals[name] for name in ("never waits", "waits a minute", "waits as long as it takes"))
    assert totals["chosen"] < 0.9 * best_fixed, totals
    assert totals["chosen"] < 1.25 * totals["who knew"], totals
