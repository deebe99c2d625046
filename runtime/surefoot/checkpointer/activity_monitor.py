"""Looks, now and then, whether this rank works or waits for others.

Used by `step_reports`. Hooks on a program's modules would break what it exports or compiles; a thread that looks where
the main thread stands touches nothing of it. The cost of a look is what `LOOK_SECONDS` bounds.
"""

from __future__ import annotations

import atexit
import logging
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from surefoot.checkpointer.usage_checks import register_at_exit
from surefoot.protocol.hangs import INNERMOST_FRAMES, loads_data, runs_backward, waits_for_ranks
from surefoot.protocol.progress import RankActivity

_log = logging.getLogger(__name__)


# ---- line of the training loop ---------------------------------------------------------------------------------------
# Tells in which line of its training loop a rank stands. Pure. Who works longest may be slow, or may do what no other
# rank does: rank 0 writes logs and evaluates. Equal ranks run the same lines, so where the difference lies in a line of
# its own it is the program's, and no node is to blame.

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


def stack_places(frame: FrameType | None) -> tuple[StackPlace, ...]:
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


# ---- activity monitor ------------------------------------------------------------------------------------------------

POLL_SECONDS = 0.2
"""From look to look, in the mean: drawn for each, so that none falls into step with the training."""

_CLOSE_SECONDS = 5.0

MIN_RANKS = 3
"""In a smaller world nobody could say who is usual, and nobody looks."""

MAX_LINES = 12
"""Of the training loop, that are counted each for itself: of more nobody could say which makes the difference."""


class ActivityMonitor:
    """Counts looks at the thread that makes the steps.

    From the end of the first step on, and not within `aside`. Of a program that uses a GPU only looks that find it loading
    data count as work: all else may wait for the device, which may wait for other ranks.
    """

    def __init__(self, objects: Iterable[Any], rank: int, world_size: int) -> None:
        models = [one for one in objects if isinstance(one, torch.nn.Module)]
        parameters = [parameter for model in models for parameter in model.parameters()]
        self._rank = rank
        self._work = sum(parameter.numel() for parameter in parameters)
        self._on_device = any(parameter.device.type != "cpu" for parameter in parameters)
        self._stopped = threading.Lock()
        self._thread: threading.Thread | None = None
        self._main, self._status = 0, Path()
        self._asides = 0
        self._totals = (0, 0, dict[tuple[int, int], int]())
        """Looks, those that found it at work, and in which lines of the loop: a value, never changed."""
        self._samples = 0
        self._loop = LoopLines(())
        self._wanted = world_size >= MIN_RANKS
        if self._wanted:
            register_at_exit(self.close)

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Counts no look meanwhile: this is no part of a step."""
        self._asides += 1
        try:
            yield
        finally:
            self._asides -= 1

    def end_step(self, samples: int | None) -> tuple[RankActivity, ...]:
        """Tells the looks so far; none before the second step.

        Called by the thread that makes the steps.
        """
        if not self._wanted:
            return ()
        if self._thread is None:
            self._begin()
            return ()
        self._samples += samples or 0
        looks, own, lines = self._totals
        return (
            RankActivity(
                self._rank,
                self._work,
                looks,
                own,
                self._samples,
                tuple((*line, count) for line, count in sorted(lines.items())),
            ),
        )

    def close(self) -> None:
        """Ends the thread.

        Before the interpreter takes itself down: a thread that asks for its lock then is ended in the middle of C++ frames,
        which aborts the process.
        """
        thread = self._thread
        self.disable_after_fork()
        if thread is not None:
            self._stopped.release()
            thread.join(_CLOSE_SECONDS)

    def disable_after_fork(self) -> None:
        """Looks no more; in a forked child the thread is none."""
        self._thread, self._wanted = None, False
        atexit.unregister(self.close)

    def _begin(self) -> None:
        self._main = threading.get_ident()
        self._loop = LoopLines(stack_places(sys._getframe()))
        self._status = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        self._stopped.acquire(blocking=False)
        thread = threading.Thread(target=self._run, name="surefoot-pace", daemon=True)
        try:
            thread.start()
        except RuntimeError as refused:  # no more threads are allowed
            _log.warning("this rank cannot measure whether it works or waits: %s", refused)
            self.disable_after_fork()
            return
        self._thread = thread

    def _run(self) -> None:
        chance = random.Random()  # its own: the program's generators are the program's
        while not self._stopped.acquire(timeout=POLL_SECONDS * chance.uniform(0.5, 1.5)):
            on_device = self._on_device or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it so
            stack = () if self._asides else stack_places(sys._current_frames().get(self._main))
            if stack:
                self._totals = self._with_observation(stack, on_device)

    def _with_observation(
        self, stack: Sequence[StackPlace], on_device: bool
    ) -> tuple[int, int, dict[tuple[int, int], int]]:
        looks, own, lines = self._totals
        loads = loads_data(place.name for place in stack)
        if not self._works([place.name for place in stack[:INNERMOST_FRAMES]], loads, on_device):
            return looks + 1, own, lines
        line = None if loads else self._loop.line(stack)
        if line is None:
            return looks + 1, own + 1, lines
        counted = line if line in lines or len(lines) < MAX_LINES else OTHERS
        return looks + 1, own + 1, {**lines, counted: lines.get(counted, 0) + 1}

    def _works(self, innermost: Sequence[tuple[str, str]], loads: bool, on_device: bool) -> bool:
        """Whether a thread that stands there waits for nobody."""
        if on_device:
            return loads and not waits_for_ranks(innermost)
        return self._runs() if runs_backward(innermost) else not waits_for_ranks(innermost)

    def _runs(self) -> bool:
        """Whether the kernel has work for it: a backward pass computes, and waits for its collectives, in one call."""
        try:
            state = self._status.read_bytes().rpartition(b")")[2].split(maxsplit=1)[0]
        except (OSError, IndexError):
            return False
        return state in (b"R", b"D")
