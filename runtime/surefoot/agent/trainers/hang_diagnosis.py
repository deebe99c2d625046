"""Groups ranks by the stack they stand at, in a few lines.

Pure. A thousand ranks of a hung job mostly stand in the same collective; the one line that differs is what a person
looks for. So ranks with the same main thread are one group, and each group is told by its innermost frame and the
innermost frame of the user's own code. Nobody is blamed here: who waits and who is waited for is for the reader to
say.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from surefoot.ipc.stacks import TAKE_SECONDS, CapturedStack
from surefoot.ipc.trainer_messages import CollectivesReport, RequestCollectives
from surefoot.protocol.hangs import INNERMOST_FRAMES, Collective, RankStack, waits_for_ranks
from surefoot.protocol.text import join_names

MAX_STACKS_CHARACTERS = 2000
"""Characters that one worker's ranks may fill in an incident."""
_MAX_GROUP_CHARACTERS = 400
_MAX_STACK_RANKS = 16
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*:$")
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ", "/surefoot/")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(self.file.split('/')[-2:])}:{self.line})"


def summarize_stacks(captured: Sequence[CapturedStack]) -> str:
    """Lists groups of ranks with one stack, smallest first, in LONGEST characters."""
    groups: dict[str, list[int]] = {}
    for stack in captured:
        groups.setdefault(stack.why or _place(main_thread(stack.text)), []).append(stack.rank)
    lines = [
        f"{_ranks_text(ranks)}: {place[:_MAX_GROUP_CHARACTERS]}"
        for place, ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    ]
    return "\n".join(lines)[:MAX_STACKS_CHARACTERS]


def rank_stacks(captured: Sequence[CapturedStack]) -> tuple[RankStack, ...]:
    """Groups ranks by their whole main thread.

    Empty if some rank gave no stack, which proves nothing.
    """
    groups: dict[tuple[Frame, ...], list[int]] = {}
    for stack in captured:
        frames = main_thread(stack.text)
        if stack.why or not frames:
            return ()
        groups.setdefault(frames, []).append(stack.rank)
    return tuple(
        RankStack(tuple(ranks), _digest(frames), _place(frames)[:_MAX_GROUP_CHARACTERS], _waits(frames))
        for frames, ranks in sorted(groups.items(), key=lambda group: group[1])
    )


def _digest(frames: tuple[Frame, ...]) -> str:
    """Of names without their folders, which differ from node to node."""
    return hashlib.blake2b("\n".join(map(str, frames)).encode(), digest_size=8).hexdigest()


def _waits(frames: tuple[Frame, ...]) -> bool:
    return waits_for_ranks([(frame.file, frame.function) for frame in frames[:INNERMOST_FRAMES]])


def main_thread(text: str) -> tuple[Frame, ...]:
    """Its frames, the innermost first: faulthandler writes the oldest thread last."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = []
        elif (match := _FRAME.match(line)) is not None:
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(frames)


def _place(frames: tuple[Frame, ...]) -> str:
    if not frames:
        return "it runs no Python code"
    inner = frames[0]
    user_frame = next((frame for frame in frames if not any(part in frame.file for part in _NOT_THE_USERS)), None)
    return f"in {inner}" if user_frame is None or user_frame == inner else f"in {inner}, called by {user_frame}"


def _ranks_text(ranks: Sequence[int]) -> str:
    unlisted_text = f" and {len(ranks) - _MAX_STACK_RANKS} more" if len(ranks) > _MAX_STACK_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_STACK_RANKS]))}{unlisted_text}"


# ---- collectives of a hang -------------------------------------------------------------------------------------------
# Asks ranks that make no step which collective they are in. Runs on the agent's loop; `heard` takes the answers that
# come over the trainers' lines. A rank that holds the GIL in C code cannot answer, so no answer is waited for longer
# than for a stack, and what lacks is said.

Answers = Mapping[int, CollectivesReport]
MAX_COLLECTIVES_CHARACTERS = 1000
"""Characters that one worker's collectives may fill in an incident."""
_MAX_RANK_CHARACTERS = 400
_MAX_COLLECTIVE_RANKS = 16


@dataclass(slots=True)
class CollectiveQuery:
    """Asks the ranks of one agent.

    `tell` sends to a rank of an epoch, `attached` says who can be asked.
    """

    tell: Callable[[int, int, RequestCollectives], None]
    attached: Callable[[int], frozenset[int]]
    _request: int = 0
    _answers: dict[int, CollectivesReport] = field(default_factory=dict)
    _awaited: frozenset[int] = frozenset()
    _complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def query_ranks(self, generation: int, ranks: Iterable[int]) -> Answers:
        """Returns what each rank says within the time.

        Of a rank that did not answer it says why it may not have.
        """
        queried = frozenset(ranks)
        self._request += 1
        self._answers, self._awaited = {}, queried & self.attached(generation)
        self._complete.clear()
        answers, request, awaited = self._answers, self._request, self._awaited
        for rank in awaited:
            self.tell(generation, rank, RequestCollectives(request))
        if awaited:
            try:
                async with asyncio.timeout(TAKE_SECONDS):
                    await self._complete.wait()
            except TimeoutError:
                pass  # said below, of whoever is missing
        late_reason = f"it did not say within {TAKE_SECONDS:g} s: it holds the GIL, or is stopped"
        unattached_reason = "it cannot say: it has made no Checkpointer"
        return {
            rank: answers.get(rank, CollectivesReport(request, (), (), late_reason if rank in awaited else unattached_reason))
            for rank in sorted(queried)
        }

    def add_reply(self, rank: int, report: CollectivesReport) -> None:
        """Takes an answer; one to an earlier question is too late."""
        if report.request != self._request:
            return
        self._answers[rank] = report
        if self._awaited <= self._answers.keys():
            self._complete.set()


def collectives_of(answers: Answers) -> tuple[Collective, ...]:
    """Groups ranks by what they are in.

    Nothing if some rank said nothing, which proves nothing.
    """
    if not all(report.collectives for report in answers.values()):
        return ()
    ranks: dict[Collective, list[int]] = {}
    for rank, report in sorted(answers.items()):
        for collective in report.collectives:
            ranks.setdefault(replace(collective, ranks=()), []).append(rank)
    return tuple(replace(collective, ranks=tuple(ranks_in)) for collective, ranks_in in ranks.items())


def summarize_collectives(answers: Answers) -> str:
    """Lists groups of ranks, smallest first, in LONGEST characters."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for rank, report in sorted(answers.items()):
        waiting_in = [(collective, seconds) for collective, seconds in zip(report.collectives, report.seconds, strict=False) if collective.waits]
        newest = min(zip(report.collectives, report.seconds, strict=False), key=lambda collective: collective[1], default=None)
        if waiting_in:
            description, seconds = "waits in " + ", ".join(str(collective) for collective, _ in waiting_in), waiting_in[0][1]
        elif newest is not None:
            description, seconds = f"in no collective, the last: {newest[0]}", newest[1]
        else:
            description, seconds = f"collective unknown: {report.reason}", -1.0
        groups.setdefault(description[:_MAX_RANK_CHARACTERS], []).append((rank, seconds))
    lines = [
        f"{_ranks_prefix([rank for rank, _ in ranks])} {description}{_since(min(seconds for _, seconds in ranks))}"
        for description, ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    ]
    return "\n".join(lines)[:MAX_COLLECTIVES_CHARACTERS]


def _since(seconds: float) -> str:
    return "" if seconds < 0.0 else f", made {seconds:.0f} s ago"


def _ranks_prefix(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {join_names(ranks, _MAX_COLLECTIVE_RANKS)}:"
