"""The line of a training loop is found through what it calls, and what `step` itself does is of no line."""

from __future__ import annotations

import sys
from collections.abc import Callable

from surefoot.checkpointer.activity_monitor import OTHERS, LoopLines, StackPlace, stack_places


def here() -> tuple[StackPlace, ...]:
    """The stack of who calls this."""
    return stack_places(sys._getframe().f_back)


def line_of(function: Callable[..., object], behind: int) -> int:
    return function.__code__.co_firstlineno + behind


def work() -> tuple[StackPlace, ...]:
    return here()


def whole_step() -> tuple[StackPlace, ...]:
    return work()


def step() -> tuple[StackPlace, ...]:
    return here()


def loop() -> tuple[tuple[StackPlace, ...], ...]:
    stepping = step()[1:]
    return (
        stepping,
        here(),
        whole_step(),
        step(),
    )


def test_each_line_of_the_loop_is_told_with_what_is_called_there() -> None:
    stepping, direct, called, again = loop()
    lines = LoopLines(stepping)
    assert lines.line(direct) == (line_of(loop, 4), 0)
    assert lines.line(called) == (line_of(loop, 5), line_of(whole_step, 1)), "not of what that calls in turn"
    assert lines.line(again) == (line_of(loop, 6), line_of(step, 1))


def test_what_step_itself_does_is_of_no_line() -> None:
    stepping, *_ = loop()
    inner = (StackPlace(work.__code__, 3), *stepping)
    assert LoopLines(stepping).line(inner) is None
    assert LoopLines(stepping).line(stepping) is None


def test_a_loop_inside_another_is_told_by_the_line_that_is_under_way() -> None:
    """An evaluation is called beside the function that makes the steps, by the one that calls both."""
    stepping, *_ = loop()
    lines = LoopLines(stepping)
    evaluates = (StackPlace(work.__code__, 9), StackPlace(stepping[1].code, 77), *stepping[2:])
    assert lines.line(evaluates) == (77, 9)


def test_our_own_calls_are_no_part_of_the_loop_and_nothing_is_known_of_another_stack() -> None:
    stepping, *_ = loop()
    ours = compile("def step(): pass", "/x/surefoot/checkpointer/facade.py", "exec")
    assert LoopLines((StackPlace(ours, 1), *stepping)).line(stepping) is None
    assert LoopLines(stepping).line((StackPlace(work.__code__, 1),)) == OTHERS
    assert LoopLines(()).line(stepping) == OTHERS
