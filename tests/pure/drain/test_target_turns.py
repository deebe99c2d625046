"""Ranks of one agent write to a target one after another, and to several targets at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from surefoot.flush.engine import Outcome, TargetTurn, TargetTurns
from surefoot.protocol.identities import HolderId

NODE_A, NODE_B = HolderId("node-a", "1"), HolderId("node-b", "1")
SECONDS = 10.0


class Writer:
    """Takes a turn in a thread of its own, and holds it until it is let go."""

    def __init__(self, turn: TargetTurn, told: list[str], name: str) -> None:
        self.came, self.release, self.stopped = threading.Event(), threading.Event(), threading.Event()
        self.outcome: Outcome | None = None
        self._turn, self._told, self._name = turn, told, name
        self.asked = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self.asked.wait(SECONDS)

    def _run(self) -> None:
        def is_stopped() -> bool:
            self.asked.set()  # it stands in the row
            return self.stopped.is_set()

        with self._turn.taken(is_stopped) as outcome:
            self.outcome = outcome
            self._told.append(self._name)
            self.came.set()
            if outcome == "turn":
                assert self.release.wait(SECONDS)

    def end(self) -> None:
        self.release.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


def row(turn: TargetTurn, told: list[str], *names: str) -> list[Writer]:
    return [Writer(turn, told, name) for name in names]


def test_first_come_first_served_and_one_at_a_time() -> None:
    told: list[str] = []
    first, *others = row(TargetTurn(), told, "a", "b", "c", "d")
    assert first.came.wait(SECONDS)
    for writer in others:
        assert not writer.came.is_set()
    for place, writer in enumerate((first, *others)):
        assert writer.came.wait(SECONDS)
        assert told == ["a", "b", "c", "d"][: place + 1]
        writer.end()
    assert {w.outcome for w in (first, *others)} == {"turn"}


def test_one_that_is_called_off_waits_no_longer_and_holds_up_nobody() -> None:
    first, second, third = row(TargetTurn(), [], "a", "b", "c")
    second.stopped.set()
    assert second.came.wait(SECONDS)
    assert second.outcome == "stopped"
    first.end()
    assert third.came.wait(SECONDS)
    assert third.outcome == "turn"
    for writer in (second, third):
        writer.end()


def test_all_that_wait_behind_a_silent_target_hear_of_it_at_once_and_who_comes_later_tries() -> None:
    turn = TargetTurn()
    first, second, third = row(turn, [], "a", "b", "c")
    assert first.came.wait(SECONDS)
    turn.fail()
    for writer in (second, third):
        assert writer.came.wait(SECONDS)
        assert writer.outcome == "unavailable"
        writer.end()
    first.end()
    (again,) = row(turn, [], "d")
    assert again.came.wait(SECONDS)
    assert again.outcome == "turn"
    again.end()


def test_an_error_in_a_turn_ends_it() -> None:
    turn = TargetTurn()
    never: Callable[[], bool] = lambda: False  # noqa: E731
    try:
        with turn.taken(never):
            raise ValueError("a writer failed")
    except ValueError:
        pass
    with turn.taken(never) as outcome:
        assert outcome == "turn"


def test_targets_share_no_turn_and_one_that_nobody_writes_to_is_forgotten() -> None:
    turns = TargetTurns()
    (first,) = row(turns.of(NODE_A), [], "a")
    (other,) = row(turns.of(NODE_B), [], "b")
    assert first.came.wait(SECONDS)
    assert other.came.wait(SECONDS)
    for writer in (first, other):
        writer.end()
    kept = turns.of(NODE_A)
    assert turns.of(NODE_A) is kept
    del kept, first, other, writer
    gc.collect()
    assert not turns._turns
