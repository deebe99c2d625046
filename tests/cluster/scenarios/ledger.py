"""What the trainings wrote down, read as it grows, and what it proves. Touches the folder of one job.

Nothing here asks operator or agents: each line was written by the trainer that made the step.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.scenarios.trainer_files import FINAL, TRACE
from surefoot.protocol.checkpoints.completeness import Lineage
from surefoot_operator.cli.local import progress as counting
from surefoot_operator.cli.local.progress import LedgerEntry, parse_line


@dataclass(slots=True)
class _Tail:
    path: Path
    offset: int = 0

    def lines(self) -> list[str]:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            whole = file.read().rpartition(b"\n")[0]
        self.offset += len(whole) + 1 if whole else 0
        return whole.decode().splitlines()


@dataclass(slots=True)
class Ledger:
    """`look` reads what is new. `lines` by epoch; `runners` says which processes made a rank's steps in an epoch."""

    folder: Path
    lines: dict[int, list[LedgerEntry]] = field(default_factory=lambda: defaultdict(list))
    runners: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    _tails: dict[str, _Tail] = field(default_factory=dict)

    def look(self) -> None:
        for path in sorted(self.folder.glob("epoch-*.jsonl")):
            tail = self._tails.setdefault(path.name, _Tail(path))
            for text in tail.lines():
                line = parse_line(text)
                if line is not None:
                    self.lines[line.generation].append(line)
                    self.runners[line.generation, line.rank].add(path.name)

    def finished(self, epoch: int, world: int) -> int:
        """The newest step that every rank of that epoch has finished."""
        return counting.finished_step(self.lines.get(epoch, ()), epoch, world)

    def first_step_at(self, epoch: int, world: int) -> float | None:
        """When every rank of that epoch had finished its first step."""
        firsts: dict[int, float] = {}
        for line in self.lines.get(epoch, ()):
            firsts[line.rank] = min(firsts.get(line.rank, line.at_seconds), line.at_seconds)
        return max(firsts.values()) if len(firsts) == world else None

    def twice(self) -> list[str]:
        """Ranks that two processes ran in one epoch."""
        return [
            f"rank {rank} of epoch {epoch}: {sorted(by)}" for (epoch, rank), by in self.runners.items() if len(by) > 1
        ]

    def all_lines(self) -> Iterable[LedgerEntry]:
        return (line for lines in self.lines.values() for line in lines)

    def final(self) -> tuple[int, list[float]] | None:
        """Step and parameters of the last step, once it was made."""
        try:
            body = json.loads((self.folder / FINAL).read_text())
        except FileNotFoundError:
            return None
        return int(body["step"]), [float(value) for value in body["parameters"]]

    def traced(self, step: int, count: int) -> list[float]:
        """The parameters after a step, of a job that wrote down every step's."""
        with open(self.folder / TRACE, "rb") as file:
            file.seek((step - 1) * count * 8)
            return list(struct.unpack(f"{count}d", file.read(count * 8)))


@dataclass(frozen=True)
class Account:
    """A job against the undisturbed one, up to `steps`."""

    steps: int
    samples_lost: int
    samples_repeated: int
    max_loss_difference: float
    ranks_run_twice: int
    max_parameter_difference: float | None = None
    """None until it has ended."""

    def shown(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def account(
    mine: Ledger, lineage: Lineage, undisturbed: Ledger, straight: Lineage, until: int | None = None
) -> Account:
    """Every step along the lineage up to `until`, against the same steps of the undisturbed job."""
    kept = {
        s: lines
        for s, lines in counting.counted_lines(mine.all_lines(), lineage).items()
        if until is None or s <= until
    }
    losses = counting.mean_loss_by_step(counting.counted_lines(undisturbed.all_lines(), straight))
    counted = counting.count_samples(kept)
    assert counted is not None, "no step was written down"
    difference = counting.largest_difference(counting.mean_loss_by_step(kept), losses)
    assert difference is not None, "the two jobs share no step"
    assert kept.keys() <= losses.keys(), "the undisturbed job made fewer steps"
    return Account(counted.steps, counted.lost, counted.repeated, difference, len(mine.twice()))
