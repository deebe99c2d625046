"""Virtual time, one seed, processes that die, freeze and thaw, and a network that delays, parts and heals.

Everything that happens in a simulated run is an event of this queue; every choice is drawn from one `random.Random`.
A process that is dead loses its events; one that is frozen gets them, in order, when it thaws (late, as a stopped
process reads what its kernel kept). Nothing else drops or repeats a message.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from surefoot.errors import ProtocolError

if TYPE_CHECKING:
    from simulator.wiring import Wire

Action = Callable[..., None]


class Process:
    """Something that runs at a site and can be killed or frozen. A restart is another Process."""

    __slots__ = (
        "alive",
        "backlog",
        "busy_until",
        "frozen",
        "frozen_at",
        "lines",
        "name",
        "silent",
        "site",
        "thawed_at",
    )

    def __init__(self, name: str, site: str) -> None:
        self.name = name
        self.site = site
        self.alive = True
        self.frozen = False
        self.busy_until = 0.0  # its one thread computes until then, and hears nothing
        self.frozen_at = self.thawed_at = 0.0
        self.silent = False  # died without a word: its machine is gone, nobody gets a reset
        self.backlog: list[tuple[Action, tuple[Any, ...]]] = []
        self.lines: list[Line] = []

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen


class Engine:
    """The queue. `run` goes on until `done()` holds, the queue is empty or virtual time is over."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.environment = Process("environment", "outside")
        self.tracing = tracing
        self.lines: list[str] = []
        self._queue: list[tuple[float, int, Process, Action, tuple[Any, ...]]] = []
        self._order = itertools.count()

    def after(self, delay: float, process: Process, action: Action, *arguments: Any) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), process, action, arguments))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until and not done():
            self.now, _, process, action, arguments = heapq.heappop(queue)
            if not process.alive:
                continue
            if process.frozen:
                process.backlog.append((action, arguments))
                continue
            if process.busy_until > self.now:
                heapq.heappush(queue, (process.busy_until, next(self._order), process, action, arguments))
                continue
            self.events += 1
            action(*arguments)

    def spend(self, process: Process, seconds: float) -> None:
        """CPU time of a process with one thread: whatever else it has to do waits."""
        process.busy_until = max(process.busy_until, self.now) + seconds

    def kill(self, process: Process, silent: bool = False) -> None:
        if not process.alive:
            return
        process.alive, process.silent = False, silent
        process.backlog.clear()
        for line in list(process.lines):
            line.die(process)

    def freeze(self, process: Process) -> None:
        if not process.frozen:
            process.frozen, process.frozen_at = True, self.now

    def thaw(self, process: Process) -> None:
        if not process.frozen:
            return
        process.frozen, process.thawed_at = False, self.now
        for action, arguments in process.backlog:
            self.after(self.rng.uniform(0, 1e-4), process, action, *arguments)
        process.backlog = []

    def say(self, text: str, *arguments: Any) -> None:
        """One line of the trace; costs nothing unless the run is being replayed."""
        if self.tracing:
            self.lines.append(f"{self.now:9.4f}  {text.format(*arguments)}")


class Unavailable(Exception):
    """What a call gets when nobody answered in time or the connection broke. It may have happened all the same."""


class Refusal(Exception):
    """What a call gets when the other side answered no: fenced, full, chunks missing."""


def machine(site: str) -> str:
    """`n0/holder` is on n0."""
    return site.partition("/")[0]


