"""Decides what a follower of logs shows.

Pure; called by `follow_pods` and `follow_files`. A line without an end, or of megabytes, must not fill the memory of who watches; a worker
that was replaced must not look like one that fell silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surefoot_operator.job_snapshot import WorkerSeen

MOST_LINE_BYTES = 16 << 10
"""A longer line is shown in pieces."""


@dataclass(frozen=True, slots=True)
class FollowChoice:
    """Whose lines are wanted, and how many old ones of each."""

    rank: int | None = None
    worker: int | None = None
    tail: int = 20

    def takes(self, rank: int | None) -> bool:
        return self.rank in (None, rank)


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """One worker as a follower last saw it."""

    attempt: int
    node: str
    over: str = ""
    """How it ended; empty: it has not."""


def whole_lines(rest: bytes, chunk: bytes) -> tuple[list[str], bytes]:
    """Splits what has come into lines, and what waits for its end."""
    *lines, left = (rest + chunk).split(b"\n")
    while len(left) > MOST_LINE_BYTES:
        lines.append(left[:MOST_LINE_BYTES])
        left = left[MOST_LINE_BYTES:]
    return [line.decode(errors="replace") for line in lines], left


def followed_line(worker: int, attempt: int, rank: int | None, text: str) -> str:
    """Renders one line: `1.2 rank 1 | words`; worker 1, attempt 2."""
    who = "agent" if rank is None else f"rank {rank}"
    return f"{worker}.{attempt} {who:<8} | {text}"


def workers_now(workers: Iterable[WorkerSeen], only: int | None) -> dict[int, WorkerNow]:
    """Maps each worker to its newest attempt."""
    found: dict[int, WorkerNow] = {}
    for one in workers:
        known = found.get(one.index)
        if only in (None, one.index) and (known is None or known.attempt < one.attempt):
            ended = one.phase in ("Succeeded", "Failed")
            code = "" if one.exit_code is None else f" with exit code {one.exit_code}"
            found[one.index] = WorkerNow(one.attempt, one.node or "", f"{one.phase}{code}" if ended else "")
    return found


def worker_changes(before: Mapping[int, WorkerNow], now: Mapping[int, WorkerNow]) -> list[str]:
    """Words what became of workers since the last look, in their order."""
    said = []
    for index in sorted(before.keys() | now.keys()):
        old, new = before.get(index), now.get(index)
        if new is None:
            if old is not None and not old.over:
                said.append(f"== worker {index} (attempt {old.attempt}) is gone")
        elif old is None:
            said.append(f"== worker {index} (attempt {new.attempt}){_on(new)}")
        elif old.attempt != new.attempt:
            where = f", which was on {old.node}" if old.node and old.node != new.node else ""
            successor = f"attempt {new.attempt}{_on(new)}" if new.node else f"attempt {new.attempt}, which{_on(new)},"
            said.append(f"== worker {index} is replaced: {successor} follows attempt {old.attempt}{where}")
        elif new.node != old.node:
            said.append(f"== worker {index} (attempt {new.attempt}){_on(new)}")
        if new is not None and new.over and (old is None or old.attempt != new.attempt or old.over != new.over):
            said.append(f"== worker {index} (attempt {new.attempt}) ended: {new.over}")
    return said


def _on(worker: WorkerNow) -> str:
    return f" on {worker.node}" if worker.node else " waits for a node"
