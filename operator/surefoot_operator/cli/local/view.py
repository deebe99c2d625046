"""Shows a running job: as a live table on a terminal, else as plain lines.

The caller's thread draws. Child processes die with the thread that forked them, so the display adds no thread that
could become such a parent. `RunSnapshot` is pure; `RunView` reads the run folder and writes to the terminal.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
_STEP_LINE_SECONDS = 10.0
"""Time between two plain lines that differ only in their numbers while steps are made; without steps six times as long."""
_IDLE_SECONDS = 5.0
"""Time without a finished step after which the operator's own reason is shown."""
_BAR_WIDTH = 60
RANK_0 = "rank 0"
"""Shows only the output of rank 0."""
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
    is_training: bool = True
    """Whether a step was finished a moment ago."""

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
            self.reason(),
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

    def reason(self) -> str:
        """Returns the operator's reason for which no rank trains; empty while the job makes steps or has ended."""
        is_silent = self.status.phase in ("Complete", "Failed") or (self.status.phase == "Running" and self.is_training)
        return "" if is_silent or not self.status.message else f"({self.status.message})"

    def waits(self) -> str:
        """Lists what each worker does that has not finished a step; empty if there is none."""
        workers_by_phase: dict[str, list[str]] = {}
        for row in self.rows:
            if row.doing:
                workers_by_phase.setdefault(row.doing, []).append(row.worker)
        return "; ".join(f"{', '.join(workers)} {doing}" for doing, workers in workers_by_phase.items())


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

    def __init__(self, context: RunContext, is_plain: bool, logs: str = RANK_0) -> None:
        """Creates the view. `logs`: whose output is shown: RANK_0, "all" or "none"."""
        self._context = context
        self._logs = TrainerOutput(context.machine.folder.logs_folder, logs)
        self._last_step: tuple[int, float] = (0, time.monotonic())
        self._console = Console()
        is_live = sys.stdout.isatty() and not is_plain
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if is_live else None
        self._rate = ProgressRate()
        self._checkpoint: tuple[Checkpoint | None, float] = (None, 0.0)
        self._next_seconds = 0.0
        self._line_key, self._line_seconds, self._line_step = "", 0.0, 0

    def show(self) -> None:
        """Draws the current state of the run, unless it was drawn a moment ago."""
        now = time.monotonic()
        self._show_output()
        if now < self._next_seconds:
            return
        self._next_seconds = now + (_LINE_SECONDS if self._live is None else _DRAW_SECONDS)
        snapshot = self.take(now)
        if self._live is not None:
            self._live.update(draw(snapshot), refresh=True)
            return
        line = "; ".join(filter(None, (snapshot.headline(), snapshot.waits())))
        # A line whose words are those of the last one only counts on; in a file a hundred of them hide the others.
        key = re.sub(r"[\d.]+(e-?\d+)?", "", line)
        wait_seconds = _STEP_LINE_SECONDS if snapshot.step != self._line_step else 6 * _STEP_LINE_SECONDS
        if key != self._line_key or now >= self._line_seconds + wait_seconds:
            self._line_key, self._line_seconds, self._line_step = key, now, snapshot.step
            say(f"{clock()} {line}")

    def _show_output(self) -> None:
        membership = self._context.progress.status.membership
        for line in self._logs.new_lines(membership.generation if membership is not None else 0):
            if self._live is None:
                say(line)
            else:
                self._console.print(Text(escape_control_characters(line)), soft_wrap=True)

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
        self._show_output()
        if self._live is not None:
            self._live.stop()

    def take(self, now: float) -> RunSnapshot:
        """Reads the state of the run. `now`: seconds on the monotonic clock."""
        progress = self._context.progress
        status, membership = progress.status, progress.status.membership
        if status.last_complete != self._checkpoint[0]:
            self._checkpoint = (status.last_complete, now)
        if progress.finished_step != self._last_step[0]:
            self._last_step = (progress.finished_step, now)
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
            is_training=now - self._last_step[1] < _IDLE_SECONDS,
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


# ---- output of trainers ----------------------------------------------------------------------------------------------

_OUTPUT_SECONDS = 0.2
_MAX_OUTPUT_BYTES = 32 << 10
"""Bytes of one log that are shown at each read. The rest stays in the file, whose name is then printed."""


@dataclass(slots=True)
class TrainerOutput:
    """Reads the output of the current generation's trainers from their log files."""

    logs_folder: Path
    ranks: str
    """RANK_0, "all" or "none"."""
    _offsets: dict[Path, int] = field(default_factory=dict)
    _next_seconds: float = 0.0

    def __post_init__(self) -> None:
        # of a run that is continued, only new output is shown
        self._offsets = {path: path.stat().st_size for path in self.logs_folder.glob("worker-*/epoch-*/rank-*.log")}

    def new_lines(self, generation: int) -> list[str]:
        """Returns the lines printed since the last call, each with its rank; at most a few hundred."""
        now = time.monotonic()
        if self.ranks == "none" or now < self._next_seconds:
            return []
        self._next_seconds = now + _OUTPUT_SECONDS
        pattern = "rank-0.log" if self.ranks == RANK_0 else "rank-*.log"
        # The last lines of a trainer that ended are read although the next generation has been claimed by then.
        self._offsets = {path: at for path, at in self._offsets.items() if _generation_of(path) >= generation - 1}
        lines = []
        for path in sorted({*self.logs_folder.glob(f"worker-*/epoch-{generation}/{pattern}"), *self._offsets}):
            lines += [f"[rank {path.stem.removeprefix('rank-')}] {line}" for line in self._read(path)]
        return lines

    def _read(self, path: Path) -> list[str]:
        offset = self._offsets.setdefault(path, 0)
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                if size < offset:  # the agent deleted the older part of a log that was too long
                    offset = size
                file.seek(offset)
                content = file.read(_MAX_OUTPUT_BYTES)
        except OSError:
            return []
        content = content[: content.rfind(b"\n") + 1] if len(content) < _MAX_OUTPUT_BYTES else content
        is_cut = size - offset > _MAX_OUTPUT_BYTES
        self._offsets[path] = size if is_cut else offset + len(content)
        # a progress bar rewrites its line: show its last text
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in content.decode(errors="replace").split("\n")[:-1]]
        return [*lines, f"… more than is shown here: {path}"] if is_cut else lines


def _generation_of(log: Path) -> int:
    return int(log.parent.name.removeprefix("epoch-"))


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