class Network:
    """Messages between sites. A cut, of one way or of both, holds what arrives; healing delivers some of it late."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.twice_until = 0.0
        """Until then calls may be carried out once more, later, and nobody hears of it."""
        self.last_calls: dict[Process, Action] = {}
        """Who ends in the middle of the next call that it serves, and how."""
        self._cuts: dict[tuple[str, str], int] = {}
        self._healed: dict[tuple[str, str], float] = {}
        """When a way that was cut was healed last."""
        self._held: dict[tuple[str, str], list[tuple[Process, Action, tuple[Any, ...]]]] = {}
        self._parted: dict[tuple[str, str], list[Line]] = {}

    def reaches(self, one: str, other: str) -> bool:
        if one == other or not self._cuts:
            return True
        return (one, other) not in self._cuts and (machine(one), machine(other)) not in self._cuts

    def together_since(self, one: str, other: str) -> float:
        """Since when both hear each other; infinite while they do not."""
        if not (self.reaches(one, other) and self.reaches(other, one)):
            return float("inf")
        ways = ((one, other), (other, one), (machine(one), machine(other)), (machine(other), machine(one)))
        return max(self._healed.get(way, 0.0) for way in ways)

    def cut(self, one: str, other: str, both: bool = True) -> None:
        for way in ((one, other), (other, one))[: 1 + both]:
            self._cuts[way] = self._cuts.get(way, 0) + 1

    def heal(self, one: str, other: str, both: bool = True) -> None:
        for way in ((one, other), (other, one))[: 1 + both]:
            self._cuts[way] -= 1
            if not self._cuts[way]:
                del self._cuts[way]
                self._healed[way] = self.engine.now
        for way in [w for w in self._held if self.reaches(*w)]:
            for target, action, arguments in self._held.pop(way):
                if self.engine.rng.random() < 0.6:
                    self.engine.after(self.delay() * 20, target, action, *arguments)
        for way in [w for w in self._parted if self.reaches(*w)]:
            for line in self._parted.pop(way):
                line.resume()

    def delay(self) -> float:
        rng = self.engine.rng
        return rng.uniform(0.0005, 0.004) if rng.random() < 0.97 else rng.uniform(0.02, 0.4)

    def send(self, source: str, target: Process, action: Action, *arguments: Any) -> None:
        """One datagram's worth: arrives once, late, or (held by a cut) perhaps never."""
        self.engine.after(self.delay(), target, self._arrive, source, target, action, arguments)

    def _arrive(self, source: str, target: Process, action: Action, arguments: tuple[Any, ...]) -> None:
        if self.reaches(source, target.site):
            action(*arguments)
        else:
            self._held.setdefault((source, target.site), []).append((target, action, arguments))

    def hold(self, one: str, other: str, line: Line) -> None:
        waiting = self._parted.setdefault((one, other), [])
        if line not in waiting:
            waiting.append(line)

    def call(
        self,
        source: Process,
        target: Process,
        operation: Callable[[], Any],
        done: Callable[[Any], None],
        limit_seconds: float = 1.0,
    ) -> None:
        """Runs `operation` at the target; `done` gets what it returned, a Refusal, or Unavailable, exactly once."""
        open_call = [True]
        if not target.alive and not target.silent and self.reaches(source.site, target.site):
            self.engine.after(self.delay(), source, self._finish, open_call, done, Unavailable("refused"))
            return
        self.send(source.site, target, self._serve, source, target, operation, open_call, done)
        if self.engine.now < self.twice_until and self.engine.rng.random() < 0.3:
            self.engine.after(self.engine.rng.uniform(0.0, 1.0), target, self._again, operation)
        self.engine.after(limit_seconds, source, self._finish, open_call, done, Unavailable("no answer"))

    def _serve(
        self,
        source: Process,
        target: Process,
        operation: Callable[[], Any],
        open_call: list[bool],
        done: Callable[..., None],
    ) -> None:
        try:
            answer = operation()
        except Refusal as refusal:
            answer = refusal
        if target in self.last_calls:
            self.last_calls.pop(target)()
        else:
            self.send(target.site, source, self._finish, open_call, done, answer)

    @staticmethod
    def _again(operation: Callable[[], Any]) -> None:
        with contextlib.suppress(Refusal):
            operation()

    @staticmethod
    def _finish(open_call: list[bool], done: Callable[[Any], None], answer: Any) -> None:
        if open_call[0]:
            open_call[0] = False
            done(answer)


CLOSED = object()


class Line:
    """An ordered connection of two processes: what is sent arrives in order, or the line breaks."""

    def __init__(self, network: Network, one: Process, other: Process, wire: Wire | None = None) -> None:
        self.network, self._wire = network, wire
        self.ends = (one, other)
        self.hear: dict[Process, Callable[[Any], None]] = {}
        self.broken: dict[Process, Callable[[], None]] = {}
        self._flying: dict[Process, deque[Any]] = {one: deque(), other: deque()}
        self._open: dict[Process, bool] = {one: True, other: True}
        one.lines.append(self)
        other.lines.append(self)

    def peer(self, end: Process) -> Process:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def send(self, sender: Process, message: Any) -> None:
        if not self._open[sender]:
            return
        target = self.peer(sender)
        wired = self._wire is not None and message is not CLOSED
        for packed in self._wire.packed(message) if wired and self._wire is not None else [message]:
            self._flying[target].append(packed)
            self.network.engine.after(self.network.delay(), target, self._arrive, target)

    def close(self, by: Process) -> None:
        """This end hangs up; the other hears of it after everything that was sent."""
        if self._open[by]:
            self.send(by, CLOSED)
            self._leave(by)

    def die(self, by: Process) -> None:
        if by.silent:
            self._leave(by)
        else:
            self.close(by)

    def cut(self) -> None:
        """A reset from between: both ends hear of it, and what was on its way is lost."""
        for end in self.ends:
            self._flying[end].clear()
            if self._open[end]:
                self._leave(end)
                self.network.engine.after(self.network.delay(), end, self.broken[end])

    def resume(self) -> None:
        for end in self.ends:
            for _ in self._flying[end]:
                self.network.engine.after(self.network.delay(), end, self._arrive, end)

    def _arrive(self, target: Process) -> None:
        flying = self._flying[target]
        if not flying or not self._open[target]:
            return
        sender = self.peer(target)
        if not self.network.reaches(sender.site, target.site):
            self.network.hold(sender.site, target.site, self)
            return
        message = flying.popleft()
        if message is CLOSED:
            self._leave(target)
            self.broken[target]()
            return
        if self._wire is not None:
            try:
                message = self._wire.unpacked(message)
            except ProtocolError:
                self.cut()
                return
        if message is not None:
            self.hear[target](message)

    def _leave(self, end: Process) -> None:
        self._open[end] = False
        if self in end.lines:
            end.lines.remove(self)
