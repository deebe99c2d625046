"""Checks run beside each other, within their time; what changed is told, once to people and whole to the coordinator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from surefoot.agent.health.node_monitor import CHECK_SECONDS, RETRY_SECONDS, NodeMonitor
from surefoot.protocol.messages import MAX_FINDING_CHARACTERS, MAX_FINDINGS, FromAgent, NodeFinding, NodeHealth

LOST = NodeFinding("GpuLost", "GPU 0 is lost", "node")
SLOW = NodeFinding("GpuThrottled", "GPU 0 is slow", "unknown")


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not done():  # noqa: ASYNC110  the other side is a thread
            await asyncio.sleep(0.001)


class Scripted:
    """A check that answers what it is told to."""

    def __init__(self, name: str, found: Sequence[NodeFinding] = (), period_seconds: float = 5.0) -> None:
        self.name, self.period_seconds, self.found = name, period_seconds, found
        self.error: Exception | None = None
        self.hold: threading.Event | None = None
        self.looks = 0

    def find_faults(self) -> Sequence[NodeFinding]:
        self.looks += 1
        if self.hold is not None:
            self.hold.wait(30)
        if self.error is not None:
            raise self.error
        return self.found


class Watched:
    """A watch over scripted checks, its clock, and what it told."""

    def __init__(self, *checks: Scripted) -> None:
        self.now, self.sent, self.notices = 100.0, list[FromAgent](), list[tuple[str, str]]()
        self.watch = NodeMonitor(checks, self.sent.append, lambda *one: self.notices.append(one), lambda: self.now)

    async def look(self, done: Callable[[], bool], seconds: float = 6.0) -> None:
        self.now += seconds
        self.watch.poll_checks()
        await _until(done)

    @property
    def told(self) -> list[tuple[str, ...]]:
        return [tuple(f.reason for f in m.findings) for m in self.sent if isinstance(m, NodeHealth)]


async def test_what_changes_is_told_whole_and_people_hear_of_it_once() -> None:
    gpu, disk = Scripted("gpu"), Scripted("disk")
    all_ = Watched(gpu, disk)
    await all_.look(lambda: (gpu.looks, disk.looks) == (1, 1) and not all_.told)
    gpu.found, disk.found = (LOST,), (SLOW,)
    await all_.look(lambda: all_.told[-1:] == [("GpuLost", "GpuThrottled")])
    before = len(all_.told)
    await all_.look(lambda: gpu.looks == 3 and disk.looks == 3)
    assert len(all_.told) == before, "the same again is no news"
    gpu.found = ()
    await all_.look(lambda: all_.told[-1:] == [("GpuThrottled",)])
    assert sorted(all_.notices) == [("GpuLost", LOST.text), ("GpuThrottled", SLOW.text)]


async def test_a_check_that_hangs_is_told_once_by_name_and_keeps_no_other_from_looking() -> None:
    hung, well = Scripted("gpu"), Scripted("disk", (SLOW,))
    hung.hold = threading.Event()
    all_ = Watched(hung, well)
    await all_.look(lambda: all_.told == [("GpuThrottled",)] and hung.looks == 1)
    await all_.look(lambda: well.looks == 2, seconds=CHECK_SECONDS + 1)
    await all_.look(lambda: well.looks == 3, seconds=CHECK_SECONDS + 1)
    assert [one for one in all_.notices if one[0] == "HealthCheckTimeout"] == [
        ("HealthCheckTimeout", "the node check gpu has not answered for 10 s; this is reported only once")
    ]
    assert hung.looks == 1, "it is not asked again before it answers"
    hung.hold.set()

    def looks_again() -> bool:
        all_.now += 6
        all_.watch.poll_checks()
        return hung.looks == 2

    await _until(looks_again)


async def test_a_check_that_fails_is_told_once_and_what_it_found_before_stays() -> None:
    gpu = Scripted("gpu", (LOST,))
    all_ = Watched(gpu)
    await all_.look(lambda: all_.told == [("GpuLost",)])
    gpu.error = RuntimeError("driver")
    await all_.look(lambda: len(all_.notices) == 2)
    await all_.look(lambda: gpu.looks == 3)
    assert [one[0] for one in all_.notices] == ["GpuLost", "HealthCheckError"]
    assert all_.watch.findings == (LOST,)


async def test_the_clock_is_told_every_few_minutes() -> None:
    all_ = Watched(Scripted("gpu"))
    await all_.look(lambda: len(all_.told) == 1, seconds=RETRY_SECONDS)
    assert isinstance(all_.sent[0], NodeHealth)
    assert all_.sent[0].clock_seconds > 1e9


async def test_a_message_is_bounded_and_has_the_gravest_first() -> None:
    many = [NodeFinding(f"Odd{i:03}", "x" * 1000, "unknown") for i in range(100)]
    gpu = Scripted("gpu", (*many, LOST))
    all_ = Watched(gpu)
    await all_.look(lambda: bool(all_.told))
    found = all_.watch.findings
    assert (len(found), found[0]) == (MAX_FINDINGS, LOST)
    assert max(len(one.text) for one in found) == MAX_FINDING_CHARACTERS


async def test_of_two_checks_that_find_the_same_the_graver_counts() -> None:
    weak = NodeFinding("GpuXid79", "told", "unknown")
    grave = NodeFinding("GpuXid79", "told", "node")
    one, other = Scripted("gpu", (weak,)), Scripted("kernel", (grave,))
    all_ = Watched(one, other)
    await all_.look(lambda: all_.watch.findings == (grave,))
