"""Merges trainers' and agents' lines by rank and attempt.

Pure; called by `logs`. In a failure most ranks write only that they lost the connection to another; the rank to blame comes first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from surefoot_operator.api.status import Incident

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\S+) (.*)", re.DOTALL)
_RANK = re.compile(r"\[rank (\d+)\] ?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line, and when it was written where that is known."""

    text: str
    at: str = ""
    """RFC 3339, as the kubelet stamped it; of a run folder's files empty."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """The lines of one rank of one attempt, or of its agent."""

    worker: int
    attempt: int
    rank: int | None
    """None: the agent's own words."""
    lines: tuple[LogLine, ...]
    epoch: int | None = None
    """None: of all epochs that this attempt took part in."""
    blamed: str = ""
    """Why this one is blamed; empty: it is not."""


def parts_of_pod(worker: int, attempt: int, text: str) -> list[LogPart]:
    """Parts a container's stamped output by the rank that each line names."""
    found: dict[int | None, list[LogLine]] = {}
    for text_line in text.splitlines():
        rank, line = ranked_line(text_line)
        found.setdefault(rank, []).append(line)
    return [LogPart(worker, attempt, rank, tuple(lines)) for rank, lines in found.items()]


def ranked_line(text: str) -> tuple[int | None, LogLine]:
    """Reads one stamped line: whose it is (None: the agent's), and what it says."""
    stamped = _STAMPED.fullmatch(text)
    at, said = (stamped[1], stamped[2]) if stamped else ("", text)
    ranked = _RANK.fullmatch(said)
    rank, said = (int(ranked[1]), ranked[2]) if ranked else (None, said)
    return rank, LogLine(said, at)


def stamp_order(at: str) -> tuple[str, str]:
    """Orders stamps of one kubelet, which leaves out a fraction's last zeros.

    As text `…02.5Z` would come after `…02.51Z`.
    """
    return at[:19], at[19:].lstrip(".").rstrip("Z").ljust(9, "0")


def blamed_incident(incidents: Sequence[Incident]) -> Incident | None:
    """The newest incident that names somebody; None: nobody is blamed."""
    named = (one for one in reversed(incidents) if one.kind != "planned" and (one.rank, one.worker) != (None, None))
    return next(named, None)


def in_order(parts: Iterable[LogPart], blamed: Incident | None) -> list[LogPart]:
    """Puts the blamed part first, then ranks, then agents."""
    parts = list(parts)
    attempts = frozenset[int]() if blamed is None else _attempts(parts, blamed)
    marked = [_marked(part, blamed, attempts) for part in parts]
    return sorted(
        marked,
        key=lambda part: (
            not part.blamed,
            part.rank is None,
            part.rank or 0,
            part.worker,
            part.attempt,
            part.epoch or 0,
        ),
    )


def _attempts(parts: Sequence[LogPart], blamed: Incident) -> frozenset[int]:
    """Attempts of the blamed worker whose agent began the epoch that failed; none where no line is left to tell."""
    began = f"epoch {blamed.epoch}: starting "
    agents = (part for part in parts if part.worker == blamed.worker and part.rank is None)
    return frozenset(part.attempt for part in agents if any(began in line.text for line in part.lines))


def _marked(part: LogPart, blamed: Incident | None, attempts: frozenset[int]) -> LogPart:
    if blamed is None or part.worker != blamed.worker or part.rank != blamed.rank:
        return part
    if attempts and part.attempt not in attempts:
        return part  # it came after the failure, or ended before
    if part.epoch is not None and part.epoch != blamed.epoch:
        return part
    return LogPart(part.worker, part.attempt, part.rank, part.lines, part.epoch, blamed.reason)


def part_lines(parts: Sequence[LogPart], most: int) -> list[str]:
    """Renders each part under a heading, its last `most` lines."""
    lines: list[str] = []
    for part in parts:
        left_out = len(part.lines) - most
        before = [f"({left_out} lines before)"] if left_out > 0 else []
        lines += ["", heading(part), *before, *(one.text for one in part.lines[-most:])]
    return lines[1:]


def heading(part: LogPart) -> str:
    """`== rank 1, worker 1 (attempt 1), epoch 2`, and why it is blamed."""
    who = "agent" if part.rank is None else f"rank {part.rank}"
    epoch = "" if part.epoch is None else f", epoch {part.epoch}"
    blame = f", blamed: {part.blamed}" if part.blamed else ""
    return f"== {who}, worker {part.worker} (attempt {part.attempt}){epoch}{blame}"


def by_time(parts: Iterable[LogPart], most: int) -> list[str]:
    """Renders the newest `most` lines in the order of their stamps."""
    lines = [(line.at, _who(part), line.text) for part in parts for line in part.lines]
    return [f"{at}  {who}  {text}" for at, who, text in sorted(lines, key=lambda one: stamp_order(one[0]))[-most:]]


def _who(part: LogPart) -> str:
    return f"worker {part.worker}.{part.attempt} " + ("agent" if part.rank is None else f"rank {part.rank}")
