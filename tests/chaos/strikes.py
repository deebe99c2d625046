"""What is struck in a run, when, and how: drawn from a seed, carried out by signals from outside.

A node dies by `surefoot local --fault`, which alone can bring it back; everything else is a SIGKILL, or a SIGSTOP with a
SIGCONT some seconds later, of a process that is found by the run folder in its environment.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from support.local_run import LocalRun
from surefoot.linux_process import ProcessIdentity, identity_of, parent_of, send_signal
from surefoot_operator.platforms.local.local_nodes import is_trainer
from surefoot_operator.platforms.local.run_folder import read_json

WEIGHTS = {"kill trainer": 5, "kill agent": 4, "kill redis": 2, "kill operator": 2, "kill zygote": 1, "node": 2,
           "stop trainer": 1, "stop agent": 1, "stop redis": 1, "stop operator": 1}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Strike:
    """`kind` at or behind `step`, `later` seconds after it was seen; `seconds`: until what is stopped goes on."""

    kind: str
    step: int
    later: float
    seconds: float


def draw(rng: random.Random, count: int, steps: int) -> list[Strike]:
    """In the order of their steps; some fall into the recovery from the one before."""
    kinds = list(WEIGHTS)
    found, last = [], 0
    for _ in range(count):
        kind = rng.choices(kinds, list(WEIGHTS.values()))[0]
        step = last if found and rng.random() < 0.2 else rng.randint(5, steps - 20)
        last = step
        found.append(Strike(kind, step, rng.choice((0.0, 0.0, 0.1, 0.3, 1.0)), rng.uniform(1.0, 5.0)))
    return sorted(found, key=lambda strike: strike.step)


class Striker:
    """Of one run. `struck` counts what really was hit, by kind."""

    def __init__(self, run: LocalRun, rng: random.Random) -> None:
        self._run, self._rng = run, rng
        self.struck: list[str] = []
        self._stopped: list[tuple[float, ProcessIdentity]] = []

    def strike(self, strike: Strike) -> None:
        """Hits one process of that kind, drawn among those that live; none may live at the moment."""
        verb, _, kind = strike.kind.partition(" ")
        victims = self.victims(kind)
        if not victims:
            return
        victim = self._rng.choice(victims)
        if not send_signal(victim, signal.SIGKILL if verb == "kill" else signal.SIGSTOP):
            return
        self.struck.append(strike.kind)
        if verb == "stop":
            self._stopped.append((time.monotonic() + strike.seconds, victim))

    @property
    def holding(self) -> bool:
        """Whether anything is stopped now."""
        return bool(self._stopped)

    def thaw(self, everybody: bool = False) -> None:
        """Whoever was stopped for long enough goes on."""
        due = [one for one in self._stopped if everybody or time.monotonic() >= one[0]]
        self._stopped = [one for one in self._stopped if one not in due]
        for _, life in due:
            send_signal(life, signal.SIGCONT)

    def victims(self, kind: str) -> list[ProcessIdentity]:
        """Those that live, in the order of their numbers."""
        pids = [pid for pid in sorted(self._run.processes()) if self._is(pid, kind)]
        return [life for pid in pids if (life := identity_of(pid)) is not None]

    def _is(self, pid: int, kind: str) -> bool:
        match kind:
            case "trainer":
                return is_trainer(pid)
            case "operator":
                return "surefoot_operator.controller.local_operator" in _words(pid)
            case "redis":
                return any("redis-server" in word for word in _words(pid)[:1])
            case "agent":
                return pid in self._agents()
            case _:
                return not is_trainer(pid) and parent_of(pid) in self._agents()

    def _agents(self) -> set[int]:
        states = [read_json(path) or {} for path in self._run.run_folder.workers_folder.glob("*.state")]
        return {ProcessIdentity.parse(state["life"]).pid for state in states if state.get("life")}


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
