"""Summarizes the stacks and collectives of ranks that make no progress.

In a hung job most ranks wait in the same collective; the reader searches for the one that does not. So ranks with the
same main thread form one group, described by its innermost frame and the innermost frame of the user's own code. The
summary blames no rank: which one the others wait for is for the operator or the reader to decide.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from surefoot.ipc.stacks import CAPTURE_TIMEOUT_SECONDS, CapturedStack
from surefoot.ipc.trainer_messages import CollectivesReport, RequestCollectives
from surefoot.protocol.hangs import INNERMOST_FRAMES, Collective, RankStack, waits_for_ranks
from surefoot.protocol.text import join_names

MAX_STACKS_CHARACTERS = 2000
"""Longest summary of one worker's stacks in an incident."""
_MAX_GROUP_CHARACTERS = 400
_MAX_STACK_RANKS = 16
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*:$")
_LIBRARY_PATHS = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ", "/surefoot/")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(self.file.split('/')[-2:])}:{self.line})"


def summarize_stacks(captured: Sequence[CapturedStack]) -> str:
    """Lists groups of ranks with the same stack, smallest first, in at most MAX_STACKS_CHARACTERS."""
    groups: dict[str, list[int]] = {}
    for stack in captured:
        groups.setdefault(stack.reason or _describe_place(parse_main_thread(stack.text)), []).append(stack.rank)
    lines = [
        f"{_ranks_text(ranks)}: {place[:_MAX_GROUP_CHARACTERS]}"
        for place, ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    ]
    return "\n".join(lines)[:MAX_STACKS_CHARACTERS]


def rank_stacks(captured: Sequence[CapturedStack]) -> tuple[RankStack, ...]:
    """Groups ranks by the stack of their main thread; empty if some rank gave no stack, which proves nothing."""
    groups: dict[tuple[Frame, ...], list[int]] = {}
    for stack in captured:
        frames = parse_main_thread(stack.text)
        if stack.reason or not frames:
            return ()
        groups.setdefault(frames, []).append(stack.rank)
    return tuple(
        RankStack(
            tuple(ranks), _digest(frames), _describe_place(frames)[:_MAX_GROUP_CHARACTERS], _waits_for_ranks(frames)
        )
        for frames, ranks in sorted(groups.items(), key=lambda group: group[1])
    )


def _digest(frames: tuple[Frame, ...]) -> str:
    """Hashes file names without their folders, which differ between nodes."""
    return hashlib.blake2b("\n".join(map(str, frames)).encode(), digest_size=8).hexdigest()


def _waits_for_ranks(frames: tuple[Frame, ...]) -> bool:
    return waits_for_ranks([(frame.file, frame.function) for frame in frames[:INNERMOST_FRAMES]])


def parse_main_thread(text: str) -> tuple[Frame, ...]:
    """Parses faulthandler's dump; returns the main thread's frames, innermost first (it is written last)."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = []
        elif (match := _FRAME.match(line)) is not None:
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(frames)


def _describe_place(frames: tuple[Frame, ...]) -> str:
    if not frames:
        return "it runs no Python code"
    inner = frames[0]
    user_frame = next((frame for frame in frames if not any(part in frame.file for part in _LIBRARY_PATHS)), None)
    return f"in {inner}" if user_frame is None or user_frame == inner else f"in {inner}, called by {user_frame}"


def _ranks_text(ranks: Sequence[int]) -> str:
    unlisted_text = f" and {len(ranks) - _MAX_STACK_RANKS} more" if len(ranks) > _MAX_STACK_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_STACK_RANKS]))}{unlisted_text}"


# ---- collectives of a hang -------------------------------------------------------------------------------------------
# Asks ranks that make no step which collective they are in. Runs on the agent's loop; `add_reply` gets the answers from
# the trainers' connections. A rank whose C code never releases the GIL cannot answer, so the wait is as short as that for
# a stack, and the summary names the ranks that did not answer.

Answers = Mapping[int, CollectivesReport]
MAX_COLLECTIVES_CHARACTERS = 1000
"""Longest summary of one worker's collectives in an incident."""
_MAX_RANK_CHARACTERS = 400
_MAX_COLLECTIVE_RANKS = 16


