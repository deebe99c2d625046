"""Shows a running job: as a live table on a terminal, else as plain lines.

The caller's thread draws. Child processes die with the thread that forked them, so the display adds no thread that
could become such a parent. `RunSnapshot` is pure; `RunView` reads the run folder and writes to the terminal.
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
"""A phase shorter than this is shown without its duration."""


class Row(NamedTuple):
    """A table row: a worker on its node, or a node without a worker."""

    node: str
    state: str
    """State of the node: up, down, frozen, cordoned or drained."""
    worker: str = ""
    """Name of the worker; empty on a node without one."""
    doing: str = ""
    """Phase of a worker that has not finished a step in this generation; else empty."""
    lines: tuple[LedgerEntry, ...] = ()
    """Newest ledger line of each of the worker's ranks."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The displayed state of a run at one moment."""

    name: str
    status: JobStatus
    step: int
    total_steps: int | None = None
    """Number of steps that the job intends to run; None if it does not declare one."""
    steps_per_second: float | None = None
    loss: float | None = None
    checkpoint_seconds: float = 0.0
    """Seconds since the newest complete checkpoint was first observed."""
    rows: tuple[Row, ...] = ()

    def headline(self) -> str:
        """Renders job, generation, step, rate, loss and checkpoint in one line."""
        membership, total_steps, steps_per_second, checkpoint = (
            self.status.membership,
            self.total_steps,
            self.steps_per_second,
            self.status.last_complete,
        )
        parts = (
            self.name,
            self.status.phase,
            "no generation yet"
            if membership is None
            else f"generation {membership.generation}  {membership.world_size} ranks",
            f"step {self.step}"
            + (f" of {total_steps} ({min(100, 100 * self.step // total_steps)}%)" if total_steps else ""),
            f"{steps_per_second:.3g} steps/s" if steps_per_second else "",
            f"{age(max(0, total_steps - self.step) / steps_per_second)} left"
            if total_steps and steps_per_second
            else "",
            f"loss {self.loss:.4f}" if self.loss is not None else "",
            f"checkpoint step {checkpoint.step}, {self.checkpoint_seconds:.1f} s old" if checkpoint is not None else "",
        )
        return "  ".join(filter(None, parts))

    def waits(self) -> str:
        """Explains why no steps are made; empty while the job makes steps."""
        workers_by_phase: dict[str, list[str]] = {}
        for row in self.rows:
            if row.doing:
                workers_by_phase.setdefault(row.doing, []).append(row.worker)
        phases = [f"{', '.join(workers)} {doing}" for doing, workers in workers_by_phase.items()]
        message = "" if self.status.phase in ("Running", "Complete", "Failed") else self.status.message
        return "; ".join(filter(None, (message, *phases)))


def draw(snapshot: RunSnapshot) -> Group:
    """Renders the progress, the reason for waiting and the table of workers for a terminal."""
    parts: list[RenderableType] = [Text(escape_control_characters(snapshot.headline()))]
    if snapshot.total_steps is not None:
        progress_line = Table.grid()  # a progress bar alone does not end its line
        done_steps = min(snapshot.step, snapshot.total_steps)
        progress_line.add_row(ProgressBar(total=snapshot.total_steps, completed=done_steps, width=_BAR_WIDTH))
        parts.append(progress_line)
    if waits := snapshot.waits():
        parts.append(Text(escape_control_characters(waits), style="dim"))
    table = Table(expand=False)
    for name in ("node", "state", "worker", "rank", "generation", "step", "loss"):
        table.add_column(name, justify="right" if name in ("rank", "generation", "step", "loss") else "left")
    for row in snapshot.rows:
        cells = [
            (
                str(progress_line.rank),
                str(progress_line.generation),
                str(progress_line.step),
                "" if progress_line.loss is None else f"{progress_line.loss:.4f}",
            )
            for progress_line in row.lines
        ]
        for rank_cells in cells or [("",) * 4]:
            table.add_row(*row[:3], *rank_cells, style="" if row.state == "up" else "red")
    return Group(*parts, table)


