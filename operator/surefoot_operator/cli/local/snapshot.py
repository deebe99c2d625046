"""Takes a snapshot of a run for display: steps, rate, workers.

Drawn by `run_local`. `take` reads the run folder; everything else here is pure.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from surefoot_operator.api.status import World
from surefoot_operator.cli.local.progress import LedgerLine
from surefoot_operator.cli.local.supervise import Scene
from surefoot_operator.platforms.local.run_folder import read_json

_PACE_SECONDS = 15.0
_LONG_SECONDS = 2.0
"""What takes less is not worth a word."""


@dataclass(frozen=True, slots=True)
class Row:
    """A worker on its node, or a node without one.

    `doing`: its present phase (warming up, restoring …) while it has finished no step.
    """

    node: str
    state: str
    worker: str = ""
    doing: str = ""
    lines: tuple[LedgerLine, ...] = ()


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    name: str
    phase: str
    message: str
    epoch: int | None
    world: int
    step: int
    total: int | None
    """Steps that the job says it makes."""
    steps_per_second: float | None
    loss: float | None
    saved_step: int | None
    saved_seconds: float | None
    """How long the newest complete checkpoint is known."""
    rows: tuple[Row, ...]

    @property
    def left_seconds(self) -> float | None:
        if self.total is None or not self.steps_per_second:
            return None
        return max(0, self.total - self.step) / self.steps_per_second

    def headline(self) -> str:
        """Renders job, epoch, step, rate, loss and checkpoint in one line."""
        of = "" if self.total is None else f" of {self.total} ({min(100, 100 * self.step // self.total)}%)"
        rate, left = self.steps_per_second, self.left_seconds
        parts = (
            self.name,
            self.phase,
            "no epoch yet" if self.epoch is None else f"epoch {self.epoch}",
            f"world {self.world}" if self.epoch is not None else "",
            f"step {self.step}{of}",
            f"{rate:.3g} steps/s" if rate else "",
            f"{clock(left)} left" if left else "",
            f"loss {self.loss:.4f}" if self.loss is not None else "",
            f"checkpoint step {self.saved_step}, {self.saved_seconds:.1f} s old"
            if self.saved_seconds is not None
            else "",
        )
        return "  ".join(part for part in parts if part)

    def waits(self) -> str:
        """Says why no step is made; empty while steps are made."""
        busy: dict[str, list[str]] = {}
        for row in self.rows:
            if row.doing:
                busy.setdefault(row.doing, []).append(row.worker)
        what = "; ".join(f"{', '.join(workers)} {words}" for words, workers in busy.items())
        told = "" if self.phase in ("Running", "Complete", "Failed") else self.message
        return "; ".join(part for part in (told, what) if part)


@dataclass(slots=True)
class ProgressRate:
    """Measures steps a second over a sliding window.

    A new epoch clears the window: the steps that it restored were not trained.
    """

    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    _epoch: int = 0

    def steps_per_second(self, now: float, epoch: int, step: int) -> float | None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._seen.clear()
        if step <= 0:
            return None
        if not self._seen or step != self._seen[-1][1]:
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > _PACE_SECONDS:
            self._seen.popleft()
        (begin, first), (_, last) = self._seen[0], self._seen[-1]
        # up to now, not to the last step: a world that stands must be seen to slow down
        return (last - first) / (now - begin) if last > first and now > begin else None


@dataclass(slots=True)
class NewestCheckpoint:
    """What is carried between snapshots: the newest checkpoint's age and the rate."""

    pace: ProgressRate = field(default_factory=ProgressRate)
    checkpoint: object = None
    since: float = 0.0


def take(scene: Scene, known: NewestCheckpoint) -> RunSnapshot:
    """Takes a snapshot of the run now."""
    now, progress = time.monotonic(), scene.progress
    status, world = progress.status, progress.status.world
    if status.last_complete != known.checkpoint:
        known.checkpoint, known.since = status.last_complete, now
    rows = _rows(scene, world, time.time())
    newest = max((line for row in rows for line in row.lines), key=lambda line: line.step, default=None)
    epoch = world.epoch if world is not None else None
    return RunSnapshot(
        scene.job.name,
        status.phase,
        status.message,
        epoch,
        world.size if world is not None else 0,
        progress.reached_step,
        scene.total_steps,
        known.pace.steps_per_second(now, epoch or 0, progress.finished_step),
        newest.loss if newest is not None else None,
        status.last_complete.step if status.last_complete is not None else None,
        now - known.since if status.last_complete is not None else None,
        rows,
    )


def _rows(scene: Scene, world: World | None, now: float) -> tuple[Row, ...]:
    found: dict[str, list[Row]] = {}
    folder = scene.machine.folder
    for path in sorted(folder.workers.glob("*.json")):
        body, state = read_json(path), read_json(folder.worker_state(path.stem))
        if body is None or not body.get("node") or (state is not None and state["phase"] != "Running"):
            continue
        node, worker = str(body["node"]), f"worker-{body['index']}-{body['attempt']}"
        lines = newest_of(scene.progress.newest.get(worker, {}), world)
        member = world is not None and any(
            (m.index, m.attempt) == (body["index"], body["attempt"]) for m in world.members
        )
        words = "" if lines else doing(world, member, float(body["created_seconds"]), now)
        found.setdefault(node, []).append(Row(node, node_state(scene, node), worker, words, lines))
    return tuple(row for node in scene.nodes for row in found.get(node) or [Row(node, node_state(scene, node))])


def newest_of(ranks: Mapping[int, LedgerLine], world: World | None) -> tuple[LedgerLine, ...]:
    """Each rank's newest line in the present epoch."""
    epoch = world.epoch if world is not None else 0
    return tuple(line for _, line in sorted(ranks.items()) if line.epoch == epoch)


def doing(world: World | None, member: bool, created_seconds: float, now: float) -> str:
    """Names the phase of a worker that has finished no step yet."""
    if world is not None and world.state == "Committed" and member:
        return _since("restoring and making its first step", now - world.changed_seconds)
    if world is not None and world.state == "Claimed" and member:
        return _since("stopped until the new world begins", now - world.changed_seconds)
    return _since("warming up (importing torch and the program's modules) or waiting to join", now - created_seconds)


def _since(words: str, seconds: float) -> str:
    return f"{words}, since {clock(seconds)}" if seconds >= _LONG_SECONDS else words


def node_state(scene: Scene, node: str) -> str:
    if node in scene.machine.frozen:
        return "frozen"
    if node in scene.machine.cordoned:
        return "drained" if node in scene.machine.drained else "cordoned"
    return "up" if scene.machine.node_record(node) is not None else "down"


def clock(seconds: float) -> str:
    """`12 s`, `3:05`, `2:10:00`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
