"""Groups ranks by the stack they stand at, in a few lines.

Pure. A thousand ranks of a hung job mostly stand in the same collective; the one line that differs is what a person
looks for. So ranks with the same main thread are one group, and each group is told by its innermost frame and the
innermost frame of the user's own code. Nobody is blamed here: who waits and who is waited for is for the reader to
say.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.ipc.stacks import Taken
from surefoot.protocol.rank_places import INNERMOST_FRAMES, RankPlace, waits_for_ranks

LONGEST = 2000
"""Characters that one worker's ranks may fill in an incident."""
_LONGEST_GROUP = 400
_MOST_RANKS = 16
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


def summary(taken: Sequence[Taken]) -> str:
    """Lists groups of ranks with one stack, smallest first, in LONGEST characters."""
    groups: dict[str, list[int]] = {}
    for one in taken:
        groups.setdefault(one.why or _place(main_thread(one.text)), []).append(one.rank)
    lines = [
        f"{_ranks(ranks)}: {place[:_LONGEST_GROUP]}"
        for place, ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    ]
    return "\n".join(lines)[:LONGEST]


def rank_places(taken: Sequence[Taken]) -> tuple[RankPlace, ...]:
    """Groups ranks by their whole main thread.

    Empty if some rank gave no stack, which proves nothing.
    """
    groups: dict[tuple[Frame, ...], list[int]] = {}
    for one in taken:
        frames = main_thread(one.text)
        if one.why or not frames:
            return ()
        groups.setdefault(frames, []).append(one.rank)
    return tuple(
        RankPlace(tuple(ranks), _digest(frames), _place(frames)[:_LONGEST_GROUP], _waits(frames))
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
        elif (found := _FRAME.match(line)) is not None:
            frames.append(Frame(found["file"], int(found["line"]), found["function"]))
    return tuple(frames)


def _place(frames: tuple[Frame, ...]) -> str:
    if not frames:
        return "it runs no Python code"
    inner = frames[0]
    own = next((frame for frame in frames if not any(part in frame.file for part in _NOT_THE_USERS)), None)
    return f"in {inner}" if own is None or own == inner else f"in {inner}, called by {own}"


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST_RANKS]))}{more}"
