"""What an agent finds on its node replaces what it found before, and a clock that is far off is told once."""

from __future__ import annotations

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import Hello, NodeFinding, NodeHealth
from surefoot_operator.coordinator.sessions import Sessions, begin, connected, heard
from surefoot_operator.job_snapshot import SessionSeen

WORKER = WorkerId(0, 1)
LOST = NodeFinding("GpuLost", "GPU 0 is lost", "node")


def joined() -> Sessions:
    return connected(begin("job", 0.0), Hello("job", 0, 1, "inc", "n0", "", 0, 0, True), 1.0)


def seen(sessions: Sessions) -> SessionSeen:
    return sessions.by_worker[WORKER].seen


def test_findings_stand_until_others_come_with_the_time_since_they_are_these() -> None:
    one = heard(joined(), WORKER, NodeHealth((LOST,), 5.0), 5.0)
    assert (seen(one).findings, seen(one).findings_seconds) == ((LOST,), 5.0)
    other_words = NodeFinding("GpuLost", "GPU 0 is still lost", "node")
    again = heard(one, WORKER, NodeHealth((other_words,), 9.0), 9.0)
    assert (seen(again).findings, seen(again).findings_seconds) == ((other_words,), 5.0)
    over = heard(again, WORKER, NodeHealth((), 12.0), 12.0)
    assert (seen(over).findings, seen(over).findings_seconds) == ((), 12.0)


def test_a_clock_that_is_far_off_is_told_when_it_comes_about() -> None:
    sessions = joined()
    for now, clock in ((10.0, 10.5), (20.0, 320.0), (30.0, 331.0), (40.0, 40.0), (50.0, 5.0)):
        sessions = heard(sessions, WORKER, NodeHealth((), clock), now)
    assert [(notice.reason, notice.text) for _, notice in sessions.notices] == [
        ("ClockSkew", "the clock of node n0 is 300 s ahead of the operator's"),
        ("ClockSkew", "the clock of node n0 is 45 s behind the operator's"),
    ]
    unsaid = heard(joined(), WORKER, NodeHealth(), 1000.0)
    assert seen(unsaid).clock_skew_seconds is None
    assert unsaid.notices == ()
