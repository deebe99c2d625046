"""Copies run where they hold the training up for less, and the other way is tried now and then."""

from __future__ import annotations

from surefoot.staging.stager import LEAST_BYTES, TRY_EVERY, Timing

SIZE = LEAST_BYTES


def played(timing: Timing, saves: int, behind: tuple[float, float], inside: float) -> list[bool]:
    found = []
    for _ in range(saves):
        found.append(timing.choose(SIZE))
        timing.saw(found[-1], SIZE, *(behind if found[-1] else (inside, 0.0)))
    return found


def test_with_a_core_to_spare_every_save_is_copied_behind() -> None:
    assert all(played(Timing(), 100, (0.2, 0.01), 0.5))


def test_with_none_to_spare_saves_are_copied_inside_and_the_other_way_is_tried_now_and_then() -> None:
    found = played(Timing(), 10 * TRY_EVERY, (0.2, 0.8), 0.5)
    assert found[:3] == [True, False, False]
    assert sum(found) <= 1 + 10


def test_a_core_that_becomes_free_is_found_again() -> None:
    timing = Timing()
    played(timing, 3, (0.2, 0.8), 0.5)
    found = played(timing, 3 * TRY_EVERY, (0.2, 0.0), 0.5)
    assert sum(found[-TRY_EVERY:]) == TRY_EVERY - 1


def test_a_copy_that_was_waited_for_and_is_still_cheaper_stays_behind() -> None:
    found = played(Timing(), 2 * TRY_EVERY, (0.1, 0.2), 0.5)
    assert found.count(False) <= 3


def test_what_is_small_is_always_copied_behind() -> None:
    timing = Timing()
    played(timing, 4, (0.2, 0.8), 0.5)
    assert timing.choose(LEAST_BYTES - 1)
