"""Shows a running job: a live table on a terminal, else plain lines.

Drawn by the caller's thread: a thread of its own would be one more parent that child processes could die with.
`RunSnapshot` is pure; `RunView` reads the run folder and writes to the terminal.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.text import escape_control_characters
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.cli.command_base import clock, say
from surefoot_operator.cli.local.progress import LedgerEntry
from surefoot_operator.cli.local.supervise import RunContext
from surefoot_operator.cli.tables import age
from surefoot_operator.platforms.local.platform import read_all_worker_files

_DRAW_SECONDS = 0.2
_LINE_SECONDS = 2.0
_BAR_WIDTH = 60
_RATE_SECONDS = 15.0
_LONG_SECONDS = 2.0
"""What takes less is not worth a word."""


class Row(NamedTuple):
    """A worker on its node, or a node without one.

    `doing`: its present phase (warming up, restoring …) while it has finished no step.
    """

    node: str
    state: str
    worker: str = ""
    doing: str = ""
    lines: tuple[LedgerEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """What is shown of a run at one moment."""

    name: str
    status: JobStatus
    step: int
    total_steps: int | None = None
    """Steps that the job says it makes."""
    steps_per_second: float | None = None
    loss: float | None = None
    checkpoint_seconds: float = 0.0
    """How long the newest complete checkpoint is known."""
    rows: tuple[Row, ...] = ()

    def headline(self) -> str:
        """Renders job, epoch, step, rate, loss and checkpoint in one line."""
        world, total, rate, saved = (
            self.status.membership,
            self.total_steps,
            self.steps_per_second,
            self.status.last_complete,
        )
        parts = (
            self.name,
            self.status.phase,
            "no epoch yet" if world is None else f"epoch {world.generation}  world {world.world_size}",
            f"step {self.step}" + (f" of {total} ({min(100, 100 * self.step // total)}%)" if total else ""),
            f"{rate:.3g} steps/s" if rate else "",
            f"{age(max(0, total - self.step) / rate)} left" if total and rate else "",
            f"loss {self.loss:.4f}" if self.loss is not None else "",
            f"checkpoint step {saved.step}, {self.checkpoint_seconds:.1f} s old" if saved is not None else "",
        )
        return "  ".join(filter(None, parts))

    def waits(self) -> str:
        """Says why no step is made; empty while steps are made."""
        workers_by_phase: dict[str, list[str]] = {}
        for row in self.rows:
            if row.doing:
                workers_by_phase.setdefault(row.doing, []).append(row.worker)
        phases = [f"{', '.join(workers)} {doing}" for doing, workers in workers_by_phase.items()]
        message = "" if self.status.phase in ("Running", "Complete", "Failed") else self.status.message
        return "; ".join(filter(None, (message, *phases)))


def draw(snapshot: RunSnapshot) -> Group:
    """Renders progress, reason for waiting, and workers for a terminal."""
    parts: list[RenderableType] = [Text(escape_control_characters(snapshot.headline()))]
    if snapshot.total_steps is not None:
        line = Table.grid()  # a bar alone ends no line
        done = min(snapshot.step, snapshot.total_steps)
        line.add_row(ProgressBar(total=snapshot.total_steps, completed=done, width=_BAR_WIDTH))
        parts.append(line)
    if waits := snapshot.waits():
        parts.append(Text(escape_control_characters(waits), style="dim"))
    table = Table(expand=False)
    for name in ("node", "state", "worker", "rank", "generation", "step", "loss"):
        table.add_column(name, justify="right" if name in ("rank", "generation", "step", "loss") else "left")
    for row in snapshot.rows:
        cells = [
            (str(line.rank), str(line.generation), str(line.step), "" if line.loss is None else f"{line.loss:.4f}")
            for line in row.lines
        ]
        for rank_cells in cells or [("",) * 4]:
            table.add_row(*row[:3], *rank_cells, style="" if row.state == "up" else "red")
    return Group(*parts, table)


class RunView:
    """The display of one run; a context manager that restores the terminal."""

    def __init__(self, scene: RunContext, is_plain: bool) -> None:
        self._scene = scene
        self._console = Console()
        is_live = sys.stdout.isatty() and not is_plain
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if is_live else None
        self._rate = ProgressRate()
        self._checkpoint: tuple[Checkpoint | None, float] = (None, 0.0)
        self._next_seconds = 0.0
        self._line = ""

    def show(self) -> None:
        """Draws the run as it is now, unless that was done a moment ago."""
        now = time.monotonic()
        if now < self._next_seconds:
            return
        self._next_seconds = now + (_LINE_SECONDS if self._live is None else _DRAW_SECONDS)
        snapshot = self.take(now)
        if self._live is not None:
            self._live.update(draw(snapshot), refresh=True)
            return
        line = "; ".join(filter(None, (snapshot.headline(), snapshot.waits())))
        if line != self._line:
            self._line = line
            say(f"{clock()} {line}")

    def tell(self, sentence: str, warning: bool) -> None:
        """Prints one sentence above the table."""
        if self._live is None:
            say(f"{clock()} {'! ' if warning else ''}{sentence}")
        else:
            self._console.print(
                Text(escape_control_characters(f"{clock()} {sentence}"), style="yellow" if warning else "")
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def take(self, now: float) -> RunSnapshot:
        """Takes a snapshot at `now` on the monotonic clock."""
        progress = self._scene.progress
        status, world = progress.status, progress.status.membership
        if status.last_complete != self._checkpoint[0]:
            self._checkpoint = (status.last_complete, now)
        rows = tuple(self._rows(world))
        newest = max((line for row in rows for line in row.lines), key=lambda line: line.step, default=None)
        return RunSnapshot(
            self._scene.job.name,
            status,
            progress.reached_step,
            self._scene.total_steps,
            self._rate.steps_per_second(now, world.generation if world is not None else 0, progress.finished_step),
            newest.loss if newest is not None else None,
            now - self._checkpoint[1],
            rows,
        )

    def _rows(self, membership: Membership | None) -> Iterator[Row]:
        rows: dict[str, list[Row]] = {}
        members = {(m.index, m.attempt) for m in membership.members} if membership is not None else set()
        for worker in read_all_worker_files(self._scene.machine.folder):
            record = worker.record
            if record.node is None or worker.has_ended:
                continue
            name = f"worker-{record.index}-{record.attempt}"
            lines = newest_of(self._scene.progress.newest.get(name, {}), membership)
            is_member = (record.index, record.attempt) in members
            phase = "" if lines else phase_of(membership, is_member, record.created_seconds, time.time())
            rows.setdefault(record.node, []).append(Row(record.node, self._node_state(record.node), name, phase, lines))
        for node in self._scene.nodes:
            yield from rows.get(node) or [Row(node, self._node_state(node))]

    def _node_state(self, node: str) -> str:
        machine = self._scene.machine
        if node in machine.frozen_nodes:
            return "frozen"
        if node in machine.cordoned_nodes:
            return "drained" if node in machine.drained_nodes else "cordoned"
        return "up" if machine.read_node_record(node) is not None else "down"


@dataclass(slots=True)
class ProgressRate:
    """Measures steps a second over a sliding window.

    A new epoch clears the window: the steps that it restored were not trained.
    """

    _steps: deque[tuple[float, int]] = field(default_factory=deque)
    _epoch: int = 0

    def steps_per_second(self, now: float, generation: int, step: int) -> float | None:
        if generation != self._epoch:
            self._epoch = generation
            self._steps.clear()
        if step <= 0:
            return None
        if not self._steps or step != self._steps[-1][1]:
            self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[0][0] > _RATE_SECONDS:
            self._steps.popleft()
        (begin, first), (_, last) = self._steps[0], self._steps[-1]
        # up to now, not to the last step: a world that stands must be seen to slow down
        return (last - first) / (now - begin) if last > first and now > begin else None


def newest_of(ranks: Mapping[int, LedgerEntry], membership: Membership | None) -> tuple[LedgerEntry, ...]:
    """Each rank's newest line in the present epoch."""
    epoch = membership.generation if membership is not None else 0
    return tuple(line for _, line in sorted(ranks.items()) if line.generation == epoch)


def phase_of(membership: Membership | None, is_member: bool, created_seconds: float, now: float) -> str:
    """Names the phase of a worker that has finished no step yet."""
    words, since = "warming up (importing torch and the program's modules) or waiting to join", created_seconds
    if membership is not None and is_member:
        since = membership.changed_seconds
        words = (
            "stopped until the new world begins"
            if membership.state == "Claimed"
            else "restoring and making its first step"
        )
    return f"{words}, since {age(now - since)}" if now - since >= _LONG_SECONDS else words
