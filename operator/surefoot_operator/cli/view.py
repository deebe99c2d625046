"""How a run looks while it runs: a live table on a terminal, plain lines elsewhere. Writes to standard output only.

Called by `supervise` through `show` and `tell`. Drawing happens on the caller's thread: a thread of its own would be
one more parent that processes could die with.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from surefoot.protocol.plain import plain
from surefoot_operator.cli.ledger import Line
from surefoot_operator.cli.saying import say
from surefoot_operator.cli.supervise import Scene
from surefoot_operator.fabric.processes.folder import read_json

_DRAW_SECONDS = 0.2
_LINE_SECONDS = 2.0


class View(Protocol):
    """A context manager, so that the terminal is always given back."""

    def show(self, scene: Scene) -> None: ...

    def tell(self, sentence: str, warning: bool) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def view_for(plain: bool) -> View:
    """A live view where there is a terminal and nobody asked for lines."""
    return PlainView() if plain or not sys.stdout.isatty() else LiveView()


@dataclass(slots=True)
class _Age:
    """Since when the newest complete checkpoint is known."""

    checkpoint: object = None
    since: float = 0.0

    def seconds(self, scene: Scene) -> float | None:
        newest = scene.progress.status.last_complete
        if newest != self.checkpoint:
            self.checkpoint, self.since = newest, time.monotonic()
        return None if newest is None else time.monotonic() - self.since


def _headline(scene: Scene, age: float | None) -> str:
    status = scene.progress.status
    world = status.world
    saved = status.last_complete
    parts = [
        scene.job.name,
        status.phase,
        f"epoch {world.epoch}" if world else "no epoch yet",
        f"world {world.size}" if world else "",
        f"step {scene.progress.reached_step}",
        f"loss {loss:.4f}" if (loss := _loss(scene)) is not None else "",
        f"checkpoint step {saved.step}, {age:.1f} s old" if saved is not None and age is not None else "",
    ]
    return "  ".join(part for part in parts if part)


def _loss(scene: Scene) -> float | None:
    epoch = scene.progress.status.world.epoch if scene.progress.status.world else 0
    lines = [line for ranks in scene.progress.newest.values() for line in ranks.values() if line.epoch == epoch]
    newest = max(lines, key=lambda line: line.step, default=None)
    return newest.loss if newest is not None else None


@dataclass(slots=True)
class PlainView:
    """A line every two seconds while something changes, and one for each thing that happens."""

    _age: _Age = field(default_factory=_Age)
    _next: float = 0.0
    _last: str = ""

    def show(self, scene: Scene) -> None:
        age = self._age.seconds(scene)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_SECONDS
        line = _headline(scene, age)
        if line != self._last:
            self._last = line
            say(f"{_clock()} {line}")

    def tell(self, sentence: str, warning: bool) -> None:
        say(f"{_clock()} {'! ' if warning else ''}{sentence}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class LiveView:
    """A table of workers that stays in place, with what happens scrolling above it."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._age = _Age()
        self._next = 0.0

    def show(self, scene: Scene) -> None:
        age = self._age.seconds(scene)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _DRAW_SECONDS
        self._live.update(_table(scene, age), refresh=True)

    def tell(self, sentence: str, warning: bool) -> None:
        self._console.print(Text(plain(f"{_clock()} {sentence}"), style="yellow" if warning else ""))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def _table(scene: Scene, age: float | None) -> Table:
    table = Table(title=Text(plain(_headline(scene, age))), title_justify="left", expand=False)
    for name in ("node", "state", "worker", "rank", "epoch", "step", "loss"):
        table.add_column(name, justify="right" if name in ("rank", "epoch", "step", "loss") else "left")
    workers = _workers_by_node(scene)
    for node in scene.nodes:
        state = _node_state(scene, node)
        shown = [(worker, line) for worker in workers.get(node, ()) for line in _lines(scene, worker)]
        if not shown:
            names = ", ".join(workers.get(node, ()))
            table.add_row(node, state, names, "", "", "", "", style="" if state == "up" else "red")
        for worker, line in shown:
            loss = "" if line.loss is None else f"{line.loss:.4f}"
            figures = (str(line.rank), str(line.epoch), str(line.step), loss)
            table.add_row(node, state, worker, *figures, style="" if state == "up" else "red")
    return table


def _node_state(scene: Scene, node: str) -> str:
    if node in scene.machine.frozen:
        return "frozen"
    return "up" if scene.machine.node_record(node) is not None else "down"


def _workers_by_node(scene: Scene) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    folder = scene.machine.folder
    for path in sorted(folder.workers.glob("*.json")):
        body = read_json(path)
        state = read_json(folder.worker_state(path.stem))
        if body is None or not body.get("node") or (state is not None and state["phase"] != "Running"):
            continue
        found.setdefault(str(body["node"]), []).append(f"worker-{body['index']}-{body['attempt']}")
    return found


def _lines(scene: Scene, worker: str) -> list[Line]:
    return [line for _, line in sorted(scene.progress.newest.get(worker, {}).items())]


def _clock() -> str:
    return time.strftime("%H:%M:%S")