class RunView:
    """Displays one run; a context manager that restores the terminal at its end."""

    def __init__(self, context: RunContext, is_plain: bool) -> None:
        self._context = context
        self._console = Console()
        is_live = sys.stdout.isatty() and not is_plain
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if is_live else None
        self._rate = ProgressRate()
        self._checkpoint: tuple[Checkpoint | None, float] = (None, 0.0)
        self._next_seconds = 0.0
        self._line = ""

    def show(self) -> None:
        """Draws the current state of the run, unless it was drawn a moment ago."""
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
        """Prints one sentence above the live table, or as a line of its own."""
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
        """Reads the state of the run. `now`: seconds on the monotonic clock."""
        progress = self._context.progress
        status, membership = progress.status, progress.status.membership
        if status.last_complete != self._checkpoint[0]:
            self._checkpoint = (status.last_complete, now)
        rows = tuple(self._rows(membership))
        newest_line = max((line for row in rows for line in row.lines), key=lambda line: line.step, default=None)
        return RunSnapshot(
            self._context.job.name,
            status,
            progress.reached_step,
            self._context.total_steps,
            self._rate.steps_per_second(
                now, membership.generation if membership is not None else 0, progress.finished_step
            ),
            newest_line.loss if newest_line is not None else None,
            now - self._checkpoint[1],
            rows,
        )

    def _rows(self, membership: Membership | None) -> Iterator[Row]:
        """Yields the rows of the table: each node with its workers, in the order of nodes."""
        rows_by_node: dict[str, list[Row]] = {}
        members = {(member.index, member.attempt) for member in membership.members} if membership is not None else set()
        for worker in read_all_worker_files(self._context.machine.folder):
            record = worker.record
            if record.node is None or worker.has_ended:
                continue
            name = f"worker-{record.index}-{record.attempt}"
            lines = newest_of(self._context.progress.newest.get(name, {}), membership)
            is_member = (record.index, record.attempt) in members
            phase = "" if lines else phase_of(membership, is_member, record.created_seconds, time.time())
            rows_by_node.setdefault(record.node, []).append(
                Row(record.node, self._node_state(record.node), name, phase, lines)
            )
        for node in self._context.nodes:
            yield from rows_by_node.get(node) or [Row(node, self._node_state(node))]

    def _node_state(self, node: str) -> str:
        """Returns the state of a node for the table."""
        machine = self._context.machine
        if node in machine.frozen_nodes:
            return "frozen"
        if node in machine.cordoned_nodes:
            return "drained" if node in machine.drained_nodes else "cordoned"
        return "up" if machine.read_node_record(node) is not None else "down"


@dataclass(slots=True)
class ProgressRate:
    """Measures steps per second over a sliding window.

    A new generation clears the window, because the steps that it restored were not trained.
    """

    _steps: deque[tuple[float, int]] = field(default_factory=deque)
    _generation: int = 0

    def steps_per_second(self, now: float, generation: int, step: int) -> float | None:
        """Adds a measurement and returns the rate over the window; None if it is not known yet."""
        if generation != self._generation:
            self._generation = generation
            self._steps.clear()
        if step <= 0:
            return None
        if not self._steps or step != self._steps[-1][1]:
            self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[0][0] > _RATE_SECONDS:
            self._steps.popleft()
        (first_seconds, first_step), (_, last_step) = self._steps[0], self._steps[-1]
        # Measure up to now, not to the last step: the rate of a job that makes no more steps must fall.
        return (
            (last_step - first_step) / (now - first_seconds) if last_step > first_step and now > first_seconds else None
        )


def newest_of(ranks: Mapping[int, LedgerEntry], membership: Membership | None) -> tuple[LedgerEntry, ...]:
    """Returns the newest lines that belong to the current generation, by rank. `ranks`: each rank's newest line."""
    generation = membership.generation if membership is not None else 0
    return tuple(line for _, line in sorted(ranks.items()) if line.generation == generation)


def phase_of(membership: Membership | None, is_member: bool, created_seconds: float, now: float) -> str:
    """Describes the phase of a worker that has not finished a step yet; times are Unix times."""
    phase, start_seconds = "warming up (importing torch and the program's modules) or waiting to join", created_seconds
    if membership is not None and is_member:
        start_seconds = membership.changed_seconds
        phase = (
            "stopped until the new world begins"
            if membership.state == "Claimed"
            else "restoring and making its first step"
        )
    return f"{phase}, since {age(now - start_seconds)}" if now - start_seconds >= _LONG_SECONDS else phase
