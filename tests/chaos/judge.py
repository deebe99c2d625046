"""Holds the notes of a disturbed training against an undisturbed one's. Knows nothing of Surefoot but what `restore` returned."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGEST_DIFFERENCE = 1e-12
"""Of losses and parameters: sums over other numbers of ranks are rounded otherwise."""


@dataclass
class Life:
    """One rank's notes of one epoch."""

    epoch: int
    rank: int
    world: int
    restored: int
    steps: dict[int, tuple[tuple[int, ...], float]] = field(default_factory=dict)
    parameters: list[list[float]] | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    lost: int
    repeated: int
    steps: int
    """That count: along the last epoch's history."""
    loss_difference: float
    parameter_difference: float
    epochs: int
    complaints: tuple[str, ...] = ()


def read(folder: Path) -> list[Life]:
    lives = []
    for path in sorted(folder.glob("notes-*.jsonl")):
        lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        if not lines:
            continue
        life = Life(**lines[0])
        for line in lines[1:]:
            if "step" in line:
                life.steps[line["step"]] = (tuple(line["ids"]), line["loss"])
            else:
                life.parameters = line["parameters"]
        lives.append(life)
    return lives


def judge(disturbed: Path, undisturbed: Path, steps: int) -> Judgement:
    """Walks back from the last step, epoch by epoch, and counts every sample of every step against the other run."""
    (alone,) = read(undisturbed)
    lives: dict[int, dict[int, Life]] = defaultdict(dict)
    complaints: list[str] = []
    for life in read(disturbed):
        if life.rank in lives[life.epoch]:
            complaints.append(f"rank {life.rank} of epoch {life.epoch} began twice")
        lives[life.epoch][life.rank] = life
    whole = {epoch: ranks for epoch, ranks in lives.items() if len(ranks) == next(iter(ranks.values())).world}
    for epoch, ranks in sorted(whole.items()):
        if len({life.restored for life in ranks.values()}) > 1:
            complaints.append(f"ranks of epoch {epoch} restored different steps")
    lost = repeated = counted = 0
    differences, step, before = [0.0], steps, max(whole, default=0) + 1
    while step:
        epoch = max((e for e, ranks in whole.items() if e < before and _made(ranks, step)), default=None)
        if epoch is None:
            complaints.append(f"no epoch before {before} made step {step} on all its ranks")
            break
        begun = next(iter(whole[epoch].values())).restored
        for at in range(step, begun, -1):
            notes = [life.steps[at] for life in whole[epoch].values()]
            seen, wanted = Counter(i for ids, _ in notes for i in ids), Counter(alone.steps[at][0])
            lost, repeated, counted = lost + (wanted - seen).total(), repeated + (seen - wanted).total(), counted + 1
            differences += [abs(loss - alone.steps[at][1]) for _, loss in notes]
        step, before = begun, epoch
    parameters = [
        abs(a - b)
        for ranks in whole.values()
        for life in ranks.values()
        if life.parameters is not None
        for mine, theirs in zip(life.parameters, alone.parameters or [], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    if not parameters:
        complaints.append("no rank came to the end of the training")
    return Judgement(
        lost, repeated, counted, max(differences), max(parameters, default=0.0), len(lives), tuple(complaints)
    )


def _made(ranks: dict[int, Life], step: int) -> bool:
    return all(step in life.steps for life in ranks.values())


def sentence_of(found: Judgement, steps: int) -> str | None:
    """What is wrong with it, or None."""
    if found.complaints:
        return "; ".join(found.complaints)
    if found.lost or found.repeated or found.steps != steps:
        return f"{found.lost} samples lost, {found.repeated} repeated, {found.steps} of {steps} steps"
    if max(found.loss_difference, found.parameter_difference) > LARGEST_DIFFERENCE:
        return f"losses differ by {found.loss_difference:.1e}, parameters by {found.parameter_difference:.1e}"
    return None