@dataclass(slots=True)
class CollectiveQuery:
    """Asks the local ranks for their collectives.

    `send_request` sends a message to a rank of a generation; `attached` returns the ranks with a connection.
    """

    send_request: Callable[[int, int, RequestCollectives], None]
    attached: Callable[[int], frozenset[int]]
    _request: int = 0
    _answers: dict[int, CollectivesReport] = field(default_factory=dict)
    _awaited: frozenset[int] = frozenset()
    _complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def query_ranks(self, generation: int, ranks: Iterable[int]) -> Answers:
        """Returns each rank's collectives, or the likely reason why it did not report them within TAKE_SECONDS."""
        queried = frozenset(ranks)
        self._request += 1
        self._answers, self._awaited = {}, queried & self.attached(generation)
        self._complete.clear()
        answers, request, awaited = self._answers, self._request, self._awaited
        for rank in awaited:
            self.send_request(generation, rank, RequestCollectives(request))
        if awaited:
            try:
                async with asyncio.timeout(CAPTURE_TIMEOUT_SECONDS):
                    await self._complete.wait()
            except TimeoutError:
                pass  # the missing ranks get a reason below
        late_reason = (
            f"no answer within {CAPTURE_TIMEOUT_SECONDS:g} s: its C code keeps the GIL, or the process is stopped"
        )
        unattached_reason = "it cannot be asked, since it has created no Checkpointer"
        return {
            rank: answers.get(
                rank, CollectivesReport(request, (), (), late_reason if rank in awaited else unattached_reason)
            )
            for rank in sorted(queried)
        }

    def add_reply(self, rank: int, report: CollectivesReport) -> None:
        """Records a rank's answer; ignores one to an earlier request."""
        if report.request != self._request:
            return
        self._answers[rank] = report
        if self._awaited <= self._answers.keys():
            self._complete.set()


def collectives_of(answers: Answers) -> tuple[Collective, ...]:
    """Groups ranks by their collectives; empty if some rank reported none, which proves nothing."""
    if not all(report.collectives for report in answers.values()):
        return ()
    ranks: dict[Collective, list[int]] = {}
    for rank, report in sorted(answers.items()):
        for collective in report.collectives:
            ranks.setdefault(replace(collective, ranks=()), []).append(rank)
    return tuple(replace(collective, ranks=tuple(ranks_in)) for collective, ranks_in in ranks.items())


def summarize_collectives(answers: Answers) -> str:
    """Lists groups of ranks by collective, smallest first, in at most MAX_COLLECTIVES_CHARACTERS."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for rank, report in sorted(answers.items()):
        waiting_in = [
            (collective, seconds)
            for collective, seconds in zip(report.collectives, report.seconds, strict=False)
            if collective.is_waiting
        ]
        newest = min(
            zip(report.collectives, report.seconds, strict=False), key=lambda collective: collective[1], default=None
        )
        if waiting_in:
            description, seconds = (
                "waits in " + ", ".join(str(collective) for collective, _ in waiting_in),
                waiting_in[0][1],
            )
        elif newest is not None:
            description, seconds = f"in no collective, the last: {newest[0]}", newest[1]
        else:
            description, seconds = f"collective unknown: {report.reason}", -1.0
        groups.setdefault(description[:_MAX_RANK_CHARACTERS], []).append((rank, seconds))
    lines = [
        f"{_ranks_prefix([rank for rank, _ in ranks])} {description}{_age_text(min(seconds for _, seconds in ranks))}"
        for description, ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    ]
    return "\n".join(lines)[:MAX_COLLECTIVES_CHARACTERS]


def _age_text(seconds: float) -> str:
    return "" if seconds < 0.0 else f", called {seconds:.0f} s ago"


def _ranks_prefix(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {join_names(ranks, _MAX_COLLECTIVE_RANKS)}:"
