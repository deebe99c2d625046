"""Displays a running job: a live table or plain lines.

Drawn by the caller's thread: a thread of its own would be one more parent that child processes could die with.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.protocol.plain import plain
from surefoot_operator.cli.command_base import clock, say
from surefoot_operator.cli.local.snapshot import NewestCheckpoint, Row, RunSnapshot, take
from surefoot_operator.cli.local.supervise import Scene

_DRAW_SECONDS = 0.2
_LINE_SECONDS = 2.0
_BAR_WIDTH = 60


class View(AbstractContextManager["View"], Protocol):
    """A display of the run; a context manager that restores the terminal."""

    def show(self, scene: Scene) -> None: ...

    def tell(self, sentence: str, warning: bool) -> None: ...


def view_for(plain: bool) -> View:
    """Chooses the live view on a terminal, else plain lines."""
    return PlainView() if plain or not sys.stdout.isatty() else LiveView()


@dataclass(slots=True)
class PlainView:
    """Prints a line at most every two seconds, and one per event."""

    _known: NewestCheckpoint = field(default_factory=NewestCheckpoint)
    _next: float = 0.0
    _last: str = ""

    def show(self, scene: Scene) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_SECONDS
        picture = take(scene, self._known)
        line = "; ".join(part for part in (picture.headline(), picture.waits()) if part)
        if line != self._last:
            self._last = line
            say(f"{clock()} {line}")

    def tell(self, sentence: str, warning: bool) -> None:
        say(f"{clock()} {'! ' if warning else ''}{sentence}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class LiveView:
    """Shows a table of workers in place, with events scrolling above it."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._known = NewestCheckpoint()
        self._next = 0.0

    def show(self, scene: Scene) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _DRAW_SECONDS
        self._live.update(drawn(take(scene, self._known)), refresh=True)

    def tell(self, sentence: str, warning: bool) -> None:
        self._console.print(Text(plain(f"{clock()} {sentence}"), style="yellow" if warning else ""))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def drawn(picture: RunSnapshot) -> Group:
    """Renders progress, reason for waiting, and workers for a terminal."""
    parts: list[RenderableType] = [Text(plain(picture.headline()))]
    if picture.total is not None:
        line = Table.grid()  # a bar alone ends no line
        line.add_row(ProgressBar(total=picture.total, completed=min(picture.step, picture.total), width=_BAR_WIDTH))
        parts.append(line)
    if waits := picture.waits():
        parts.append(Text(plain(waits), style="dim"))
    return Group(*parts, _table(picture.rows))


def _table(rows: tuple[Row, ...]) -> Table:
    table = Table(expand=False)
    for name in ("node", "state", "worker", "rank", "epoch", "step", "loss"):
        table.add_column(name, justify="right" if name in ("rank", "epoch", "step", "loss") else "left")
    for row in rows:
        style = "" if row.state == "up" else "red"
        if not row.lines:
            table.add_row(row.node, row.state, row.worker, "", "", "", "", style=style)
        for line in row.lines:
            loss = "" if line.loss is None else f"{line.loss:.4f}"
            table.add_row(
                row.node, row.state, row.worker, str(line.rank), str(line.epoch), str(line.step), loss, style=style
            )
    return table
