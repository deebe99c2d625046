"""Tells in which line of its training loop a rank stands.

Pure; used by `activity_monitor`. Who works longest may be slow, or may do what no other rank does: rank 0 writes logs and evaluates. Equal
ranks run the same lines, so where the difference lies in a line of its own it is the program's, and no node is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, FrameType
from typing import NamedTuple

OTHERS = (0, 0)
"""Stands for all lines beyond the first few, and for what is not of the loop."""

_OUR_CALLS = "/surefoot/checkpointer/"


class StackPlace(NamedTuple):
    """A function of a stack, and where it is in it."""

    code: CodeType
    line: int

    @property
    def name(self) -> tuple[str, str]:
        """Its file and function."""
        return self.code.co_filename, self.code.co_name


def places_of(frame: FrameType | None) -> tuple[StackPlace, ...]:
    """A stack, the innermost first.

    None of the frames is kept: it would keep alive what the function holds, and have it end on another thread.
    """
    found = list[StackPlace]()
    while frame is not None:
        found.append(StackPlace(frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(found)


class LoopLines:
    """The functions by which a program came to call `step`, outermost first."""

    def __init__(self, stack: Sequence[StackPlace]) -> None:
        calls = list(reversed(stack))
        while calls and _OUR_CALLS in calls[-1].code.co_filename:
            calls.pop()
        self._calls = tuple(calls)

    def line(self, stack: Sequence[StackPlace]) -> tuple[int, int] | None:
        """The line of the innermost call that is still under way.

        Returns:
            It and the line of the function that is called there (0: none), as many loops call one that makes the whole step.
            None: it is in the call of `step` itself, as all ranks are at times.
        """
        outermost, depth = stack[::-1], 0
        for place, call in zip(outermost, self._calls, strict=False):
            if place.code is not call.code:
                break
            depth += 1
        if not depth:
            return OTHERS
        line = outermost[depth - 1].line
        if depth == len(self._calls) and line == self._calls[-1].line:
            return None
        return line, outermost[depth].line if len(outermost) > depth else 0
